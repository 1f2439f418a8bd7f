"""A run whose batches are all planned and stored, with a tiny real model to train on them: for tests of the trainer's loop.

Prompts, tokens and rewards are made up (strawflow.testing.runs); the trainer is the real one, in this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.testing.runs import small_run
from strawflow_workers.drain import Drain
from strawflow_workers.trainer import loop, team
from tests.integration.megatron_cases import make_hf

SEQUENCE_TOKENS = (5, 6)
"""Of the two members of every group: a prompt of three tokens, then two and three."""


def stored_batches(folder: Path, *, steps: int, settings: Mapping[str, str] | None = None) -> Run:
    """Make a run of so many steps of four groups of two, all planned and none trained; close it."""
    make_hf(folder / "hf")
    made = small_run(
        folder,
        num_prompts=4 * steps,
        settings={
            "model.path": str(folder / "hf"),
            "trainer.steps": str(steps),
            "trainer.checkpoint_interval": "2",
            "rollout.max_staleness": str(steps),
            **(settings or {}),
        },
    )
    # Trained by the real trainer: the made-up one only published the weights that were sampled.
    made.sessions.pop("train").end()
    made.sample()
    for _ in range(steps):
        assert made.plan() is not None
    for session in made.sessions.values():
        session.end()
    made.sessions.clear()
    return made.run


def train(run: Run, monkeypatch: pytest.MonkeyPatch, *, drain_after: int = 0) -> None:
    """Train as a worker does, to the end or until a drain that is asked for while step `drain_after` is trained."""
    drain = Drain()
    real = team.apply_batch

    def applied(trainer, config, batch, mini_batches, *, left_out=None):  # type: ignore[no-untyped-def]
        metrics = real(trainer, config, batch, mini_batches, left_out=left_out)
        if batch.step == drain_after:
            drain.request()
        return metrics

    with monkeypatch.context() as patched, WorkerSession(run, "train") as session:
        patched.setattr(team, "apply_batch", applied)
        loop.TrainerLoop(session, drain).run()
