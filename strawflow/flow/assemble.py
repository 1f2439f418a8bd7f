"""Assembly: what a consumer is offered, and the one transaction that plans its next batch.

1. One session at a time holds the role `assemble:<consumer>`; its fence is checked in the transaction that plans.
2. step = last planned + 1, checked in the statement; a unit is assigned once, by primary key.
3. The packed rows and the plan are durable before the batch's row names them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from strawflow import faults
from strawflow.errors import ConflictError, NotFoundError
from strawflow.flow import journal, returned
from strawflow.flow.journal import Entry, EntryKind
from strawflow.flow.placed import read_extents
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.flow.trajectory import with_every_token
from strawflow.ids import Extent, RowRange
from strawflow.index import batches, consumers, events, leases, packs, units, weights
from strawflow.index.batches import Batch, MicroBatchPlace, NewBatch
from strawflow.index.consumers import Assignment, Role
from strawflow.index.engine import Connection
from strawflow.index.units import Unit

log = logging.getLogger(__name__)

NO_DIGEST = "0" * 32
UNIT_FAILED = "unit_failed"
"""Why a unit is dropped that used up its attempts."""


@dataclass(frozen=True)
class Lineage:
    """Which weights count for the branch now."""

    newest_step: int
    dead: dict[str, int]
    """Version id to step of versions published after the checkpoint the branch went back to."""


@dataclass(frozen=True)
class PackedMicroBatch:
    """Packed rows of one micro-batch of one slice of one mini-batch (schema records.BATCH)."""

    mini_batch: int
    slice: int
    micro_batch: int
    rows: pa.RecordBatch


@dataclass(frozen=True)
class BatchPlan:
    """A batch ready to be stored."""

    step: int
    objective: str
    micro_batches: Sequence[PackedMicroBatch]
    plan: pa.RecordBatch
    denominators: tuple[float, ...]
    assignments: Sequence[Assignment]
    mean_reward: float | None
    max_staleness: int
    num_masked_tokens: int = 0
    """Response tokens that are not trained for being stale."""
    version_ids: frozenset[str] = frozenset()
    """Weight versions that sampled any of its tokens."""
    records: Sequence[RowRange] = ()
    """Trajectory rows that the batch is made of, when it holds them by reference and packs none."""

    @property
    def num_sequences(self) -> int:
        packed: int = sum(m.rows.num_rows for m in self.micro_batches)
        return packed + sum(r.count for r in self.records)

    @property
    def num_tokens(self) -> int:
        if self.records:
            return int(pc.sum(self.plan.column("num_tokens")).as_py() or 0)
        lengths = (pc.sum(pc.list_value_length(m.rows.column("tokens"))).as_py() for m in self.micro_batches)
        return sum(int(length or 0) for length in lengths)


def take_role(session: WorkerSession) -> Role | None:
    """Become the consumer's assembler; None while another live session is."""
    run = session.run
    with run.index.begin() as connection:
        return consumers.take_role(connection, run.branch, f"assemble:{run.consumer}", session.session_id)


def last_planned(session: WorkerSession) -> int:
    run = session.run
    with run.index.read() as connection:
        return consumers.find(connection, run.branch, run.consumer).planned


def offered(session: WorkerSession, *, purpose: str, limit: int) -> list[Unit]:
    """Return completed units the consumer has not been given yet: oldest weights first, then first in."""
    run = session.run
    with run.index.read() as connection:
        return consumers.offered(connection, run.branch, run.consumer, purpose=purpose, limit=limit)


def lineage(session: WorkerSession) -> Lineage:
    run = session.run
    with run.index.read() as connection:
        newest = weights.newest(connection, run.branch)
        return Lineage(-1 if newest is None else newest.step, weights.dead_ids(connection, run.branch))


def steps_of_versions(session: WorkerSession, version_ids: Sequence[str]) -> dict[str, int]:
    """Return each weight version's step.

    Raises:
        NotFoundError: a trajectory names weights the index does not know.
    """
    with session.run.index.read() as connection:
        found = {version_id: weights.find(connection, version_id) for version_id in version_ids}
    unknown = [version_id for version_id, version in found.items() if version is None]
    if unknown:
        raise NotFoundError(f"a trajectory names the unknown weight version {unknown[0]!r}")
    return {version_id: version.step for version_id, version in found.items() if version is not None}


