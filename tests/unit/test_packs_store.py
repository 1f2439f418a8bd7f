"""The packs of a session: group commit across threads, roll-over, failures, forks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pytest

from strawflow import faults
from strawflow.errors import AlreadyExistsError, InvalidInputError, LeaseLostError, StorageError
from strawflow.ids import Extent
from strawflow.packs.posix import PosixOutput
from strawflow.packs.probe import Durability
from strawflow.packs.reader import PackReader
from strawflow.packs.store import PackCreated, PackFailed, PackSealed, PackStore
from strawflow.testing.pack_rows import made_up_rows

T = TypeVar("T")


class Told:
    """What the store told its owner, in order."""

    def __init__(self) -> None:
        self.all: list[PackCreated | PackSealed | PackFailed] = []

    def create(self, created: PackCreated) -> int:
        self.all.append(created)
        return len(self.of(PackCreated))

    def of(self, kind: type[T]) -> list[T]:
        return [told for told in self.all if isinstance(told, kind)]


def new_store(
    root: Path,
    told: Told,
    *,
    session_id: str = "s-1",
    durability: Durability = "host",
    max_pack_bytes: int = 2**28,
) -> PackStore:
    return PackStore(
        root,
        session_id,
        durability=durability,
        on_create=told.create,
        on_seal=told.all.append,
        on_fail=told.all.append,
        max_pack_bytes=max_pack_bytes,
    )


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline, "did not come about within 20 s"
        time.sleep(0.001)


def read_all(root: Path, extents: list[Extent]) -> list[pa.RecordBatch]:
    reader = PackReader(root)
    return [reader.read(extent) for extent in extents]


def arrow_files(root: Path) -> list[str]:
    return sorted(str(place.relative_to(root)) for place in root.rglob("*.arrow"))


def test_an_append_reads_back_and_closing_seals_every_kind(tmp_path: Path) -> None:
    told = Told()
    with new_store(tmp_path, told) as store:
        extents = [store.append(kind, made_up_rows(kind, 5)) for kind in ("plan", "batch", "plan")]
        assert read_all(tmp_path, extents) == [made_up_rows(kind, 5) for kind in ("plan", "batch", "plan")]
    assert arrow_files(tmp_path) == ["packs/batch/s-1-000000.arrow", "packs/plan/s-1-000000.arrow"]
    assert {(t.kind, t.num_extents, t.num_rows) for t in told.of(PackSealed)} == {
        ("batch", 1, 5),
        ("plan", 2, 10),
    }
    for sealed in told.of(PackSealed):
        assert (tmp_path / sealed.path).stat().st_size == sealed.length
        with pa.ipc.open_file(tmp_path / sealed.path) as file:
            assert file.read_all().num_rows == sealed.num_rows


def test_a_store_that_appended_nothing_makes_no_file(tmp_path: Path) -> None:
    told = Told()
    with new_store(tmp_path, told) as store:
        assert store.append_many("plan", []) == []
        store.seal("plan")
    assert told.all == []
    assert arrow_files(tmp_path) == []


def test_the_owner_is_told_of_a_pack_before_its_file_exists(tmp_path: Path) -> None:
    seen: list[bool] = []

    def on_create(created: PackCreated) -> int:
        seen.append((tmp_path / created.path).exists())
        return 41

    store = PackStore(
        tmp_path,
        "s-1",
        durability="process",
        on_create=on_create,
        on_seal=lambda sealed: seen.append((tmp_path / sealed.path).exists()),
    )
    extent = store.append("plan", made_up_rows("plan", 1))
    store.close()
    assert (extent.pack_id, extent.extent_id) == (41, 0)
    assert seen == [False, True]


def test_a_full_pack_is_sealed_and_the_next_append_opens_another(tmp_path: Path) -> None:
    told = Told()
    with new_store(tmp_path, told, max_pack_bytes=10_000) as store:
        extents = store.append_many("plan", [made_up_rows("plan", 20, seed=seed) for seed in range(12)])
        assert len(told.of(PackSealed)) == len(told.of(PackCreated)) - 1 > 0
    assert read_all(tmp_path, extents) == [made_up_rows("plan", 20, seed=seed) for seed in range(12)]
    names = [type(t).__name__ for t in told.all]
    assert names == ["PackCreated", "PackSealed"] * (len(names) // 2)
    assert sum(sealed.num_extents for sealed in told.of(PackSealed)) == 12


def test_appends_that_arrive_during_a_window_share_the_next_sync(tmp_path: Path) -> None:
    is_leading, may_go_on = threading.Event(), threading.Event()

    def on_create(_: PackCreated) -> int:
        is_leading.set()
        assert may_go_on.wait(20)
        return 1

    store = PackStore(tmp_path, "s-1", durability="host", on_create=on_create, on_seal=lambda _: None)
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(store.append, "plan", made_up_rows("plan", 1, seed=0))
        assert is_leading.wait(20)
        later = [
            pool.submit(store.append, "plan", made_up_rows("plan", 1, seed=seed)) for seed in range(1, 9)
        ]
        wait_until(lambda: len(store._lanes["plan"].queue) == 8)
        may_go_on.set()
        extents = [first.result(20), *(future.result(20) for future in later)]
    assert (store.num_messages, store.num_syncs, store.num_packs) == (9, 2, 1)
    assert read_all(tmp_path, extents) == [made_up_rows("plan", 1, seed=seed) for seed in range(9)]
    store.close()


@pytest.mark.parametrize("durability, num_syncs", [("process", 0), ("host", 1)])
def test_bytes_are_synced_before_an_append_returns_at_level_host_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability, num_syncs: int
) -> None:
    calls: list[str] = []

    def watch(name: str) -> None:
        real = getattr(os, name)

        def watched(*given: object) -> object:
            calls.append(name)
            return real(*given)

        monkeypatch.setattr(os, name, watched)

    # The real calls, watched: no test on a running machine can take its power away.
    watch("pwritev")
    watch("fdatasync")
    with new_store(tmp_path, Told(), durability=durability) as store:
        store.append("plan", made_up_rows("plan", 1))
        calls.clear()
        store.append_many("plan", [made_up_rows("plan", 1)] * 3)
        assert calls == ["pwritev"] * 3 + ["fdatasync"] * num_syncs


def test_an_interrupt_of_the_leading_thread_is_an_error_to_the_others_not_an_interrupt(
    tmp_path: Path,
) -> None:
    is_leading, may_go_on = threading.Event(), threading.Event()

    def on_create(_: PackCreated) -> int:
        if not is_leading.is_set():
            return 1
        assert may_go_on.wait(20)
        is_leading.clear()
        raise KeyboardInterrupt

    store = PackStore(tmp_path, "s-1", durability="process", on_create=on_create, on_seal=lambda _: None)
    lane = store._lanes["plan"]
    with lane.turn:
        lane.is_busy = True
    is_leading.set()
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(store.append, "plan", made_up_rows("plan", 1)) for _ in range(3)]
        wait_until(lambda: len(lane.queue) == 3)
        store._end_turn(lane)
        may_go_on.set()
        errors = [future.exception(20) for future in futures]
    assert sorted(type(error).__name__ for error in errors) == [
        "KeyboardInterrupt",
        "StorageError",
        "StorageError",
    ]
    assert any("broken off by KeyboardInterrupt" in str(error) for error in errors)
    store.append("plan", made_up_rows("plan", 1))
    store.close()


def test_sealing_and_closing_under_load_lose_nothing(tmp_path: Path) -> None:
    store, batch = new_store(tmp_path, Told(), durability="process"), made_up_rows("plan", 1)
    is_closing = threading.Event()

    def append_until_closed(_: int) -> list[Extent]:
        extents = []
        while True:
            try:
                extents.append(store.append("plan", batch))
            except StorageError:
                assert is_closing.is_set()
                return extents

    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(append_until_closed, n) for n in range(6)]
        for num_packs in range(1, 6):
            wait_until(lambda least=num_packs: store.num_packs >= least)  # type: ignore[misc]
            store.seal("plan")
        wait_until(lambda: store.num_packs >= 6)
        is_closing.set()
        store.close()
        extents = [extent for future in futures for extent in future.result(20)]
    assert len(extents) == store.num_messages
    assert read_all(tmp_path, extents) == [batch] * len(extents)
    for name in arrow_files(tmp_path):
        pa.ipc.open_file(tmp_path / name)


def test_a_lone_writer_syncs_each_append_at_once(tmp_path: Path) -> None:
    with new_store(tmp_path, Told()) as store:
        for seed in range(5):
            store.append("plan", made_up_rows("plan", 1, seed=seed))
            assert store.num_syncs == store.num_messages == seed + 1


def test_sixteen_threads_lose_nothing_and_sync_less_often_than_they_append(tmp_path: Path) -> None:
    told = Told()
    batches = [made_up_rows("plan", 2, seed=seed) for seed in range(16)]
    all_started = threading.Barrier(16)

    def append_200(thread: int) -> list[Extent]:
        all_started.wait(20)
        return [store.append("plan", batches[thread]) for _ in range(200)]

    with new_store(tmp_path, told, max_pack_bytes=1_000_000) as store, ThreadPoolExecutor(16) as pool:
        extents = list(pool.map(append_200, range(16)))
        assert store.num_messages == 3200
        assert store.num_syncs < 3200 / 2
    reader = PackReader(tmp_path)
    for thread, own in enumerate(extents):
        assert all(reader.read(extent, sealed=True) == batches[thread] for extent in own)
    places = {(extent.path, extent.offset) for own in extents for extent in own}
    assert len(places) == 3200
    assert len(told.of(PackSealed)) == len(told.of(PackCreated)) == store.num_packs > 1


def test_kinds_do_not_wait_for_each_other(tmp_path: Path) -> None:
    is_leading, may_go_on = threading.Event(), threading.Event()

    def on_create(created: PackCreated) -> int:
        if created.kind == "plan":
            is_leading.set()
            assert may_go_on.wait(20)
        return 1

    store = PackStore(tmp_path, "s-1", durability="process", on_create=on_create, on_seal=lambda _: None)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(store.append, "plan", made_up_rows("plan", 1))
        assert is_leading.wait(20)
        store.append("batch", made_up_rows("batch", 1))
        assert not slow.done()
        may_go_on.set()
        slow.result(20)
    store.close()


def test_a_bad_batch_fails_its_own_caller_only(tmp_path: Path) -> None:
    with new_store(tmp_path, Told()) as store:
        kept = store.append("plan", made_up_rows("plan", 1))
        with pytest.raises(InvalidInputError, match="fields are"):
            store.append_many("plan", [made_up_rows("plan", 1), made_up_rows("batch", 1)])
        with pytest.raises(InvalidInputError, match="unknown record kind"):
            store.append("straw", made_up_rows("plan", 1))
        assert store.append("plan", made_up_rows("plan", 1)).pack_id == kept.pack_id
        assert store.num_messages == 2


@pytest.mark.parametrize("point", ["pack.after_append", "pack.after_sync"])
def test_a_failure_fails_its_whole_window_and_the_next_append_uses_a_new_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    told = Told()
    with new_store(tmp_path, told) as store:
        kept = store.append("plan", made_up_rows("plan", 1, seed=99))
        lane = store._lanes["plan"]
        with lane.turn:
            lane.is_busy = True  # as if a window were in flight, so that the four below form one window
        with ThreadPoolExecutor(4) as pool:
            futures = [
                pool.submit(store.append, "plan", made_up_rows("plan", 1, seed=seed)) for seed in range(4)
            ]
            wait_until(lambda: len(lane.queue) == 4)
            monkeypatch.setenv(faults.VARIABLE, f"{point}:1:raise")
            store._end_turn(lane)
            assert all(isinstance(future.exception(20), faults.InjectedFaultError) for future in futures)
        extents = [store.append("plan", made_up_rows("plan", 1, seed=seed)) for seed in range(4)]
        assert {extent.pack_id for extent in extents}.isdisjoint({kept.pack_id})
        failed = told.of(PackFailed)
        assert [t.pack_id for t in failed] == [kept.pack_id]
        assert point in failed[0].reason
    assert read_all(tmp_path, [kept, *extents]) == [
        made_up_rows("plan", 1, seed=seed) for seed in (99, 0, 1, 2, 3)
    ]


def test_an_owner_that_refuses_a_pack_fails_the_append_and_no_file_is_made(tmp_path: Path) -> None:
    refusals = [LeaseLostError("the session was superseded")]

    def on_create(_: PackCreated) -> int:
        if refusals:
            raise refusals.pop()
        return 2

    store = PackStore(tmp_path, "s-1", durability="process", on_create=on_create, on_seal=lambda _: None)
    with pytest.raises(LeaseLostError, match="superseded"):
        store.append("plan", made_up_rows("plan", 1))
    assert arrow_files(tmp_path) == []
    assert store.append("plan", made_up_rows("plan", 1)).path == "packs/plan/s-1-000001.arrow"
    store.close()


def test_an_owner_that_fails_at_a_roll_over_is_heard_and_the_durable_part_stays(tmp_path: Path) -> None:
    failures = [StorageError("the index did not answer")]

    def on_seal(_: PackSealed) -> None:
        if failures:
            raise failures.pop()

    store = PackStore(
        tmp_path, "s-1", durability="process", on_create=lambda _: 1, on_seal=on_seal, max_pack_bytes=1
    )
    first = store.append("plan", made_up_rows("plan", 1))
    with pytest.raises(StorageError, match="index did not answer"):
        store.append("plan", made_up_rows("plan", 1))
    second = store.append("plan", made_up_rows("plan", 1))
    assert first.path != second.path
    assert read_all(tmp_path, [first, second]) == [made_up_rows("plan", 1)] * 2
    store.close()


def test_a_name_in_use_fails_loudly_and_is_reported_and_the_next_name_serves(tmp_path: Path) -> None:
    told = Told()
    with new_store(tmp_path, Told()) as store:
        kept = store.append("plan", made_up_rows("plan", 3))
    with new_store(tmp_path, told) as again:
        with pytest.raises(AlreadyExistsError, match="used once"):
            again.append("plan", made_up_rows("plan", 1))
        assert [t.path for t in told.of(PackFailed)] == [kept.path]
        assert again.append("plan", made_up_rows("plan", 1)).path == "packs/plan/s-1-000001.arrow"
    assert read_all(tmp_path, [kept]) == [made_up_rows("plan", 3)]


def test_a_closed_store_refuses_and_closes_twice(tmp_path: Path) -> None:
    store = new_store(tmp_path, Told())
    store.append("plan", made_up_rows("plan", 1))
    store.close()
    store.close()
    with pytest.raises(StorageError, match="is closed"):
        store.append("plan", made_up_rows("plan", 1))


def test_closing_seals_the_other_kinds_when_one_fails(tmp_path: Path) -> None:
    told = Told()
    store = new_store(tmp_path, told)
    store.append("batch", made_up_rows("batch", 1))
    store.append("plan", made_up_rows("plan", 1))
    writer = store._lanes["batch"].writer
    assert writer is not None
    assert isinstance(writer._output, PosixOutput)
    os.close(writer._output._descriptor)  # the next system call on it gives a real errno
    with pytest.raises(StorageError, match="cannot seal packs/batch"):
        store.close()
    assert [t.kind for t in told.of(PackSealed)] == ["plan"]
    assert [t.kind for t in told.of(PackFailed)] == ["batch"]


def test_sealing_one_kind_starts_a_new_pack_for_it(tmp_path: Path) -> None:
    with new_store(tmp_path, Told()) as store:
        first = store.append("plan", made_up_rows("plan", 1))
        store.seal("plan")
        second = store.append("plan", made_up_rows("plan", 1))
    assert first.pack_id != second.pack_id


@pytest.mark.parametrize("session_id", ["", "a/b", "../x", ".hidden"])
def test_a_session_id_that_is_no_file_name_is_refused(tmp_path: Path, session_id: str) -> None:
    with pytest.raises(InvalidInputError, match="file name"):
        new_store(tmp_path, Told(), session_id=session_id)


def test_a_forked_process_cannot_write_its_parents_packs(tmp_path: Path) -> None:
    told = Told()
    store = new_store(tmp_path, told)
    first = store.append("plan", made_up_rows("plan", 1, seed=1))
    length = (tmp_path / first.path).stat().st_size
    child = os.fork()
    if child == 0:
        os._exit(sum(_refuses(verb) for verb in (_append_to(store), store.close, lambda: store.seal("plan"))))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert (tmp_path / first.path).stat().st_size == length
    second = store.append("plan", made_up_rows("plan", 1, seed=2))
    store.close()
    assert read_all(tmp_path, [first, second]) == [made_up_rows("plan", 1, seed=seed) for seed in (1, 2)]


def _append_to(store: PackStore) -> Callable[[], object]:
    return lambda: store.append("plan", made_up_rows("plan", 1))


def _refuses(verb: Callable[[], object]) -> bool:
    try:
        verb()
    except StorageError as error:
        return "forked" in error.message
    return False
