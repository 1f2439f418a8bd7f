"""Units that left for the history while a consumer still has to read them: found again where their trajectories still lie.

1. Retention takes units out of the index; sweep and compaction take their trajectories later. Until then a branch that sets
   a consumer back can give it such units again.
2. An extent is believed where its bytes match the digests that the history holds. One whose row was swept gets a row again,
   in a transaction of its own: if nothing comes to name it, the next sweep takes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from strawflow.errors import CorruptPackError, IncompatibleFormatError, StorageError
from strawflow.flow.placed import moved_rows
from strawflow.flow.run import Run
from strawflow.ids import Extent
from strawflow.index import datasets, packs
from strawflow.index.carry import Carried, Place
from strawflow.index.engine import Connection
from strawflow.index.units import Unit
from strawflow.packs.reader import PackReader
from strawflow.states import UnitState


@dataclass(frozen=True)
class RetiredUnit:
    """A unit that left the index for the history, as far as a fork must know it."""

    unit_id: int
    is_completed: bool
    fates: Mapping[str, int]
    """{consumer: step}."""
    row: Mapping[str, Any]
    """What the history holds of it."""


def retired_units(run: Run, branch_id: str) -> list[RetiredUnit]:
    """Return the units of a branch that left the index; reads every pack of the history."""
    return [
        RetiredUnit(
            unit_id=row["unit_id"],
            is_completed=row["state"] == UnitState.COMPLETED,
            fates=dict(zip(row["consumers"], row["steps"], strict=True)),
            row=row,
        )
        for rows in moved_rows(run, "history")
        for row in rows.to_pylist()
        if row["branch_id"] == branch_id
    ]


def places_gone(run: Run, branch_id: str) -> set[Place]:
    """Return the places of a branch's units that are in the history."""
    found = retired_units(run, branch_id)
    with run.index.read() as connection:
        segments = _segment_ids(connection, found)
    return {(r.row["profile"], _segment_of(r, segments), r.row["epoch"], r.row["position"]) for r in found}


def readable(run: Run, wanted: Sequence[RetiredUnit]) -> dict[int, Carried]:
    """Return those of the units whose trajectories can still be read, with their results, by id.

    Extents that had lost their rows have them again afterwards.
    """
    stored = {r.unit_id: e for r in wanted if r.is_completed and (e := _extent_of(r.row)) is not None}
    with run.index.read() as connection:
        segments = _segment_ids(connection, wanted)
        found = packs.with_digests(connection, "trajectory", [e.digests for e in stored.values()])
    swept = {e.digests: e for e in stored.values() if e.digests not in found}
    whole = _whole(run, swept.values())
    if whole:
        with run.index.begin() as connection:
            found |= packs.name_again(connection, whole)
    return {
        r.unit_id: _carried(r, found[stored[r.unit_id].digests], segments)
        for r in wanted
        if r.unit_id in stored and stored[r.unit_id].digests in found
    }


def _extent_of(row: Mapping[str, Any]) -> Extent | None:
    """Return where a unit's trajectories lay; None where the history does not say (version 1, quarantine)."""
    if row.get("result_digests") is None:
        return None
    where = (row["result_path"], row["result_offset"], row["result_length"], row["result_num_rows"])
    return Extent(0, 0, "trajectory", *where, row["result_digests"])


def _whole(run: Run, extents: Iterable[Extent]) -> list[Extent]:
    """Return those of the extents whose bytes are where they were."""
    found = []
    with closing(PackReader(run.root)) as reader:
        for extent in extents:
            try:
                reader.read(extent)
            except (CorruptPackError, StorageError, IncompatibleFormatError):
                continue  # swept and compacted away: it is told as lost
            found.append(extent)
    return found


Segments = Mapping[tuple[str, int], int]
"""Ids of segments by dataset and number."""


def _segment_ids(connection: Connection, found: Collection[RetiredUnit]) -> Segments:
    names = {r.row["dataset_id"] for r in found if "dataset_id" in r.row}
    return {
        (name, segment.segment_seq): segment.segment_id
        for name in sorted(names)
        for segment in datasets.segments_of(connection, name)
    }


def _segment_of(retired: RetiredUnit, segments: Segments) -> int:
    row = retired.row
    number: int = row["segment_id"]  # all that version 1 says
    return segments.get((row["dataset_id"], row["segment_seq"]), number) if "dataset_id" in row else number


def _carried(retired: RetiredUnit, extent: Extent, segments: Segments) -> Carried:
    row = retired.row
    told = {name: row[name] for name in Unit.__dataclass_fields__ if name in row}
    unit = Unit(
        **{
            **told,
            "segment_id": _segment_of(retired, segments),
            "state": UnitState.COMPLETED,
            "required_version_id": None,
            "session_id": None,
            "extent_id": extent.extent_id,
            "row_start": row["result_row_start"],
            "row_count": row["result_row_count"],
        }
    )
    return Carried(unit, row["dataset_id"], 0, keeps=True)


# ---- as the journal tells them


def told(carried: Sequence[Carried], connection: Connection, unit_ids: Collection[int]) -> list[list[Any]]:
    """Return how an entry tells the units among `carried` that have left the index: their places in it, and what they are."""
    numbers = {
        segment.segment_id: segment.segment_seq
        for name in sorted({c.dataset_id for c in carried})
        for segment in datasets.segments_of(connection, name)
    }
    return [
        [u.unit_id, u.purpose, u.profile, c.dataset_id, numbers[u.segment_id], u.epoch, u.position]
        for c in carried
        for u in (c.unit,)
        if u.unit_id in unit_ids
    ]


def from_entry(connection: Connection, rows: Iterable[Sequence[Any]]) -> dict[int, Carried]:
    """Return the units that an entry tells, which had left the index by then; their results are told beside."""
    found: dict[int, Carried] = {}
    for unit_id, purpose, profile, dataset_id, segment_seq, epoch, position in rows:
        segments = {s.segment_seq: s.segment_id for s in datasets.segments_of(connection, dataset_id)}
        if segment_seq not in segments:
            continue
        nothing = dict.fromkeys(Unit.__dataclass_fields__)
        counts = dict.fromkeys(("fence", "seq", "attempts", "crashes", "parks", "requeues"), 0)
        identity = {
            "unit_id": unit_id,
            "branch_id": "",
            "purpose": purpose,
            "profile": profile,
            "segment_id": segments[segment_seq],
            "epoch": epoch,
            "position": position,
            "state": UnitState.COMPLETED,
        }
        unit = Unit(**{**nothing, **counts, **identity})  # type: ignore[arg-type]
        found[unit_id] = Carried(unit, dataset_id, 0, keeps=False)
    return found