def read_trajectories(session: WorkerSession, offered_units: Sequence[Unit]) -> dict[int, pa.RecordBatch]:
    """Return each unit's trajectory rows, mask and versions told for every token.

    Raises:
        CorruptPackError: stored bytes do not match their checksum.
    """
    ids = {u.unit_id: u.extent_id for u in offered_units if u.extent_id is not None}
    whole = {
        extent_id: with_every_token(rows)
        for extent_id, rows in read_extents(session.run, session.reader, ids.values())
    }
    return {u.unit_id: whole[ids[u.unit_id]].slice(u.row_start, u.row_count) for u in offered_units}


def requeue(session: WorkerSession, role: Role, unit_ids: Sequence[int], *, reason: str) -> None:
    """Send offered units back to be sampled afresh, their stored trajectories unused.

    What another consumer has given its fate keeps its trajectories: they are what that consumer trained and would replay.
    For this one such a unit is dropped with the reason, and owed a replacement. The others are taken back from all.

    Raises:
        LeaseLostError: another session took over as assembler; nothing changed.
        ConflictError: a batch was planned, or a unit was sent back by another, meanwhile; judge the units again.
    """
    while (epochs := _requeue(session, role, unit_ids, reason=reason)) is None:
        pass  # another consumer gave one of them its fate meanwhile: which of them go back is looked at again
    # crash here: those kept for another consumer are still offered, and judged again
    kept = [(unit_id, epoch) for unit_id, epoch in epochs.items() if epoch is not None]
    drop(session, role, [Assignment(epoch, unit_id, "dropped", reason) for unit_id, epoch in kept])


class _FatedError(Exception):
    """A unit about to be sent back got its fate: the transaction goes back."""


def _requeue(
    session: WorkerSession, role: Role, unit_ids: Sequence[int], *, reason: str
) -> dict[int, int | None] | None:
    """Send those of the units back that have no fate; returns {unit: its epoch if it has one}, None to look again."""
    run = session.run
    with run.index.read() as connection:
        fated = consumers.fated_among(connection, run.branch, unit_ids)
        try:
            found = [units.find(connection, unit_id) for unit_id in unit_ids if unit_id not in fated]
        except NotFoundError as error:
            raise ConflictError(f"{error.message} any more; judge the groups again") from error
    after = [replace(u, attempts=0, requeues=u.requeues + 1) for u in found]
    entries = returned.entries(EntryKind.REQUEUE, after, fence=role.fence, reason=reason)
    try:
        with journal.recorded(session, entries) as record, run.index.begin() as connection:
            consumers.require_role(connection, role)
            record.name(connection)
            epochs = consumers.hold_unfated(connection, run.branch, unit_ids)
            back = [unit_id for unit_id, epoch in epochs.items() if epoch is None]
            if set(back) != {u.unit_id for u in found}:
                raise _FatedError
            _withdraw(connection, run, back)
            consumers.withdraw_from_all(connection, run.branch, back)
            if [units.find(connection, u.unit_id) for u in found] != found:
                raise ConflictError(
                    "a unit was sent back and sampled again meanwhile; judge the groups again"
                )
            for unit_id in back:
                units.requeue(connection, unit_id, reason=reason)
            return epochs
    except _FatedError:
        return None


def drop(session: WorkerSession, role: Role, dropped: Sequence[Assignment]) -> None:
    """Record units as dropped outside any batch, with their reasons; each is owed a replacement.

    Raises:
        LeaseLostError: another session took over as assembler; nothing changed.
        ConflictError: a batch was planned, or a unit was taken back, meanwhile; nothing changed.
    """
    if not dropped:
        return
    run = replace(session.run, branch=role.branch_id, consumer=role.role.partition(":")[2])
    entry, planned = _drop_entry(run, role, dropped)
    with journal.recorded(session, [entry]) as record, run.index.begin() as connection:
        consumers.require_role(connection, role)
        record.name(connection)
        _withdraw(connection, run, [a.unit_id for a in dropped])
        _drop(connection, run, dropped, planned=planned)


def _withdraw(connection: Connection, run: Run, unit_ids: Sequence[int]) -> None:
    """Take offers away for fates that are about to be given; another consumer may have sent a unit back meanwhile."""
    if consumers.withdraw(connection, run.branch, run.consumer, unit_ids) < len(unit_ids):
        raise ConflictError(
            f"a unit is not offered to consumer {run.consumer!r} any more: it has a fate, or was sent back to be sampled "
            "afresh; judge the groups again"
        )


