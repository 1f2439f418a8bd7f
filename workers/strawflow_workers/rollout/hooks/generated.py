"""Calling the generate hook for one member, and making a stored member of what it returns.

1. What a hook returns is checked as an engine's answer is: parallel arrays, finite log-probabilities, only versions that the
   engine served meanwhile, no mask on what was not sampled. What is wrong fails that member, with the reason.
2. An engine that does not answer is no fault of the hook, whatever the hook makes of it.
3. A member that is broken off comes back partial, as its session saved it last; without a session it starts again from its
   prompt. Others of its group are kept.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any, cast

from strawflow.errors import InvalidInputError
from strawflow.flow.claim import Grant
from strawflow.flow.trajectory import PARTIAL, Member, failed_member
from strawflow_workers.rollout.engine import ServedEngine
from strawflow_workers.rollout.hooks.interfaces import (
    Generated,
    Interrupted,
    Rollout,
    Sample,
    Segment,
)
from strawflow_workers.rollout.hooks.turns import TurnSession, mask_of, segment_of
from strawflow_workers.rollout.sglang_client import EngineUnavailableError, GenerateRequest
from strawflow_workers.rollout.tokens import PromptTokenizer

LOOK_S = 0.5
"""How often a hook that waits for something else than the engine is looked after."""


class MemberEngine:
    """The engine as one member's hook sees it (`interfaces.Engine`)."""

    def __init__(
        self,
        engine: ServedEngine,
        tokenizer: PromptTokenizer,
        sample: Sample,
        rid: str,
        *,
        run_id: str = "",
        saved: Member | None = None,
    ) -> None:
        """`saved` is the partial member of before a break."""
        self._engine, self._tokenizer, self._sample = engine, tokenizer, sample
        self._rids = (f"{rid}.{number}" for number in count())
        self._run_id, self._saved = run_id, saved
        self._session: TurnSession | None = None
        self.key = (sample.unit_id, sample.member)
        self._served_from = max(0, len(engine.served) - 1)
        self.url = engine.client.url
        self.eos_id = tokenizer.eos_id
        self.was_used = self.was_interrupted = False
        self.unavailable: EngineUnavailableError | None = None

    @property
    def served(self) -> Sequence[str]:
        """Ids of the weights that the engine served since this rollout began, in order."""
        return self._engine.served[self._served_from :]

    async def generate(
        self,
        prompt_tokens: Sequence[int],
        sampling: Mapping[str, Any] | None = None,
        *,
        images: Sequence[bytes] | None = None,
    ) -> Generated:
        """See `interfaces.Engine`."""
        self.was_used = True
        self.require_going_on()
        params = {**self._sample.sampling, **(sampling or {}), "n": 1}
        request = GenerateRequest(
            input_ids=list(prompt_tokens),
            sampling_params=params,
            images=self._sample.images if images is None else images,
            rid=next(self._rids),
        )
        try:
            (found,) = await self._engine.sample(request)
        except EngineUnavailableError as error:
            self.unavailable = error
            raise
        if found.finish_reason == "abort":
            self._break_off()
        return Generated(
            tokens=found.output_ids,
            logprobs=found.logprobs,
            versions=found.weight_versions,
            finish_reason="length" if found.finish_reason == "length" else "stop",
        )

    def session(self) -> TurnSession:
        """See `interfaces.Engine`; it is one for the whole call of the hook."""
        if self._session is None:
            self._session = TurnSession(self, self._sample, run_id=self._run_id, saved=self._saved)
        return self._session

    @property
    def saved(self) -> Member:
        """The member as a break leaves it: partial, with the turns that its session saved."""
        saved = self._saved if self._session is None else self._session.saved
        return saved or broken_off(self._sample.member)

    @property
    def may_have_sampled(self) -> set[str]:
        """Ids of the weights that may have sampled what the hook returns."""
        before = [] if self._saved is None else [v for s in self._saved.segments for v in s.versions]
        return {*self.served, *before}

    def require_going_on(self) -> None:
        """Raise Interrupted when the group is being broken off."""
        if self._engine.is_interrupted:
            self._break_off()

    def _break_off(self) -> None:
        self.was_interrupted = True
        raise Interrupted

    def encode(self, text: str) -> list[int]:
        """See `interfaces.Engine`."""
        return self._tokenizer.encode_text(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """See `interfaces.Engine`."""
        return self._tokenizer.decode(tokens)


class InFlight:
    """Members that hooks are making, for whoever saves progress meanwhile; belongs to one event loop."""

    def __init__(self) -> None:
        self._handles: dict[tuple[int, int], MemberEngine] = {}

    @contextmanager
    def during(self, handles: Sequence[MemberEngine]) -> Iterator[None]:
        """Hold members for as long as their hook runs."""
        own = {handle.key: handle for handle in handles}
        self._handles |= own
        try:
            yield
        finally:
            for key in own:
                del self._handles[key]

    def saved(self, unit_id: int) -> list[Member]:
        """Return the members of a unit of which turns are saved, each as a break at this moment would leave it: partial."""
        found = [handle.saved for (unit, _), handle in self._handles.items() if unit == unit_id]
        return [member for member in found if member.environment is not None]


class CalledHook:
    """A hook that makes rollouts, the engine it asks, and what becomes of a member by what it did."""

    setting = ""
    """The field of `rollout` that names it."""

    def __init__(
        self,
        hook: Any,
        engine: ServedEngine,
        tokenizer: PromptTokenizer,
        *,
        in_flight: InFlight,
        timeout_s: float,
        run_id: str = "",
    ) -> None:
        """`timeout_s` bounds one call of the hook; 0: nothing does. `run_id` stands in the keys that tools are given."""
        self._hook, self._engine, self._tokenizer = hook, engine, tokenizer
        self._in_flight, self._timeout_s, self._run_id = in_flight, timeout_s, run_id

    def _handle(self, sample: Sample, rid: str, saved: Member | None) -> MemberEngine:
        return MemberEngine(self._engine, self._tokenizer, sample, rid, run_id=self._run_id, saved=saved)

    async def _call(self, *arguments: object) -> Any:
        """Call the hook, as `bounded` bounds it."""
        call = cast(Coroutine[Any, Any, Any], self._hook(*arguments))
        return await bounded(call, self._engine, timeout_s=self._timeout_s)

    def _member(self, handle: MemberEngine, found: object) -> Member:
        """Return what the hook made of a member, whatever it is.

        Raises:
            EngineUnavailableError: the engine does not answer.
        """
        # A hook that asked the engine by itself does not know a response that was broken off from one that ended.
        if handle.was_interrupted or (self._engine.is_interrupted and not handle.was_used):
            return handle.saved
        try:
            return member_of(
                handle.key[1],
                checked_rollout(found),
                tokenizer=self._tokenizer,
                sampled_by=handle.may_have_sampled,
            )
        except Exception as error:  # what user code made of this member is wrong; the others stand
            return self._ended(handle, error)

    def _ended(self, handle: MemberEngine, error: Exception) -> Member:
        """Return a member whose call, or rollout, came to nothing; raises as `_member`."""
        if handle.was_interrupted:
            return handle.saved
        if handle.unavailable is not None:
            raise handle.unavailable from error
        return failed_member(handle.key[1], f"{self.setting}: {type(error).__name__}: {error}")


class HookedRollouts(CalledHook):
    """Samples members by a generate hook; safe for many at a time on one event loop."""

    setting = "generate"

    async def sample(self, sample: Sample, rid: str, saved: Member | None = None) -> Member:
        """Return the member that the hook made: finished, truncated, failed with its reason, or partial when interrupted.

        `saved` is the member as it was parked. The reward is None, unless the hook gave one.

        Raises:
            EngineUnavailableError: the engine does not answer.
        """
        handle = self._handle(sample, rid, saved)
        if self._engine.is_interrupted:
            return handle.saved
        with self._in_flight.during([handle]):
            try:
                found = await self._call(sample, handle)
            except Interrupted:
                return handle.saved
            except Exception as error:  # whatever user code raises is the outcome of this member
                return self._ended(handle, error)
            return self._member(handle, found)


async def bounded(call: Coroutine[Any, Any, Any], engine: ServedEngine, *, timeout_s: float) -> Any:
    """Await a hook's call, ended when groups are broken off or its time is up.

    Raises:
        Interrupted: groups are being broken off.
        TimeoutError: it took longer than `timeout_s` (0: no bound).
    """
    deadline = time.monotonic() + timeout_s if timeout_s else None
    task = asyncio.ensure_future(call)
    try:
        while True:
            left = LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())
            done, _ = await asyncio.wait({task}, timeout=max(0.0, left))
            if done:
                return task.result()
            if engine.is_interrupted:
                raise Interrupted
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"took longer than rollout.generate_timeout_s, {timeout_s:g} s")
    finally:
        if not task.done():
            task.cancel()


