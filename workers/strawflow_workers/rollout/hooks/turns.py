"""Sessions: rollouts of several turns that go on at the turn boundary where they were broken off.

1. What a session saved is a partial member: all segments so far, and in `environment` the number of the turn with the hook's
   state. Whoever parks the group stores it like any partial member; a worker that claims it gives it to the hook again.
2. Saved tokens are never tokenised anew: the next request's prompt is the ids as they were sampled.
3. A saved state is checked when it is saved, so that it can always be stored.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import xxhash

from strawflow.errors import CorruptPackError
from strawflow.flow.trajectory import PARTIAL, Member
from strawflow_workers.rollout.hooks.interfaces import Engine, Generated, Sample, Segment, TurnKey


class MembersEngine(Engine, Protocol):
    """An engine that knows whether its member's group is being broken off."""

    def require_going_on(self) -> None:
        """Raise Interrupted when it is."""
        ...


class TurnSession:
    """One member's session (`interfaces.Session`)."""

    def __init__(
        self, engine: MembersEngine, sample: Sample, *, run_id: str, saved: Member | None = None
    ) -> None:
        """`saved` is what `saved` told before the break; None begins anew.

        Raises:
            CorruptPackError: the saved environment is none that a session wrote.
        """
        self._engine, self._sample, self._run_id = engine, sample, run_id
        self._num_calls = 0
        self.saved: Member | None = None
        """The last saved turn, a partial member; None before the first."""
        self.turn: int = 0
        self.state: Any = None
        self.segments: list[Segment] = [Segment()]
        if saved is not None and saved.environment is not None:
            self.saved = saved
            self.turn, self.state = unpacked_state(saved.environment)
            self.segments = [segment_of(s) for s in saved.segments]

    @property
    def tokens_left(self) -> int:
        """See `interfaces.Session`."""
        return max(0, int(self._sample.sampling["max_new_tokens"]) - len(self.segments[-1].tokens))

    async def sample(
        self,
        sampling: Mapping[str, Any] | None = None,
        *,
        trained: bool = True,
        images: Sequence[bytes] | None = None,
    ) -> Generated:
        """See `interfaces.Session`."""
        wanted = dict(sampling or {})
        limit = min(self.tokens_left, int(wanted.get("max_new_tokens", self.tokens_left)))
        if limit <= 0:
            self.segments[-1].finish_reason = "length"
            return Generated(tokens=[], logprobs=[], versions=[], finish_reason="length")
        segment = self.segments[-1]
        found = await self._engine.generate(
            [*self._prompt(segment), *segment.tokens], {**wanted, "max_new_tokens": limit}, images=images
        )
        segment.add_generated(found, trained=trained)
        return found

    def add_environment(self, tokens: Sequence[int]) -> None:
        """See `interfaces.Session`."""
        self.segments[-1].add_environment(tokens)

    def begin_segment(self, prompt_tokens: Sequence[int]) -> None:
        """See `interfaces.Session`."""
        self.segments.append(Segment(prompt_tokens=list(prompt_tokens)))

    async def call(self, tool: Callable[..., Any], *arguments: Any) -> Any:
        """See `interfaces.Session`."""
        self._engine.require_going_on()
        key = self._key()
        self._num_calls += 1
        if inspect.iscoroutinefunction(tool):
            return await tool(*arguments, key=key)
        return await asyncio.to_thread(tool, *arguments, key=key)

    def save(self, state: Any = None) -> None:
        """See `interfaces.Session`."""
        environment = packed_state(self.turn + 1, state)
        # As it will come back, whether or not there is a break: a tuple as a list, a number that was a key as text.
        turn, state = unpacked_state(environment)
        members = [self._member(segment) for segment in self.segments]
        saved = replace(members[0], siblings=tuple(members[1:]), environment=environment)
        saved.check()
        self.saved = saved
        self.turn, self.state = turn, state
        self._num_calls = 0

    def _member(self, segment: Segment) -> Member:
        return Member(
            member=self._sample.member,
            status=PARTIAL,
            response_tokens=list(segment.tokens),
            logprobs=list(segment.logprobs),
            token_versions=list(segment.versions),
            finish_reason=segment.finish_reason,
            reward=None,
            response_text=segment.text,
            loss_mask=mask_of(segment),
            prompt_tokens=list(self._prompt(segment)),
            tensors=segment.tensors,
        )

    def _key(self) -> TurnKey:
        seen = xxhash.xxh3_128()
        for segment in self.segments:
            for tokens in (self._prompt(segment), segment.tokens):
                seen.update(len(tokens).to_bytes(8, "little"))
                seen.update(np.asarray(tokens, np.int32).tobytes())
        return TurnKey(
            run_id=self._run_id,
            unit_id=self._sample.unit_id,
            member=self._sample.member,
            turn=self.turn,
            call=self._num_calls,
            content=seen.hexdigest(),
        )

    def _prompt(self, segment: Segment) -> Sequence[int]:
        return self._sample.prompt_tokens if segment.prompt_tokens is None else segment.prompt_tokens


def mask_of(segment: Segment) -> list[int] | None:
    """Return what of a segment is trained; None where every token is."""
    if segment.loss_mask is not None:
        return list(segment.loss_mask)
    return None if all(segment.versions) else [int(bool(version)) for version in segment.versions]


def segment_of(member: Member) -> Segment:
    """Return a stored segment as hooks see it."""
    versions = member.token_versions
    return Segment(
        tokens=list(member.response_tokens),
        logprobs=list(member.logprobs),
        versions=[versions] * len(member.response_tokens) if isinstance(versions, str) else list(versions),
        loss_mask=None if member.loss_mask is None else list(member.loss_mask),
        prompt_tokens=member.prompt_tokens,
        finish_reason=member.finish_reason,
        text=member.response_text,
        tensors=member.tensors,
    )


def packed_state(turn: int, state: Any) -> bytes:
    """Return what is stored as `environment`: a line of JSON with `turn` and `format`, then the state as JSON or as it is.

    Raises:
        TypeError, ValueError: the state is neither bytes nor a JSON value.
    """
    is_json = not isinstance(state, bytes)
    head = json.dumps({"turn": turn, "format": "json" if is_json else "bytes"}).encode()
    body = json.dumps(state, allow_nan=False).encode() if is_json else bytes(state)
    return head + b"\n" + body


def unpacked_state(environment: bytes) -> tuple[int, Any]:
    """Return turn and state of a stored `environment`.

    Raises:
        CorruptPackError: no session wrote it.
    """
    head, _, body = environment.partition(b"\n")
    try:
        told = json.loads(head)
        return int(told["turn"]), body if told["format"] == "bytes" else json.loads(body)
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptPackError(
            f"the saved environment of a member is none that a session wrote ({error!r}); drop its group"
        ) from error
