"""A full disk under packs, under the index, under both: errors that say so, nothing lost or half-written, and work goes on
when there is space again.

The disk is a small tmpfs of its own, so these tests need root (or the right to mount).
"""

from __future__ import annotations

import errno
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from strawflow.errors import CommitUnknownError, StorageError
from strawflow.flow import assemble, rescue
from strawflow.flow.check import check
from strawflow.flow.claim import Grant
from strawflow.flow.complete import Receipt
from strawflow.testing.runs import SmallRun, prompt_lines, small_run
from strawflow.weights.verify import verify_checkpoint
from strawflow_workers.trainer import checkpoints
from tests.fault.store_worker import Nest, Order, StoreWorker, assert_all_done_once, wide_run

SIZE = "8m"

PAGE = 4096

NUM_UNITS = 300
"""Together their trajectories are a message of many pages."""


TO_THE_LAST_BYTE = {"storage.min_free_bytes": "0"}
"""No reserve: the disk itself refuses."""


class SmallDisk:
    """A mounted tmpfs, and the ballast that fills it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._ballast = place / "ballast"

    def fill(self, *, but: int = 0) -> None:
        """Leave `but` bytes of space, whatever was there."""
        with self._ballast.open("ab", buffering=0) as sink:
            try:
                while sink.write(bytes(PAGE)):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
            sink.truncate(sink.tell() - but)

    def free(self) -> None:
        self._ballast.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "strawflow-test", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"no tmpfs can be mounted, which needs root or CAP_SYS_ADMIN: {done.stderr.strip()}")
    try:
        yield SmallDisk(place)
    finally:
        # Lazily: a killed worker may still be on its way out with a file open.
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def assert_sound(small: SmallRun) -> None:
    assert check(small.run).findings == []


def results_of(small: SmallRun) -> dict[int, int]:
    """Return {completed unit: how many trajectory rows are its result}."""
    session = small.session("rollout")
    offered = assemble.offered(session, purpose="train", limit=1000)
    return {u: rows.num_rows for u, rows in assemble.read_trajectories(session, offered).items()}


@pytest.mark.parametrize("room", [0, PAGE], ids=["no byte left", "room for a torn message"])
def test_a_full_disk_under_the_packs_loses_nothing_and_the_same_submission_succeeds_later(
    tmp_path: Path, disk: SmallDisk, room: int
) -> None:
    settings = {**TO_THE_LAST_BYTE, "run.index_url": f"sqlite:///{tmp_path / 'index.sqlite'}"}
    with wide_run(disk.place, NUM_UNITS, settings) as small:
        small.complete(small.claim(2), submission_id="before")
        grants = small.claim(NUM_UNITS)
        disk.fill(but=room)
        for _ in range(3):
            with pytest.raises(StorageError, match="No space left"):
                small.complete(grants, submission_id="during")
        assert results_of(small) == {1: 1, 2: 1}
        assert_sound(small)

        disk.free()
        rest = tuple(range(3, NUM_UNITS + 1))
        assert small.complete(grants, submission_id="during") == Receipt(rest, ())
        rescue.recover_packs(small.session("supervise"))
        assert results_of(small) == dict.fromkeys(range(1, NUM_UNITS + 1), 1)
        assert_sound(small)


def test_prompts_that_do_not_fit_are_not_enqueued_in_part(tmp_path: Path, disk: SmallDisk) -> None:
    settings = {**TO_THE_LAST_BYTE, "run.index_url": f"sqlite:///{tmp_path / 'index.sqlite'}"}
    path = tmp_path / "more.jsonl"
    path.write_text(prompt_lines(9000, first=100), encoding="utf-8")
    with small_run(disk.place, settings=settings) as small:
        disk.fill(but=8 * PAGE)
        with pytest.raises(StorageError, match="No space left"):
            small.enqueue(path)
        assert_sound(small)
        disk.free()
        assert small.enqueue(path) == 9000
        assert_sound(small)


def test_a_full_disk_under_the_index_loses_nothing_that_was_acknowledged_and_work_goes_on(
    tmp_path: Path, disk: SmallDisk
) -> None:
    settings = {**TO_THE_LAST_BYTE, "run.index_url": f"sqlite:///{disk.place / 'index.sqlite'}"}
    with wide_run(tmp_path, 64, settings) as small:
        small.session("rollout")
        disk.fill()
        held: list[Grant] = []
        done: list[int] = []
        num_failed = 0
        for _ in range(64):
            try:
                held += small.claim(1)
                done += small.complete(held[-1:], submission_id=f"s-{len(held)}").accepted
            except (StorageError, CommitUnknownError):
                num_failed += 1
        assert num_failed, "the index grew without space"
        assert sorted(results_of(small)) == sorted(done)
        assert_sound(small)

        disk.free()
        for number, grant in enumerate(held, 1):
            small.complete([grant], submission_id=f"s-{number}")
        while small.sample(8):
            pass
        assert results_of(small) == dict.fromkeys(range(1, 65), 1)
        assert_sound(small)


def test_a_checkpoint_that_does_not_fit_leaves_no_mark_and_the_previous_stays_whole(disk: SmallDisk) -> None:
    state = checkpoints.RankState({"weight": torch.arange(200_000, dtype=torch.float32)}, {"step": 1})
    checkpoints.write_rank_state(disk.place / "c1", state)
    disk.fill(but=50 * PAGE)  # the tensors do not fit
    with pytest.raises(StorageError, match=r"c2: could not be written .*No space left"):
        checkpoints.write_rank_state(disk.place / "c2", state)
    assert sorted(path.name for path in disk.place.iterdir()) == ["ballast", "c1"]
    assert checkpoints.read_rank_state(disk.place / "c1").values == {"step": 1}
    disk.free()
    checkpoints.write_rank_state(disk.place / "c2", state)
    verify_checkpoint(disk.place / "c2")


def test_workers_on_a_disk_that_fills_again_and_again_complete_every_unit_once(
    tmp_path: Path, disk: SmallDisk
) -> None:
    with (
        Nest(tmp_path) as nest,
        wide_run(disk.place, 400, {**TO_THE_LAST_BYTE, "lease.ttl_s": "600"}) as small,
    ):
        order = Order(str(small.run.root), limit=4, retry_s=60)
        workers = [nest.start(order) for _ in range(2)]
        for _ in range(3):
            before = num_lines(workers, "completed")
            await_more(workers, "completed", before + 3)
            seen = num_lines(workers, "error")
            disk.fill()
            await_more(workers, "error", seen + 4)
            disk.free()
        for worker in workers:
            worker.await_end()
            assert [line for line in worker.lines() if line["event"] == "failed"] == []
        told = {line["error"] for w in workers for line in w.lines("error")}
        assert told <= {"StorageError", "CommitUnknownError"}
        rescue.recover_packs(small.session("supervise"))
        assert_all_done_once(small.run, workers, num_units=400)


def num_lines(workers: list[StoreWorker], event: str) -> int:
    return sum(len(worker.lines(event)) for worker in workers)


def await_more(workers: list[StoreWorker], event: str, number: int, *, seconds: float = 60) -> None:
    """Wait until the workers told of an event so many times."""
    deadline = time.monotonic() + seconds
    while num_lines(workers, event) < number:
        assert any(worker.is_alive() for worker in workers), [w.lines()[-2:] for w in workers]
        assert time.monotonic() < deadline, (
            f"no more {event} in {seconds} s: {[w.lines()[-2:] for w in workers]}"
        )
        time.sleep(0.01)
