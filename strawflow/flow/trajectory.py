"""Results of generation as rows: the members of a unit and the checks they must pass before they are stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from strawflow.config import SamplingProfile
from strawflow.errors import InvalidInputError
from strawflow.flow.columns import constant, lists, maybe, numbers, same
from strawflow.records import schema_of

NOT_SAMPLED = -1
"""token_versions of a token that no weights sampled (a demonstration)."""


COMPLETE_SEQ = 1
"""A unit without saved progress has one guarded write: its completion."""


@dataclass(frozen=True)
class Member:
    """One member of a group: finished, truncated at the token limit, failed with a reason, or (parked) partial.

    `logprobs[i]` is log-softmax(logits / temperature) of `response_tokens[i]` in the pass that sampled it;
    `token_versions[i]` is the id of the weights of that pass ("" for a demonstration), or one id for all tokens.
    Tokens, log-probabilities and versions have equal length; arrays of int32 and float32 are taken without a copy.
    """

    member: int
    status: str
    response_tokens: Sequence[int]
    logprobs: Sequence[float]
    token_versions: Sequence[str] | str
    finish_reason: str
    reward: float | None
    score: float | None = None
    failure: str | None = None
    response_text: str | None = None
    environment: bytes | None = None
    """State of the environment a parked member goes on in; stored with continuations only."""

    @cached_property
    def versions(self) -> tuple[str, ...]:
        """The distinct weight versions among the tokens, sorted."""
        if isinstance(self.token_versions, str):
            return (self.token_versions,) if self.token_versions and len(self.response_tokens) else ()
        return tuple(sorted({v for v in self.token_versions if v}))

    @cached_property
    def token_array(self) -> np.ndarray[Any, Any]:
        """Response tokens, int32."""
        return np.asarray(self.response_tokens, np.int32)

    @cached_property
    def logprob_array(self) -> np.ndarray[Any, Any]:
        """Log-probabilities, float32."""
        return np.asarray(self.logprobs, np.float32)

    def check(self) -> None:
        """Raise InvalidInputError when the parallel arrays disagree, a number is not finite, or a result is missing."""
        num_tokens = len(self.response_tokens)
        is_same = isinstance(self.token_versions, str)
        num_versions = num_tokens if is_same else len(self.token_versions)
        if not num_tokens == len(self.logprobs) == num_versions:
            raise InvalidInputError(
                f"member {self.member}: {num_tokens} tokens, {len(self.logprobs)} log-probabilities, "
                f"{num_versions} versions; they must be equally many"
            )
        # One pass: a sum of finite float32 values in float64 cannot overflow, and NaN or infinity shows in it.
        if not math.isfinite(self.logprob_array.sum(dtype=np.float64)):
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

    def check(self) -> None:
        """Raise InvalidInputError when a member breaks promise P9 or P10."""
        for member in self.members:
            member.check()

    @property
    def num_tokens(self) -> int:
        return sum(len(m.response_tokens) for m in self.members)

    @property
    def mean_reward(self) -> float | None:
        rewards = [m.reward for m in self.members if m.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    def versions(self) -> set[str]:
        return {version for m in self.members for version in m.versions}


def to_record_batch(results: Sequence[UnitResult], *, kind: str = "trajectory") -> pa.RecordBatch:
    """Return the rows of several units, unit after unit, member after member; `kind` is trajectory or continuation.

    Results are taken as checked (`UnitResult.check`).
    """
    schema = schema_of(kind)
    rows = [(result, member) for result in results for member in result.members]
    of_units = _UnitColumns(results)
    columns: dict[str, Callable[[pa.DataType], pa.Array]] = {
        "unit_id": lambda t: numbers(of_units.spread(lambda r: r.unit_id), t),
        "fence": lambda t: numbers(of_units.spread(lambda r: r.fence), t),
        "seq": lambda t: numbers(of_units.spread(lambda r: r.seq), t),
        "member": lambda t: numbers([m.member for _, m in rows], t),
        "segment": lambda t: constant(0, t, len(rows)),
        "purpose": lambda t: of_units.shared(lambda r: r.profile.purpose, t),
        "status": lambda t: same([m.status for _, m in rows], t),
        "failure": lambda t: maybe([m.failure for _, m in rows], t),
        "prompt_tokens": lambda t: lists([np.asarray(r.prompt_tokens, np.int32) for r, _ in rows], t),
        "response_tokens": lambda t: lists([m.token_array for _, m in rows], t),
        "loss_mask": lambda t: lists([_ones(len(m.response_tokens)) for _, m in rows], t),
        "logprobs": lambda t: lists([m.logprob_array for _, m in rows], t),
        "token_versions": lambda t: lists([_places(m) for _, m in rows], t),
        "weight_versions": lambda t: same([m.versions for _, m in rows], t),
        "reward": lambda t: maybe([m.reward for _, m in rows], t),
        "score": lambda t: maybe([m.score for _, m in rows], t),
        "response_text": lambda t: maybe([m.response_text for _, m in rows], t),
        "finish_reason": lambda t: same([m.finish_reason for _, m in rows], t),
        "temperature": lambda t: of_units.shared(lambda r: r.profile.temperature, t),
        "top_p": lambda t: of_units.shared(lambda r: r.profile.top_p, t),
        "top_k": lambda t: constant(-1, t, len(rows)),
        "max_response_tokens": lambda t: of_units.shared(lambda r: r.profile.max_response_tokens, t),
        "engine": lambda t: of_units.shared(lambda r: r.engine, t),
        "environment": lambda t: maybe([m.environment for _, m in rows], t),
    }
    return pa.RecordBatch.from_arrays([columns[f.name](f.type) for f in schema], schema=schema)


class _UnitColumns:
    """Values of units, repeated for each of their members."""

    def __init__(self, results: Sequence[UnitResult]) -> None:
        self._results = results
        self._counts = [len(r.members) for r in results]

    def spread(self, get: Callable[[UnitResult], Any]) -> list[Any]:
        return [
            value
            for r, n in zip(self._results, self._counts, strict=True)
            for value in [get(r)]
            for _ in range(n)
        ]

    def shared(self, get: Callable[[UnitResult], Any], dtype: pa.DataType) -> pa.Array:
        """Return a column that is nearly always the same value in every row."""
        values = {get(r) for r in self._results}
        if len(values) == 1:
            return constant(values.pop(), dtype, sum(self._counts))
        return pa.array(self.spread(get), dtype)


_ONES = np.ones(65536, np.int8)
_ZEROS = np.zeros(65536, np.int32)


def _ones(count: int) -> np.ndarray[Any, Any]:
    return _ONES[:count] if count <= len(_ONES) else np.ones(count, np.int8)


def _places(member: Member) -> np.ndarray[Any, Any]:
    """Return each token's place in the member's distinct versions."""
    num_tokens = len(member.response_tokens)
    if isinstance(member.token_versions, str):
        if not member.token_versions:
            return np.full(num_tokens, NOT_SAMPLED, np.int32)
        return _ZEROS[:num_tokens] if num_tokens <= len(_ZEROS) else np.zeros(num_tokens, np.int32)
    if len(member.versions) == 1 and "" not in member.token_versions:  # nearly always: one sampled it all
        return _ZEROS[:num_tokens] if num_tokens <= len(_ZEROS) else np.zeros(num_tokens, np.int32)
    place = {version: at for at, version in enumerate(member.versions)}
    return np.array([place.get(version, NOT_SAMPLED) for version in member.token_versions], np.int32)
