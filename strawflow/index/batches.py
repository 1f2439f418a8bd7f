"""Planned batches: one row per training step of a consumer, and where its packed rows lie."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow import clock
from strawflow.errors import NotFoundError
from strawflow.index import branches, meta
from strawflow.index import tables as t
from strawflow.index.engine import unused_id
from strawflow.index.prepared import Prepared
from strawflow.states import BatchState


@dataclass(frozen=True)
class Batch:
    batch_id: int
    branch_id: str
    consumer: str
    step: int
    objective: str
    state: BatchState
    num_units: int
    num_sequences: int
    num_tokens: int
    mean_reward: float | None
    max_staleness: int
    denominators: tuple[float, ...]
    digest: str
    plan_extent_id: int
    fence: int
    planned_at: str


@dataclass(frozen=True)
class MicroBatchPlace:
    mini_batch: int
    slice: int
    micro_batch: int
    extent_id: int


@dataclass(frozen=True)
class NewBatch:
    branch_id: str
    consumer: str
    step: int
    objective: str
    num_units: int
    num_sequences: int
    num_tokens: int
    mean_reward: float | None
    max_staleness: int
    denominators: tuple[float, ...]
    digest: str
    plan_extent_id: int
    fence: int
    places: tuple[MicroBatchPlace, ...]


LAST_VOID_ID = "last_void_batch_id"
"""Key in meta: largest id of a batch that was taken back; no other batch gets it."""


def insert(connection: Connection, batch: NewBatch) -> int:
    """Store a batch and the places of its packed rows; unique per (branch, consumer, step). Returns its id."""
    batch_id: int = connection.execute(
        sa.insert(t.batches)
        .values(
            **unused_id(t.batches.c.batch_id, connection, above=int(meta.counter(connection, LAST_VOID_ID))),
            branch_id=batch.branch_id,
            consumer=batch.consumer,
            step=batch.step,
            objective=batch.objective,
            state=BatchState.PLANNED,
            num_units=batch.num_units,
            num_sequences=batch.num_sequences,
            num_tokens=batch.num_tokens,
            mean_reward=batch.mean_reward,
            max_staleness=batch.max_staleness,
            denominators=json.dumps(list(batch.denominators)),
            digest=batch.digest,
            plan_extent_id=batch.plan_extent_id,
            fence=batch.fence,
            planned_at=clock.wall_time(),
        )
        .returning(t.batches.c.batch_id)
    ).scalar_one()
    if batch.places:
        connection.execute(
            sa.insert(t.batch_extents),
            [
                {
                    "batch_id": batch_id,
                    "mini_batch": p.mini_batch,
                    "slice": p.slice,
                    "micro_batch": p.micro_batch,
                    "extent_id": p.extent_id,
                }
                for p in batch.places
            ],
        )
    return batch_id


_COLUMN_NAMES = tuple(Batch.__dataclass_fields__)
_COLUMNS = [t.batches.c[name] for name in _COLUMN_NAMES]
_STATE_AT, _DENOMINATORS_AT = _COLUMN_NAMES.index("state"), _COLUMN_NAMES.index("denominators")
_FIND = Prepared(
    f"SELECT {', '.join(_COLUMN_NAMES)} FROM batches WHERE branch_id = :branch_id AND consumer = :consumer AND step = :step"
)


def _batch(row: Sequence[Any]) -> Batch:
    values = list(row)
    values[_STATE_AT] = BatchState(values[_STATE_AT])
    values[_DENOMINATORS_AT] = tuple(json.loads(values[_DENOMINATORS_AT]))
    return Batch(*values)


def find(connection: Connection, branch_id: str, consumer: str, step: int) -> Batch | None:
    """Return the batch of a step on the branch's line."""
    for stretch in branches.lineage(connection, branch_id, consumer):
        if stretch.up_to_step is None or step <= stretch.up_to_step:
            rows = _FIND.rows(connection, branch_id=stretch.branch_id, consumer=consumer, step=step)
            if rows:
                return _batch(rows[0])
    return None


def require(connection: Connection, branch_id: str, consumer: str, step: int) -> Batch:
    """Return the batch of a step.

    Raises:
        NotFoundError: no such batch.
    """
    batch = find(connection, branch_id, consumer, step)
    if batch is None:
        raise NotFoundError(f"consumer {consumer!r} has no batch for step {step} on branch {branch_id!r}")
    return batch


def listed(connection: Connection, branch_id: str, consumer: str) -> list[Batch]:
    """Return the batches on the branch's line in step order."""
    rows = connection.execute(
        sa.select(*_COLUMNS)
        .where(branches.seen(connection, t.batches, branch_id, consumer), t.batches.c.consumer == consumer)
        .order_by(t.batches.c.step)
    )
    return [_batch(row) for row in rows]


def places(connection: Connection, batch_id: int) -> list[MicroBatchPlace]:
    """Return where the packed rows lie, ordered by mini-batch, slice and micro-batch."""
    b = t.batch_extents.c
    rows = connection.execute(
        sa.select(b.mini_batch, b.slice, b.micro_batch, b.extent_id)
        .where(b.batch_id == batch_id)
        .order_by(b.mini_batch, b.slice, b.micro_batch)
    )
    return [MicroBatchPlace(r.mini_batch, r.slice, r.micro_batch, r.extent_id) for r in rows]


def is_retired(connection: Connection, batch_id: int) -> bool:
    """Tell whether retention gave the batch's packed rows up."""
    state = connection.execute(sa.select(t.batches.c.state).where(t.batches.c.batch_id == batch_id)).scalar()
    return bool(state == BatchState.RETIRED)


def mark_trained(connection: Connection, branch_id: str, consumer: str, *, up_to_step: int) -> None:
    connection.execute(
        sa.update(t.batches)
        .where(
            t.batches.c.branch_id == branch_id,
            t.batches.c.consumer == consumer,
            t.batches.c.step <= up_to_step,
            t.batches.c.state == BatchState.PLANNED,
        )
        .values(state=BatchState.TRAINED)
    )


def units_of(connection: Connection, batch_ids: Sequence[int]) -> list[tuple[int, int, str, str | None]]:
    """Return (batch id, unit id, outcome, reason) of every unit in these batches."""
    a = t.assignments.c
    rows = connection.execute(
        sa.select(a.batch_id, a.unit_id, a.outcome, a.reason)
        .where(a.batch_id.in_(list(batch_ids)))
        .order_by(a.batch_id, a.unit_id)
    )
    return [(r.batch_id, r.unit_id, r.outcome, r.reason) for r in rows]
