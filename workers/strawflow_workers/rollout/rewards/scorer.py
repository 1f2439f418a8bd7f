"""The way in: scores the members of groups by whatever reward the run, or the row, names.

1. Verifiers run in the pool's processes, servers are asked from the event loop: a server that is dead or slow holds no process.
2. A row's `metadata.reward` beats the run's reward. One that cannot be had fails the row's members, with the reason.
3. Rewards of one response are scored as responses come; those of a group, and post-processing, wait for `settle_group`.
4. Post-processing sees the rewards that there are, in the order of members, and returns as many. Scores stay as they were.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from strawflow.config import RolloutSection
from strawflow.errors import ConfigError
from strawflow.reward_names import RewardName, parse_reward, parse_row_reward
from strawflow_workers.rollout.rewards import remote, reward_model
from strawflow_workers.rollout.rewards.calls import Value
from strawflow_workers.rollout.rewards.pool import RewardPool
from strawflow_workers.rollout.rewards.reward_server import RewardServers, ServerLimits
from strawflow_workers.rollout.rewards.spec import RewardOutcome, RewardRequest, RewardSpec


@dataclass(frozen=True, kw_only=True)
class ScorerOptions:
    """What a scorer is made with."""

    spec: RewardSpec
    num_processes: int = 1
    timeout_s: float = 10.0
    concurrency: int = 64
    retries: int = 5
    reward_model_input: reward_model.Input = "tokens"

    @classmethod
    def of(cls, rollout: RolloutSection) -> ScorerOptions:
        return cls(
            spec=RewardSpec(
                rollout.reward,
                rollout.reward_shape,
                row_rewards=rollout.row_rewards,
                post_process=rollout.reward_post_process,
            ),
            num_processes=rollout.reward_processes,
            timeout_s=rollout.reward_timeout_s,
            concurrency=rollout.reward_concurrency,
            retries=rollout.reward_retries,
            reward_model_input=rollout.reward_model_input,
        )


class RewardScorer:
    """Scores responses; use as an async context manager, or call `start` and `close`. Belongs to one event loop."""

    def __init__(self, options: ScorerOptions) -> None:
        self._options = options
        self._spec = options.spec
        self._run_reward = parse_reward(options.spec.name)
        self._servers = RewardServers(
            ServerLimits(options.timeout_s, concurrency=options.concurrency, retries=options.retries)
        )
        self._pool = RewardPool(
            options.spec, num_processes=options.num_processes, timeout_s=options.timeout_s
        )
        self._pool_starting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RewardScorer:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Load what the configuration names, and look whether its reward models are such.

        Raises:
            ConfigError: a reward cannot be loaded, or a server is none of a reward model.
            WorkerFailedError: a process ended, or took too long, while loading.
        """
        try:
            names = [self._run_reward, *(parse_reward(name) for name in self._spec.row_rewards)]
            if self._spec.post_process or not all(name.over_http for name in names):
                await self._pool_started()
            for name in names:
                if name.kind == "reward_model":
                    await reward_model.check(self._servers, name.target)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End processes and connections; whoever still waits for a verifier gets a WorkerFailedError."""
        await self._pool.close()
        if self._pool_starting is not None:
            await asyncio.gather(self._pool_starting, return_exceptions=True)  # whoever asked was told
        await self._servers.close()

    @property
    def post_processes(self) -> bool:
        """Whether the rewards of a group are processed together once it is scored."""
        return bool(self._spec.post_process)

    def waits_for_group(self, metadata: str | None) -> bool:
        """Whether the members of a row with this metadata are scored together, by `settle_group` alone."""
        try:
            name = self._reward_of(metadata)
        except ConfigError:
            return False
        return name.takes_group or (name.kind == "function" and self._pool.takes_group(name.text))

    async def score(self, request: RewardRequest) -> RewardOutcome:
        """Score one response by a reward that takes one (see `waits_for_group`).

        Raises:
            WorkerFailedError: there is no process left, and none can be started.
        """
        try:
            name = self._reward_of(request.metadata)
        except ConfigError as error:  # this row's own: the others go on
            return RewardOutcome.failed(error.message)
        if name.kind == "remote":
            return self._outcome(await remote.score(self._servers, name.target, request))
        if name.kind == "reward_model":
            what = self._options.reward_model_input
            return self._outcome(await reward_model.score(self._servers, name.target, request, what=what))
        await self._pool_started()
        return await self._pool.score(request, reward=name.text)

    async def settle_group(
        self, requests: Sequence[RewardRequest], outcomes: Sequence[RewardOutcome]
    ) -> list[RewardOutcome]:
        """Return the outcomes of a whole group: scored together where the reward wants that, then post-processed.

        requests: of the members that have a response, in the order of members; all of one prompt row.
        outcomes: what `score` gave for each; not looked at where the group is scored together.

        Raises:
            WorkerFailedError: there is no process left, and none can be started.
        """
        if requests and self.waits_for_group(requests[0].metadata):
            outcomes = await self._score_group(requests)
        if self._spec.post_process:
            return await self._post_processed(requests, outcomes)
        return list(outcomes)

    async def _score_group(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        name = self._reward_of(requests[0].metadata)
        if name.kind == "remote":
            values = await remote.score_group(self._servers, name.target, requests)
            return [self._outcome(value) for value in values]
        await self._pool_started()
        return await self._pool.score_group(requests, reward=name.text)

    async def _post_processed(
        self, requests: Sequence[RewardRequest], outcomes: Sequence[RewardOutcome]
    ) -> list[RewardOutcome]:
        scored = [at for at, outcome in enumerate(outcomes) if outcome.reward is not None]
        if not scored:
            return list(outcomes)
        rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
        values = await self._pool.post_process([requests[at] for at in scored], rewards)
        settled = list(outcomes)
        for at, value in zip(scored, values, strict=True):
            if isinstance(value, str):
                settled[at] = RewardOutcome.failed(f"post-processing: {value}")
            else:
                settled[at] = replace(outcomes[at], reward=value)
        return settled

    def _reward_of(self, metadata: str | None) -> RewardName:
        """Return the reward of a row.

        Raises:
            ConfigError: it names one that it may not, or that there is not.
        """
        if metadata is None or '"reward"' not in metadata:
            return self._run_reward
        own = json.loads(metadata).get("reward")
        return self._run_reward if own is None else parse_row_reward(str(own), listed=self._spec.row_rewards)

    def _outcome(self, value: Value) -> RewardOutcome:
        if isinstance(value, str):
            return RewardOutcome.failed(value)
        return RewardOutcome.scored(value, spec=self._spec)

    async def _pool_started(self) -> None:
        """Start the pool where it has not been: rows may want it in a run whose own reward is a server's."""
        if self._pool_starting is None:
            self._pool_starting = asyncio.get_running_loop().create_task(self._pool.start())
        if not self._pool_starting.done():
            await asyncio.shield(self._pool_starting)
        elif (error := self._pool_starting.exception()) is not None:
            raise error
