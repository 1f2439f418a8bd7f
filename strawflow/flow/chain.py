"""Saved progress of a group that is worked on: a chain of records, each with only what came since the one before.

1. A record holds the members that changed. A row's tokens follow the first `start` tokens its member had before; `start` 0:
   the member stands as the row says, whatever it had.
2. Each record names the one it goes on from by (fence, seq); the first goes on from the prompt. Folding stops where that is
   not the record before: what follows belongs to a chain that was given up.
3. Whoever goes on with the group under another grant adds to the same chain. Parking stores it whole again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from strawflow.errors import CorruptPackError
from strawflow.flow.payload import arrays_of, fill_in
from strawflow.flow.placed import read_rows
from strawflow.flow.run import Run
from strawflow.flow.trajectory import COMPLETE_SEQ, NOT_SAMPLED, Member, UnitResult, with_every_token
from strawflow.ids import RowRange
from strawflow.index import continuations, packs
from strawflow.index.leases import Key
from strawflow.index.units import Unit
from strawflow.packs.reader import PackReader
from strawflow.records import CONTINUATION

_AS_STORED = (
    "member",
    "status",
    "response_tokens",
    "logprobs",
    "finish_reason",
    "reward",
    "score",
    "failure",
    "response_text",
    "environment",
    "loss_mask",
    "prompt_tokens",
)
"""Fields of a member that are columns of its row."""
_OF_TOKENS = ("response_tokens", "loss_mask", "logprobs", "token_versions")


@dataclass
class Chain:
    """What is saved of one unit under the grant at hand. Not safe for threads."""

    fence: int
    last: Key | None = None
    """(fence, seq) of the newest record; None before the first."""
    members: dict[int, Member] = field(default_factory=dict)
    """As they are saved, by number."""

    @property
    def next_seq(self) -> int:
        """The `seq` of this grant's next write: a save, or what ends it."""
        return self.last[1] + 1 if self.last is not None and self.last[0] == self.fence else COMPLETE_SEQ

    def record(self, result: UnitResult) -> UnitResult | None:
        """Return what of a group's present members is not saved yet, as the chain's next record; None when all is."""
        since = (_since(self.members.get(m.member), m, result.prompt_tokens) for m in result.members)
        changed = [member for member in since if member is not None]
        if not changed:
            return None
        return replace(result, members=changed, seq=self.next_seq, after=self.last)

    def saved(self, record: UnitResult, result: UnitResult) -> None:
        """Note that a record of a result's members is stored."""
        self.last = (record.fence, record.seq)
        self.members |= {m.member: m for m in result.members}


_TOLD_AGAIN = ("status", "finish_reason", "reward", "score", "failure", "response_text", "environment")
"""Fields of a member that a record tells anew, beside its tokens."""


def _since(before: Member | None, now: Member, prompt: Sequence[int]) -> Member | None:
    """Return a member with only the tokens after those it had before, or as it is where they do not go on from those; None
    when nothing is new."""
    if before is None or now.siblings or before.siblings:
        return now if before is None or _told(now) != _told(before) else None
    had = len(before.response_tokens)
    if list(now.response_tokens[:had]) != list(before.response_tokens) or (
        list(_prompt_of(now, prompt)) != list(_prompt_of(before, prompt))
    ):
        return now
    if had == len(now.response_tokens) and all(
        getattr(now, name) == getattr(before, name) for name in _TOLD_AGAIN
    ):
        return None
    versions = now.token_versions
    return replace(
        now,
        response_tokens=now.response_tokens[had:],
        logprobs=now.logprobs[had:],
        token_versions=versions if isinstance(versions, str) else versions[had:],
        loss_mask=None if now.loss_mask is None else now.loss_mask[had:],
        start=had,
    )


def _told(member: Member) -> list[tuple[Any, ...]]:
    return [(list(s.response_tokens), *(getattr(s, name) for name in _TOLD_AGAIN)) for s in member.segments]


def _prompt_of(member: Member, prompt: Sequence[int]) -> Sequence[int]:
    return prompt if member.prompt_tokens is None else member.prompt_tokens


