"""Results of generation as rows: the members of a unit and the checks they must pass before they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from strawflow.config import SamplingProfile
from strawflow.errors import InvalidInputError
from strawflow.records import TRAJECTORY

NOT_SAMPLED = -1
"""token_versions of a token that no weights sampled (a demonstration)."""


COMPLETE_SEQ = 1
"""A unit without saved progress has one guarded write: its completion."""


@dataclass(frozen=True)
class Member:
    """One member of a group: finished, truncated at the token limit, or failed with a reason.

    `logprobs[i]` is log-softmax(logits / temperature) of `response_tokens[i]` in the pass that sampled it;
    `token_versions[i]` is the id of the weights of that pass ("" for a demonstration). Both have the response's length.
    """

    member: int
    status: str
    response_tokens: Sequence[int]
    logprobs: Sequence[float]
    token_versions: Sequence[str]
    finish_reason: str
    reward: float | None
    score: float | None = None
    failure: str | None = None
    response_text: str | None = None

    def check(self) -> None:
        """Raise InvalidInputError when the parallel arrays disagree, a number is not finite, or a result is missing."""
        num_tokens = len(self.response_tokens)
        if not num_tokens == len(self.logprobs) == len(self.token_versions):
            raise InvalidInputError(
                f"member {self.member}: {num_tokens} tokens, {len(self.logprobs)} log-probabilities, "
                f"{len(self.token_versions)} versions; they must be equally many"
            )
        if not np.isfinite(np.asarray(self.logprobs, np.float64)).all():
            raise InvalidInputError(f"member {self.member}: a log-probability is not finite")
        if (self.status == "failed") != (self.failure is not None):
            raise InvalidInputError(
                f"member {self.member}: a failed member needs its reason, another must have none"
            )
        if self.status == "failed" and self.reward is not None:
            raise InvalidInputError(f"member {self.member}: a failed member has no reward")


def failed_member(member: int, reason: str) -> Member:
    """Return a member that failed before anything could be kept of it."""
    return Member(
        member=member,
        status="failed",
        response_tokens=(),
        logprobs=(),
        token_versions=(),
        finish_reason="error",
        reward=None,
        failure=reason,
    )


@dataclass(frozen=True)
class UnitResult:
    """All members of one unit, ready to be stored."""

    unit_id: int
    fence: int
    seq: int
    prompt_tokens: Sequence[int]
    members: Sequence[Member]
    profile: SamplingProfile
    engine: str

    @property
    def num_tokens(self) -> int:
        return sum(len(m.response_tokens) for m in self.members)

    @property
    def mean_reward(self) -> float | None:
        rewards = [m.reward for m in self.members if m.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    def versions(self) -> set[str]:
        return {version for m in self.members for version in m.token_versions if version}


def to_record_batch(results: Sequence[UnitResult]) -> pa.RecordBatch:
    """Return the trajectory rows of several units, unit after unit, member after member.

    Raises:
        InvalidInputError: a member breaks promise P9 or P10.
    """
    rows = [(result, member) for result in results for member in result.members]
    for _, member in rows:
        member.check()
    distinct = [sorted({v for v in member.token_versions if v}) for _, member in rows]
    columns: dict[str, Any] = {
        "unit_id": [r.unit_id for r, _ in rows],
        "fence": [r.fence for r, _ in rows],
        "seq": [r.seq for r, _ in rows],
        "member": [m.member for _, m in rows],
        "segment": [0] * len(rows),
        "purpose": [r.profile.purpose for r, _ in rows],
        "status": [m.status for _, m in rows],
        "failure": [m.failure for _, m in rows],
        "prompt_tokens": _lists([r.prompt_tokens for r, _ in rows], np.int32),
        "response_tokens": _lists([m.response_tokens for _, m in rows], np.int32),
        "loss_mask": _lists([np.ones(len(m.response_tokens), np.int8) for _, m in rows], np.int8),
        "logprobs": _lists([m.logprobs for _, m in rows], np.float32),
        "token_versions": _lists(
            [_places(m.token_versions, known) for (_, m), known in zip(rows, distinct, strict=True)], np.int32
        ),
        "weight_versions": distinct,
        "reward": [m.reward for _, m in rows],
        "score": [m.score for _, m in rows],
        "response_text": [m.response_text for _, m in rows],
        "finish_reason": [m.finish_reason for _, m in rows],
        "temperature": [r.profile.temperature for r, _ in rows],
        "top_p": [r.profile.top_p for r, _ in rows],
        "top_k": [-1] * len(rows),
        "max_response_tokens": [r.profile.max_response_tokens for r, _ in rows],
        "engine": [r.engine for r, _ in rows],
    }
    arrays = [
        column if isinstance(column := columns[f.name], pa.Array) else pa.array(column, type=f.type)
        for f in TRAJECTORY
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=TRAJECTORY)


def _lists(values: Sequence[Sequence[float] | np.ndarray[Any, Any]], dtype: type[np.generic]) -> pa.Array:
    """Return one list per row; whole arrays are copied, never a Python object per token."""
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(v) for v in values], out=offsets[1:])
    flat = np.concatenate([np.asarray(v, dtype) for v in values]) if values else np.zeros(0, dtype)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))


def _places(versions: Sequence[str], known: list[str]) -> np.ndarray[Any, Any]:
    """Return each token's place in the row's distinct versions."""
    if len(known) == 1 and "" not in versions:  # nearly always: one version sampled the whole response
        return np.zeros(len(versions), np.int32)
    place = {version: at for at, version in enumerate(known)}
    return np.array([place.get(version, NOT_SAMPLED) for version in versions], np.int32)
