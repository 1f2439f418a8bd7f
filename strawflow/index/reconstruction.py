"""Rows of an index that is brought up to what packs, journal and manifests say; flow.reconstruct decides what that is.

1. Everything runs in the caller's transaction, on both dialects, a chunk of rows at a time.
2. A result goes to a unit only if its (fence, seq) is higher than the one the unit has.
3. What is offered, and what is set aside, follows from units and assignments alone and is worked out anew at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow.errors import CorruptPackError
from strawflow.index import meta
from strawflow.index import tables as t
from strawflow.index.carry import CARRIED_COLUMNS, Carried, to_carried
from strawflow.index.engine import insert_unless_there
from strawflow.index.leases import FENCES_PER_INCARNATION
from strawflow.index.prepared import Prepared, rows_value
from strawflow.index.units import LAST_UNIT_ID
from strawflow.states import UnitState, WeightState

_CHUNK = 500


@contextmanager
def contradictions_told() -> Iterator[None]:
    """Tell rows that the tables refuse as damage of what they came from; the caller's transaction is lost.

    Raises:
        CorruptPackError: in place of the database's own error.
    """
    try:
        yield
    except sa.exc.IntegrityError as error:
        raise CorruptPackError(
            f"what packs, journal and backup tell cannot all be true, the index refuses it ({error.orig}); nothing was "
            "changed, use another backup"
        ) from error


# ---- datasets, branches, consumers


def datasets_of(connection: Connection) -> list[str]:
    return list(
        connection.execute(sa.select(t.datasets.c.dataset_id).order_by(t.datasets.c.dataset_id)).scalars()
    )


def date_branch(connection: Connection, branch_id: str, created_at: str) -> None:
    """Say when a branch was made."""
    connection.execute(
        sa.update(t.branches).where(t.branches.c.branch_id == branch_id).values(created_at=created_at)
    )


def last_step_of(connection: Connection, branch_id: str, consumer: str) -> tuple[int, str] | None:
    """Return (step, digest) of the last batch of a line's own; None without one."""
    b = t.batches.c
    row = connection.execute(
        sa.select(b.step, b.digest)
        .where(b.branch_id == branch_id, b.consumer == consumer)
        .order_by(b.step.desc())
        .limit(1)
    ).first()
    return None if row is None else (row.step, row.digest)


def set_consumer(
    connection: Connection, branch_id: str, consumer: str, *, position: int, planned: int
) -> None:
    c = t.consumers.c
    connection.execute(
        sa.update(t.consumers)
        .where(c.branch_id == branch_id, c.consumer == consumer)
        .values(position=position, planned=planned)
    )


def raise_ids(connection: Connection, last_unit_id: int) -> None:
    """Let unit ids go on beyond every one that was met."""
    meta.put(connection, LAST_UNIT_ID, str(max(float(last_unit_id), meta.counter(connection, LAST_UNIT_ID))))


def incarnation_of(fence: int) -> int:
    return fence // FENCES_PER_INCARNATION


# ---- units


def carried_units(connection: Connection, unit_ids: Sequence[int]) -> dict[int, Carried]:
    """Return units that another branch takes up again, pristine."""
    found: dict[int, Carried] = {}
    for at in range(0, len(unit_ids), _CHUNK):
        rows = connection.execute(
            sa.select(*CARRIED_COLUMNS)
            .join(t.segments, t.segments.c.segment_id == t.units.c.segment_id)
            .where(t.units.c.unit_id.in_(list(unit_ids[at : at + _CHUNK])))
        )
        found |= {row.unit_id: to_carried(row, keeps=False) for row in rows}
    return found


@dataclass(frozen=True)
class Standing:
    """How a unit stands, as far as a result must know."""

    profile: str
    purpose: str
    fence: int
    seq: int


def standing_of(connection: Connection, unit_ids: Iterable[int]) -> dict[int, Standing]:
    rows = _STANDING.rows(connection, rows=rows_value(unit_ids))
    return {row[0]: Standing(*row[1:]) for row in rows}


_STANDING = Prepared(
    "SELECT units.unit_id, units.profile, units.purpose, units.fence, units.seq FROM {each} JOIN units "
    "ON units.unit_id = CAST(r.value AS BIGINT)"
)

