"""What may leave the index as it grows old: checkpoints' files, batches' rows, units with their fates, receipts, events.

1. Every removal asks its condition again in the transaction that removes, after the rows were locked.
2. The newest checkpoint with files stays, and every one that is pinned or that a branch starts from.
3. A unit leaves only when every consumer of its branch that wants its purpose has given it a fate that may leave.
4. It removes rows; where their content goes is flow.retain's part.
"""

from __future__ import annotations

import bisect
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow.errors import StorageError
from strawflow.index import branches, continuations, dump, retired
from strawflow.index import tables as t
from strawflow.index.checkpoints import Checkpoint
from strawflow.index.consumers import Consumer
from strawflow.index.engine import Index, lock_rows
from strawflow.index.pins import PinKind, is_pinned
from strawflow.index.prepared import Prepared, rows_value
from strawflow.index.retired import Fate, Retired
from strawflow.index.units import COLUMN_NAMES, COLUMNS, Unit, to_unit
from strawflow.states import BatchState, UnitState

# ---- checkpoints


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint whose files are kept, and what holds it there beside its age."""

    checkpoint: Checkpoint
    is_pinned: bool
    starts_branch: bool


def checkpoints_with_files(connection: Connection) -> list[KeptCheckpoint]:
    """Return every checkpoint whose files are kept, of all branches and consumers, by step."""
    c = t.checkpoints
    starts = _starts_branch()
    rows = connection.execute(
        sa.select(c, is_pinned(PinKind.CHECKPOINT).label("is_pinned"), starts.label("starts"))
        .where(c.c.files_removed.is_(False))
        .order_by(c.c.step)
    )
    fields = tuple(Checkpoint.__dataclass_fields__)
    return [
        KeptCheckpoint(
            Checkpoint(**{name: getattr(r, name) for name in fields}), bool(r.is_pinned), bool(r.starts)
        )
        for r in rows
    ]


def _starts_branch() -> sa.ColumnElement[bool]:
    """Return the condition that a branch was made from a checkpoint, or that its consumer went on from it there."""
    c = t.checkpoints.c
    made_from = sa.exists().where(t.branches.c.from_checkpoint_id == c.checkpoint_id)
    return sa.or_(made_from, branches.is_start_of_consumer(c.consumer, c.step))


def mark_checkpoint_removed(connection: Connection, checkpoint_id: str) -> bool:
    """Say that a checkpoint's files are removed; False if it has to stay, or they were removed before."""
    c = t.checkpoints
    connection.execute(
        lock_rows(sa.select(c.c.step).where(c.c.checkpoint_id == checkpoint_id), connection)
    ).all()
    newer = c.alias()
    has_newer = sa.exists().where(
        newer.c.branch_id == c.c.branch_id,
        newer.c.consumer == c.c.consumer,
        newer.c.step > c.c.step,
        newer.c.files_removed.is_(False),
    )
    done = connection.execute(
        sa.update(c)
        .where(
            c.c.checkpoint_id == checkpoint_id,
            c.c.files_removed.is_(False),
            has_newer,
            ~is_pinned(PinKind.CHECKPOINT),
            ~_starts_branch(),
        )
        .values(files_removed=True)
    )
    return bool(done.rowcount)


# ---- batches


def batches_up_to(connection: Connection, consumer: Consumer, step: int) -> list[tuple[int, int]]:
    """Return (batch id, step) of a consumer's trained batches up to a step that are not pinned, in step order."""
    b = t.batches.c
    rows = connection.execute(
        sa.select(b.batch_id, b.step)
        .where(
            b.branch_id == consumer.branch_id,
            b.consumer == consumer.consumer,
            b.step <= step,
            b.state == BatchState.TRAINED,
            ~is_pinned(PinKind.BATCH),
        )
        .order_by(b.step)
    )
    return [(r.batch_id, r.step) for r in rows]


def retire_batches(connection: Connection, batch_ids: Sequence[int]) -> set[int]:
    """Give trained batches' packed rows up; plan, counts and digest stay. Returns those that were neither pinned nor retired."""
    b = t.batches
    wanted = sa.select(b.c.step).where(b.c.batch_id.in_(batch_ids)).order_by(b.c.batch_id)
    connection.execute(lock_rows(wanted, connection)).all()
    rows = connection.execute(
        sa.update(b)
        .where(b.c.batch_id.in_(batch_ids), b.c.state == BatchState.TRAINED, ~is_pinned(PinKind.BATCH))
        .values(state=BatchState.RETIRED)
        .returning(b.c.batch_id)
    )
    given_up = {row.batch_id for row in rows}
    connection.execute(sa.delete(t.batch_extents).where(t.batch_extents.c.batch_id.in_(sorted(given_up))))
    return given_up


# ---- units


