"""Consuming: take the consumer, read planned batches in order, commit checkpoint and position together.

    checkpoint: files durable ▸ [C] ▸ journal entry durable ▸ transaction(checkpoint row + consumer position) ▸ [D]

C: files without a row are never loaded. D: committed; a restart goes on from it.

A line (branch, consumer) has at most one checkpoint a step; folder and id hold both names, so that no consumer comes upon
another's files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from strawflow import clock, faults
from strawflow.errors import ConflictError, CorruptPackError, InvalidInputError, NotFoundError
from strawflow.flow import inherit, journal
from strawflow.flow.journal import Entry, EntryKind
from strawflow.flow.placed import read_extent
from strawflow.flow.run import TRAINER, Run
from strawflow.flow.session import WorkerSession
from strawflow.ids import NAME_RULE, Extent, checkpoint_id, is_name
from strawflow.index import batches, checkpoints, consumers, datasets, events, packs, weights
from strawflow.index.batches import Batch, MicroBatchPlace
from strawflow.index.checkpoints import Checkpoint
from strawflow.index.consumers import Role
from strawflow.index.engine import Connection
from strawflow.packs.reader import PackReader
from strawflow.weights.verify import MANIFEST


@dataclass(frozen=True)
class Resumption:
    """Where a trainer goes on: its role, the checkpoint to load (None: the initial weights) and the step it stands for."""

    role: Role
    checkpoint: Checkpoint | None

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step


def take_over(session: WorkerSession) -> Resumption | None:
    """Become the consumer's trainer; None while another live session is.

    In the same transaction every weight version that the consumer published later than the newest checkpoint dies: engines
    stop loading it, and what was sampled from it waits for the replay to arrive at equal weights.
    """
    run = session.run
    with run.index.begin() as connection:
        role = consumers.take_role(connection, run.branch, f"consume:{run.consumer}", session.session_id)
        if role is None:
            return None
        newest = checkpoints.newest(connection, run.branch, run.consumer)
        if _publishes(connection, run):
            weights.kill_after(connection, run.branch, step=0 if newest is None else newest.step)
        return Resumption(role, newest)


def _publishes(connection: Connection, run: Run) -> bool:
    """Tell whether the branch's weights are this consumer's: one that only reads batches leaves them alone."""
    # Earlier programs did not write down whose weights they published: they are taken for the trainer's.
    return run.consumer in (consumers.publishers(connection, run.branch) or {TRAINER})


def require_consumer_name(run: Run) -> None:
    """Refuse to make a consumer whose name cannot be part of a folder name; one that is there keeps its name.

    Raises:
        InvalidInputError: the name is none.
    """
    if not is_name(run.consumer) and not _is_there(run):
        raise InvalidInputError(f"consumer name {run.consumer!r}: {NAME_RULE}")


def _is_there(run: Run) -> bool:
    with run.index.read() as connection:
        return any(c.consumer == run.consumer for c in consumers.listed(connection, run.branch))


def ensure_consumer(session: WorkerSession, *, purposes: Collection[str]) -> None:
    """Create the consumer the session is of, unless it exists; it is offered every completed unit of its purposes.

    On a branch these are those of its whole line: what was settled before it, up to where it left, and its own.

    Raises:
        InvalidInputError: its name cannot be part of a folder name.
    """
    run = session.run
    require_consumer_name(run)
    if _is_there(run):
        return
    inherit.make_consumer(session, purposes=purposes)


def newest_checkpoint(run: Run) -> Checkpoint | None:
    """Return the newest checkpoint on the branch's line whose files are kept."""
    with run.index.read() as connection:
        return checkpoints.newest(connection, run.branch, run.consumer)


def batch_of_step(run: Run, step: int) -> Batch | None:
    """Return the planned batch of a step, or None when it is not planned yet."""
    with run.index.read() as connection:
        return batches.find(connection, run.branch, run.consumer, step)