_RESULT = Prepared(
    "UPDATE units SET state = r.value->>3, session_id = NULL, not_before = NULL, last_error = NULL, "
    "claim_class = CASE WHEN r.value->>3 = 'ready' THEN 0 ELSE claim_class END, "
    "scheduling_key = CASE WHEN r.value->>3 = 'ready' THEN CAST(r.value->>7 AS BIGINT) ELSE scheduling_key END, "
    "fence = CAST(r.value->>1 AS BIGINT), seq = CAST(r.value->>2 AS BIGINT), "
    "extent_id = CAST(r.value->>4 AS BIGINT), row_start = CAST(r.value->>5 AS INTEGER), "
    "row_count = CAST(r.value->>6 AS INTEGER), version_step = CAST(r.value->>7 AS BIGINT), "
    "mean_reward = CAST(r.value->>8 AS DOUBLE PRECISION), num_tokens = CAST(r.value->>9 AS INTEGER) "
    "FROM {each} WHERE units.unit_id = CAST(r.value->>0 AS BIGINT)"
)


@dataclass(frozen=True)
class FoundResult:
    """What a unit has generated: its trajectories (completed), or what it was parked with (ready)."""

    unit_id: int
    fence: int
    seq: int
    state: UnitState
    extent_id: int
    row_start: int
    row_count: int
    version_step: int
    mean_reward: float | None
    num_tokens: int

    def row(self) -> tuple[Any, ...]:
        return (
            self.unit_id,
            self.fence,
            self.seq,
            self.state.value,
            self.extent_id,
            self.row_start,
            self.row_count,
            self.version_step,
            self.mean_reward,
            self.num_tokens,
        )


def take_results(connection: Connection, results: Iterable[FoundResult]) -> None:
    """Point units at what was found of them; one result for each unit."""
    _RESULT.count(connection, rows=rows_value(result.row() for result in results))


def assigned_among(
    connection: Connection, branch_id: str, consumer: str, unit_ids: Sequence[int]
) -> set[int]:
    """Return those of the units that a consumer has given a fate."""
    found: set[int] = set()
    a = t.assignments.c
    for at in range(0, len(unit_ids), _CHUNK):
        rows = connection.execute(
            sa.select(a.unit_id).where(
                a.branch_id == branch_id,
                a.consumer == consumer,
                a.unit_id.in_(list(unit_ids[at : at + _CHUNK])),
            )
        )
        found.update(rows.scalars())
    return found


def missing_among(connection: Connection, unit_ids: Sequence[int]) -> set[int]:
    """Return those of the ids that no unit has."""
    return set(unit_ids) - set(standing_of(connection, unit_ids))


# ---- batches, checkpoints, weights


@dataclass(frozen=True)
class FoundBatch:
    """A planned batch as the journal tells it, its extents placed."""

    branch_id: str
    consumer: str
    step: int
    values: Mapping[str, Any]
    """Further columns of its row."""
    places: Sequence[tuple[int, int, int, int]]
    """(mini-batch, slice, micro-batch, extent id)."""
    fates: Sequence[tuple[int, str, str | None, Sequence[int]]]
    """(epoch, outcome, reason, units)."""


def add_batch(connection: Connection, batch: FoundBatch) -> int:
    """Insert a batch with the places of its rows and the fates of its units; returns its id."""
    batch_id: int = connection.execute(
        sa.insert(t.batches)
        .values(branch_id=batch.branch_id, consumer=batch.consumer, step=batch.step, **batch.values)
        .returning(t.batches.c.batch_id)
    ).scalar_one()
    if batch.places:
        names = ("mini_batch", "slice", "micro_batch", "extent_id")
        connection.execute(
            sa.insert(t.batch_extents),
            [{"batch_id": batch_id, **dict(zip(names, p, strict=True))} for p in batch.places],
        )
    rows = [
        {
            "branch_id": batch.branch_id,
            "consumer": batch.consumer,
            "epoch": epoch,
            "unit_id": unit_id,
            "batch_id": batch_id,
            "outcome": outcome,
            "reason": reason,
            "at_step": batch.step,
        }
        for epoch, outcome, reason, unit_ids in batch.fates
        for unit_id in unit_ids
    ]
    if rows:
        connection.execute(sa.insert(t.assignments), rows)
    return batch_id


def add_checkpoint(connection: Connection, values: Mapping[str, Any]) -> bool:
    """Insert a checkpoint; False if its step has one."""
    return bool(connection.execute(insert_unless_there(t.checkpoints, connection).values(**values)).rowcount)