@dataclass(frozen=True)
class LeavingUnit:
    """A unit whose row may leave, and what became of it."""

    unit: Unit
    dataset_id: str
    segment_seq: int
    fates: tuple[Fate, ...]

    def identity(self) -> tuple[Any, ...]:
        """What tells it from what it may become meanwhile."""
        u = self.unit
        return (u.unit_id, u.state, u.fence, u.seq, u.extent_id, u.requeues, self.fates)

    def counted(self) -> Retired:
        u = self.unit
        return Retired(u.purpose, u.state, self.dataset_id, u.num_tokens, self.fates)


@dataclass(frozen=True)
class Limits:
    """Up to where the units of one branch may leave."""

    branch_id: str
    steps: Mapping[str, int]
    """By consumer: units dropped while this step or an earlier one was planned, beside those of retired batches."""
    purposes: Mapping[str, Collection[str]]
    """By consumer: what it wants."""
    counts_trained: bool = False
    """Whether batches that are trained and may be retired count as retired: for a look ahead."""
    starts: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """By consumer: (step, last unit id) of its checkpoints that a branch may start from, by step. Such a branch takes the
    units over that were admitted by then and had no fate."""

    def takes_over(self, unit_id: int, fates: Iterable[Fate]) -> bool:
        """Tell whether a branch from one of the checkpoints would take this unit over."""
        for fate in fates:
            starts = self.starts.get(fate.consumer, ())
            # Of the checkpoints before its step the last one had admitted the most.
            at = bisect.bisect_left(starts, (fate.at_step, -1))
            if at and unit_id <= starts[at - 1][1]:
                return True
        return False


_U = t.units.c
_A = t.assignments.c


def _may_leave(limits: Limits) -> list[sa.ColumnElement[bool]]:
    def is_settled_for(consumer: str) -> sa.ColumnElement[bool]:
        last_step, b = limits.steps.get(consumer, 0), t.batches.c
        is_retired = b.state == BatchState.RETIRED
        if limits.counts_trained:
            may_be = (b.state == BatchState.TRAINED, b.step <= last_step, ~is_pinned(PinKind.BATCH))
            is_retired = sa.or_(is_retired, sa.and_(*may_be))
        retired_batch = sa.exists().where(b.batch_id == _A.batch_id, is_retired)
        fate = sa.exists().where(
            _A.unit_id == _U.unit_id,
            _A.branch_id == limits.branch_id,
            _A.consumer == consumer,
            sa.or_(sa.and_(_A.batch_id.is_(None), _A.at_step <= last_step), retired_batch),
        )
        return sa.or_(_U.purpose.not_in(sorted(limits.purposes[consumer])), fate)

    return [
        _U.branch_id == limits.branch_id,
        _U.state.in_([UnitState.COMPLETED, UnitState.FAILED]),
        _U.purpose.in_(sorted({p for wanted in limits.purposes.values() for p in wanted} - {"eval"})),
        ~sa.exists().where(t.offers.c.unit_id == _U.unit_id),
        *(is_settled_for(consumer) for consumer in limits.purposes),
    ]


def leaving_units(
    connection: Connection, limits: Limits, *, after: int = 0, num_looked_at: int = 2000
) -> tuple[list[LeavingUnit], int | None]:
    """Look at the next units of a branch beyond the id `after`; returns those that may leave, in their order, and the id to
    go on after (None: there are no more)."""
    looked_at = (
        sa.select(_U.unit_id)
        .where(_U.branch_id == limits.branch_id, _U.unit_id > after)
        .order_by(_U.unit_id)
        .limit(num_looked_at)
        .subquery()
    )
    count, last = connection.execute(sa.select(sa.func.count(), sa.func.max(looked_at.c.unit_id))).one()
    if not count:
        return [], None
    # A range is what either planner sees to be small, however many units there are.
    found = _with_fates(connection, _select(connection, limits, after + 1, last))
    kept = [unit for unit in found if not limits.takes_over(unit.unit.unit_id, unit.fates)]
    return kept, (last if count == num_looked_at else None)


def _select(connection: Connection, limits: Limits, first_id: int, last_id: int) -> list[sa.Row[Any]]:
    return list(
        connection.execute(
            sa.select(*COLUMNS, t.segments.c.dataset_id, t.segments.c.segment_seq)
            .join(t.segments, t.segments.c.segment_id == _U.segment_id)
            .where(*_may_leave(limits), _U.unit_id.between(first_id, last_id))
            .order_by(_U.unit_id)
        )
    )


_FATES_OF = Prepared(
    "SELECT unit_id, consumer, outcome, reason, at_step, batch_id FROM {each} "
    "JOIN assignments ON assignments.unit_id = CAST(r.value AS BIGINT) ORDER BY unit_id, consumer"
)


def _with_fates(connection: Connection, rows: Sequence[sa.Row[Any]]) -> list[LeavingUnit]:
    units = [(to_unit(row[: len(COLUMN_NAMES)]), row.dataset_id, row.segment_seq) for row in rows]
    fates: dict[int, list[Fate]] = {unit.unit_id: [] for unit, *_ in units}
    if units:
        for unit_id, *fate in _FATES_OF.rows(connection, rows=rows_value(list(fates))):
            fates[unit_id].append(Fate(*fate))
    return [
        LeavingUnit(unit, dataset_id, segment_seq, tuple(fates[unit.unit_id]))
        for unit, dataset_id, segment_seq in units
    ]