def micro_batch_sizes(run: Run, reader: PackReader, batch: Batch) -> list[dict[MicroBatchPlace, int]]:
    """Return for each mini-batch the tokens of its micro-batches, as the plan says; no packed row is read.

    Raises:
        CorruptPackError: stored bytes do not match their checksum. NotFoundError: retention gave the batch's rows up.
    """
    places, extents = _placed(run, batch, [batch.plan_extent_id])
    plan = read_extent(run, reader, extents[batch.plan_extent_id])
    columns = ("mini_batch", "slice", "micro_batch", "num_tokens")
    tokens: dict[tuple[int, int, int], int] = {}
    for mini, part, micro, num in zip(*(plan.column(name).to_pylist() for name in columns), strict=True):
        if mini is not None:
            tokens[mini, part, micro] = tokens.get((mini, part, micro), 0) + num
    sizes: dict[int, dict[MicroBatchPlace, int]] = {}
    for p in places:
        sizes.setdefault(p.mini_batch, {})[p] = tokens.get((p.mini_batch, p.slice, p.micro_batch), 0)
    return [sizes[mini] for mini in sorted(sizes)]


def _placed(
    run: Run, batch: Batch, also: Sequence[int] = ()
) -> tuple[list[MicroBatchPlace], dict[int, Extent]]:
    with run.index.read() as connection:
        places = batches.places(connection, batch.batch_id)
        if not places and batches.is_retired(connection, batch.batch_id):
            raise NotFoundError(
                f"the packed rows of step {batch.step} were given up by retention (storage.keep_steps); only its plan is left"
            )
        return places, packs.find_extents(connection, [*(p.extent_id for p in places), *also])


def read_batch(
    run: Run, reader: PackReader, batch: Batch, *, only: Collection[MicroBatchPlace] | None = None
) -> Iterator[tuple[MicroBatchPlace, pa.RecordBatch]]:
    """Yield the packed rows of a batch by mini-batch, slice and micro-batch; checked as they are read.

    Micro-batches that are not in `only` are not read; None: all are.

    Raises:
        CorruptPackError: stored bytes do not match their checksum, or belong to another step.
        NotFoundError: retention gave the batch's rows up.
    """
    places, placed = _placed(run, batch)
    for place in places:
        if only is not None and place not in only:
            continue
        rows = read_extent(run, reader, placed[place.extent_id])
        if rows.num_rows and rows.column("step")[0].as_py() != batch.step:
            raise CorruptPackError(
                f"{placed[place.extent_id].path} holds another step where step {batch.step} should lie",
                extent_id=place.extent_id,
            )
        yield place, rows


def record_step(session: WorkerSession, role: Role, *, step: int, metrics: dict[str, Any]) -> None:
    """Store what was measured in a step just applied.

    Raises:
        LeaseLostError: another session took over as trainer.
    """
    run = session.run
    body = {"consumer": run.consumer, "step": step, "fence": role.fence, "metrics": metrics}
    entry = Entry(EntryKind.STEP, run.branch, body)
    with journal.recorded(session, [entry]) as record, run.index.begin() as connection:
        consumers.require_role(connection, role)
        record.name(connection)
        checkpoints.record_step(
            connection, run.branch, run.consumer, step=step, fence=role.fence, metrics=metrics
        )


def tell(session: WorkerSession, name: str, **facts: Any) -> None:
    """Record an event of the trainer."""
    with session.run.index.begin() as connection:
        events.record(connection, name, session_id=session.session_id, **facts)


def _checkpoint_id(role: Role, step: int) -> str:
    return checkpoint_id(role.branch_id, role.role.partition(":")[2], fence=role.fence, step=step)


def checkpoint_path(role: Role, step: int) -> str:
    """Return where the checkpoint of this consumer, step and fence lies, relative to the run."""
    return f"checkpoints/{_checkpoint_id(role, step)}"