def add_step(connection: Connection, values: Mapping[str, Any]) -> None:
    connection.execute(insert_unless_there(t.steps, connection).values(**values))


def add_weights(connection: Connection, values: Mapping[str, Any]) -> bool:
    """Insert a weight version; False if it is there."""
    return bool(
        connection.execute(insert_unless_there(t.weight_versions, connection).values(**values)).rowcount
    )


def weights_of(connection: Connection, branch_id: str) -> list[tuple[str, int, int, str, WeightState]]:
    """Return (version id, step, fence, digest, state) of a branch's versions in order of step and fence."""
    w = t.weight_versions.c
    rows = connection.execute(
        sa.select(w.version_id, w.step, w.fence, w.digest, w.state)
        .where(w.branch_id == branch_id)
        .order_by(w.step, w.fence, w.version_id)
    )
    return [(r.version_id, r.step, r.fence, r.digest, WeightState(r.state)) for r in rows]


def set_weights_state(
    connection: Connection, version_id: str, state: WeightState, *, superseded_by: str | None = None
) -> None:
    connection.execute(
        sa.update(t.weight_versions)
        .where(t.weight_versions.c.version_id == version_id)
        .values(state=state, superseded_by=superseded_by)
    )


def steps_of_versions(connection: Connection) -> dict[str, int]:
    """Return {version id: step} of every version."""
    w = t.weight_versions.c
    return {r.version_id: r.step for r in connection.execute(sa.select(w.version_id, w.step))}


# ---- at the end


_OFFER_AGAIN = Prepared(
    "INSERT INTO offers (branch_id, consumer, purpose, version_step, unit_id) "
    "SELECT units.branch_id, consumers.consumer, units.purpose, units.version_step, units.unit_id "
    "FROM units JOIN consumers ON consumers.branch_id = units.branch_id "
    "AND ',' || consumers.purposes || ',' LIKE '%,' || units.purpose || ',%' "
    "WHERE units.state = 'completed' AND NOT EXISTS (SELECT 1 FROM assignments WHERE "
    "assignments.branch_id = units.branch_id AND assignments.consumer = consumers.consumer "
    "AND assignments.epoch = units.epoch AND assignments.unit_id = units.unit_id)"
)


def offer_again(connection: Connection) -> int:
    """Put every completed unit before each consumer that wants it and gave it no fate; returns how many offers."""
    connection.execute(sa.delete(t.offers))
    return _OFFER_AGAIN.count(connection)


def count_units(connection: Connection) -> dict[str, int]:
    """Return {"purpose state": number of units} over all branches."""
    u = t.units.c
    rows = connection.execute(
        sa.select(u.purpose, u.state, sa.func.count())
        .group_by(u.purpose, u.state)
        .order_by(u.purpose, u.state)
    )
    return {f"{purpose} {state}": count for purpose, state, count in rows}


def set_fated_aside(connection: Connection, *, reason: str, dropped_as: str | None = None) -> list[int]:
    """Set units aside that have a fate and no result; returns them. They are not worked on again.

    With `dropped_as` only those that were dropped for this reason.
    """
    a = t.assignments.c
    fate = [a.branch_id == t.units.c.branch_id, a.unit_id == t.units.c.unit_id]
    fate += [] if dropped_as is None else [a.reason == dropped_as]
    rows = connection.execute(
        sa.update(t.units)
        .where(t.units.c.state == UnitState.READY, sa.exists().where(*fate))
        .values(
            state=UnitState.FAILED,
            not_before=None,
            last_error=reason,
            extent_id=None,
            row_start=None,
            row_count=None,
        )
        .returning(t.units.c.unit_id)
    )
    return sorted(row.unit_id for row in rows)


def set_unservable_aside(connection: Connection, *, reason: str) -> list[int]:
    """Set units aside that wait for weights which cannot be served; returns them."""
    w = t.weight_versions.c
    can_be = sa.exists().where(
        w.version_id == t.units.c.required_version_id,
        w.files_removed.is_(False),
        w.state != WeightState.DEAD,
    )
    rows = connection.execute(
        sa.update(t.units)
        .where(t.units.c.state == UnitState.READY, t.units.c.required_version_id.is_not(None), ~can_be)
        .values(state=UnitState.FAILED, not_before=None, last_error=reason)
        .returning(t.units.c.unit_id)
    )
    return sorted(row.unit_id for row in rows)