def saved_members(rows: pa.RecordBatch | None) -> dict[int, Member]:
    """Return the members of a `Grant.continuation` by number, each with all its segments; none without one."""
    if rows is None:
        return {}
    segments: dict[int, list[Member]] = {}
    tensors = arrays_of(rows.column("tensors"))
    for row, of_row in zip(rows.drop_columns(["tensors"]).to_pylist(), tensors, strict=True):
        segments.setdefault(row["member"], []).append(replace(_member(row), tensors=of_row))
    return {number: replace(first, siblings=tuple(others)) for number, (first, *others) in segments.items()}


def _member(row: Mapping[str, Any]) -> Member:
    versions = row["weight_versions"]
    as_stored = {name: row[name] for name in _AS_STORED}
    return Member(
        token_versions=["" if place == NOT_SAMPLED else versions[place] for place in row["token_versions"]],
        **as_stored,
    )


def last_record(rows: pa.RecordBatch) -> Key:
    """Return (fence, seq) of the newest record among the rows of a continuation."""
    return max(zip(rows.column("fence").to_pylist(), rows.column("seq").to_pylist(), strict=True))


def fold(records: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the rows that a chain's records come to: whole members, as if they had been saved at once.

    Each record is its rows (kind continuation or progress) in the order of (fence, seq), the first one whole. What comes of
    it has the columns of kind continuation.

    Raises:
        CorruptPackError: a row goes on from more tokens than its member has.
    """
    first, *others = (with_every_token(rows) for rows in records)
    members = _by_member(first)
    last = last_record(first)
    num_folded = 0
    for rows in others:
        if _after(rows) != last:
            break
        for number, found in _by_member(rows).items():
            members[number] = [_joined(members.get(number), found[0])] if found[0]["start"] else found
        last = last_record(rows)
        num_folded += 1
    if not num_folded:
        return first.select(CONTINUATION.names)
    whole = [row for number in sorted(members) for row in members[number]]
    return pa.RecordBatch.from_pylist(whole, schema=CONTINUATION)


def _by_member(rows: pa.RecordBatch) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    told = rows.to_pylist()
    # The row that holds the data of others may be replaced by a later record.
    fill_in(row["tensors"] for row in told)
    for row in told:
        found.setdefault(row["member"], []).append(row)
    return found


def _after(rows: pa.RecordBatch) -> Key | None:
    """Return the record that one goes on from; None: from the prompt."""
    if "after_seq" not in rows.schema.names or rows.column("after_seq")[0].as_py() is None:  # parked: whole
        return None
    return rows.column("after_fence")[0].as_py(), rows.column("after_seq")[0].as_py()


def _joined(before: Sequence[dict[str, Any]] | None, row: dict[str, Any]) -> dict[str, Any]:
    start = row["start"]
    if before is None or len(before) != 1 or len(before[0]["response_tokens"]) < start:
        raise CorruptPackError(
            f"saved progress goes on from {start} tokens that were not saved: what wrote it was wrong; drop its group",
            unit_id=row["unit_id"],
            member=row["member"],
        )
    (had,) = before
    versions = list(dict.fromkeys([*had["weight_versions"], *row["weight_versions"]]))
    places = [versions.index(version) for version in row["weight_versions"]]
    sampled_by = [NOT_SAMPLED if place == NOT_SAMPLED else places[place] for place in row["token_versions"]]
    told = {**row, "token_versions": sampled_by}
    joined = {name: [*had[name][:start], *told[name]] for name in _OF_TOKENS}
    return {**row, **joined, "weight_versions": versions}


def read_chains(run: Run, reader: PackReader, found: Iterable[Unit]) -> dict[int, pa.RecordBatch]:
    """Return what is saved of units that have no result yet, folded, by unit id; those without are left out.

    Raises:
        CorruptPackError, StorageError: a record is damaged or cannot be read.
    """
    begun = {u.unit_id: u for u in found if u.extent_id is not None}
    if not begun:
        return {}
    with run.index.read() as connection:
        on_top = continuations.find(connection, begun)
        records = {
            u.unit_id: [
                (u.extent_id or 0, u.row_start or 0, u.row_count or 0),
                *((r.extent_id, r.row_start, r.row_count) for r in on_top.get(u.unit_id, ())),
            ]
            for u in begun.values()
        }
        placed = packs.find_extents(connection, {r[0] for of_unit in records.values() for r in of_unit})
    return {
        unit_id: fold(
            [
                read_rows(run, reader, RowRange(placed[extent_id], start, count))
                for extent_id, start, count in of_unit
            ]
        )
        for unit_id, of_unit in records.items()
    }