_HOLD_UNITS = Prepared(
    "SELECT units.unit_id FROM units WHERE unit_id IN (SELECT CAST(r.value AS BIGINT) FROM {each}) "
    "ORDER BY unit_id {lock}"
)
_REMOVE_FATES = Prepared(
    "DELETE FROM assignments WHERE unit_id IN (SELECT CAST(r.value AS BIGINT) FROM {each})"
)
_REMOVE_UNITS = Prepared("DELETE FROM units WHERE unit_id IN (SELECT CAST(r.value AS BIGINT) FROM {each})")


def remove_units(connection: Connection, limits: Limits, leaving: Sequence[LeavingUnit]) -> bool:
    """Remove units with their fates and count them as retired; False, and nothing changed, if one may not leave any more."""
    ids = [unit.unit.unit_id for unit in leaving]
    _HOLD_UNITS.rows(connection, rows=rows_value(ids))
    # Ids may have gaps, so a range bounds the question and equality answers it.
    found = _with_fates(connection, _select(connection, limits, ids[0], ids[-1]))
    wanted = set(ids)
    now = [unit.identity() for unit in found if unit.unit.unit_id in wanted]
    if now != [unit.identity() for unit in leaving]:
        return False
    _REMOVE_FATES.count(connection, rows=rows_value(ids))
    continuations.end(connection, ids)
    _REMOVE_UNITS.count(connection, rows=rows_value(ids))
    retired.add(connection, limits.branch_id, [unit.counted() for unit in leaving])
    return True


# ---- receipts and events

_FORGET_RECEIPTS = Prepared(
    "DELETE FROM receipts WHERE submission_id IN "
    "(SELECT submission_id FROM receipts WHERE at_ms < :before_ms ORDER BY at_ms LIMIT :num_rows)"
)
_REMOVE_EVENTS = Prepared("DELETE FROM events WHERE event_id IN (SELECT CAST(r.value AS BIGINT) FROM {each})")


def num_receipts_before(connection: Connection, before_ms: int) -> int:
    statement = sa.select(sa.func.count()).select_from(t.receipts).where(t.receipts.c.at_ms < before_ms)
    return int(connection.execute(statement).scalar_one())


def forget_receipts(connection: Connection, before_ms: int, *, limit: int) -> int:
    """Remove up to `limit` receipts older than any delivery can still be; returns how many."""
    return _FORGET_RECEIPTS.count(connection, before_ms=before_ms, num_rows=limit)


def oldest_events(connection: Connection, *, before_ms: int, limit: int) -> list[dict[str, Any]]:
    """Return the first events of the log, up to `limit` and up to the first that is younger."""
    rows = connection.execute(sa.select(t.events).order_by(t.events.c.event_id).limit(limit))
    found: list[dict[str, Any]] = []
    for row in rows:
        if row.at_ms >= before_ms:
            break
        found.append(dict(row._mapping))  # the public row mapping of SQLAlchemy
    return found


def num_events_before(connection: Connection, before_ms: int) -> int:
    statement = sa.select(sa.func.count()).select_from(t.events).where(t.events.c.at_ms < before_ms)
    return int(connection.execute(statement).scalar_one())


def remove_events(connection: Connection, event_ids: Sequence[int]) -> int:
    """Remove events whose rows are in a pack; returns how many were still there."""
    return _REMOVE_EVENTS.count(connection, rows=rows_value(event_ids))


# ---- space inside an SQLite file

_MIN_FREE_SHARE = 0.5
_MAX_KEPT_BYTES = 256 * 1024 * 1024


def give_back(index: Index) -> int:
    """Shrink an SQLite index most of which is free pages; returns the bytes given back, 0 when it is left as it is.

    It rewrites what is kept, and writers wait meanwhile: measured, a file of 207 MB of which 10 were kept took 0.3 s, while
    incremental vacuum, page by page, took 110 s. So only a file is shrunk that is mostly free and keeps little enough for
    seconds; otherwise the free pages are filled again as the index grows. A server does this by itself.

    Raises:
        StorageError: others kept the file locked, or there is no room for the copy; nothing changed.
    """
    file = dump.sqlite_file(index.url)
    if file is None:
        return 0
    before = file.stat().st_size
    try:
        with closing(sqlite3.connect(file, timeout=10, isolation_level=None)) as connection:
            (free,), (pages,), (page_bytes,) = (
                connection.execute(f"PRAGMA {name}").fetchone()
                for name in ("freelist_count", "page_count", "page_size")
            )
            if free < pages * _MIN_FREE_SHARE or (pages - free) * page_bytes > _MAX_KEPT_BYTES:
                return 0
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.OperationalError as error:
        raise StorageError(f"the index could not be shrunk: {error}", url=index.shown_url) from error
    return max(0, before - file.stat().st_size)