def _drop_entry(run: Run, role: Role, dropped: Sequence[Assignment]) -> tuple[Entry, int]:
    """Return the entry of drops, and the last step that is planned; the fence tells which attempt was judged."""
    with run.index.read() as connection:
        planned = consumers.find(connection, run.branch, run.consumer).planned
        found = leases.read_back(connection, [a.unit_id for a in dropped])
    body = {
        "consumer": run.consumer,
        "fence": role.fence,
        "at_step": planned + 1,
        "units": [[a.epoch, a.unit_id, found[a.unit_id].fence, a.reason] for a in dropped],
    }
    return Entry(EntryKind.DROP, run.branch, body), planned


def _drop(connection: Connection, run: Run, dropped: Sequence[Assignment], *, planned: int) -> None:
    if consumers.find(connection, run.branch, run.consumer).planned != planned:
        raise ConflictError("a batch was planned while units were dropped; judge them again")
    consumers.assign(connection, run.branch, run.consumer, dropped, batch_id=None, at_step=planned + 1)
    for a in dropped:
        events.record(connection, "unit.dropped", unit_id=a.unit_id, reason=a.reason)


def tell_starved(session: WorkerSession, *, reasons: Mapping[str, int], drop_rate: float) -> None:
    """Record that groups were dropped by these reasons until the run was given up, at this share of all that were judged."""
    with session.run.index.begin() as connection:
        events.record(
            connection,
            "run.starved",
            session_id=session.session_id,
            reasons=dict(reasons),
            drop_rate=round(drop_rate, 4),
        )


def drop_failed(session: WorkerSession, role: Role, *, purpose: str, epoch: int | None = None) -> int:
    """Record units (of one epoch, if it is given) that used up their attempts as dropped; returns how many."""
    run = session.run
    with run.index.read() as connection:
        failed = consumers.failed_unassigned(connection, run.branch, run.consumer, purpose=purpose)
    failed = [u for u in failed if epoch is None or u.epoch == epoch]
    if not failed:
        return 0
    dropped = [Assignment(u.epoch, u.unit_id, "dropped", UNIT_FAILED) for u in failed]
    entry, planned = _drop_entry(run, role, dropped)
    try:
        with journal.recorded(session, [entry]) as record, run.index.begin() as connection:
            consumers.require_role(connection, role)
            record.name(connection)
            # Read again under the lock: an operator may have retried one of them meanwhile.
            again = consumers.failed_unassigned(connection, run.branch, run.consumer, purpose=purpose)
            if {u.unit_id for u in failed} - {u.unit_id for u in again}:
                raise ConflictError("a failed unit was retried while it was to be dropped")
            _drop(connection, run, dropped, planned=planned)
    except ConflictError as error:
        log.warning("nothing was dropped, the failed units are looked at again: %s", error)
        return 0
    return len(dropped)


def plan_batch(session: WorkerSession, role: Role, plan: BatchPlan) -> Batch:
    """Store a batch: packed rows, plan and journal entry first, then the transaction that makes it step `plan.step`.

    Raises:
        LeaseLostError: another session took over as assembler; nothing changed.
        ConflictError: the step was planned meanwhile, a unit was given away before, or weights that sampled it died
            (a resume went back before them); nothing changed.
    """
    run = session.run
    extents = session.packs.append_many("batch", [m.rows for m in plan.micro_batches])
    plan_extent = session.packs.append("plan", plan.plan)
    with run.index.read() as connection:
        before = batches.find(connection, run.branch, run.consumer, plan.step - 1)
        known = batches.find(connection, run.branch, run.consumer, plan.step)
    previous = NO_DIGEST if before is None else before.digest
    digest = chain_digest(previous, plan, extents)
    if known is not None and (known.fence, known.digest) == (role.fence, digest):
        return known  # a repetition after a lost reply: (step, fence) is its submission id
    faults.at("assemble.before_plan")  # crash here: orphan bytes, named by nothing
    body = _plan_body(run, role, plan, [*extents, plan_extent], previous=previous, digest=digest)
    entry = Entry(EntryKind.PLAN, run.branch, body)
    with journal.recorded(session, [entry]) as record, run.index.begin() as connection:
        consumers.require_role(connection, role)
        _take_step(connection, run, plan, previous=previous)
        record.name(connection)
        *extents, plan_extent = packs.name_extents(
            connection, [*extents, plan_extent], session_id=session.session_id
        )
        batch_id = batches.insert(
            connection, _new_batch(run, role, plan, [*extents, plan_extent], digest=digest)
        )
        _withdraw(connection, run, [a.unit_id for a in plan.assignments])
        consumers.assign(
            connection, run.branch, run.consumer, plan.assignments, batch_id=batch_id, at_step=plan.step
        )
        events.record(
            connection,
            "batch.planned",
            session_id=session.session_id,
            step=plan.step,
            num_sequences=plan.num_sequences,
            num_tokens=plan.num_tokens,
            max_staleness=plan.max_staleness,
            num_masked_tokens=plan.num_masked_tokens,
        )
        return batches.require(connection, run.branch, run.consumer, plan.step)


