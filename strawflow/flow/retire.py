"""Rows that leave the index: packed rows of old batches, units with their fates, receipts, events.

    rows durable in a pack ▸ transaction(names the extent, deletes the rows from the index)

1. Units go to packs of kind `history`, events to packs of kind `event`; any Arrow reader opens them. A kill leaves each row in
   the index, or named in a pack, or both places with only the index's counting.
2. A batch gives its packed rows up and keeps plan, counts and digest.
3. A unit leaves once every consumer that wants it is done with it, and stays while a branch could take it over.

Which steps are old enough is flow.retain's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from strawflow import clock, faults
from strawflow.flow.placed import moved_rows
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.flow.sweep import Item
from strawflow.ids import Extent
from strawflow.index import events, packs, retention, sessions
from strawflow.index.consumers import Consumer
from strawflow.index.engine import Connection
from strawflow.index.retention import LeavingUnit, Limits
from strawflow.index.units import Unit
from strawflow.plural import counted
from strawflow.records import EVENT, HISTORY
from strawflow.states import UnitState

_CHUNK = 2000
_RECEIPTS_AT_ONCE = 5000
_BATCHES_AT_ONCE = 50


class _ChangedError(Exception):
    """A row was another than the one that was brought to a pack: the transaction goes back."""


def retire_batches(session: WorkerSession, consumer: Consumer, last_step: int) -> list[Item]:
    """Give the packed rows of a consumer's batches up to a step up, those that are pinned apart."""
    run = session.run
    steps: list[int] = []
    with run.index.read() as connection:
        found = retention.batches_up_to(connection, consumer, last_step)
    for at in range(0, len(found), _BATCHES_AT_ONCE):
        session.mark_progress()
        with run.index.begin() as connection:
            sessions.require_live(connection, session.session_id)
            part = dict(found[at : at + _BATCHES_AT_ONCE])
            given_up = [part[b] for b in sorted(retention.retire_batches(connection, list(part)))]
            events.record(
                connection,
                "batches.retired",
                session_id=session.session_id,
                consumer=consumer.consumer,
                steps=given_up,
            )
        steps += given_up
    return batches_items(consumer, steps)


def num_leaving(connection: Connection, limits: Limits) -> int:
    """Return how many units `retire_units` would bring to the history, once the batches before are retired."""
    ahead = replace(limits, counts_trained=True)
    after: int | None = 0
    total = 0
    while after is not None:
        found, after = retention.leaving_units(connection, ahead, after=after, num_looked_at=_CHUNK)
        total += len(found)
    return total


def retire_units(session: WorkerSession, limits: Limits) -> list[Item]:
    """Bring the units of a branch that may leave to the history."""
    run, num_units = session.run, 0
    after: int | None = 0
    while after is not None:
        session.mark_progress()
        with run.index.read() as connection:
            found, following = retention.leaving_units(connection, limits, after=after, num_looked_at=_CHUNK)
        if found and _move_units(session, limits, found):
            num_units += len(found)
        after = following
    return [rows_item("units", limits.branch_id, num_units)] if num_units else []


def _move_units(session: WorkerSession, limits: Limits, leaving: Sequence[LeavingUnit]) -> bool:
    """Bring units to the history; False when one of them changed meanwhile: the next retention looks at them again."""

    def remove(connection: Connection) -> bool:
        events.record(
            connection,
            "units.retired",
            session_id=session.session_id,
            branch_id=limits.branch_id,
            num_units=len(leaving),
        )
        return retention.remove_units(connection, limits, leaving)

    with session.run.index.read() as connection:
        placed = packs.whole_extents(connection, [u.unit.extent_id for u in leaving if u.unit.extent_id])
    return _move(session, "history", history_rows(leaving, placed), remove)


def _move(
    session: WorkerSession, kind: str, rows: pa.RecordBatch, remove: Callable[[Connection], bool]
) -> bool:
    """Make rows durable, then name them in the transaction that removes them from the index; False if that refused."""
    extent = session.packs.append(kind, rows)
    faults.at("retain.before_commit")  # crash here: rows in a pack that nothing names, and still in the index
    try:
        with session.run.index.begin() as connection:
            packs.name_extents(connection, [extent], session_id=session.session_id)
            if not remove(connection):
                raise _ChangedError
    except _ChangedError:
        return False
    return True


