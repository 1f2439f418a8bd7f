"""One unit through the engine and the reward: prompt in, members out, failures kept as failures.

1. A response whose log-probabilities are short, missing or not finite fails that member with the reason, never the run.
2. A reward that raised or ran out of time fails the member; it never becomes reward 0.
3. A failed member is tried once more before its failure stands; one that the sample filter dropped is not.
4. While the engine is being interrupted nothing new is asked of it: members that it broke off, or that were not asked for
   yet, come back partial. A partial member goes on with its tokens in the prompt and what is left of its token limits.
5. How far the units in flight have come can be asked at any moment, to be saved: responses that may be longer than the
   engine's stream interval are streamed for that.
6. With a generate hook, it makes each member's rollout; the filter, the reward and the second try are the same. A partial member
   goes on from the last turn that its session saved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from strawflow.config import RunConfig, SamplingProfile
from strawflow.flow.chain import saved_members
from strawflow.flow.claim import Grant, Prompt
from strawflow.flow.trajectory import PARTIAL, Member, UnitResult, failed_member
from strawflow_workers.rollout.engine import ServedEngine
from strawflow_workers.rollout.hooks.filtered import DROPPED, why_dropped
from strawflow_workers.rollout.hooks.generated import HookedRollouts, InFlight, rollout_of, sample_of
from strawflow_workers.rollout.hooks.interfaces import (
    GenerateGroupsHook,
    GenerateHook,
    Sample,
    SampleFilter,
)
from strawflow_workers.rollout.hooks.load import load_generate, load_generate_groups, load_sample_filter
from strawflow_workers.rollout.hooks.whole import Asked, GatheredClaim, WholeRollouts
from strawflow_workers.rollout.profile_rewards import ProfileRewards
from strawflow_workers.rollout.rewards.members import MemberRewards
from strawflow_workers.rollout.sglang_client import (
    EngineResponseError,
    GenerateRequest,
    Generation,
    OnProgress,
)
from strawflow_workers.rollout.stops import first_stop, is_at_end
from strawflow_workers.rollout.tokens import PromptInputs, PromptTokenizer


@dataclass(frozen=True)
class _Response:
    """All that was sampled of one member so far: three lists of equal length, and why it ended ("abort": it did not)."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[str]
    finish_reason: str

    def after(self, saved: Member | None) -> _Response:
        """Return it with what was sampled before it was broken off in front."""
        if saved is None:
            return self
        return _Response(
            [*saved.response_tokens, *self.tokens],
            [*saved.logprobs, *self.logprobs],
            [*saved.token_versions, *self.versions],
            self.finish_reason,
        )

    @classmethod
    def of(cls, generation: Generation) -> _Response:
        return cls(
            generation.output_ids, generation.logprobs, generation.weight_versions, generation.finish_reason
        )

    def kept(self, num_tokens: int, finish_reason: str) -> _Response:
        return _Response(
            self.tokens[:num_tokens], self.logprobs[:num_tokens], self.versions[:num_tokens], finish_reason
        )


_NOTHING = _Response([], [], [], "abort")


@dataclass(frozen=True)
class _Streamed:
    """What is being sampled: what it goes on from, and what came since. Its lists grow with what the engine says next, which may
    be garbage: only the first `num_tokens` were looked at."""

    before: Member | None
    response: _Response
    num_tokens: int

    def sound(self) -> _Response:
        return self.response.kept(self.num_tokens, self.response.finish_reason)


@dataclass
class _Underway:
    """How far one unit in flight has come."""

    prompt_tokens: list[int]
    members: dict[int, Member]
    """Those saved before, and those that have ended since."""
    streamed: dict[int, _Streamed] = field(default_factory=dict)
    """What is being sampled, by member."""
    told: dict[int, int] = field(default_factory=dict)
    """How many tokens of those there were when progress was last asked for."""


