"""Replay: train again from stored batches alone: no engine, no prompts; each step's loss beside the recorded one.

The start is the initial weights, or the checkpoint before the first step asked for. Where a committed checkpoint of a
replayed step exists, the digests of all state are compared: equal means bit for bit.

A run whose trainer has several ranks is replayed by as many; the first of them prints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from strawflow.errors import InvalidInputError, NotFoundError
from strawflow.flow import consume, history
from strawflow.flow.run import Run, open_run
from strawflow.index.checkpoints import Checkpoint
from strawflow.packs.reader import PackReader
from strawflow_workers.trainer.team import Team


@dataclass(frozen=True)
class ReplayedStep:
    step: int
    objective: str
    num_tokens: int
    loss: float | None
    recorded_loss: float | None
    is_recorded: bool
    state_equal: bool | None
    """Whether all state equals the committed checkpoint's, bit for bit; None where there is none of this step."""

    @property
    def is_equal(self) -> bool:
        """Whether nothing that was recorded differs."""
        return (not self.is_recorded or self.loss == self.recorded_loss) and self.state_equal is not False


def replay(run: Run, *, from_step: int | None = None, to_step: int | None = None) -> Iterator[ReplayedStep]:
    """Yield each replayed step as it is done.

    Raises:
        NotFoundError: the run has no stored batch in that range, or no checkpoint to start from.
        InvalidInputError: the range is empty.
    """
    checkpoints = {c.step: c for c in history.checkpoints(run)}
    recorded = {s["step"]: s for s in history.steps(run)}
    stored = [b.step for b in history.batches(run)]
    if not stored:
        raise NotFoundError(f"{run.root} holds no stored batch yet")
    first = from_step if from_step is not None else 1
    # A batch may be planned and not trained yet: what was never recorded has nothing to be compared with.
    last = to_step if to_step is not None else max(recorded, default=0)
    if not recorded:
        raise NotFoundError(f"{run.root} has trained no step yet")
    if first > last:
        if to_step is None:
            raise NotFoundError(f"the last trained step is {last}; there is none from {first} on")
        raise InvalidInputError(f"--from-step {first} is after --to-step {last}")
    team = Team(run, PackReader(run.root))
    if first > 1:
        team.load(run.root / _checkpoint_before(first, checkpoints).path)
    for step in range(first, last + 1):
        batch = consume.batch_of_step(run, step)
        if batch is None:
            raise NotFoundError(
                f"{run.root} holds no batch of step {step}; it has {stored[0]} to {stored[-1]}"
            )
        metrics = team.train(batch, team.read(batch), recorded=recorded.get(step))
        checkpoint = checkpoints.get(step)
        yield ReplayedStep(
            step=step,
            objective=batch.objective,
            num_tokens=batch.num_tokens,
            loss=metrics["loss"],
            recorded_loss=recorded.get(step, {}).get("loss"),
            is_recorded=step in recorded,
            state_equal=None if checkpoint is None else team.state_digest() == checkpoint.state_digest,
        )
    team.end()


def _checkpoint_before(first: int, checkpoints: dict[int, Checkpoint]) -> Checkpoint:
    if first - 1 not in checkpoints:
        known = ", ".join(str(step + 1) for step in sorted(checkpoints)[:-1]) or "none"
        raise NotFoundError(
            f"no checkpoint of step {first - 1} to start from; --from-step can be 1 or one of: {known}"
        )
    return checkpoints[first - 1]


def replay_command(root: Path, *, from_step: int | None, to_step: int | None, as_json: bool) -> int:
    """Print a replay step by step; exit code 1 when a step differs from what was recorded."""
    run = open_run(root)
    num_steps = num_different = 0
    for step in replay(run, from_step=from_step, to_step=to_step):
        num_steps += 1
        num_different += not step.is_equal
        print(json.dumps(asdict(step)) if as_json else _line(step), flush=True)
    verdict = f"{num_steps} steps replayed, {num_different} differ from what was recorded"
    print(verdict, file=sys.stderr if as_json else sys.stdout)
    return 1 if num_different else 0


def _line(step: ReplayedStep) -> str:
    def shown(loss: float | None) -> str:
        return "      none" if loss is None else f"{loss:+.7f}"

    state = {True: "  state equal to the checkpoint", False: "  STATE DIFFERS", None: ""}[step.state_equal]
    mark = "not recorded" if not step.is_recorded else "=" if step.loss == step.recorded_loss else "DIFFERS"
    return (
        f"step {step.step:4d} {step.objective:4s} {step.num_tokens:7d} tokens  loss {shown(step.loss)}  "
        f"recorded {shown(step.recorded_loss)}  {mark}{state}"
    )
