"""The rewards of a run's sampling profiles: one scorer for each reward that a profile names.

1. Evaluation datasets may be scored otherwise than training is; most runs have one reward, and one scorer.
2. What rollout.reward_post_process makes of rewards is for training: evaluation is told them as they are.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

from strawflow.config import RolloutSection, RunConfig, SamplingProfile
from strawflow_workers.rollout.rewards.scorer import RewardScorer, ScorerOptions


class ProfileRewards:
    """Starts every scorer on entry and closes them all on exit; belongs to one event loop."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        profiles = config.profiles()
        used = [profiles["train"], *(profiles[found.profile] for found in config.eval_profiles())]
        self._scorers = {
            self._key(profile): RewardScorer(ScorerOptions.of(self._settings(profile)))
            for profile in {self._key(p): p for p in used}.values()
        }
        self._open = AsyncExitStack()

    async def __aenter__(self) -> ProfileRewards:
        """Start the scorers.

        Raises:
            ConfigError: a reward cannot be loaded, or a server is none of a reward model.
            WorkerFailedError: a process ended, or took too long, while loading.
        """
        async with AsyncExitStack() as opened:
            for scorer in self._scorers.values():
                await opened.enter_async_context(scorer)
            self._open = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    def of(self, profile: SamplingProfile) -> RewardScorer:
        """Return what scores the members of a unit with this profile."""
        return self._scorers[self._key(profile)]

    def _key(self, profile: SamplingProfile) -> tuple[str, str, str]:
        is_training = profile.purpose == "train"
        post_process = self._config.rollout.reward_post_process if is_training else ""
        return profile.reward, profile.reward_shape, post_process

    def _settings(self, profile: SamplingProfile) -> RolloutSection:
        reward, shape, post_process = self._key(profile)
        own = {"reward": reward, "reward_shape": shape, "reward_post_process": post_process}
        return self._config.rollout.model_copy(update=own)
