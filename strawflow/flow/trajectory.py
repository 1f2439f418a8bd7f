"""Results of generation as rows: the members of a unit and the checks they must pass before they are stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from strawflow.config import SamplingProfile
from strawflow.errors import CorruptPackError, InvalidInputError
from strawflow.flow.columns import constant, lists, maybe, numbers, offsets, same
from strawflow.flow.payload import check_tensors, tensor_column
from strawflow.records import schema_of

NOT_SAMPLED = -1
"""token_versions of a token that no weights sampled (a demonstration)."""

ALIGNED_OR_NULL = ("loss_mask", "token_versions")
"""Columns of one item a token, or null where one word tells them all."""

MAX_LOGPROB = 1e-4
"""Above: not a log-probability; up to here it is rounding."""

PARTIAL = "partial"
STATUSES = ("finished", "truncated", "failed", PARTIAL)
"""What a member may be; partial only while its group is parked."""

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
    loss_mask: Sequence[int] | None = None
    """1 = trained, for each response token; None: all are. A token that no weights sampled is never trained."""
    prompt_tokens: Sequence[int] | None = None
    """What its first token was sampled after; None: the group's prompt."""
    start: int = 0
    """Of progress saved as a difference: how many of the member's tokens before it still count (`flow.chain`)."""
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None
    """Arrays that go with the segment (what a processor made of images), of any numpy type and shape; stored bit for bit."""
    siblings: Sequence[Member] = ()
    """Further segments of the same rollout, in order: only what is a segment's own counts (tokens, their parallel arrays,
    text, prompt, finish reason). Status, reward and failure are the rollout's: told here, once."""

    @cached_property
    def segments(self) -> tuple[Member, ...]:
        """The rollout's segments in order, this one first, each as a row is stored: without siblings."""
        if not self.siblings:
            return (self,)
        shared = {name: getattr(self, name) for name in _OF_ROLLOUT}
        return (replace(self, siblings=()), *(replace(s, siblings=(), **shared) for s in self.siblings))

    @property
    def is_worth_keeping(self) -> bool:
        """Whether anything of it is worth keeping when its group is broken off, or saved while it is worked on."""
        return bool(len(self.response_tokens)) or self.environment is not None or self.status != PARTIAL

    @property
    def last(self) -> Member:
        """The segment that ends the rollout: what a reward reads."""
        return self.segments[-1]

    @cached_property
    def mask_array(self) -> np.ndarray[Any, Any] | None:
        """The mask, int8; None where every token is trained."""
        if self.loss_mask is None:
            return None
        mask = np.asarray(self.loss_mask, np.int8)
        return None if len(mask) == len(self.response_tokens) and mask.all() else mask

    @cached_property
    def versions(self) -> tuple[str, ...]:
        """The distinct weight versions among the tokens, sorted."""
        if isinstance(self.token_versions, str):
            return (self.token_versions,) if self.token_versions and len(self.response_tokens) else ()
        return tuple(sorted({v for v in self.token_versions if v}))

    @cached_property
    def version_places(self) -> np.ndarray[Any, Any] | None:
        """Each token's place in `versions`, int32; None where one version sampled all, or none any."""
        versions = self.versions
        if isinstance(self.token_versions, str) or not versions:
            return None
        if len(versions) == 1 and "" not in self.token_versions:
            return None
        place = {version: at for at, version in enumerate(versions)}
        return np.array([place.get(version, NOT_SAMPLED) for version in self.token_versions], np.int32)

    @cached_property
    def token_array(self) -> np.ndarray[Any, Any]:
        """Response tokens, int32."""
        return _int32(self.response_tokens, of=f"member {self.member}: a response token")

    @cached_property
    def logprob_array(self) -> np.ndarray[Any, Any]:
        """Log-probabilities, float32."""
        return np.asarray(self.logprobs, np.float32)

    def check(self) -> None:
        """Raise InvalidInputError when the parallel arrays disagree, a number is not finite, or status and result do.

        A partial member passes: whether its group may hold one is `UnitResult.check`'s question.
        """
        for sibling in self.segments[1:]:
            sibling.check()
        num_tokens = len(self.response_tokens)
        is_same = isinstance(self.token_versions, str)
        num_versions = num_tokens if is_same else len(self.token_versions)
        if not num_tokens == len(self.logprobs) == num_versions:
            raise InvalidInputError(
                f"member {self.member}: {num_tokens} tokens, {len(self.logprobs)} log-probabilities, "
                f"{num_versions} versions; they must be equally many"
            )
        self._check_mask()
        check_tensors(self.tensors, of=f"member {self.member}")
        # One pass: a sum of finite float32 values in float64 cannot overflow, and NaN or infinity shows in it.
        if not math.isfinite(self.logprob_array.sum(dtype=np.float64)):
            raise InvalidInputError(f"member {self.member}: a log-probability is not finite")
        if self.logprob_array.max(initial=0.0) > MAX_LOGPROB:
            raise InvalidInputError(
                f"member {self.member}: a log-probability is above 0; hand in natural logarithms"
            )
        if self.token_array.min(initial=0) < 0:
            raise InvalidInputError(
                f"member {self.member}: a token is below 0; tokens are ids of the vocabulary"
            )
        for name, number in (("reward", self.reward), ("score", self.score)):
            if number is not None and not math.isfinite(number):  # no JSON number, and no mean of a group
                raise InvalidInputError(
                    f"member {self.member}: the {name} is {number}; give a finite one, or fail the member with a reason"
                )
        if self.status not in STATUSES:
            raise InvalidInputError(
                f"member {self.member}: status {self.status!r} is none of {', '.join(STATUSES)}"
            )
        if (self.status == "failed") != (self.failure is not None):
            raise InvalidInputError(
                f"member {self.member}: a failed member needs its reason, another must have none"
            )
        if self.status == "failed" and self.reward is not None:
            raise InvalidInputError(f"member {self.member}: a failed member has no reward")

    def _check_mask(self) -> None:
        if self.loss_mask is None:
            return
        mask = np.asarray(self.loss_mask, np.int8)
        if len(mask) != len(self.response_tokens):
            raise InvalidInputError(
                f"member {self.member}: {len(self.response_tokens)} tokens, {len(mask)} items of loss_mask; "
                "they must be equally many"
            )
        if ((mask != 0) & (mask != 1)).any():
            raise InvalidInputError(f"member {self.member}: loss_mask holds other than 0 and 1")
        # A demonstration is trained without having been sampled, but then it is so as a whole.
        if self.versions and any(m and not v for m, v in zip(mask, self._version_of_each(), strict=True)):
            raise InvalidInputError(
                f"member {self.member}: a token that no weights sampled has loss_mask 1; set it to 0"
            )

    def _version_of_each(self) -> Sequence[str]:
        told = self.token_versions
        return [told] * len(self.response_tokens) if isinstance(told, str) else told


