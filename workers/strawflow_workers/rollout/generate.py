"""One unit through the engine and the reward: prompt in, members out, failures kept as failures.

1. A response whose log-probabilities are short, missing or not finite fails that member with the reason, never the run.
2. A reward that raised or ran out of time fails the member; it never becomes reward 0.
3. A failed member is tried once more before its failure stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from strawflow.config import SamplingProfile
from strawflow.flow.claim import Grant
from strawflow.flow.trajectory import COMPLETE_SEQ, Member, UnitResult, failed_member
from strawflow_workers.rollout.engine import ServedEngine
from strawflow_workers.rollout.rewards.pool import RewardPool
from strawflow_workers.rollout.rewards.spec import RewardRequest
from strawflow_workers.rollout.sglang_client import EngineResponseError, GenerateRequest, Generation
from strawflow_workers.rollout.tokens import PromptTokenizer


class UnitGenerator:
    """Generates and scores units; safe for many at a time on one event loop."""

    def __init__(self, engine: ServedEngine, rewards: RewardPool, tokenizer: PromptTokenizer) -> None:
        self._engine, self._rewards, self._tokenizer = engine, rewards, tokenizer

    async def generate(self, grant: Grant) -> UnitResult:
        """Return the result of a granted unit.

        Raises:
            EngineUnavailableError: the engine does not answer; the unit's attempt has failed.
        """
        prompt_tokens = self._tokenizer.encode(grant.prompt)
        members = await self._members(grant, prompt_tokens, range(grant.profile.num_samples))
        again = [m.member for m in members if m.status == "failed"]
        if again:
            second = {m.member: m for m in await self._members(grant, prompt_tokens, again)}
            members = [second.get(m.member, m) for m in members]
        return UnitResult(
            unit_id=grant.unit_id,
            fence=grant.fence,
            seq=COMPLETE_SEQ,
            prompt_tokens=prompt_tokens,
            members=members,
            profile=grant.profile,
            engine=self._engine.label,
        )

    async def _members(
        self, grant: Grant, prompt_tokens: list[int], numbers: Sequence[int] | range
    ) -> list[Member]:
        generations = await self._sample(grant, prompt_tokens, list(numbers))
        return list(
            await asyncio.gather(
                *(
                    self._scored(grant, number, generation)
                    for number, generation in zip(numbers, generations, strict=True)
                )
            )
        )

    async def _sample(
        self, grant: Grant, prompt_tokens: list[int], numbers: list[int]
    ) -> list[Generation | EngineResponseError]:
        """Ask for all members in one request; when the answer is unsound, one by one, to fail only those to blame."""
        try:
            return list(await self._engine.client.generate(self._request(grant, prompt_tokens, numbers)))
        except EngineResponseError as error:
            if len(numbers) == 1:
                return [error]
        alone = [self._sample(grant, prompt_tokens, [number]) for number in numbers]
        return [found[0] for found in await asyncio.gather(*alone)]

    def _request(self, grant: Grant, prompt_tokens: list[int], numbers: list[int]) -> GenerateRequest:
        rid = f"u{grant.unit_id}.{grant.fence}.m{numbers[0]}-{len(numbers)}"
        return GenerateRequest(
            input_ids=prompt_tokens,
            sampling_params=sampling_params(grant.profile, num_samples=len(numbers)),
            rid=rid,
        )

    async def _scored(
        self, grant: Grant, number: int, generation: Generation | EngineResponseError
    ) -> Member:
        if isinstance(generation, EngineResponseError):
            return failed_member(number, f"engine: {generation.message}")
        if (served := set(generation.weight_versions)) - {self._engine.serving}:
            return failed_member(
                number, f"engine: sampled from {sorted(served)}, asked of {self._engine.serving}"
            )
        if generation.finish_reason == "abort":
            return failed_member(number, "engine: the request was aborted")
        text = self._tokenizer.decode(generation.output_ids)
        outcome = await self._rewards.score(
            RewardRequest(text, grant.prompt.prompt, grant.prompt.label, grant.prompt.metadata)
        )
        status = "truncated" if generation.finish_reason == "length" else "finished"
        return Member(
            member=number,
            status="failed" if outcome.failure is not None else status,
            response_tokens=generation.output_ids,
            logprobs=generation.logprobs,
            token_versions=generation.weight_versions,
            finish_reason=generation.finish_reason,
            reward=outcome.reward,
            score=outcome.score,
            failure=None if outcome.failure is None else f"reward: {outcome.failure}",
            response_text=text,
        )


def sampling_params(profile: SamplingProfile, *, num_samples: int) -> dict[str, Any]:
    """Return SGLang's sampling parameters of a profile."""
    return {
        "n": num_samples,
        "temperature": profile.temperature,
        "top_p": profile.top_p,
        "max_new_tokens": profile.max_response_tokens,
    }