def require_no_checkpoint(run: Run, *, step: int) -> None:
    """Raise ConflictError when the consumer has a committed checkpoint of a step: its files must stay as they are.

    So it is for a step of the line before the branch: a checkpoint of it would be of a branch that has no such batch.
    """
    with run.index.read() as connection:
        known = checkpoints.of_step(connection, run.branch, run.consumer, step)
        _require_own(connection, run, step)
    if known is not None:
        raise ConflictError(
            f"step {step} of consumer {run.consumer!r} has its checkpoint {known.checkpoint_id} already; get the next batch"
        )


def _require_own(connection: Connection, run: Run, step: int) -> None:
    batch = batches.find(connection, run.branch, run.consumer, step)
    if batch is not None and batch.branch_id != run.branch:
        raise ConflictError(
            f"step {step} of consumer {run.consumer!r} is one of branch {batch.branch_id!r}, from which {run.branch!r} went on; "
            "get the next batch"
        )


def stands_for(run: Run, role: Role, *, step: int) -> dict[str, Any]:
    """Return what a checkpoint's manifest says of the place it has in the run, for whoever has the files alone.

    Raises:
        NotFoundError: no such batch.
    """
    with run.index.read() as connection:
        batch = batches.require(connection, run.branch, run.consumer, step)
    return {
        "branch": run.branch,
        "consumer": run.consumer,
        "step": step,
        "fence": role.fence,
        "batch_digest": batch.digest,
    }


def _require_manifest(run: Run, path: str) -> None:
    if not (run.root / path / MANIFEST).is_file():
        raise NotFoundError(
            f"{run.root / path} has no {MANIFEST}: the checkpoint is not complete; the one before it stays current"
        )


def commit_checkpoint(
    session: WorkerSession, role: Role, *, step: int, previous_step: int, state_digest: str
) -> Checkpoint:
    """Commit a checkpoint whose files are durable, together with the consumer position it stands for.

    Its submission id is the checkpoint's own (branch, consumer, fence, step): repeating it after a lost reply gives the
    same answer, other content under it is a conflict.

    Raises:
        LeaseLostError: another session took over as trainer; the files stay unnamed.
        ConflictError: the committed position is not `previous_step`, or the step has a checkpoint of other content or of
            an earlier session, or lies before the branch.
        NotFoundError: the folder has no manifest: it is no complete checkpoint.
    """
    run = session.run
    faults.at("checkpoint.after_files")
    with run.index.read() as connection:
        known = checkpoints.of_step(connection, run.branch, run.consumer, step)
        if known is not None:
            if (known.fence, known.state_digest) != (role.fence, state_digest):
                raise ConflictError(
                    f"step {step} of consumer {run.consumer!r} has a checkpoint with other content or of an earlier "
                    f"session: {known.checkpoint_id}"
                )
            return known
        batch = batches.require(connection, run.branch, run.consumer, step)
        _require_own(connection, run, step)
        cursors, last_unit_id = datasets.standing(connection, run.branch)
    checkpoint = Checkpoint(
        checkpoint_id=_checkpoint_id(role, step),
        branch_id=run.branch,
        consumer=run.consumer,
        step=step,
        fence=role.fence,
        path=checkpoint_path(role, step),
        state_digest=state_digest,
        batch_digest=batch.digest,
        created_at=clock.wall_time(),
        cursors=cursors,
        last_unit_id=last_unit_id,
    )
    entry = Entry(EntryKind.CHECKPOINT, run.branch, {**asdict(checkpoint), "previous_step": previous_step})
    with journal.recorded(session, [entry]) as record, run.index.begin() as connection:
        consumers.require_role(connection, role)
        _require_manifest(run, checkpoint.path)
        if batches.require(connection, run.branch, run.consumer, step).digest != batch.digest:
            raise ConflictError(f"the batch of step {step} was replaced while its checkpoint was committed")
        record.name(connection)
        checkpoints.insert(connection, checkpoint)
        consumers.advance_position(connection, run.branch, run.consumer, expected=previous_step, new=step)
        batches.mark_trained(connection, run.branch, run.consumer, up_to_step=step)
        events.record(
            connection, "checkpoint.committed", session_id=session.session_id, step=step, path=checkpoint.path
        )
    faults.at("checkpoint.after_commit")
    return checkpoint