def sample_of(grant: Grant, prompt_tokens: Sequence[int], member: int, sampling: Mapping[str, Any]) -> Sample:
    """Return what a hook is told of a member of a granted group."""
    prompt = grant.prompt
    return Sample(
        unit_id=grant.unit_id,
        member=member,
        prompt=prompt.prompt,
        prompt_format="text" if prompt.prompt_format == "text" else "messages",
        prompt_tokens=list(prompt_tokens),
        sampling=sampling,
        purpose="eval" if grant.profile.purpose == "eval" else "train",
        label=prompt.label,
        metadata=json.loads(prompt.metadata) if prompt.metadata else {},
        images=prompt.images or (),
    )


def broken_off(number: int) -> Member:
    """Return a member of which nothing is kept."""
    return replace(failed_member(number, ""), status=PARTIAL, failure=None, finish_reason="abort")


def checked_rollout(found: object) -> Rollout:
    """Return what a generate hook returned, as a rollout.

    Raises:
        TypeError: it is none.
        ValueError: it has no segment.
    """
    made = found
    if isinstance(made, Segment):
        made = Rollout(segments=[made])
    elif isinstance(made, list | tuple):
        made = Rollout(segments=made)
    if not isinstance(made, Rollout) or not all(isinstance(s, Segment) for s in made.segments):
        raise TypeError(
            f"a generate hook must return a Segment, a list of them, or a Rollout; got {found!r:.200}"
        )
    if not made.segments and made.failure is None:
        raise ValueError("a rollout without segments must say why, in `failure`")
    return made


