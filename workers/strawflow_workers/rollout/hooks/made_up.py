"""The made-up world of the contract test: a tokenizer of bytes, an engine that always answers the same, samples and groups."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from strawflow.flow.trajectory import Member
from strawflow_workers.rollout.hooks.generated import checked_rollout
from strawflow_workers.rollout.hooks.interfaces import (
    CompletedGroup,
    Generated,
    GroupMember,
    Interrupted,
    Rollout,
    Sample,
    Segment,
)
from strawflow_workers.rollout.hooks.turns import TurnSession

NUM_MEMBERS = 4
VERSION = "v000000-check"
EOS = 256
_RESPONSE = "The answer is 4."


class ByteTokenizer:
    """One token a byte."""

    eos_id = EOS

    def encode_text(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < EOS).decode(errors="replace")


class CheckEngine:
    """An engine that always gives the same answer, cut at max_new_tokens; its next answer may be that it is interrupted."""

    def __init__(self) -> None:
        self.url = ""
        self.eos_id = EOS
        self.served: Sequence[str] = (VERSION,)
        self.interrupts = False
        self.breaks_at: int | None = None
        """Interrupts once its session has saved so many turns."""
        self.begin(sample(0))

    def begin(self, sample: Sample, saved: Member | None = None) -> None:
        """Be used for a sample, from what its session saved or afresh."""
        self._sample, self._saved = sample, saved
        self.opened: TurnSession | None = None
        """The hook's session, if it asked for one."""

    def session(self) -> TurnSession:
        if self.opened is None:
            self.opened = TurnSession(self, self._sample, run_id="check", saved=self._saved)
        return self.opened

    def require_going_on(self) -> None:
        turn = 0 if self.opened is None else self.opened.turn
        if self.interrupts or (self.breaks_at is not None and turn >= self.breaks_at):
            raise Interrupted

    async def generate(
        self,
        prompt_tokens: Sequence[int],
        sampling: Mapping[str, Any] | None = None,
        *,
        images: Sequence[bytes] | None = None,
    ) -> Generated:
        await asyncio.sleep(0)
        self.require_going_on()
        tokens, is_cut = self._answer({**self._sample.sampling, **(sampling or {})})
        return Generated(
            tokens=tokens,
            logprobs=[-0.5] * len(tokens),
            versions=[VERSION] * len(tokens),
            finish_reason="length" if is_cut else "stop",
        )

    def encode(self, text: str) -> list[int]:
        return ByteTokenizer().encode_text(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return ByteTokenizer().decode(tokens)

    def _answer(self, sampling: Mapping[str, Any]) -> tuple[list[int], bool]:
        whole = [*ByteTokenizer().encode_text(_RESPONSE), EOS]
        limit = int(sampling.get("max_new_tokens", len(whole)))
        return whole[:limit], limit < len(whole)

    async def answer_http(self, request: web.Request) -> web.Response:
        """SGLang's /generate."""
        body = await request.json()
        tokens, is_cut = self._answer(body.get("sampling_params") or {})
        reason = "abort" if self.interrupts else "length" if is_cut else "stop"
        meta = {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "weight_version": VERSION,
            "prompt_tokens": len(body.get("input_ids") or ()),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
        }
        text = ByteTokenizer().decode(tokens)
        return web.json_response({"text": text, "output_ids": tokens, "meta_info": meta})


class CheckEngines:
    """A `CheckEngine` for each member of a claim."""

    def __init__(self, engine: CheckEngine) -> None:
        self._engine = engine
        self.url, self.eos_id, self.served = engine.url, engine.eos_id, engine.served

    def of(self, sample: Sample) -> CheckEngine:
        own = CheckEngine()
        own.url, own.interrupts = self.url, self._engine.interrupts
        own.begin(sample)
        return own

    def encode(self, text: str) -> list[int]:
        return self._engine.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._engine.decode(tokens)


def sample(member: int) -> Sample:
    """Return what a hook is asked for."""
    prompt = "What is 2 + 2?\n"
    return Sample(
        unit_id=1,
        member=member,
        prompt=prompt,
        prompt_format="text",
        prompt_tokens=ByteTokenizer().encode_text(prompt),
        sampling={"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 64, "n": 1},
        purpose="train",
        label="4",
        metadata={},
    )


def rollout() -> Rollout:
    """Return a finished rollout of one segment."""
    tokens = ByteTokenizer().encode_text(_RESPONSE)
    segment = Segment(
        tokens=tokens, logprobs=[-0.5] * len(tokens), versions=[VERSION] * len(tokens), text=_RESPONSE
    )
    return checked_rollout(segment)


def groups() -> list[CompletedGroup]:
    """Groups of equal and of different rewards, one with a failed member and one with a member of two segments."""
    return [
        _group([1.0] * NUM_MEMBERS),
        _group([0.0] * NUM_MEMBERS),
        _group([0.0, 1.0, 0.0, 1.0]),
        _group([0.0, 1.0, None, 1.0]),
        _group([0.0, 1.0, 0.5, 1.0], num_segments=2),
    ]


def _group(rewards: Sequence[float | None], *, num_segments: int = 1) -> CompletedGroup:
    tokens = ByteTokenizer().encode_text(_RESPONSE)
    row = {
        "prompt_tokens": list(sample(0).prompt_tokens),
        "response_tokens": tokens,
        "response_text": _RESPONSE,
        "loss_mask": [1] * len(tokens),
        "logprobs": [-0.5] * len(tokens),
        "token_versions": [0] * len(tokens),
        "weight_versions": [VERSION],
        "finish_reason": "stop",
    }
    return CompletedGroup(
        unit_id=1,
        members=[
            GroupMember(
                member=n,
                status="failed" if reward is None else "finished",
                segments=[{**row, "member": n, "segment": at} for at in range(num_segments)],
                reward=reward,
                score=reward,
                failure="reward: ValueError" if reward is None else None,
            )
            for n, reward in enumerate(rewards)
        ],
    )


def stored_rows(group: CompletedGroup) -> list[dict[str, Any]]:
    """Return the rows of a group as they are stored."""
    return [
        {
            **row,
            "unit_id": group.unit_id,
            "status": m.status,
            "reward": m.reward,
            "score": m.score,
            "failure": m.failure,
        }
        for m in group.members
        for row in m.segments
    ]
