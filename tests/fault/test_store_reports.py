"""What users of other systems reported of stores like this one, played on this one; each part names its row of reports."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from strawflow.errors import ConfigError
from strawflow.flow import publish_weights, rescue
from strawflow.flow import run as running
from strawflow.flow.check import check
from strawflow.flow.claim import PromptShelf
from strawflow.flow.enqueue import EnqueueRequest, enqueue
from strawflow.flow.retain import policy_of, retain
from strawflow.flow.run import Run, create_run, open_run
from strawflow.flow.session import WorkerSession
from strawflow.flow.sweep import sweep
from strawflow.packs.probe import durability_of
from strawflow.prompts.row import PromptKeys
from strawflow.prompts.source import PromptSource
from strawflow.testing.runs import SmallRun, small_config, small_run
from strawflow.weights.verify import verify_checkpoint
from tests.fault.store_worker import Nest, Order


@pytest.fixture(scope="module")
def nest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nest]:
    with Nest(tmp_path_factory.mktemp("nest")) as made:
        yield made


# ---- S24: the newest name moves before what it names is whole, and the last good copy is deleted


@pytest.mark.parametrize(
    "point, resumed_at",
    [("checkpoint.after_files", 1), ("checkpoint.after_commit", 2)],
)
def test_a_trainer_killed_around_the_commit_of_a_checkpoint_goes_on_from_a_whole_one(
    tmp_path: Path, nest: Nest, point: str, resumed_at: int
) -> None:
    keeps_little = {
        "trainer.keep_weights": "1",
        "storage.keep_checkpoints": "1",
        "storage.sweep_grace_s": "0",
    }
    with small_run(tmp_path, settings=keeps_little) as small:
        small.advance(1)
        root = small.run.root
    trainer = nest.start(Order(str(root), train_steps=2, fault=point))
    trainer.await_end()
    assert [line["event"] for line in trainer.lines()] == ["ready"]
    with SmallRun(open_run(root)) as small:
        rescue.declare_dead_processes_lost(small.run)
        role = small.trainer()
        assert small.resumption is not None
        assert small.resumption.checkpoint is not None
        assert small.resumption.step == resumed_at
        publish_weights.remove_unneeded_weights(small.session("train"), role)
        retain(small.session("storage"), policy_of(small.run.config))
        sweep(small.session("storage"))
        verify_checkpoint(root / small.resumption.checkpoint.path)
        for step in range(resumed_at + 1, 3):  # planned before the kill: replayed
            small.train(step)
        small.advance(1)
        assert check(small.run).findings == []


# ---- S30: SQLite on a network file system


def on_a_network_mount(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Path) -> None:
    """Have the mount table say that `place` lies on NFS; the rest of the machine is ext4."""
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(
        "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        f"30 27 0:30 / {place} rw,noatime - nfs4 server:/export rw,vers=4.2\n"
    )
    monkeypatch.setattr(running, "durability_of", partial(durability_of, mountinfo=mountinfo))


def test_a_run_whose_sqlite_index_would_lie_on_a_network_mount_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = tmp_path / "share"
    on_a_network_mount(monkeypatch, tmp_path, share)
    with pytest.raises(ConfigError, match=r"network file system \(nfs4\).*PostgreSQL"):
        create_run(share / "run", small_config())
    assert not list(share.rglob("*.sqlite*"))


def test_a_run_on_a_network_mount_whose_index_is_on_a_local_disk_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = tmp_path / "share"
    on_a_network_mount(monkeypatch, tmp_path, share)
    local = {"run.index_url": f"sqlite:///{tmp_path / 'index.sqlite'}"}
    create_run(share / "run", small_config(local)).close()
    open_run(share / "run").close()


def test_a_run_with_an_sqlite_index_that_was_moved_to_a_network_mount_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = tmp_path / "share"
    create_run(share / "run", small_config()).close()
    on_a_network_mount(monkeypatch, tmp_path, share)
    with pytest.raises(ConfigError, match="network file system"):
        open_run(share / "run")


def test_a_run_on_a_local_disk_whose_sqlite_index_would_lie_on_a_network_mount_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = tmp_path / "share"
    share.mkdir()
    on_a_network_mount(monkeypatch, tmp_path, share)
    settings = {"run.index_url": f"sqlite:///{share / 'index.sqlite'}"}
    with pytest.raises(ConfigError, match="network file system"):
        create_run(tmp_path / "run", small_config(settings))


# ---- S40: equal payloads share their bytes, and the first to finish deletes what the second still needs


def enqueue_and_die(run: Run, path: Path, text: str) -> None:
    """Enqueue one more row of a text, by a session that then counts as dead: its pack is up for recovery."""
    with path.open("a", encoding="utf-8") as sink:
        sink.write(f'{{"prompt": "{text}"}}\n')
    session = WorkerSession(run, "enqueue")
    request = EnqueueRequest("twins", "train", PromptSource(path), PromptKeys("prompt"))
    assert enqueue(session, request).num_added == 1
    rescue.declare_lost(run, session.session_id, reason="killed by the test")


def test_of_rows_with_equal_bytes_each_is_read_while_the_packs_of_the_others_are_taken_away(
    tmp_path: Path,
) -> None:
    text, ended, num_recovered = "the same bytes " * 20, threading.Event(), 0

    def collect(small: SmallRun) -> int:
        number, session = 0, small.session("storage")
        while not ended.is_set():
            number += rescue.recover_packs(session)
            sweep(session)
        return number

    def read(small: SmallRun, upto: list[int]) -> int:
        number = 0
        session = small.session("rollout")
        while not ended.is_set():
            for segment_id in range(2, 2 + upto[0]):
                assert PromptShelf(session).read(segment_id, 0).prompt == text
                number += 1
        return number

    # A place that a reader looked up stays readable for the grace, and no longer is promised.
    with (
        small_run(tmp_path, settings={"storage.sweep_grace_s": "1"}) as small,
        ThreadPoolExecutor(2) as pool,
    ):
        small.session("storage")
        small.session("rollout")
        upto = [0]
        tasks = [pool.submit(collect, small), pool.submit(read, small, upto)]
        try:
            for number in range(1, 13):
                enqueue_and_die(small.run, tmp_path / "twins.jsonl", text)
                upto[0] = number
                if any(task.done() for task in tasks):
                    break
        finally:
            ended.set()
        num_recovered, num_read = (task.result() for task in tasks)
        assert num_recovered > 3
        assert num_read > 12
        assert check(small.run).findings == []
