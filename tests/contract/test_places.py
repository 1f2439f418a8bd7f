"""One contract for every place packs can lie in: a folder, memory, and a real S3 server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest

from strawflow import faults
from strawflow.errors import (
    AlreadyExistsError,
    ConfigError,
    CorruptPackError,
    InvalidInputError,
    StorageError,
)
from strawflow.ids import Extent, RowRange
from strawflow.packs.objects import HEAD_BYTES
from strawflow.packs.places import open_place
from strawflow.packs.probe import Durability, durability_of
from strawflow.packs.reader import PackReader
from strawflow.packs.salvage import salvage
from strawflow.packs.store import GroupFlush, PackCreated, PackFailed, PackSealed, PackStore
from strawflow.packs.tensors import read_tensor_rows, to_tensor_batches
from strawflow.packs.writer import PackWriter
from strawflow.testing.pack_rows import made_up_rows
from tests.s3 import S3Server, running_server

PATH = "packs/plan/a.arrow"
AT_ONCE = GroupFlush(min_bytes=1)
NEVER = GroupFlush(min_bytes=2**40, max_delay_s=1e6)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with running_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@dataclass
class Root:
    """Where one test's packs lie, and what can be done to them behind the product's back."""

    address: str | Path
    durability: Durability

    @property
    def appends(self) -> bool:
        return isinstance(self.address, Path)

    def writer(self, path: str = PATH, *, pack_id: int = 1, kind: str = "plan") -> PackWriter:
        return PackWriter(self.address, pack_id=pack_id, path=path, kind=kind, durability=self.durability)

    def reader(self) -> PackReader:
        return PackReader(self.address)

    def content(self, path: str = PATH) -> bytes:
        with fsspec.open(f"{self.address}/{path}", "rb") as file:
            return bytes(file.read())

    def overwrite(self, content: bytes, path: str = PATH) -> None:
        with fsspec.open(f"{self.address}/{path}", "wb", auto_mkdir=True) as file:
            file.write(content)


@pytest.fixture(params=["posix", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    if request.param == "posix":
        return Root(tmp_path, "host")
    if request.param == "memory":
        return Root(f"memory://{tmp_path.name}", "process")
    server: S3Server = request.getfixturevalue("s3_server")
    return Root(f"s3://{server.make_bucket()}/run", "store")


@dataclass
class Told:
    """What a store told its owner."""

    created: list[PackCreated] = field(default_factory=list)
    sealed: list[PackSealed] = field(default_factory=list)
    failed: list[PackFailed] = field(default_factory=list)

    def on_create(self, created: PackCreated) -> int:
        self.created.append(created)
        return len(self.created)


def new_store(
    root: Root, told: Told, *, flush: GroupFlush = AT_ONCE, max_pack_bytes: int = 2**28
) -> PackStore:
    return PackStore(
        root.address,
        "s-1",
        durability=root.durability,
        on_create=told.on_create,
        on_seal=told.sealed.append,
        on_fail=told.failed.append,
        max_pack_bytes=max_pack_bytes,
        flush=flush,
    )


def rows_of(seed: int, num_rows: int = 5) -> pa.RecordBatch:
    return made_up_rows("plan", num_rows, seed=seed)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline, "did not come about within 30 s"
        time.sleep(0.001)


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes asked of the system or the store from here on, one entry a request; the real calls, watched."""
    from strawflow.packs.objects import ObjectPlace

    asked: list[int] = []
    real_get, real_preadv = ObjectPlace.get, os.preadv

    def get(self: ObjectPlace, path: str, offset: int, length: int) -> pa.Buffer:
        found = real_get(self, path, offset, length)
        asked.append(found.size)
        return found

    def preadv(descriptor: int, targets: list[memoryview], offset: int) -> int:
        count = real_preadv(descriptor, targets, offset)
        asked.append(count)
        return count

    monkeypatch.setattr(ObjectPlace, "get", get)
    monkeypatch.setattr(os, "preadv", preadv)
    return asked