def history_rows(leaving: Iterable[LeavingUnit], placed: Mapping[int, Extent]) -> pa.RecordBatch:
    """Return units and their fates as rows of kind history; `placed` says where the results lie that can be read."""
    now_ms = clock.wall_ms()
    rows = [
        {
            **unit.unit.__dict__,
            "state": unit.unit.state.value,
            "consumers": [fate.consumer for fate in unit.fates],
            "outcomes": [fate.outcome for fate in unit.fates],
            "reasons": [fate.reason for fate in unit.fates],
            "steps": [fate.at_step for fate in unit.fates],
            "batch_ids": [fate.batch_id for fate in unit.fates],
            "retired_at_ms": now_ms,
            "dataset_id": unit.dataset_id,
            "segment_seq": unit.segment_seq,
            **_result(unit.unit, placed.get(unit.unit.extent_id or 0)),
        }
        for unit in leaving
    ]
    return pa.RecordBatch.from_pylist(rows, schema=HISTORY)


def _result(unit: Unit, extent: Extent | None) -> dict[str, Any]:
    if extent is None or unit.state is not UnitState.COMPLETED:
        return {}
    return {
        "result_digests": extent.digests,
        "result_path": extent.path,
        "result_offset": extent.offset,
        "result_length": extent.length,
        "result_num_rows": extent.num_rows,
        "result_row_start": unit.row_start,
        "result_row_count": unit.row_count,
    }


def find_retired(run: Run, unit_id: int) -> dict[str, Any] | None:
    """Return what the history holds of a unit, None if it holds nothing; reads pack after pack, the newest first."""
    for rows in moved_rows(run, "history", newest_first=True):
        found = rows.filter(pc.equal(rows.column("unit_id"), unit_id))
        if found.num_rows:
            row: dict[str, Any] = found.to_pylist()[0]
            return row
    return None


def fates_in_history(run: Run, branch_id: str, consumer: str) -> Iterator[tuple[int, str]]:
    """Yield (unit id, outcome) of the retired units of a branch for one consumer."""
    for rows in moved_rows(run, "history"):
        of_branch = rows.filter(pc.equal(rows.column("branch_id"), branch_id))
        for row in of_branch.select(["unit_id", "consumers", "outcomes"]).to_pylist():
            for name, outcome in zip(row["consumers"], row["outcomes"], strict=True):
                if name == consumer:
                    yield row["unit_id"], outcome


# ---- receipts and events


def forget_receipts(session: WorkerSession, *, before_ms: int) -> list[Item]:
    """Remove receipts older than any delivery can still be."""
    total = 0
    while True:
        session.mark_progress()
        with session.run.index.begin() as connection:
            sessions.require_live(connection, session.session_id)
            removed = retention.forget_receipts(connection, before_ms, limit=_RECEIPTS_AT_ONCE)
        total += removed
        if removed < _RECEIPTS_AT_ONCE:
            return [rows_item("receipts", "older than any delivery", total)] if total else []


def move_events(session: WorkerSession, *, before_ms: int) -> list[Item]:
    """Bring the events at the head of the log that are older to packs."""
    total = 0
    while True:
        session.mark_progress()
        with session.run.index.read() as connection:
            old = retention.oldest_events(connection, before_ms=before_ms, limit=_CHUNK)
        if not old:
            break
        ids = [event["event_id"] for event in old]
        rows = pa.RecordBatch.from_pylist(old, schema=EVENT)
        if _move(session, "event", rows, lambda c, ids=ids: retention.remove_events(c, ids) == len(ids)):  # type: ignore[misc]
            total += len(old)
    return [rows_item("events", "moved to packs of kind event", total)] if total else []


def latest_events(run: Run, *, limit: int, name_prefix: str = "") -> list[dict[str, Any]]:
    """Return the newest events first: those of the index, then those that were moved to packs."""
    with run.index.read() as connection:
        found = events.latest(connection, limit=limit, name_prefix=name_prefix)
    if len(found) < limit:
        # The index has one as well that was moved just now, or that a restore brought back; ids begin anew with a rebuild.
        told = {(event["event_id"], event["at"]) for event in found}
        older = (e for e in _moved_events(run, name_prefix) if (e["event_id"], e["at"]) not in told)
        found += islice(older, limit - len(found))
    return found


def _moved_events(run: Run, name_prefix: str) -> Iterator[dict[str, Any]]:
    for rows in moved_rows(run, "event", newest_first=True):
        wanted = rows.filter(pc.starts_with(rows.column("name"), name_prefix))
        yield from map(events.shown, reversed(wanted.to_pylist()))


# ---- what is said


def batches_items(consumer: Consumer, steps: Sequence[int]) -> list[Item]:
    if not steps:
        return []
    why = f"packed rows of {counted(len(steps), 'batch', 'batches')}, steps {steps[0]} to {steps[-1]}; their bytes go with sweep and compaction"
    return [Item("batches", f"{consumer.branch_id}/{consumer.consumer}", why, 0)]


def rows_item(what: str, subject: str, number: int) -> Item:
    return Item(what, subject, f"{counted(number, 'row')} of the index", 0)
