"""From sampled members to rewarded ones: what a generator calls for the members of one unit.

1. A member whose reward failed is a failed member with the reason; it keeps its tokens and has no reward.
2. A member that failed before takes part in nothing: neither a group's reward nor post-processing sees it.
3. While a member is partial its group is not settled: it will be when the last has ended, by whoever goes on with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strawflow.flow.claim import Prompt
from strawflow.flow.trajectory import PARTIAL, Member
from strawflow_workers.rollout.rewards.scorer import RewardScorer
from strawflow_workers.rollout.rewards.spec import RewardOutcome, RewardRequest


class MemberRewards:
    """Rewards the members of one unit: each by `reward` when it is sampled, then all by `settle`."""

    def __init__(self, scorer: RewardScorer, prompt: Prompt, prompt_tokens: Sequence[int]) -> None:
        self._scorer = scorer
        self._prompt = prompt
        self._prompt_tokens = prompt_tokens
        self._waits = scorer.waits_for_group(prompt.metadata)
        self._is_settled = not self._waits and not scorer.post_processes

    async def reward(self, member: Member) -> Member:
        """Return the member with its reward; unchanged where it has failed or not ended, or its group is scored as a whole.

        Raises:
            WorkerFailedError: no reward can be scored any more.
        """
        if self._waits or member.status in ("failed", PARTIAL):
            return member
        return _rewarded(member, await self._scorer.score(self._request(member)))

    async def settle(self, members: Sequence[Member]) -> list[Member]:
        """Return all members of the unit with what depends on the whole group; unchanged while one of them is partial.

        Raises:
            WorkerFailedError: no reward can be scored any more.
        """
        if self._is_settled or any(member.status == PARTIAL for member in members):
            return list(members)
        sound = [member for member in members if member.status != "failed"]
        outcomes = await self._scorer.settle_group(
            [self._request(member) for member in sound],
            [RewardOutcome(member.score, member.reward, None) for member in sound],
        )
        settled = {m.member: _rewarded(m, outcome) for m, outcome in zip(sound, outcomes, strict=True)}
        return [settled.get(member.member, member) for member in members]

    def _request(self, member: Member) -> RewardRequest:
        last = member.last  # of several segments the one that ends the rollout
        return RewardRequest(
            last.response_text or "",
            self._prompt.prompt,
            self._prompt.label,
            self._prompt.metadata,
            prompt_is_messages=self._prompt.prompt_format == "messages",
            prompt_tokens=self._prompt_tokens if last.prompt_tokens is None else last.prompt_tokens,
            response_tokens=last.response_tokens,
        )


def _rewarded(member: Member, outcome: RewardOutcome) -> Member:
    if outcome.failure is not None:
        return replace(member, status="failed", reward=None, score=None, failure=f"reward: {outcome.failure}")
    return replace(member, reward=outcome.reward, score=outcome.score)
