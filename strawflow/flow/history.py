"""What a run has done so far: its batches, recorded steps and checkpoints, read-only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strawflow.flow.run import Run
from strawflow.index import batches as index_batches
from strawflow.index import checkpoints as index_checkpoints
from strawflow.index import consumers, pins, units
from strawflow.index.batches import Batch
from strawflow.index.checkpoints import Checkpoint
from strawflow.index.pins import PinKind


def batches(run: Run) -> list[Batch]:
    """Return the consumer's batches in step order."""
    with run.index.read() as connection:
        return index_batches.listed(connection, run.branch, run.consumer)


def steps(run: Run) -> list[dict[str, Any]]:
    """Return one record of metrics per applied step, in step order."""
    with run.index.read() as connection:
        return index_checkpoints.steps_recorded(connection, run.branch, run.consumer)


def rewards_by_set(run: Run, batch: Batch) -> dict[str, float]:
    """Return the mean reward of a batch's groups by prompt set: the mean over groups, those without signal among them, of the mean
    over a group's members. A set without such a group is not there.
    """
    with run.index.read() as connection:
        return units.rewards_of_batch(connection, batch.batch_id)


def checkpoints(run: Run) -> list[Checkpoint]:
    """Return the committed checkpoints in step order."""
    with run.index.read() as connection:
        return index_checkpoints.listed(connection, run.branch, run.consumer)


@dataclass(frozen=True)
class ListedCheckpoint:
    """A committed checkpoint, as it is shown."""

    checkpoint_id: str
    consumer: str
    step: int
    branch_id: str
    """Where it was made: the run's branch or an ancestor."""
    created_at: str
    files: str
    """kept or removed: retention gave them up."""
    pinned: bool
    path: str


def checkpoints_of(run: Run, *, consumer: str | None = None) -> list[ListedCheckpoint]:
    """Return the checkpoints on the branch's line of one consumer or of all, by consumer and step.

    Raises:
        NotFoundError: no such consumer.
    """
    with run.index.read() as connection:
        if consumer is None:
            names = [c.consumer for c in consumers.listed(connection, run.branch)]
        else:
            names = [consumers.find(connection, run.branch, consumer).consumer]
        pinned = {
            p.subject
            for p in pins.listed(connection)
            if p.subject_kind is PinKind.CHECKPOINT and not p.is_void
        }
        found = [c for name in names for c in index_checkpoints.listed(connection, run.branch, name)]
    return [
        ListedCheckpoint(
            checkpoint_id=c.checkpoint_id,
            consumer=c.consumer,
            step=c.step,
            branch_id=c.branch_id,
            created_at=c.created_at,
            files="removed" if c.files_removed else "kept",
            pinned=c.checkpoint_id in pinned,
            path=c.path,
        )
        for c in found
    ]


def outcomes(run: Run) -> dict[tuple[str, str, str | None], int]:
    """Return {(purpose, outcome, reason): number of units}."""
    with run.index.read() as connection:
        return consumers.count_outcomes_by_purpose(connection, run.branch, run.consumer)


def tokens_generated(run: Run) -> int:
    """Return the response tokens of all accepted results that an engine sampled."""
    with run.index.read() as connection:
        return units.total_tokens(connection, run.branch)