@dataclass(frozen=True)
class RolloutHooks:
    """What of a rollout is the user's own."""

    generate: GenerateHook | None = None
    generate_timeout_s: float = 0.0
    run_id: str = ""
    """Stands in the keys that tools are given."""
    sample_filter: SampleFilter | None = None
    generate_groups: GenerateGroupsHook | None = None

    @classmethod
    def of(cls, config: RunConfig, *, model_path: str, run_id: str = "") -> RolloutHooks:
        """Load those that a configuration names.

        Raises:
            ConfigError: one of them cannot be used.
        """
        return cls(
            load_generate(config, model_path=model_path),
            config.rollout.generate_timeout_s,
            run_id,
            load_sample_filter(config),
            load_generate_groups(config, model_path=model_path),
        )


class UnitGenerator:
    """Generates and scores units; safe for many at a time on one event loop."""

    def __init__(
        self,
        engine: ServedEngine,
        rewards: ProfileRewards,
        tokenizer: PromptTokenizer,
        hooks: RolloutHooks | None = None,
        *,
        on_sampled: Callable[[Grant], None] | None = None,
    ) -> None:
        """`on_sampled` is called when a unit has all it asked of the engine and goes on to its rewards; a member that failed
        may be asked for once more."""
        self._engine, self._rewards, self._tokenizer = engine, rewards, tokenizer
        hooks = hooks or RolloutHooks()
        self._on_sampled = on_sampled or (lambda _: None)
        self._underway: dict[tuple[int, int], _Underway] = {}
        self.most_unsaved = 0
        """Most tokens that any response has got since `progress` was last asked for."""
        self._sample_filter = hooks.sample_filter
        self._in_flight = InFlight()
        limits: dict[str, Any] = {
            "in_flight": self._in_flight,
            "timeout_s": hooks.generate_timeout_s,
            "run_id": hooks.run_id,
        }
        self._whole = (
            None
            if hooks.generate_groups is None
            else WholeRollouts(hooks.generate_groups, engine, tokenizer, **limits)
        )
        self._hooked = (
            None if hooks.generate is None else HookedRollouts(hooks.generate, engine, tokenizer, **limits)
        )

    @property
    def has_turns(self) -> bool:
        """Whether hooks make the rollouts, whose turns `progress` tells and `most_unsaved` does not count."""
        return self._hooked is not None or self._whole is not None

    @property
    def gathers_claims(self) -> bool:
        """Whether a hook is called once for all groups of one claim."""
        return self._whole is not None

    def gathered(self, num_groups: int) -> GatheredClaim | None:
        """Return what gathers so many groups of one claim into one call of a hook; None: there is no such hook."""
        return None if self._whole is None or not num_groups else self._whole.gathered(num_groups)

    async def generate(self, grant: Grant, claim: GatheredClaim | None = None) -> UnitResult:
        """Return the result of a granted unit; members are partial only when the engine was interrupted meanwhile.

        `claim` gathers the groups that were granted with it (`gathered`): each of them is to be generated.

        Raises:
            EngineUnavailableError: the engine does not answer; the unit's attempt has failed.
        """
        gathering = _Once(claim)
        try:
            return await self._generate(grant, gathering)
        finally:
            gathering.give_up()

    async def _generate(self, grant: Grant, gathering: _Once) -> UnitResult:
        inputs = await self._inputs(grant.prompt)
        prompt_tokens = inputs.tokens
        rewards = MemberRewards(self._rewards.of(grant.profile), grant.prompt, prompt_tokens)
        members = saved_members(grant.continuation)
        underway = _Underway(prompt_tokens, dict(members))
        self._underway[grant.unit_id, grant.fence] = underway
        begun = {number: m for number, m in members.items() if m.status == PARTIAL}
        # Partial first, then whatever failed once more.
        for _ in range(2):
            open_ones = [n for n in range(grant.profile.num_samples) if _is_open(members.get(n))]
            found = await self._members(grant, prompt_tokens, open_ones, begun, rewards, gathering)
            members |= {m.member: m for m in found}
            if self._engine.is_interrupted or not any(_is_open(m) for m in found):
                break
        settled = await rewards.settle([members[n] for n in range(grant.profile.num_samples)])
        if inputs.tensors is not None:
            settled = [_with_tensors(member, inputs.tensors) for member in settled]
        return self._result(grant, prompt_tokens, settled)

    def _result(self, grant: Grant, prompt_tokens: list[int], members: Sequence[Member]) -> UnitResult:
        return grant.result(members, prompt_tokens=prompt_tokens, engine=self._engine.label)

    def progress(self, grants: Iterable[Grant]) -> list[tuple[Grant, UnitResult]]:
        """Return how far units have come, each with its members so far; those that nothing came of are left out."""
        found = []
        for grant in grants:
            underway = self._underway.get((grant.unit_id, grant.fence))
            members = [] if underway is None else self._so_far(grant, underway)
            if underway is not None and members:
                found.append((grant, self._result(grant, underway.prompt_tokens, members)))
        self.most_unsaved = 0
        return found

    def _so_far(self, grant: Grant, underway: _Underway) -> list[Member]:
        members = underway.members | {m.member: m for m in self._in_flight.saved(grant.unit_id)}
        for number, streamed in underway.streamed.items():
            underway.told[number] = streamed.num_tokens
            response = self._joined(streamed.sound(), streamed.before, grant.profile)
            members[number] = _partial(number, response)
        return [m for _, m in sorted(members.items()) if m.is_worth_keeping]

    def forget(self, grant: Grant) -> None:
        """Drop what is kept of a unit that is no longer in flight."""
        self._underway.pop((grant.unit_id, grant.fence), None)

    async def _inputs(self, prompt: Prompt) -> PromptInputs:
        if not prompt.images:
            return self._tokenizer.inputs(prompt)
        is_hooked = self._hooked is not None or self._whole is not None
        if is_hooked and not self._tokenizer.has_processor:
            return PromptInputs(self._tokenizer.encode(prompt))  # the hook's to do
        return await asyncio.to_thread(self._tokenizer.inputs, prompt)  # decoding images takes its time

    async def _members(
        self,
        grant: Grant,
        prompt_tokens: list[int],
        numbers: Sequence[int],
        begun: dict[int, Member],
        rewards: MemberRewards,
        gathering: _Once,
    ) -> list[Member]:
        """Sample, filter and score members; `begun` are those that were saved partial."""
        if self._whole is not None:
            sampled = await self._of_whole(self._whole, grant, prompt_tokens, numbers, begun, gathering)
        else:
            sampled = await self._sampled(grant, prompt_tokens, numbers, begun)
        return list(
            await asyncio.gather(*(self._rewarded(grant, prompt_tokens, m, rewards) for m in sampled))
        )

    async def _of_whole(
        self,
        whole: WholeRollouts,
        grant: Grant,
        prompt_tokens: list[int],
        numbers: Sequence[int],
        begun: dict[int, Member],
        gathering: _Once,
    ) -> list[Member]:
        """Sample members by the hook of whole claims: with the groups of the claim, or (a second try) alone."""
        asked = [Asked(self._asked(grant, prompt_tokens, n), _rid(grant, n), begun.get(n)) for n in numbers]
        claim = gathering.take()
        if claim is not None:
            return await claim.members(asked)
        return (await whole.call([asked]))[0] if asked else []

    async def _sampled(
        self, grant: Grant, prompt_tokens: list[int], numbers: Sequence[int], begun: dict[int, Member]
    ) -> list[Member]:
        """Sample members: by the hook, or those with tokens each in a request of its own, the others in one together."""
        if self._hooked is not None:
            calls = [
                self._hooked.sample(
                    self._asked(grant, prompt_tokens, number),
                    _rid(grant, number),
                    begun.get(number),
                )
                for number in numbers
            ]
            members = list(await asyncio.gather(*calls))
            self._on_sampled(grant)
            return members
        alone = [n for n in numbers if n in begun and begun[n].response_tokens]
        fresh = [n for n in numbers if n not in alone]
        groups = [[n] for n in alone] + ([fresh] if fresh else [])
        sampled = await asyncio.gather(
            *(self._sample(grant, prompt_tokens, group, begun) for group in groups)
        )
        self._on_sampled(grant)
        return [
            self._member(number, answer)
            for group, found in zip(groups, sampled, strict=True)
            for number, answer in zip(group, found, strict=True)
        ]

    async def _sample(
        self, grant: Grant, prompt_tokens: list[int], numbers: list[int], begun: dict[int, Member]
    ) -> list[_Response | EngineResponseError]:
        """Ask for members in one request; when the answer is unsound, one by one, to fail only those to blame."""
        before = begun.get(numbers[0]) if len(numbers) == 1 else None
        ended = self._ended(before, grant.profile)
        if ended is not None:
            return [ended]
        if self._engine.is_interrupted:
            return [_NOTHING.after(before) for _ in numbers]
        try:
            generations = await self._engine.sample(
                self._request(grant, prompt_tokens, numbers, before),
                on_progress=self._teller(grant, numbers, before),
            )
            return [self._joined(_Response.of(found), before, grant.profile) for found in generations]
        except EngineResponseError as error:
            self._forget_streamed(grant, numbers)
            if len(numbers) == 1:
                return [error]
        alone = [self._sample(grant, prompt_tokens, [number], begun) for number in numbers]
        return [found[0] for found in await asyncio.gather(*alone)]

    def _teller(self, grant: Grant, numbers: list[int], before: Member | None) -> OnProgress | None:
        """Return what notes how far these members have come; None where an answer is too short to be told in parts."""
        done = len(before.response_tokens) if before is not None else 0
        underway = self._underway.get((grant.unit_id, grant.fence))
        interval = self._engine.stream_interval
        is_short = grant.profile.max_response_tokens - done <= interval
        if underway is None or not interval or is_short:
            return None
        underway.told |= dict.fromkeys(numbers, 0)

        def tell(place: int, generation: Generation) -> None:
            number = numbers[place]
            underway.streamed[number] = _Streamed(
                before, _Response.of(generation), len(generation.output_ids)
            )
            self.most_unsaved = max(self.most_unsaved, len(generation.output_ids) - underway.told[number])

        return tell

    def _ended(self, before: Member | None, profile: SamplingProfile) -> _Response | None:
        """Return a saved response that has ended already: nothing is left to ask for."""
        if before is None:
            return None
        whole = _NOTHING.after(before)
        if is_at_end(whole.tokens, profile=profile, eos_id=self._tokenizer.eos_id):
            return whole.kept(len(whole.tokens), "stop")
        if len(whole.tokens) >= profile.max_response_tokens:
            return whole.kept(profile.max_response_tokens, "length")
        return None

    def _forget_streamed(self, grant: Grant, numbers: Sequence[int]) -> None:
        """Drop what came of an answer that is not believed."""
        underway = self._underway.get((grant.unit_id, grant.fence))
        if underway is not None:
            for number in numbers:
                underway.streamed.pop(number, None)

    def _joined(self, found: _Response, before: Member | None, profile: SamplingProfile) -> _Response:
        whole = found.after(before)
        if before is None:
            return whole
        kept = first_stop(
            whole.tokens,
            start=len(before.response_tokens),
            profile=profile,
            decode=self._tokenizer.decode,
        )
        return whole if kept is None else whole.kept(kept, "stop")

    def _request(
        self, grant: Grant, prompt_tokens: list[int], numbers: list[int], before: Member | None
    ) -> GenerateRequest:
        done = list(before.response_tokens) if before is not None else []
        return GenerateRequest(
            input_ids=[*prompt_tokens, *done],
            sampling_params=sampling_params(grant.profile, num_samples=len(numbers), num_done=len(done)),
            images=grant.prompt.images or (),
            rid=f"u{grant.unit_id}.{grant.fence}.m{numbers[0]}-{len(numbers)}",
        )

    def _member(self, number: int, response: _Response | EngineResponseError) -> Member:
        if isinstance(response, EngineResponseError):
            return failed_member(number, f"engine: {response.message}")
        if response.finish_reason == "abort":
            return _partial(number, response)
        return Member(
            member=number,
            status="truncated" if response.finish_reason == "length" else "finished",
            response_tokens=response.tokens,
            logprobs=response.logprobs,
            token_versions=response.versions,
            finish_reason=response.finish_reason,
            reward=None,
            response_text=self._tokenizer.decode(response.tokens),
        )

    async def _rewarded(
        self, grant: Grant, prompt_tokens: list[int], member: Member, rewards: MemberRewards
    ) -> Member:
        """Return a sampled member with its reward, unless its hook gave one; failed where the filter drops it."""
        if member.status not in (PARTIAL, "failed"):
            member = await self._judged(grant, prompt_tokens, member, rewards)
        underway = self._underway.get((grant.unit_id, grant.fence))
        if underway is not None:
            underway.streamed.pop(member.member, None)
            underway.members[member.member] = member
            self.most_unsaved = max(self.most_unsaved, len(member.response_tokens))
        return member

    async def _judged(
        self, grant: Grant, prompt_tokens: list[int], member: Member, rewards: MemberRewards
    ) -> Member:
        if self._sample_filter is not None:
            sample = self._asked(grant, prompt_tokens, member.member)
            failure = why_dropped(self._sample_filter, sample, rollout_of(member))
            if failure is not None:
                return replace(member, status="failed", reward=None, score=None, failure=failure)
        return member if member.reward is not None else await rewards.reward(member)

    def _asked(self, grant: Grant, prompt_tokens: list[int], number: int) -> Sample:
        return sample_of(grant, prompt_tokens, number, sampling_params(grant.profile, num_samples=1))


