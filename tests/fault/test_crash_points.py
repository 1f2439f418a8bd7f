"""Every named crash point: a real process is killed there, another one goes on, and no promise is broken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from strawflow.faults import POINTS
from strawflow.flow import history
from strawflow.flow.check import check
from strawflow.flow.run import is_run, open_run
from strawflow.index import units
from strawflow.testing.invariants import check_batches_unchanged, check_exactly_once
from tests.fault.mixed_prompts import check_draws
from tests.fault.through_a_run import NUM_STEPS

WAYS = {
    "enqueue.before_commit": 1,
    "rollout.after_claim": 2,
    "rollout.before_complete": 2,
    "commit.before": 3,
    "commit.after": 3,
    "pack.after_append": 4,
    "pack.after_sync": 6,
    "journal.after_entry": 5,
    "assemble.before_plan": 2,
    "checkpoint.after_files": 2,
    "checkpoint.after_commit": 2,
    "weights.after_files": 2,
    "weights.after_commit": 2,
    "seal.before_footer": 2,
    "seal.after_footer": 1,
}
"""Point and which of the process's hits of it is the last; killed there in every life until it gets past."""

ELSEWHERE = {
    "trainer.before_step": "fault/test_kill_campaign.py",
    "trainer.after_step": "fault/test_kill_campaign.py",
    "rollout.after_save": "integration/test_saved_rollouts.py",
    "sweep.before_unlink": "contract/test_sweep.py",
    "sweep.after_unlink": "contract/test_sweep.py",
    "compact.before_commit": "contract/test_compaction.py",
    "compact.after_commit": "contract/test_compaction.py",
    "retain.before_files": "contract/test_retention.py",
    "retain.before_commit": "contract/test_retention.py",
    "rebuild.before_commit": "contract/test_rebuild.py",
    "eval.after_plan": "contract/test_evaluation.py",
    "eval.after_record": "contract/test_evaluation.py",
}
"""Points of verbs that a run does not go through by itself, and where they are killed."""


def life(folder: Path, index_url: str, fault: str = "", *more: str) -> int:
    """Run one process through the run; returns its exit status."""
    return subprocess.run(
        [sys.executable, "-m", "tests.fault.through_a_run", str(folder), index_url, *more],
        env={**os.environ, "STRAWFLOW_FAULT": fault},
        cwd=Path(__file__).parents[2],
        timeout=120,
        check=False,
    ).returncode


@pytest.mark.parametrize("point", sorted(WAYS))
def test_a_process_killed_at_a_crash_point_loses_and_repeats_nothing(tmp_path: Path, point: str) -> None:
    killed_at(point, tmp_path, "", max_kills=1)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", sorted(WAYS))
def test_a_process_killed_at_a_crash_point_in_four_lives_loses_and_repeats_nothing(
    tmp_path: Path, index_url: str, point: str
) -> None:
    killed_at(point, tmp_path, index_url, max_kills=4)


def killed_at(point: str, tmp_path: Path, index_url: str, *, max_kills: int) -> None:
    digests: dict[int, str] = {}
    num_kills = 0
    for _ in range(max_kills):
        status = life(tmp_path, index_url, f"{point}:{WAYS[point]}")
        if is_run(tmp_path / "run"):
            run = open_run(tmp_path / "run")
            digests = check_batches_unchanged(digests, run)
            check_exactly_once(run, finished=False)
            run.close()
        if status == 0:
            break
        assert status == -signal.SIGKILL
        num_kills += 1
    assert num_kills > 0, f"no process ever came to {point}"
    assert life(tmp_path, index_url) == 0
    run = open_run(tmp_path / "run")
    assert [b.step for b in history.batches(run)] == list(range(1, NUM_STEPS + 1))
    check_batches_unchanged(digests, run)
    check_exactly_once(run, finished=False)
    assert check(run).findings == []
    run.close()


AT_ADMISSION = (
    "journal.after_entry:4",
    "admit.before_commit:1",
    "admit.after_commit:1",
    "admit.before_commit:1",
)
"""Where the process that admits from several prompt sets is killed, one life after another: the first three at its first
admission, the last at its second."""


@pytest.mark.parametrize(
    "index_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)], indirect=True
)
def test_kills_around_admissions_from_several_prompt_sets_lose_and_double_nothing(
    tmp_path: Path, index_url: str
) -> None:
    for fault, num_admitted in zip(AT_ADMISSION, (0, 0, 8, 8), strict=True):
        assert life(tmp_path, index_url, fault, "mixed") == -signal.SIGKILL
        with closing(open_run(tmp_path / "run")) as run, run.index.read() as connection:
            assert len(units.listed(connection, run.branch, limit=100)) == num_admitted
    assert life(tmp_path, index_url, "", "mixed") == 0
    with closing(open_run(tmp_path / "run")) as run:
        assert [b.step for b in history.batches(run)] == list(range(1, NUM_STEPS + 1))
        check_exactly_once(run, finished=True)
        assert check(run).findings == []
        check_draws(run)


def test_every_crash_point_is_killed_somewhere() -> None:
    assert WAYS.keys() | ELSEWHERE.keys() | {fault.partition(":")[0] for fault in AT_ADMISSION} == POINTS
    for point, place in ELSEWHERE.items():
        assert point in (Path(__file__).parents[1] / place).read_text(), f"{point} is not in {place}"
