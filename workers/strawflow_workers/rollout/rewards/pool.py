"""A pool of reward processes that hung, slow and crashing verifiers cannot drain.

1. Every request is answered once: with a score, or with a failure that says why. A failure is never a zero.
2. A request that runs longer than the limit costs its process (SIGKILL) and nobody else: the process is replaced.
3. Requests behind a slow one move to other processes, first answer wins; so verifiers must not have side effects
   that count. While processes are stuck, up to as many again are started, and retired when no longer needed.
4. A verifier that cannot be loaded is an error of the configuration: `start` raises it.
5. The pool belongs to one event loop. Its processes die with the thread that runs it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Sequence

from strawflow.errors import ConfigError, StrawflowError, WorkerFailedError
from strawflow_workers.rollout.rewards.backlog import Backlog, Ticket
from strawflow_workers.rollout.rewards.batch_run import BatchRun, TimeLimits
from strawflow_workers.rollout.rewards.calls import Answer, Call, Value
from strawflow_workers.rollout.rewards.process import RewardProcess
from strawflow_workers.rollout.rewards.spec import RewardOutcome, RewardRequest, RewardSpec

log = logging.getLogger(__name__)

_IDLE_SECONDS = 2.0
"""A surplus process that finds nothing to do for this long is retired."""


class RewardPool:
    """Scores responses in `num_processes` processes, each request within `timeout_s` seconds.

    Use as `async with RewardPool(spec, num_processes=4, timeout_s=10.0) as pool`, or call `start` and `close`.
    """

    def __init__(
        self, reward: RewardSpec, *, num_processes: int, timeout_s: float, load_timeout_s: float = 120.0
    ) -> None:
        if num_processes < 1 or timeout_s <= 0:
            raise ConfigError(
                f"a reward pool needs a process and a time limit, got {num_processes} and {timeout_s}"
            )
        self._spec = reward
        self._num_processes = num_processes
        self._limits = TimeLimits(call_s=timeout_s, load_s=load_timeout_s)
        self._numbers = itertools.count()
        self._backlog = Backlog(when_short=self._add_lane_when_stuck)
        self._awaited: set[asyncio.Future[Answer]] = set()
        self._lanes: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        """Those of them that found themselves one too many and have not ended yet."""
        self._num_idle = 0
        self._processes: set[RewardProcess] = set()
        self._groups: dict[str, bool] = {}
        self._warned: set[str] = set()
        self._loaded = asyncio.Event()
        self._broken: StrawflowError | None = None

    async def __aenter__(self) -> RewardPool:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the processes that are loaded and not killed."""
        return sorted(process.pid for process in self._processes)

    async def start(self) -> None:
        """Start the processes; return when the first has loaded the verifier.

        Raises:
            ConfigError: the verifier cannot be loaded.
            WorkerFailedError: a process ended, or took too long, while loading.
        """
        for _ in range(self._num_processes):
            self._add_lane()
        await self._loaded.wait()
        if self._broken is not None:
            await self.close()
            raise self._broken

    async def close(self) -> None:
        """Kill all processes; whoever still waits for an outcome gets a WorkerFailedError."""
        self._break(WorkerFailedError("the reward pool was closed"))
        lanes = list(self._lanes)
        for lane in lanes:
            lane.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)

    def takes_group(self, name: str) -> bool:
        """Whether a reward of the configuration scores a whole group in one call; known once the pool has started."""
        return self._groups.get(name, False)

    async def score(self, request: RewardRequest, *, reward: str | None = None) -> RewardOutcome:
        """Score one response by the run's reward, or by `reward` where its row names one.

        Raises:
            WorkerFailedError: the pool is not running, or can start no process any more.
        """
        return (await self.score_group([request], reward=reward))[0]

    async def score_group(
        self, requests: Sequence[RewardRequest], *, reward: str | None = None
    ) -> list[RewardOutcome]:
        """Score the members of one group in one call of a reward that takes groups.

        Raises:
            WorkerFailedError: as `score` does.
        """
        answer = await self._ask(Call.of(reward or self._spec.name, requests))
        return [self._outcome(value) for value in answer.for_each(len(requests))]

    async def post_process(self, requests: Sequence[RewardRequest], rewards: Sequence[float]) -> list[Value]:
        """Return what the run's post-processing makes of a group's rewards: for each a number, or why there is none.

        Raises:
            WorkerFailedError: as `score` does.
        """
        answer = await self._ask(Call.of(self._spec.post_process, requests, rewards=rewards))
        return answer.for_each(len(requests))

    def _outcome(self, value: Value) -> RewardOutcome:
        if isinstance(value, str):
            return RewardOutcome.failed(value)
        return RewardOutcome.scored(value, spec=self._spec)

    async def _ask(self, call: Call) -> Answer:
        if self._broken is not None:
            raise WorkerFailedError(f"no reward can be scored any more: {self._broken}") from self._broken
        if not self._lanes:
            raise WorkerFailedError("the reward pool was not started")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._awaited.add(answer)
        answer.add_done_callback(self._awaited.discard)
        self._backlog.put(Ticket(next(self._numbers), call, answer))
        return await answer

    # --- lanes: each keeps one process busy, and replaces it

    def _add_lane(self) -> None:
        lane = asyncio.get_running_loop().create_task(self._run_lane(), name="reward-lane")
        self._lanes.add(lane)
        lane.add_done_callback(self._lane_ended)

    def _add_lane_when_stuck(self) -> None:
        wanted = self._num_processes + min(self._backlog.num_stuck, self._num_processes)
        if self._broken is None and not self._num_idle and self._num_staying < wanted:
            self._add_lane()

    def _lane_ended(self, lane: asyncio.Task[None]) -> None:
        self._lanes.discard(lane)
        self._leaving.discard(lane)
        if lane.cancelled() or (error := lane.exception()) is None:
            return
        if not isinstance(error, StrawflowError):
            error = WorkerFailedError(f"the reward pool failed: {type(error).__name__}: {error}")
        self._break(error)

    def _break(self, error: StrawflowError) -> None:
        if self._broken is not None:
            return
        self._broken = error
        self._loaded.set()
        for answer in list(self._awaited):
            if not answer.done():
                answer.set_exception(error)

    def _warn(self, warnings: Iterable[str]) -> None:
        """Say once what this host lacks, however many processes find it out."""
        for text in warnings:
            if text not in self._warned:
                self._warned.add(text)
                log.warning("%s", text)

    async def _run_lane(self) -> None:
        while True:
            process = await RewardProcess.start(
                self._spec, limit_s=self._limits.call_s, load_timeout_s=self._limits.load_s
            )
            self._processes.add(process)
            self._groups = process.groups
            self._warn(process.warnings)
            self._loaded.set()
            try:
                is_leaving = await self._keep_busy(process)
            finally:
                self._processes.discard(process)
                await process.kill()
            if is_leaving:
                return

    async def _keep_busy(self, process: RewardProcess) -> bool:
        """Feed a process until it was killed (return False) or is one too many (return True)."""
        while True:
            batch = self._backlog.take(num_takers=len(self._lanes))
            if batch:
                run = BatchRun(process, batch, backlog=self._backlog, limits=self._limits, warn=self._warn)
                if not await run.run():
                    return False
            elif not self._backlog and await self._is_surplus():
                return True

    async def _is_surplus(self) -> bool:
        """Wait for work; return whether none came and there are more processes than are wanted."""
        self._num_idle += 1
        try:
            await self._backlog.arrival(timeout_s=_IDLE_SECONDS)
        finally:
            self._num_idle -= 1
        is_surplus = not self._backlog and self._num_staying > self._num_processes + self._backlog.num_stuck
        if is_surplus and (lane := asyncio.current_task()) is not None:
            self._leaving.add(
                lane
            )  # at once: of two that are idle each would count the other, and both would go
        return is_surplus

    @property
    def _num_staying(self) -> int:
        return len(self._lanes - self._leaving)
