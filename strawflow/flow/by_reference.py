"""Batches by reference: what a consumer of our making plans when it has no assembler: whole groups, as they were stored.

1. A batch names its trajectories by record and copies none; the plan is durable, so that a restart gets the same batches
   in the same order with the same bytes.
2. Planning takes the fence of `assemble:<consumer>`, advancing that of `consume:<consumer>`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from strawflow.errors import ConflictError, NotFoundError
from strawflow.flow import assemble, journal
from strawflow.flow.assemble import BatchPlan
from strawflow.flow.journal import Entry, EntryKind
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.ids import RowRange
from strawflow.index import batches, consumers, events, packs, units
from strawflow.index.batches import Batch
from strawflow.index.consumers import Assignment, Role
from strawflow.index.engine import Connection
from strawflow.index.units import Unit
from strawflow.packs.reader import PackReader
from strawflow.records import PLAN, TRAJECTORY

OBJECTIVE = "reference"
"""What the objective of such a batch is called: its rows are trajectories, not packed sequences."""

_RECORD = ("unit_id", "fence", "seq", "member", "segment")


def plan_next(
    session: WorkerSession, role: Role, *, purpose: str, num_groups: int, at_least: int
) -> tuple[Batch, pa.Table] | None:
    """Plan the consumer's next step over up to `num_groups` completed groups; None while fewer than `at_least` wait.

    Returns the batch and its trajectory rows, as `rows_of` would read them again.

    Raises:
        LeaseLostError: another session took over. ConflictError: the step was planned by another meanwhile.
    """
    found = assemble.offered(session, purpose=purpose, limit=num_groups)
    if len(found) < max(1, at_least):
        return None
    rows: list[pa.RecordBatch] = []
    batch = plan_groups(session, role, found, on_rows=rows.append)
    return batch, pa.Table.from_batches(rows, schema=TRAJECTORY)


def plan_groups(
    session: WorkerSession,
    role: Role,
    found: Sequence[Unit],
    *,
    on_rows: Callable[[pa.RecordBatch], None] = lambda rows: None,
    is_training: bool = True,
) -> Batch:
    """Plan the consumer's next step over these groups, which are offered to it; `on_rows` sees each one's rows in order.

    Unless it is for training, weights that are no longer on the branch's line may have sampled it.

    Raises:
        LeaseLostError: another session took over. ConflictError: the step was planned by another meanwhile.
    """
    step = assemble.last_planned(session) + 1
    with session.run.index.read() as connection:
        records = _records(connection, found)
    planned: list[pa.RecordBatch] = []
    version_ids: set[str] = set()
    for unit, record in zip(found, records, strict=True):
        rows = session.reader.read_rows(record)
        planned.append(_plan_rows(step, unit, rows))
        version_ids.update(pc.unique(rows.column("weight_versions").flatten()).to_pylist())
        on_rows(rows)
        session.mark_progress()
    newest = assemble.lineage(session).newest_step
    oldest = min((u.version_step or 0 for u in found), default=0)
    rewards = [u.mean_reward for u in found if u.mean_reward is not None]
    plan = BatchPlan(
        step=step,
        objective=OBJECTIVE,
        micro_batches=(),
        plan=pa.Table.from_batches(planned, schema=PLAN).combine_chunks().to_batches()[0],
        denominators=(),
        assignments=[Assignment(u.epoch, u.unit_id, "trained") for u in found],
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        max_staleness=max(0, newest - oldest),
        version_ids=frozenset(version_ids) if is_training else frozenset(),
        records=records,
    )
    return assemble.plan_batch(session, role, plan)


def rows_of(run: Run, reader: PackReader, batch: Batch) -> pa.Table:
    """Return the trajectory rows of a batch by reference, in the order of its plan.

    Raises:
        CorruptPackError: stored bytes do not match their checksum.
        NotFoundError: retention gave the batch up.
    """
    whole = [rows for _, rows in groups_of(run, reader, batch)]
    return pa.Table.from_batches(whole, schema=TRAJECTORY)


def groups_of(run: Run, reader: PackReader, batch: Batch) -> Iterator[tuple[Unit, pa.RecordBatch]]:
    """Yield the groups of a batch by reference, each with its trajectory rows, in the order of its plan.

    Raises:
        CorruptPackError: stored bytes do not match their checksum.
        NotFoundError: retention gave the batch up.
    """
    with run.index.read() as connection:
        if batches.is_retired(connection, batch.batch_id):
            raise NotFoundError(
                f"the trajectories of step {batch.step} were given up by retention (storage.keep_steps); only its plan is left"
            )
        planned = packs.find_extents(connection, [batch.plan_extent_id])[batch.plan_extent_id]
        order = {
            unit_id: place
            for place, unit_id in enumerate(pc.unique(reader.read(planned).column("unit_id")).to_pylist())
        }
        found = units.of_batch(connection, batch.batch_id)
        found.sort(key=lambda unit: order.get(unit.unit_id, unit.unit_id))
        records = _records(connection, found)
    for unit, record in zip(found, records, strict=True):
        yield unit, reader.read_rows(record)


def advance(session: WorkerSession, role: Role, *, expected: int, step: int) -> None:
    """Move the consumer's committed position from `expected` to `step`; repeating it changes nothing.

    Raises:
        LeaseLostError: another session took over. ConflictError: the position is neither of the two.
    """
    run = session.run
    with run.index.read() as connection:
        if consumers.find(connection, run.branch, run.consumer).position == step:
            return
    body = {"consumer": run.consumer, "fence": role.fence, "from_step": expected, "step": step}
    entry = Entry(EntryKind.ADVANCE, run.branch, body)
    with journal.recorded(session, [entry]) as record, run.index.begin() as connection:
        consumers.require_role(connection, role)
        record.name(connection)
        if batches.find(connection, run.branch, run.consumer, step) is None:
            raise ConflictError(f"consumer {run.consumer!r} has no batch of step {step} to advance to")
        consumers.advance_position(connection, run.branch, run.consumer, expected=expected, new=step)
        batches.mark_trained(connection, run.branch, run.consumer, up_to_step=step)
        events.record(
            connection,
            "consumer.advanced",
            session_id=session.session_id,
            consumer=run.consumer,
            step=step,
        )


def _records(connection: Connection, found: Sequence[Unit]) -> list[RowRange]:
    """Return where the units' trajectories lie."""
    placed = packs.find_extents(connection, [u.extent_id for u in found if u.extent_id is not None])
    return [
        RowRange(placed[u.extent_id], u.row_start or 0, u.row_count or 0)
        for u in found
        if u.extent_id is not None  # completed, so it has one
    ]


def _plan_rows(step: int, unit: Unit, rows: pa.RecordBatch) -> pa.RecordBatch:
    num_rows = rows.num_rows
    columns = {
        **{name: rows.column(name) for name in _RECORD},
        "step": pa.repeat(pa.scalar(step, pa.int64()), num_rows),
        # The unit a row was planned for: of a branch that took trajectories over, not the one that sampled them.
        "unit_id": pa.repeat(pa.scalar(unit.unit_id, pa.int64()), num_rows),
        "outcome": pa.repeat(pa.scalar("trained"), num_rows),
        "reward": rows.column("reward"),
        "staleness": pa.repeat(pa.scalar(0, pa.int32()), num_rows),
        "num_tokens": pc.list_value_length(rows.column("response_tokens")),
    }
    arrays = [columns[f.name] if f.name in columns else pa.nulls(num_rows, f.type) for f in PLAN]
    return pa.RecordBatch.from_arrays(arrays, schema=PLAN)