def test_a_sealed_pack_reads_back_and_is_an_ordinary_arrow_file(root: Root) -> None:
    writer = root.writer()
    extents = [writer.append(rows_of(seed)) for seed in range(3)]
    writer.seal()
    reader = root.reader()
    assert [reader.read(extent, sealed=True) for extent in extents] == [rows_of(seed) for seed in range(3)]
    assert reader.read_many([extents[2], extents[0]]) == [rows_of(2), rows_of(0)]
    assert reader.read_rows(RowRange(extents[1], 2, 2)) == rows_of(1).slice(2, 2)
    with pa.ipc.open_file(pa.py_buffer(root.content())) as file:
        assert file.read_all() == pa.Table.from_batches([rows_of(seed) for seed in range(3)])


def test_sizes_lists_what_is_there_and_remove_takes_it_away(root: Root) -> None:
    place = open_place(root.address)
    assert place.sizes("packs") == {}
    for path in (PATH, "packs/batch/b.arrow"):
        writer = root.writer(path, kind=path.split("/")[1])
        writer.seal()
    assert place.sizes("packs") == {
        PATH: len(root.content()),
        "packs/batch/b.arrow": len(root.content("packs/batch/b.arrow")),
    }
    assert list(place.sizes("packs/plan")) == [PATH]
    for _ in range(2):
        place.remove(PATH)
    assert list(place.sizes("packs")) == ["packs/batch/b.arrow"]


def test_a_name_is_used_once_and_the_first_pack_keeps_its_bytes(root: Root) -> None:
    writer = root.writer()
    extent = writer.append(rows_of(0))
    writer.seal()

    def write_again() -> None:
        second = root.writer()
        second.append(rows_of(1))
        second.seal()

    with pytest.raises(AlreadyExistsError, match=r"packs/plan/a\.arrow exists.*used once"):
        write_again()
    assert root.reader().read(extent) == rows_of(0)


def test_an_extent_costs_its_own_bytes_and_the_head_once(root: Root, requested: list[int]) -> None:
    writer = root.writer("packs/batch/a.arrow", kind="batch")
    whole = made_up_rows("batch", 400, list_length=600)
    extents = [writer.append(whole.slice(start, 100)) for start in (0, 100, 200, 300)]
    writer.seal()
    assert min(extent.length for extent in extents) > 20 * HEAD_BYTES
    reader = root.reader()
    requested.clear()
    assert reader.read(extents[2]) == whole.slice(200, 100)
    assert len(requested) == 2
    assert sum(requested) <= 1.1 * extents[2].length
    assert reader.read(extents[1]) == whole.slice(100, 100)
    assert requested[2:] == [extents[1].length]
    requested.clear()
    assert reader.read_many(extents) == [whole.slice(start, 100) for start in (0, 100, 200, 300)]
    assert requested == [sum(extent.length for extent in extents)]
    requested.clear()
    for start in range(0, 100, 10):
        assert reader.read_rows(RowRange(extents[3], start, 10)) == whole.slice(300 + start, 10)
    assert requested == [extents[3].length]


def test_a_slice_of_a_tensor_costs_the_blocks_it_lies_in(root: Root, requested: list[int]) -> None:
    array = np.arange(48 * 2**18, dtype=np.int32).reshape(48, 2**18)  # 48 rows of 1 MiB
    told = Told()
    with new_store(root, told) as store:
        extents = store.append_many("tensor", to_tensor_batches("x", array, cuts=[16, 32]))
    requested.clear()
    rows = read_tensor_rows(root.reader(), extents, 16, 32)
    assert np.array_equal(rows, array[16:32])
    assert sum(requested) <= 1.1 * rows.nbytes
    requested.clear()
    assert np.array_equal(read_tensor_rows(root.reader(), extents, 21, 22), array[21:22])
    # The head of the extent, and at most the two blocks that a row of 1 MiB can touch.
    assert sum(requested) <= 3 * 4 * 2**20 + 3 * HEAD_BYTES


