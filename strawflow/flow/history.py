"""What a run has done so far: its batches, recorded steps and checkpoints, read-only."""

from __future__ import annotations

from typing import Any

from strawflow.flow.run import Run
from strawflow.index import batches as index_batches
from strawflow.index import checkpoints as index_checkpoints
from strawflow.index import consumers, units
from strawflow.index.batches import Batch
from strawflow.index.checkpoints import Checkpoint


def batches(run: Run) -> list[Batch]:
    """Return the consumer's batches in step order."""
    with run.index.read() as connection:
        return index_batches.listed(connection, run.branch, run.consumer)


def steps(run: Run) -> list[dict[str, Any]]:
    """Return one record of metrics per applied step, in step order."""
    with run.index.read() as connection:
        return index_checkpoints.steps_recorded(connection, run.branch, run.consumer)


def checkpoints(run: Run) -> list[Checkpoint]:
    """Return the committed checkpoints in step order."""
    with run.index.read() as connection:
        return index_checkpoints.listed(connection, run.branch, run.consumer)


def outcomes(run: Run) -> dict[tuple[str, str, str | None], int]:
    """Return {(purpose, outcome, reason): number of units}."""
    with run.index.read() as connection:
        return consumers.count_outcomes_by_purpose(connection, run.branch, run.consumer)


def tokens_generated(run: Run) -> int:
    """Return the response tokens of all accepted results that an engine sampled."""
    with run.index.read() as connection:
        return units.total_tokens(connection, run.branch)
