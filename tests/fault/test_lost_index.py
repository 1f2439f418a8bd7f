"""A real run whose every process is killed and whose index vanishes: rebuilt from its folder, it ends as if nothing was."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from strawflow.cli.main import main
from strawflow.flow.run import INDEX_FILE, open_run
from strawflow.testing.invariants import check_batches_unchanged, check_exactly_once
from tests.fault.kill_run import SupervisedRun, check_finished, make_run, num_planned, wait_until


def lose_and_rebuild(root: Path, *, torn: bool) -> None:
    """Remove the index; with `torn` the pack written last ends in the middle of a message, as after a lost disk block."""
    for part in ("", "-wal", "-shm"):
        (root / f"{INDEX_FILE}{part}").unlink(missing_ok=True)
    if torn:
        packs = sorted((root / "packs" / "trajectory").glob("*.arrow"), key=lambda path: path.stat().st_mtime)
        with packs[-1].open("r+b") as file:
            file.truncate(max(1, packs[-1].stat().st_size - 5))
    with pytest.raises(SystemExit) as ended:
        main(["index", "rebuild", str(root), "--yes"])
    assert not ended.value.code


def live_and_lose(root: Path, *, losses: int, seed: int, steps: int) -> None:
    make_run(root, engine="fake", steps=steps, seed=seed, engine_options={"delay-s": "0.05"}).close()
    rng = random.Random(seed)
    digests: dict[int, str] = {}
    supervised = SupervisedRun(root)
    for number in range(losses):
        supervised.start()
        before = num_planned(root)
        wait_until(lambda before=before: num_planned(root) > before + 1, seconds=120, what="two more steps")  # type: ignore[misc]
        time.sleep(rng.uniform(0.0, 1.0))  # anywhere in what comes next
        supervised.kill("everything")
        run = open_run(root)
        digests = check_batches_unchanged(digests, run)
        run.close()
        lose_and_rebuild(root, torn=number % 2 == 1)
        run = open_run(root)
        digests = check_batches_unchanged(digests, run)
        check_exactly_once(run, finished=False)
        run.close()
    supervised.start()
    supervised.finish(seconds=200)
    check_finished(root, digests)


@pytest.mark.long
def test_a_run_that_loses_its_index_ends_at_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    live_and_lose(tmp_path / "run", losses=1, seed=21, steps=8)


@pytest.mark.long
def test_a_run_that_loses_its_index_twelve_times_ends_at_the_weights_of_an_uninterrupted_one(
    tmp_path: Path,
) -> None:
    live_and_lose(tmp_path / "run", losses=12, seed=22, steps=80)