def test_damage_is_never_rows_and_its_neighbours_stay_readable(root: Root) -> None:
    writer = root.writer()
    extents = [writer.append(rows_of(seed)) for seed in range(3)]
    writer.seal()
    content = bytearray(root.content())
    content[extents[1].offset + 40] ^= 4
    root.overwrite(bytes(content))
    reader = root.reader()
    with pytest.raises(CorruptPackError, match=rf"{PATH}: the extent at byte {extents[1].offset}.*checksum"):
        reader.read(extents[1])
    with pytest.raises(CorruptPackError, match=f"at byte {extents[1].offset}"):
        reader.read_many(extents)
    assert reader.read_many([extents[0], extents[2]]) == [rows_of(0), rows_of(2)]
    root.overwrite(bytes(content[: extents[2].offset + 9]))
    reader = root.reader()
    with pytest.raises(CorruptPackError, match="cut off"):
        reader.read(extents[2])
    with pytest.raises(CorruptPackError, match="cut off"):
        reader.read(replace(extents[2], offset=2**40))


def test_a_missing_pack_is_a_storage_error_that_says_what_to_do(root: Root) -> None:
    writer = root.writer()
    extent = writer.append(rows_of(0))
    writer.seal()
    open_place(root.address).remove(PATH)
    with pytest.raises(StorageError, match=rf"{PATH} is missing under {root.address}.*restore"):
        root.reader().read(extent)


def test_many_threads_lose_nothing_and_share_flushes(root: Root) -> None:
    told, each = Told(), 25
    all_started = threading.Barrier(8)

    def append_some(thread: int) -> list[tuple[int, Extent]]:
        all_started.wait(30)
        seeds = range(thread * each, (thread + 1) * each)
        return [(seed, store.append("plan", rows_of(seed, 2))) for seed in seeds]

    with new_store(root, told, flush=GroupFlush(max_delay_s=0.02)) as store, ThreadPoolExecutor(8) as pool:
        placed = [one for own in pool.map(append_some, range(8)) for one in own]
    assert (store.num_messages, len(placed)) == (8 * each, 8 * each)
    assert store.num_syncs < 8 * each
    reader = root.reader()
    batches = reader.read_many([extent for _, extent in placed], sealed=True)
    assert batches == [rows_of(seed, 2) for seed, _ in placed]
    assert sum(sealed.num_extents for sealed in told.sealed) == 8 * each
    assert sorted(open_place(root.address).sizes("packs").items()) == sorted(
        (sealed.path, sealed.length) for sealed in told.sealed
    )
    assert told.failed == []


def test_a_full_pack_is_sealed_inside_one_append_of_many(root: Root) -> None:
    told = Told()
    with new_store(root, told, max_pack_bytes=10_000) as store:
        extents = store.append_many("plan", [rows_of(seed, 20) for seed in range(12)])
    assert len(told.sealed) == len({extent.path for extent in extents}) > 1
    assert root.reader().read_many(extents) == [rows_of(seed, 20) for seed in range(12)]


def test_a_name_taken_by_others_fails_the_flush_and_the_next_one_works(root: Root) -> None:
    root.overwrite(b"not ours", "packs/plan/s-1-000000.arrow")
    told = Told()
    with new_store(root, told) as store:
        with pytest.raises(AlreadyExistsError, match="used once"):
            store.append("plan", rows_of(0))
        extent = store.append("plan", rows_of(0))
    assert root.content("packs/plan/s-1-000000.arrow") == b"not ours"
    assert [failed.path for failed in told.failed] == ["packs/plan/s-1-000000.arrow"]
    assert [sealed.path for sealed in told.sealed] == [extent.path] == ["packs/plan/s-1-000001.arrow"]
    assert root.reader().read(extent) == rows_of(0)


def test_salvage_moves_extents_to_a_pack_of_the_same_place(root: Root) -> None:
    writer = root.writer()
    extents = [replace(writer.append(rows_of(seed)), extent_id=seed + 1) for seed in range(3)]
    writer.seal()
    target = root.writer("packs/plan/new.arrow", pack_id=2)
    moved = salvage(root.address, [extents[0], extents[2]], target=target).moved
    assert root.reader().read_many(list(moved.values())) == [rows_of(0), rows_of(2)]


