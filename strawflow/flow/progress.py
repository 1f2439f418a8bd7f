"""How far a run has come, as its workers need to know it."""

from __future__ import annotations

from dataclasses import dataclass

from strawflow.flow.run import Run
from strawflow.index import consumers, units, weights
from strawflow.states import UnitState


@dataclass(frozen=True)
class Standing:
    planned: int
    """Last step with a stored batch."""
    position: int
    """Last step covered by a checkpoint."""
    evaluating: bool
    """Whether evaluation units wait for an answer."""


def standing(run: Run) -> Standing:
    with run.index.read() as connection:
        consumer = consumers.find(connection, run.branch, run.consumer)
        evaluating = units.num_unfinished(connection, run.branch, purpose="eval") > 0
    return Standing(consumer.planned, consumer.position, evaluating)


def evaluation_progress(run: Run) -> tuple[int, int]:
    """Return (evaluation units answered or given up, all admitted so far); counts every unit, so not for a hot path."""
    with run.index.read() as connection:
        counts = units.count_by_state(connection, run.branch)
    of_eval = {state: number for (purpose, state), number in counts.items() if purpose == "eval"}
    settled = of_eval.get(UnitState.COMPLETED, 0) + of_eval.get(UnitState.FAILED, 0)
    return settled, sum(of_eval.values())


def rollout_is_done(run: Run) -> bool:
    """Tell whether nothing will be generated any more: all steps trained, the last evaluation answered."""
    now = standing(run)
    if now.position < run.config.total_steps or now.evaluating:
        return False
    with run.index.read() as connection:
        # The last weights are published, with the evaluation they call for, after the last checkpoint.
        newest = weights.newest(connection, run.branch)
        return newest is not None and newest.step >= run.config.total_steps
