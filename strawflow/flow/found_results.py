"""Groups of trajectory rows as they lie in a message, and whether they are a result: pure functions over rows.

A message holds units one after another, members in order. Of a group that an index accepted all members lie together;
checked is what promises P9 and P10 say of rows, since no index vouches for them any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from strawflow.flow.trajectory import ALIGNED_OR_NULL, NOT_SAMPLED, is_aligned


@dataclass(frozen=True)
class FoundGroup:
    """The rows of one unit under one fence and seq."""

    unit_id: int
    fence: int
    seq: int
    purpose: str
    row_start: int
    row_count: int
    members: tuple[int, ...]
    versions: frozenset[str]
    mean_reward: float | None
    num_tokens: int
    is_sound: bool
    after: tuple[int, int] | None = None
    """Of saved progress: (fence, seq) of the record it goes on from; None: it is whole."""

    def has_all(self, num_members: int) -> bool:
        """Tell whether every member of the group is here."""
        return set(self.members) == set(range(num_members))


def groups_of(rows: pa.RecordBatch) -> Iterator[FoundGroup]:
    """Yield the groups of a message of kind trajectory or continuation, in its order."""
    unit, fence, seq = (_numbers(rows, name) for name in ("unit_id", "fence", "seq"))
    starts = np.flatnonzero(
        np.concatenate([[True], (unit[1:] != unit[:-1]) | (fence[1:] != fence[:-1]) | (seq[1:] != seq[:-1])])
    )
    sound, lengths = _is_sound(rows), _lengths(rows, "response_tokens")
    purposes = rows.column("purpose").to_pylist()
    members, rewards = rows.column("member").to_pylist(), rows.column("reward").to_pylist()
    segments = _numbers(rows, "segment")  # a rollout's reward stands in each of its segments, and counts once
    versions = rows.column("weight_versions").to_pylist()
    after = _after(rows)
    for start, end in zip(starts, [*starts[1:], rows.num_rows], strict=True):
        earned = [
            r
            for r, at in zip(rewards[start:end], segments[start:end], strict=True)
            if r is not None and not at
        ]
        yield FoundGroup(
            unit_id=int(unit[start]),
            fence=int(fence[start]),
            seq=int(seq[start]),
            purpose=purposes[start],
            row_start=int(start),
            row_count=int(end - start),
            members=tuple(members[start:end]),
            versions=frozenset(v for own in versions[start:end] for v in own),
            mean_reward=sum(earned) / len(earned) if earned else None,
            num_tokens=int(lengths[start:end].sum()),
            is_sound=bool(sound[start:end].all()) and len(set(purposes[start:end])) == 1,
            after=after[start],
        )


def _after(rows: pa.RecordBatch) -> list[tuple[int, int] | None]:
    """Return for each row the record that it goes on from."""
    if "after_seq" not in rows.schema.names:
        return [None] * rows.num_rows
    told = zip(rows.column("after_fence").to_pylist(), rows.column("after_seq").to_pylist(), strict=True)
    return [None if seq is None else (fence, seq) for fence, seq in told]


def _is_sound(rows: pa.RecordBatch) -> np.ndarray[Any, Any]:
    """Tell for each row whether its parallel arrays agree and a failure is told as one."""
    num_tokens, num_versions = _lengths(rows, "response_tokens"), _lengths(rows, "weight_versions")
    sound = _lengths(rows, "logprobs") == num_tokens
    sound &= np.logical_and.reduce([is_aligned(rows, name) for name in ALIGNED_OR_NULL])
    sound &= (num_versions <= 1) | np.asarray(pc.is_valid(rows.column("token_versions")))
    sound &= _all_of_row(rows, "logprobs", np.isfinite)
    places = _values(rows, "token_versions")
    bound = np.repeat(num_versions, _lengths(rows, "token_versions"))
    sound &= _each_row(rows, "token_versions", (places >= NOT_SAMPLED) & (places < bound))
    is_failed = np.asarray(pc.equal(rows.column("status"), "failed"))
    has_failure = np.asarray(pc.is_valid(rows.column("failure")))
    has_reward = np.asarray(pc.is_valid(rows.column("reward")))
    whole: np.ndarray[Any, Any] = sound & (is_failed == has_failure) & ~(is_failed & has_reward)
    return whole


def _numbers(rows: pa.RecordBatch, name: str) -> np.ndarray[Any, Any]:
    return np.asarray(rows.column(name))


def _lengths(rows: pa.RecordBatch, name: str) -> np.ndarray[Any, Any]:
    """Return how many of `_values` each row has; none where it is null."""
    return np.asarray(pc.fill_null(pc.list_value_length(rows.column(name)), 0))


def _values(rows: pa.RecordBatch, name: str) -> np.ndarray[Any, Any]:
    return np.asarray(rows.column(name).flatten())


def _all_of_row(rows: pa.RecordBatch, name: str, holds: Any) -> np.ndarray[Any, Any]:
    return _each_row(rows, name, holds(_values(rows, name)))


def _each_row(rows: pa.RecordBatch, name: str, good: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Tell for each row whether none of its values is bad."""
    row_of_value = np.repeat(np.arange(rows.num_rows), _lengths(rows, name))
    all_good: np.ndarray[Any, Any] = np.bincount(row_of_value[~good], minlength=rows.num_rows) == 0
    return all_good