def test_the_level_of_each_place_is_what_the_probe_says_and_another_is_refused(root: Root) -> None:
    assert durability_of(root.address).level in (root.durability, "host")
    for wrong in {"process", "host", "store"} - {
        durability_of(root.address).level,
        "process",
        root.durability,
    }:
        with pytest.raises(InvalidInputError, match=f"{wrong!r}"):
            PackWriter(root.address, pack_id=1, path=PATH, kind="plan", durability=wrong)  # type: ignore[arg-type]


# From here on: what only object stores do.


@pytest.fixture(params=["memory", "s3"])
def store_root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    if request.param == "memory":
        return Root(f"memory://{tmp_path.name}", "process")
    server: S3Server = request.getfixturevalue("s3_server")
    return Root(f"s3://{server.make_bucket()}/run", "store")


def test_no_object_is_there_before_its_pack_is_sealed(store_root: Root) -> None:
    writer = store_root.writer()
    writer.append(rows_of(0))
    assert open_place(store_root.address).sizes("packs") == {}
    writer.abandon("test")
    assert open_place(store_root.address).sizes("packs") == {}
    other = store_root.writer()
    with pytest.raises(StorageError, match="only once it is sealed"):
        other.sync()


def test_appends_gather_until_they_are_large_and_are_one_object(store_root: Root) -> None:
    told, one = Told(), rows_of(0, 50)
    flush = GroupFlush(min_bytes=6 * one.nbytes, max_delay_s=1e6)
    with new_store(store_root, told, flush=flush) as store, ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(store.append, "plan", one) for _ in range(5)]
        wait_until(lambda: len(store._lanes["plan"].queue) == 5)
        assert told.created == []
        extents = [pool.submit(store.append, "plan", one).result(30), *(w.result(30) for w in waiting)]
    assert (len(told.sealed), told.sealed[0].num_extents) == (1, 6)
    assert len({extent.offset for extent in extents}) == 6
    assert store_root.reader().read_many(extents) == [one] * 6


def test_appends_that_stay_small_are_flushed_after_the_delay(store_root: Root) -> None:
    told = Told()
    with new_store(store_root, told, flush=GroupFlush(max_delay_s=0.25)) as store:
        began = time.monotonic()
        extent = store.append("plan", rows_of(0))
        assert time.monotonic() - began >= 0.25
        assert [sealed.path for sealed in told.sealed] == [extent.path]


def test_closing_flushes_what_still_gathers(store_root: Root) -> None:
    told = Told()
    store = new_store(store_root, told, flush=NEVER)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(store.append, "plan", rows_of(seed)) for seed in range(3)]
        wait_until(lambda: len(store._lanes["plan"].queue) == 3)
        store.close()
        extents = [future.result(30) for future in waiting]
    assert len(told.sealed) == 1
    assert store_root.reader().read_many(extents) == [rows_of(seed) for seed in range(3)]


def test_arrivals_during_an_upload_are_the_next_object(store_root: Root) -> None:
    told, is_leading, may_go_on = Told(), threading.Event(), threading.Event()

    def on_create(created: PackCreated) -> int:
        is_leading.set()
        assert may_go_on.wait(30)
        return told.on_create(created)

    store = PackStore(
        store_root.address,
        "s-1",
        durability=store_root.durability,
        on_create=on_create,
        on_seal=told.sealed.append,
        flush=AT_ONCE,
    )
    with store, ThreadPoolExecutor(5) as pool:
        first = pool.submit(store.append, "plan", rows_of(0))
        assert is_leading.wait(30)
        later = [pool.submit(store.append, "plan", rows_of(seed)) for seed in range(1, 5)]
        wait_until(lambda: len(store._lanes["plan"].queue) == 4)
        may_go_on.set()
        first.result(30)
        extents = [future.result(30) for future in later]
    assert [sealed.num_extents for sealed in told.sealed] == [1, 4]
    assert store_root.reader().read_many(extents) == [rows_of(seed) for seed in range(1, 5)]


