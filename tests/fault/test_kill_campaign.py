"""Promises P1 and P2 under SIGKILL: workers, engine, trainer at named instants, everything at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from strawflow.errors import AlreadyExistsError
from strawflow.flow import assemble
from strawflow.flow.run import open_run
from strawflow.flow.session import WorkerSession
from strawflow.index import packs, sessions, units
from strawflow.states import PackState, UnitState
from tests.fault.kill_run import (
    SupervisedRun,
    campaign,
    check_finished,
    make_run,
    num_planned,
    processes_of,
    wait_until,
)

pytestmark = pytest.mark.alone


def broken_off(policy: str) -> dict[str, Any]:
    """Return settings of a run that has groups in flight whenever newer weights are published.

    A batch takes the first half of what is begun together: lengths differ widely, and the other half goes on. Steps are not
    planned ahead, which would make its tokens too stale to go on with.
    """
    return {
        "engine": "fake",
        "engine_options": {"token-s": "0.05", "mean-tokens": "10"},
        "max_response_tokens": 40,
        "schedule": "sync",
        "on_new_weights": policy,
        "max_staleness": 2,
        "over_provision": 4,
        "units_in_flight": 12,
    }


def num_mixed(root: Path) -> int:
    """Return how many trained sequences hold tokens of several weight versions."""
    run = open_run(root)
    try:
        with WorkerSession(run, "look") as session, run.index.read() as connection:
            completed = units.listed(connection, run.branch, state=UnitState.COMPLETED, limit=10_000)
            rows = assemble.read_trajectories(session, completed)
        return sum(len(v) > 1 for r in rows.values() for v in r.column("weight_versions").to_pylist())
    finally:
        run.close()


PARTS = ["rollout", "engine", "train", "everything", "assemble"]


@pytest.mark.parametrize(
    ("times", "steps"),
    [(1, 15), pytest.param(2, 30, marks=pytest.mark.long), pytest.param(4, 60, marks=pytest.mark.long)],
)
def test_kills_at_random_instants_lose_and_repeat_nothing(tmp_path: Path, times: int, steps: int) -> None:
    root = tmp_path / "run"
    make_run(root, engine="fake", steps=steps, seed=1, engine_options={"delay-s": "0.05"}).close()
    supervised = SupervisedRun(root)
    digests = campaign(supervised, PARTS * times, seed=1, gap_s=(0.2, 4.0), seconds=240)
    assert sum(supervised.num_kills.values()) == 5 * times
    supervised.finish(seconds=120)
    check_finished(root, digests)


def test_ctrl_c_drains_every_worker_and_resume_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "run"
    make_run(root, engine="fake", steps=6, seed=4, engine_options={"delay-s": "0.2"}).close()
    supervised = SupervisedRun(root)
    supervised.start()
    wait_until(lambda: num_planned(root) >= 4, seconds=90, what="the fourth step")
    assert supervised.process is not None
    supervised.process.send_signal(signal.SIGINT)
    assert supervised.process.wait(timeout=40) == 130
    assert "strawflow resume" in (root / "supervisor.log").read_text()
    assert not processes_of(root)
    run = open_run(root)
    with run.index.read() as connection:
        assert sessions.listed(connection, live_only=True) == []
        assert packs.listed(connection, state=PackState.OPEN) == []
        assert not [u for u in units.listed(connection, run.branch) if u.state is UnitState.LEASED]
    run.close()
    supervised.start()
    supervised.finish(seconds=120)
    check_finished(root, {})


@pytest.mark.long
def test_workers_told_to_end_or_stopped_by_others_are_replaced(tmp_path: Path) -> None:
    root = tmp_path / "run"
    make_run(root, steps=8, seed=7, **broken_off("park")).close()
    supervised = SupervisedRun(root)
    supervised.start()
    wait_until(lambda: num_planned(root) >= 4, seconds=90, what="the fourth step")
    (rollout,) = [pid for pid, kind in processes_of(root).items() if kind == "rollout"]
    os.kill(rollout, signal.SIGTERM)  # drains and exits with code 0 before its work is done
    wait_until(lambda: "rollout" in processes_of(root).values(), seconds=30, what="another rollout worker")
    (trainer,) = [pid for pid, kind in processes_of(root).items() if kind == "train"]
    os.kill(trainer, signal.SIGSTOP)  # a zombie: alive, and silent past its lease of 6 s
    wait_until(lambda: trainer not in processes_of(root), seconds=40, what="the stopped trainer to be killed")
    supervised.finish(seconds=120)
    check_finished(root, {})
    assert num_mixed(root) > 0


@pytest.mark.long
def test_a_second_supervisor_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "run"
    make_run(root, engine="fake", steps=2, seed=6).close()
    first, second = SupervisedRun(root), SupervisedRun(root)
    first.start()
    wait_until(lambda: bool(processes_of(root)), seconds=30, what="the first worker")
    second.start()
    assert second.process is not None
    assert second.process.wait(timeout=30) == AlreadyExistsError.exit_code
    first.finish(seconds=120)
    check_finished(root, {})


@pytest.mark.long
def test_sixty_kills_over_two_hundred_steps_lose_and_repeat_nothing(tmp_path: Path) -> None:
    root = tmp_path / "run"
    make_run(root, engine="fake", steps=200, seed=8, engine_options={"delay-s": "0.05"}).close()
    supervised = SupervisedRun(root)
    digests = campaign(supervised, PARTS * 12, seed=8, gap_s=(0.2, 6.0), seconds=900)
    assert sum(supervised.num_kills.values()) == 60
    supervised.finish(seconds=600)
    check_finished(root, digests)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["park", "continue"])
def test_kills_of_a_run_whose_groups_outlive_their_weights_lose_and_repeat_nothing(
    tmp_path: Path, policy: str
) -> None:
    root = tmp_path / "run"
    make_run(root, steps=60, seed=9, **broken_off(policy)).close()
    supervised = SupervisedRun(root)
    digests = campaign(supervised, PARTS * 4, seed=9, gap_s=(0.2, 6.0), seconds=600)
    assert sum(supervised.num_kills.values()) == 20
    supervised.finish(seconds=600)
    check_finished(root, digests)
    assert num_mixed(root) > 20


@pytest.mark.parametrize(
    "point",
    [
        "trainer.before_step:4",
        "trainer.after_step:4",
        "checkpoint.after_files:2",
        "checkpoint.after_commit:2",
        "weights.after_files:3",
        "weights.after_commit:3",
        "rollout.after_claim:2",
        "rollout.before_complete:3",
        "commit.before:3",
        "commit.after:3",
        "assemble.before_plan:4",
    ],
)
@pytest.mark.long
def test_a_worker_killed_at_a_named_instant_every_life_changes_nothing(tmp_path: Path, point: str) -> None:
    root = tmp_path / "run"
    make_run(root, engine="fake", steps=8, seed=2).close()
    supervised = SupervisedRun(root, fault=point)
    supervised.start()
    supervised.finish(seconds=200)
    check_finished(root, {})


@pytest.mark.long
def test_the_trainer_killed_between_step_and_checkpoint_replays_the_same_batches(tmp_path: Path) -> None:
    root = tmp_path / "run"
    make_run(root, engine="fake", steps=6, seed=3).close()
    supervised = SupervisedRun(root, fault="checkpoint.after_files:2")
    supervised.start()
    supervised.finish(seconds=200)
    assert list((root / "logs").glob("train-2.log")), "the trainer was never killed"
    check_finished(root, {})
