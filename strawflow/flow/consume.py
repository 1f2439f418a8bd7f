"""Consuming: take the consumer, read planned batches in order, commit checkpoint and position together.

    checkpoint: files durable ▸ [C] ▸ transaction(checkpoint row + consumer position) ▸ [D]

C: files without a row are never loaded. D: committed; a restart goes on from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from strawflow import clock, faults
from strawflow.errors import CorruptPackError
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.ids import checkpoint_id
from strawflow.index import batches, checkpoints, consumers, events, packs, weights
from strawflow.index.batches import Batch, MicroBatchPlace
from strawflow.index.checkpoints import Checkpoint
from strawflow.index.consumers import Role
from strawflow.packs.reader import PackReader


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

    In the same transaction every weight version later than the newest checkpoint dies: engines stop loading it, and what
    was sampled from it waits for the replay to arrive at equal weights.
    """
    run = session.run
    with run.index.begin() as connection:
        role = consumers.take_role(connection, run.branch, f"consume:{run.consumer}", session.session_id)
        if role is None:
            return None
        newest = checkpoints.newest(connection, run.branch, run.consumer)
        weights.kill_after(connection, run.branch, step=0 if newest is None else newest.step)
        return Resumption(role, newest)


def batch_of_step(run: Run, step: int) -> Batch | None:
    """Return the planned batch of a step, or None when it is not planned yet."""
    with run.index.read() as connection:
        return batches.find(connection, run.branch, run.consumer, step)


def read_batch(
    run: Run, reader: PackReader, batch: Batch
) -> Iterator[tuple[MicroBatchPlace, pa.RecordBatch]]:
    """Yield the packed rows of a batch by mini-batch, slice and micro-batch; checked as they are read.

    Raises:
        CorruptPackError: stored bytes do not match their checksum, or belong to another step.
    """
    with run.index.read() as connection:
        places = batches.places(connection, batch.batch_id)
        placed = packs.find_extents(connection, [p.extent_id for p in places])
    for place in places:
        rows = reader.read(placed[place.extent_id])
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
    with run.index.begin() as connection:
        consumers.require_role(connection, role)
        checkpoints.record_step(
            connection, run.branch, run.consumer, step=step, fence=role.fence, metrics=metrics
        )


def checkpoint_path(role: Role, step: int) -> str:
    """Return where the checkpoint of this step and fence lies, relative to the run."""
    return f"checkpoints/{checkpoint_id(role.branch_id, role.fence, step)}"


def commit_checkpoint(
    session: WorkerSession, role: Role, *, step: int, previous_step: int, state_digest: str
) -> Checkpoint:
    """Commit a checkpoint whose files are durable, together with the consumer position it stands for.

    Raises:
        LeaseLostError: another session took over as trainer; the files stay unnamed.
        ConflictError: the committed position is not `previous_step`.
    """
    run = session.run
    faults.at("checkpoint.after_files")
    with run.index.begin() as connection:
        consumers.require_role(connection, role)
        batch = batches.require(connection, run.branch, run.consumer, step)
        checkpoint = Checkpoint(
            checkpoint_id=checkpoint_id(run.branch, role.fence, step),
            branch_id=run.branch,
            consumer=run.consumer,
            step=step,
            fence=role.fence,
            path=checkpoint_path(role, step),
            state_digest=state_digest,
            batch_digest=batch.digest,
            created_at=clock.wall_time(),
        )
        checkpoints.insert(connection, checkpoint)
        consumers.advance_position(connection, run.branch, run.consumer, expected=previous_step, new=step)
        batches.mark_trained(connection, run.branch, run.consumer, up_to_step=step)
        events.record(
            connection, "checkpoint.committed", session_id=session.session_id, step=step, path=checkpoint.path
        )
    faults.at("checkpoint.after_commit")
    return checkpoint