@pytest.mark.parametrize("point", ["pack.after_append", "seal.before_footer", "seal.after_footer"])
def test_a_flush_that_fails_fails_all_its_members_and_the_next_one_works(
    store_root: Root, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    told, one = Told(), rows_of(0, 50)
    flush = GroupFlush(min_bytes=4 * one.nbytes, max_delay_s=1e6)
    with new_store(store_root, told, flush=flush) as store, ThreadPoolExecutor(4) as pool:
        faults.reset()
        monkeypatch.setenv(faults.VARIABLE, f"{point}:1:raise")
        members = [pool.submit(store.append, "plan", one) for _ in range(4)]
        assert all(isinstance(member.exception(30), faults.InjectedFaultError) for member in members)
        assert open_place(store_root.address).sizes("packs") == {}
        again = [pool.submit(store.append, "plan", one) for _ in range(4)]
        extents = [future.result(30) for future in again]
    assert [failed.path for failed in told.failed] == ["packs/plan/s-1-000000.arrow"]
    assert {extent.path for extent in extents} == {"packs/plan/s-1-000001.arrow"}
    assert store_root.reader().read_many(extents) == [one] * 4


def test_an_upload_the_server_refuses_is_a_storage_error_and_the_retry_works(s3_server: S3Server) -> None:
    root = Root("s3://not-yet-made/run", "store")
    told = Told()
    with new_store(root, told) as store:
        with pytest.raises(StorageError, match=r"cannot seal packs/plan/s-1-000000\.arrow.*bucket"):
            store.append("plan", rows_of(0))
        s3_server.make_bucket("not-yet-made")
        extent = store.append("plan", rows_of(0))
    assert root.reader().read(extent) == rows_of(0)
    assert [failed.path for failed in told.failed] == ["packs/plan/s-1-000000.arrow"]


def test_a_server_that_is_gone_is_a_storage_error(s3_server: S3Server) -> None:
    # A process of its own: clients are kept per process, and this one's must stay with the server that runs.
    program = (
        "from strawflow.errors import StorageError\n"
        "from strawflow.packs.places import open_place\n"
        "output = open_place('s3://bucket/run').create('a', b'head', durability='store')\n"
        "try:\n    output.finish()\nexcept StorageError as error:\n    print(error.message)\n"
    )
    environment = {
        **os.environ,
        **s3_server.environment,
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_MAX_ATTEMPTS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert "cannot upload s3://bucket/run/a" in done.stdout, done.stderr


def test_an_upload_repeated_after_a_lost_reply_finds_its_own_bytes_and_succeeds(store_root: Root) -> None:
    writer = store_root.writer()
    extent = writer.append(rows_of(0))
    twin = store_root.writer()
    twin.append(rows_of(0))
    twin.seal()
    # What the back end's own retry does when the first try arrived and its reply did not.
    writer.seal()
    assert store_root.reader().read(extent) == rows_of(0)


def test_an_address_without_its_package_names_the_extra() -> None:
    program = (
        "import sys\nsys.modules['s3fs'] = None\n"  # as if it were not installed
        "from strawflow.packs.places import open_place\nopen_place('s3://bucket/run')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "ConfigError" in done.stderr
    assert "pip install 'strawflow[s3]'" in done.stderr


@pytest.mark.parametrize("address", ["file:///tmp/run", "ftp://host/run", "straw://x"])
def test_an_address_of_another_protocol_is_refused(address: str) -> None:
    for verb in (open_place, durability_of):
        with pytest.raises(ConfigError, match="packs lie in a folder or under one of"):
            verb(address)


def test_opening_a_folder_imports_no_object_store() -> None:
    program = (
        "import sys, pathlib\nfrom strawflow.packs.places import open_place\nopen_place(pathlib.Path('/tmp'))\n"
        "print(sorted(set(sys.modules) & {'s3fs', 'aiobotocore', 'botocore', 'strawflow.packs.objects'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_folder_tells_of_no_file_that_cannot_be_a_pack(tmp_path: Path) -> None:
    folder = tmp_path / "packs" / "plan"
    folder.mkdir(parents=True)
    (folder / "a.arrow").write_bytes(b"abc")
    (folder / os.fsdecode(b"\xff.arrow")).write_bytes(b"not a name")
    (folder / "gone.arrow").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "pipe.arrow")
    assert open_place(tmp_path).sizes("packs") == {"packs/plan/a.arrow": 3}
