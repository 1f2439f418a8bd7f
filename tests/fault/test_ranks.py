"""A supervised run whose trainer has several ranks: one is killed, all start again, and the replay is bit-equal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from strawflow.flow import history
from strawflow.flow.run import open_run
from strawflow.testing.invariants import check_batches_unchanged, check_exactly_once
from tests.fault.kill_run import SupervisedRun, make_run, num_planned, processes_of, wait_until
from tests.integration.parallel_cases import ranks_running

pytestmark = pytest.mark.alone

TWO = {
    "data": {"ranks": 2},
    "distributed": {"ranks": 2, "distributed_optimizer": True},
    "tensor": {"tensor": 2},
}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def trainer_ranks(root: Path) -> dict[int, int]:
    """Return {pid: rank} of the trainer of two ranks: the second is a child of the first."""
    pids = [pid for pid, kind in processes_of(root).items() if kind == "train"]
    return {pid: int(parent_of(pid) in pids) for pid in pids}


def replayed(root: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return what `replay` prints of each step."""
    done = subprocess.run(
        [sys.executable, "-m", "strawflow_workers.entry", "replay", str(root), "--json", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layout", sorted(TWO))
def test_a_killed_rank_ends_the_trainer_another_goes_on_and_the_replay_is_bit_equal(
    tmp_path: Path, layout: str, rank: int
) -> None:
    root = tmp_path / "run"
    make_run(
        root, engine="fake", steps=12, seed=3, parallel=TWO[layout], engine_options={"delay-s": "0.1"}
    ).close()
    supervised = SupervisedRun(root)
    supervised.start()
    wait_until(lambda: num_planned(root) >= 6, seconds=120, what="the sixth step")
    ranks = trainer_ranks(root)
    assert sorted(ranks.values()) == [0, 1]
    (killed,) = [pid for pid, found in ranks.items() if found == rank]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: not ranks.keys() & processes_of(root).keys(), seconds=10, what="both ranks to end")
    supervised.finish(seconds=240)
    first_life = (root / "logs" / "train-1.log").read_text()
    assert ("rank 1 of the trainer ended with signal 9" in first_life) == (rank == 1)
    assert (root / "logs" / "train-2.log").exists()
    check_kept_and_replayed(root)


def check_kept_and_replayed(root: Path) -> None:
    run = open_run(root)
    check_batches_unchanged({}, run)
    check_exactly_once(run, finished=True)
    total, kept = run.config.total_steps, history.checkpoints(run)
    run.close()
    steps = replayed(root)
    assert [step["step"] for step in steps] == list(range(1, total + 1))
    assert all(step["loss"] == step["recorded_loss"] for step in steps)
    assert steps[-1]["state_equal"] is True
    before = kept[-2].step
    later = replayed(root, "--from-step", str(before + 1))
    assert [step["state_equal"] for step in later if step["state_equal"] is not None][-1] is True
    # A launcher's two processes replay it as well: both find nothing that differs.
    with ranks_running(
        2, "strawflow_workers.entry", "replay", str(root), "--from-step", str(before + 1)
    ) as ranks:
        assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    manifest = json.loads((root / kept[-1].path / "manifest.json").read_text())
    assert manifest["world_size"] == 2
    assert {"rank-00000.safetensors", "rank-00001.safetensors"} <= manifest["files"].keys()
