"""A run whose file system takes no writes any more: it can be looked at, whatever would write says why, and nothing changes.

The file system is a small tmpfs of its own, so these tests need root (or the right to mount).
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from strawflow.errors import StorageError
from strawflow.flow.backup import backup, read_manifest
from strawflow.flow.check import check
from strawflow.flow.history import batches
from strawflow.flow.run import Run, open_run
from strawflow.flow.session import WorkerSession
from strawflow.flow.status import snapshot
from strawflow.index import units
from strawflow.states import UnitState
from strawflow.testing.runs import SmallRun, small_run
from strawflow_workers.drain import Drain
from strawflow_workers.supervisor import Supervisor, only_supervisor
from tests.fault.store_worker import Nest, Order


class Mounted:
    """A tmpfs that can be made read-only while nobody has a file of it open for writing."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def remount(self, how: str) -> None:
        done = subprocess.run(["mount", "-o", f"remount,{how}", str(self.place)], check=False)
        assert done.returncode == 0, f"it cannot be remounted {how}: somebody writes on it"


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "strawflow-test", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"no tmpfs can be mounted, which needs root or CAP_SYS_ADMIN: {done.stderr.strip()}")
    try:
        yield Mounted(place)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def assert_writes_are_refused(run: Run) -> None:
    why = "read-only file system: it can be looked at; mount it writable to go on"
    with pytest.raises(StorageError, match=why), WorkerSession(run, "rollout"):
        pass
    with pytest.raises(StorageError, match=r"cannot be run here: .*Read-only"), only_supervisor(run):
        pass
    supervisor = Supervisor(run, Drain())
    with pytest.raises(StorageError, match=r"the train worker cannot be started: .*Read-only"):
        supervisor._start(supervisor.children[0])


def test_a_run_that_was_left_whole_is_looked_at_and_backed_up_elsewhere(
    mounted: Mounted, tmp_path: Path
) -> None:
    with small_run(mounted.place) as small:
        small.advance(2)
    mounted.remount("ro")
    files = sorted(path.name for path in small.run.root.iterdir())
    with closing(open_run(small.run.root)) as run:
        assert [batch.step for batch in batches(run)] == [1, 2]
        assert snapshot(run).sessions == ()
        assert check(run).findings == []
        assert read_manifest(backup(run, to=tmp_path / "copy").folder).run == run.name
        assert_writes_are_refused(run)
    assert sorted(path.name for path in small.run.root.iterdir()) == files
    mounted.remount("rw")
    with SmallRun(open_run(small.run.root)) as again:
        again.advance(1)
        assert check(again.run).findings == []


def test_a_run_whose_workers_were_killed_is_looked_at_with_all_that_they_committed(
    mounted: Mounted, tmp_path: Path
) -> None:
    with small_run(mounted.place) as small:
        root = small.run.root
    with Nest(tmp_path) as nest:
        worker = nest.start(Order(str(root), limit=2, max_units=2, holds_until="/never"))
        worker.await_line("claimed")
        worker.kill()
    assert (root / "index.sqlite-wal").stat().st_size > 0
    mounted.remount("ro")
    with closing(open_run(root)) as run:
        with run.index.read() as connection:
            assert units.count_by_state(connection, run.branch)[("train", UnitState.LEASED)] == 2
        assert_writes_are_refused(run)