_OF_ROLLOUT = ("member", "status", "failure", "reward", "score", "environment")
"""Fields that all segments of a rollout share."""


def _int32(tokens: Sequence[int], *, of: str) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(tokens, np.int32)
    except (ValueError, OverflowError, TypeError) as error:
        raise InvalidInputError(f"{of} is no 32-bit whole number: {error}") from None


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
    after: tuple[int, int] | None = None
    """Of progress saved as a difference: (fence, seq) of the record it goes on from; None: it is whole."""

    def check(self, *, is_parked: bool = False) -> None:
        """Raise InvalidInputError when a member breaks promise P9 or P10, or is partial in a group that is not parked.

        Nor may the group be empty or hold a member twice: (unit, fence, seq, member) is a row's name for ever.
        """
        if not self.members:
            raise InvalidInputError(
                "a group without members has no result; fail it, or release it", unit_id=self.unit_id
            )
        if (
            len({m.member for m in self.members}) != len(self.members)
            or min(m.member for m in self.members) < 0
        ):
            raise InvalidInputError(
                f"members {[m.member for m in self.members]}: each has its own number, from 0 on",
                unit_id=self.unit_id,
            )
        for member in self.members:
            member.check()
            if member.status == PARTIAL and not is_parked:
                raise InvalidInputError(
                    f"member {member.member}: a partial member cannot be completed; park its group",
                    unit_id=self.unit_id,
                )

    @cached_property
    def rows(self) -> list[Member]:
        """The members' segments as they are stored, member after member."""
        return [segment for member in self.members for segment in member.segments]

    @property
    def num_tokens(self) -> int:
        return sum(len(m.response_tokens) for m in self.rows)

    @property
    def mean_reward(self) -> float | None:
        rewards = [m.reward for m in self.members if m.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    @cached_property
    def versions(self) -> frozenset[str]:
        """The distinct weight versions among all tokens."""
        return frozenset(version for m in self.rows for version in m.versions)


def to_record_batch(results: Sequence[UnitResult], *, kind: str = "trajectory") -> pa.RecordBatch:
    """Return the rows of several units, unit after unit, member after member, segment after segment.

    `kind` is trajectory or continuation.

    Results are taken as checked (`UnitResult.check`).

    Raises:
        InvalidInputError: they are more than the lists of one record batch can hold.
    """
    members = [row for result in results for row in result.rows]
    places = [place for r in results for member in r.members for place in range(1 + len(member.siblings))]
    of_units = _UnitColumns(results)
    prompts = of_units.spread(
        [_int32(r.prompt_tokens, of=f"unit {r.unit_id}: a prompt token") for r in results]
    )
    prompts = [
        prompt
        if m.prompt_tokens is None
        else _int32(m.prompt_tokens, of=f"member {m.member}: a prompt token")
        for m, prompt in zip(members, prompts, strict=True)
    ]
    responses = offsets([len(m.token_array) for m in members])
    num = len(members)
    columns: dict[str, Callable[[pa.DataType], pa.Array]] = {
        "unit_id": lambda t: of_units.numbers(lambda r: r.unit_id, t),
        "fence": lambda t: of_units.numbers(lambda r: r.fence, t),
        "seq": lambda t: of_units.numbers(lambda r: r.seq, t),
        "member": lambda t: numbers([m.member for m in members], t),
        "segment": lambda t: numbers(places, t),
        "purpose": lambda t: of_units.shared(lambda r: r.profile.purpose, t),
        "status": lambda t: same([m.status for m in members], t),
        "failure": lambda t: maybe([m.failure for m in members], t),
        "prompt_tokens": lambda t: lists(prompts, t, offsets([len(p) for p in prompts])),
        "response_tokens": lambda t: lists([m.token_array for m in members], t, responses),
        "loss_mask": lambda t: maybe([m.mask_array for m in members], t),
        "logprobs": lambda t: lists([m.logprob_array for m in members], t, responses),
        "token_versions": lambda t: maybe([m.version_places for m in members], t),
        "weight_versions": lambda t: same([m.versions for m in members], t),
        "reward": lambda t: maybe([m.reward for m in members], t),
        "score": lambda t: maybe([m.score for m in members], t),
        "response_text": lambda t: maybe([m.response_text for m in members], t),
        "finish_reason": lambda t: same([m.finish_reason for m in members], t),
        "temperature": lambda t: of_units.shared(lambda r: r.profile.temperature, t),
        "top_p": lambda t: of_units.shared(lambda r: r.profile.top_p, t),
        "top_k": lambda t: constant(-1, t, num),
        "max_response_tokens": lambda t: of_units.shared(lambda r: r.profile.max_response_tokens, t),
        "engine": lambda t: of_units.shared(lambda r: r.engine, t),
        "environment": lambda t: maybe([m.environment for m in members], t),
        "after_fence": lambda t: maybe(of_units.spread([r.after and r.after[0] for r in results]), t),
        "after_seq": lambda t: maybe(of_units.spread([r.after and r.after[1] for r in results]), t),
        "start": lambda t: numbers([m.start for m in members], t),
        "tensors": lambda t: tensor_column([[m.tensors for m in r.rows] for r in results], t),
    }
    arrays = [columns[name](dtype) for name, dtype in _fields(kind)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema_of(kind))


@cache
def _fields(kind: str) -> list[tuple[str, pa.DataType]]:
    return [(field.name, field.type) for field in schema_of(kind)]


class _UnitColumns:
    """Values of units, repeated for each of their rows."""

    def __init__(self, results: Sequence[UnitResult]) -> None:
        self._results = results
        self._counts = [len(r.rows) for r in results]

    def spread(self, values: Sequence[Any]) -> list[Any]:
        return [value for value, n in zip(values, self._counts, strict=True) for _ in range(n)]

    def numbers(self, get: Callable[[UnitResult], int], dtype: pa.DataType) -> pa.Array:
        return numbers(self.spread([get(r) for r in self._results]), dtype)

    def shared(self, get: Callable[[UnitResult], Any], dtype: pa.DataType) -> pa.Array:
        """Return a column that is nearly always the same value in every row."""
        return same(self.spread([get(r) for r in self._results]), dtype)


def with_every_token(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows of kind trajectory or continuation whose mask and versions are told for every token, none null.

    int8 mask: 1 = trained. int32 places in weight_versions: -1 (`NOT_SAMPLED`) where no weights sampled the token.

    Raises:
        CorruptPackError: a row tells another number of items than it has tokens, or not which of its versions sampled them.
    """
    lengths = np.asarray(pc.list_value_length(rows.column("response_tokens")))
    num_versions = np.asarray(pc.list_value_length(rows.column("weight_versions")))
    fillers = {
        "loss_mask": np.ones(len(lengths), np.int8),
        "token_versions": np.where(num_versions > 0, np.int32(0), np.int32(NOT_SAMPLED)),
    }
    columns = rows.columns
    for name in ALIGNED_OR_NULL:
        _require(rows, name, is_aligned(rows, name), "has another length than response_tokens")
        place = rows.schema.get_field_index(name)
        if columns[place].null_count:
            columns[place] = _filled(columns[place], lengths, fillers[name])
    is_told = np.asarray(rows.column("token_versions").is_valid()) | (num_versions <= 1)
    _require(rows, "token_versions", is_told, "is null beside several weight_versions")
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


def is_aligned(rows: pa.RecordBatch, name: str) -> np.ndarray[Any, Any]:
    """Tell for each row whether a column of `ALIGNED_OR_NULL` is null or as long as the response."""
    lengths = pc.list_value_length(rows.column(name))
    as_long = pc.equal(lengths, pc.list_value_length(rows.column("response_tokens")))
    return np.asarray(pc.or_kleene(as_long, pc.is_null(lengths)))


def _require(rows: pa.RecordBatch, name: str, holds: np.ndarray[Any, Any], otherwise: str) -> None:
    if not holds.all():
        at = int(np.argmin(holds))
        unit_id, member = (rows.column(key)[at].as_py() for key in ("unit_id", "member"))
        raise CorruptPackError(
            f"{name} of row {at} {otherwise}: what wrote it was wrong; drop its group",
            unit_id=unit_id,
            member=member,
        )


def _filled(column: pa.Array, lengths: np.ndarray[Any, Any], filler: np.ndarray[Any, Any]) -> pa.Array:
    """Return a list column with each null as `lengths` times its row's filler."""
    values = np.repeat(filler, lengths)
    if column.null_count < len(column):
        is_told = np.repeat(np.asarray(column.is_valid()), lengths)
        values[is_told] = np.asarray(column.drop_null().flatten())
    return lists([values], column.type, offsets(lengths.tolist()))