class _Once:
    """One group's part in a claim that is gathered: it is handed in, or given up, once."""

    def __init__(self, claim: GatheredClaim | None) -> None:
        self._claim = claim

    def take(self) -> GatheredClaim | None:
        claim, self._claim = self._claim, None
        return claim

    def give_up(self) -> None:
        if (claim := self.take()) is not None:
            claim.withdraw()


def _rid(grant: Grant, member: int) -> str:
    return f"u{grant.unit_id}.{grant.fence}.m{member}"


def _is_open(member: Member | None) -> bool:
    """Tell whether a member is to be sampled: it was not begun, was broken off, or failed otherwise than by a filter."""
    if member is None or member.status == PARTIAL:
        return True
    return member.status == "failed" and not (member.failure or "").startswith(DROPPED)


def _with_tensors(member: Member, tensors: Mapping[str, Any]) -> Member:
    """Return a member whose segments that brought none of their own have the prompt's."""
    if member.status == "failed":
        return member
    siblings = tuple(s if s.tensors is not None else replace(s, tensors=tensors) for s in member.siblings)
    return replace(member, tensors=tensors if member.tensors is None else member.tensors, siblings=siblings)


def _partial(number: int, response: _Response) -> Member:
    return Member(
        member=number,
        status=PARTIAL,
        response_tokens=response.tokens,
        logprobs=response.logprobs,
        token_versions=response.versions,
        finish_reason="abort",
        reward=None,
    )


def sampling_params(profile: SamplingProfile, *, num_samples: int, num_done: int = 0) -> dict[str, Any]:
    """Return SGLang's sampling parameters of a profile for what is left of a response with `num_done` tokens."""
    params: dict[str, Any] = {
        "n": num_samples,
        "temperature": profile.temperature,
        "top_p": profile.top_p,
        "max_new_tokens": profile.max_response_tokens - num_done,
    }
    if profile.min_response_tokens > num_done:
        params["min_new_tokens"] = profile.min_response_tokens - num_done
    if profile.stop:
        params["stop"] = list(profile.stop)
    if profile.stop_token_ids:
        params["stop_token_ids"] = list(profile.stop_token_ids)
    return params