def member_of(
    number: int, rollout: Rollout, *, tokenizer: PromptTokenizer, sampled_by: Collection[str]
) -> Member:
    """Return a rollout as a member; `sampled_by` are the only versions that may have sampled its tokens.

    Raises:
        InvalidInputError: its arrays are not parallel, or tell what cannot be.
    """
    segments = [_segment(number, s, tokenizer) for s in rollout.segments]
    if rollout.failure is not None:
        first = segments[0] if segments else failed_member(number, "")
        failed = {"status": "failed", "failure": f"generate: {rollout.failure}", "reward": None}
        return replace(first, siblings=tuple(segments[1:]), **failed)  # type: ignore[arg-type]  # as the fields are
    if rollout.segments[-1].finish_reason == "length":
        segments[0] = replace(segments[0], status="truncated")
    member = replace(segments[0], siblings=tuple(segments[1:]), reward=rollout.reward, score=rollout.reward)
    member.check()
    if foreign := set().union(*(s.versions for s in member.segments)) - set(sampled_by):
        raise InvalidInputError(f"sampled from {sorted(foreign)}, asked of {sorted(sampled_by)}")
    return member


def _segment(number: int, segment: Segment, tokenizer: PromptTokenizer) -> Member:
    if segment.finish_reason not in ("stop", "length"):
        raise InvalidInputError(f"finish_reason {segment.finish_reason!r} is neither 'stop' nor 'length'")
    return Member(
        member=number,
        status="finished",
        response_tokens=segment.tokens,
        logprobs=segment.logprobs,
        token_versions=segment.versions,
        finish_reason=segment.finish_reason,
        reward=None,
        response_text=tokenizer.decode(segment.tokens) if segment.text is None else segment.text,
        loss_mask=mask_of(segment),
        prompt_tokens=segment.prompt_tokens,
        tensors=segment.tensors,
    )


def rollout_of(member: Member) -> Rollout:
    """Return a sampled member as a sample filter sees it."""
    return Rollout(segments=[segment_of(s) for s in member.segments], reward=member.reward)