def _take_step(connection: Connection, run: Run, plan: BatchPlan, *, previous: str) -> None:
    """Move the consumer to this plan's step.

    Raises:
        ConflictError: the weights, the last step or the batch before are not those that it was built on.
    """
    if dead := weights.dead_among(connection, plan.version_ids):
        raise ConflictError(f"weights {dead[0]} died while the batch was built; it is built again")
    consumers.advance_planned(connection, run.branch, run.consumer, step=plan.step)
    before = batches.find(connection, run.branch, run.consumer, plan.step - 1)
    if (NO_DIGEST if before is None else before.digest) != previous:
        raise ConflictError(f"the batch of step {plan.step - 1} was replaced while the next was built")


def _new_batch(run: Run, role: Role, plan: BatchPlan, extents: Sequence[Extent], *, digest: str) -> NewBatch:
    """Return a batch as the index holds it; `extents` are those of its packed rows, then that of its plan."""
    *packed, planned = extents
    return NewBatch(
        branch_id=run.branch,
        consumer=run.consumer,
        step=plan.step,
        objective=plan.objective,
        num_units=len(plan.assignments),
        num_sequences=plan.num_sequences,
        num_tokens=plan.num_tokens,
        mean_reward=plan.mean_reward,
        max_staleness=plan.max_staleness,
        denominators=plan.denominators,
        digest=digest,
        plan_extent_id=planned.extent_id,
        fence=role.fence,
        places=tuple(
            MicroBatchPlace(m.mini_batch, m.slice, m.micro_batch, extent.extent_id)
            for m, extent in zip(plan.micro_batches, packed, strict=True)
        ),
    )


def _plan_body(
    run: Run, role: Role, plan: BatchPlan, extents: Sequence[Extent], *, previous: str, digest: str
) -> dict[str, Any]:
    """Return a batch as the journal holds it; `extents` are those of its packed rows, then that of its plan."""
    fates: dict[tuple[int, str, str | None], list[int]] = {}
    for a in plan.assignments:
        fates.setdefault((a.epoch, a.outcome, a.reason), []).append(a.unit_id)
    *packed, planned = extents
    return {
        "consumer": run.consumer,
        "step": plan.step,
        "fence": role.fence,
        "previous": previous,
        "digest": digest,
        "objective": plan.objective,
        "num_sequences": plan.num_sequences,
        "num_tokens": plan.num_tokens,
        "mean_reward": plan.mean_reward,
        "max_staleness": plan.max_staleness,
        "denominators": list(plan.denominators),
        "plan": journal.extent_ref(planned),
        "rows": [
            [m.mini_batch, m.slice, m.micro_batch, journal.extent_ref(extent)]
            for m, extent in zip(plan.micro_batches, packed, strict=True)
        ],
        "fates": [[*fate, unit_ids] for fate, unit_ids in fates.items()],
    }


def chain_digest(previous: str, plan: BatchPlan, extents: Sequence[Extent]) -> str:
    """Return xxh3-128 over the previous batch's digest, the denominators and the digests of the bytes it is made of."""
    state = xxhash.xxh3_128(previous.encode())
    state.update(repr(plan.denominators).encode())
    for micro_batch, extent in zip(plan.micro_batches, extents, strict=True):
        state.update(f"{micro_batch.mini_batch},{micro_batch.slice},{micro_batch.micro_batch};".encode())
        state.update(extent.digests)
    for record in plan.records:
        state.update(f"{record.start},{record.count};".encode())
        state.update(record.extent.digests)
    return str(state.hexdigest())
