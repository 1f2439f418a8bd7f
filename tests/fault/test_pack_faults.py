"""Kill real writers at every fault point and at random instants: what was acknowledged is there and can be salvaged.

Run as a program this file is the writer that gets killed: it appends numbered batches of kind `plan` and prints each
extent, one JSON line, once the store has said that it is durable.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pytest

from strawflow import faults
from strawflow.errors import CorruptPackError, StorageError
from strawflow.ids import Extent
from strawflow.packs.reader import PackReader
from strawflow.packs.salvage import salvage
from strawflow.packs.store import PackStore
from strawflow.packs.writer import PackWriter
from strawflow.testing.pack_rows import made_up_rows

ROWS = 20


def rows_of(seed: int) -> pa.RecordBatch:
    return made_up_rows("plan", ROWS, seed=seed)


def start_writer(root: Path, *options: str, session: str = "s-1", fault: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, str(root), "--session", session, *options],
        env={**os.environ, faults.VARIABLE: fault, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def acknowledged(output: str) -> dict[int, Extent]:
    """Return seed to extent; a line cut short by the kill was not acknowledged."""
    lines = output.split("\n")[:-1]
    found = [json.loads(line) for line in lines]
    return {
        e["seed"]: Extent(**{**e["extent"], "digests": base64.b64decode(e["extent"]["digests"])})
        for e in found
    }


def assert_readable(root: Path, extents: dict[int, Extent]) -> None:
    reader = PackReader(root)
    for seed, extent in extents.items():
        assert reader.read(extent) == rows_of(seed), f"batch {seed} in {extent.path}"


def salvage_all(root: Path, extents: dict[int, Extent]) -> None:
    """Do what recovery does for one dead pack and check the sealed result with plain Arrow."""
    target = PackWriter(root, pack_id="pack-new", path="packs/plan/new.arrow", kind="plan", durability="host")
    result = salvage(root, list(extents.values()), target=target)
    assert result.corrupt == ()
    assert_readable(root, {seed: result.moved[extent.extent_id] for seed, extent in extents.items()})
    with pa.ipc.open_file(root / target.path) as file:
        assert file.read_all() == pa.Table.from_batches([rows_of(seed) for seed in extents])


def is_sealed(place: Path) -> bool:
    try:
        pa.ipc.open_file(place)
    except pa.ArrowInvalid:
        return False
    return True


@pytest.mark.parametrize("durability", ["process", "host"])
@pytest.mark.parametrize("point", ["pack.after_append", "pack.after_sync"])
def test_a_writer_killed_between_append_and_reply_loses_nothing_acknowledged(
    tmp_path: Path, point: str, durability: str
) -> None:
    with start_writer(tmp_path, "--durability", durability, fault=f"{point}:4") as writer:
        output, _ = writer.communicate(timeout=60)
    assert writer.returncode == -signal.SIGKILL
    extents = acknowledged(output)
    assert list(extents) == [0, 1, 2]
    assert_readable(tmp_path, extents)
    # The fourth append has its bytes in the file and no name: an orphan that salvage leaves behind.
    place = tmp_path / extents[0].path
    assert place.stat().st_size > extents[2].offset + extents[2].length
    assert not is_sealed(place)
    salvage_all(tmp_path, extents)


@pytest.mark.parametrize("durability", ["process", "host"])
@pytest.mark.parametrize("point, has_footer", [("seal.before_footer", False), ("seal.after_footer", True)])
def test_a_writer_killed_while_sealing_leaves_every_extent_readable(
    tmp_path: Path, point: str, has_footer: bool, durability: str
) -> None:
    with start_writer(tmp_path, "--durability", durability, "--num", "5", fault=point) as writer:
        output, _ = writer.communicate(timeout=60)
    assert writer.returncode == -signal.SIGKILL
    extents = acknowledged(output)
    assert list(extents) == [0, 1, 2, 3, 4]
    assert_readable(tmp_path, extents)
    assert is_sealed(tmp_path / extents[0].path) == has_footer
    salvage_all(tmp_path, extents)


def test_a_footer_torn_at_any_byte_leaves_every_extent_readable(tmp_path: Path) -> None:
    with start_writer(tmp_path, "--num", "3") as writer:
        extents = acknowledged(writer.communicate(timeout=60)[0])
    place = tmp_path / extents[0].path
    end = extents[2].offset + extents[2].length
    for size in range(place.stat().st_size - 1, end - 1, -1):
        os.truncate(place, size)
        assert not is_sealed(place)
        if size % 50 == 0 or size == end:
            assert_readable(tmp_path, extents)
    salvage_all(tmp_path, extents)
    os.truncate(place, end - 1)
    with pytest.raises(CorruptPackError, match="cut off"):
        PackReader(tmp_path).read(extents[2])


def test_a_successor_writes_beside_the_dead_writers_pack(tmp_path: Path) -> None:
    with start_writer(tmp_path, fault="pack.after_append:3") as writer:
        first = acknowledged(writer.communicate(timeout=60)[0])
    with start_writer(tmp_path, "--first", "2", "--num", "3", session="s-2") as writer:
        second = acknowledged(writer.communicate(timeout=60)[0])
        assert writer.returncode == 0
    assert (list(first), list(second)) == ([0, 1], [2, 3, 4])
    assert_readable(tmp_path, first | second)


@pytest.mark.parametrize("durability", ["process", "host"])
def test_writers_killed_at_random_instants_lose_nothing_acknowledged(tmp_path: Path, durability: str) -> None:
    source, everything = random.Random(durability), {}
    options = ["--durability", durability, "--threads", "4", "--max-pack-bytes", "15000", "--num", "100000"]
    for kill in range(5):
        with start_writer(tmp_path, *options, "--first", str(kill * 100_000), session=f"s-{kill}") as writer:
            assert writer.stdout is not None
            # The instant is a number of acknowledgements and a little more, so that a slow machine kills as late.
            head = "".join(writer.stdout.readline() for _ in range(source.randint(1, 60)))
            threading.Event().wait(source.random() * 0.02)
            writer.kill()
            everything.update(acknowledged(head + writer.stdout.read()))
    assert len(everything) >= 5
    assert_readable(tmp_path, everything)


def test_another_process_reads_extents_while_the_pack_is_still_written(tmp_path: Path) -> None:
    reader = PackReader(tmp_path)
    with start_writer(tmp_path, "--num", "60", "--max-pack-bytes", "15000") as writer:
        assert writer.stdout is not None
        num_read = 0
        for line in writer.stdout:
            for seed, extent in acknowledged(line).items():
                assert reader.read(extent) == rows_of(seed)
                num_read += 1
    assert (writer.returncode, num_read) == (0, 60)


@pytest.mark.parametrize("threads", ["1", "4"])
def test_a_write_the_system_refuses_ends_the_pack_and_the_retry_loses_nothing(
    tmp_path: Path, threads: str
) -> None:
    options = ["--num", "60", "--file-limit", "15000", "--threads", threads]
    with start_writer(tmp_path, *options) as writer:
        output, errors = writer.communicate(timeout=60)
    extents = acknowledged(output)
    assert sorted(extents) == list(range(60))
    assert len({(extent.path, extent.offset) for extent in extents.values()}) == 60
    assert_readable(tmp_path, extents)
    assert "File too large" in errors
    assert "the pack is ended" in errors
    assert len({extent.path for extent in extents.values()}) > 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--session", required=True)
    parser.add_argument("--durability", default="host")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--num", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-pack-bytes", type=int, default=2**28)
    parser.add_argument("--file-limit", type=int)
    options = parser.parse_args()
    if options.file_limit:
        # Python ignores SIGXFSZ, so a write beyond the limit fails with EFBIG after a partial write.
        resource.setrlimit(resource.RLIMIT_FSIZE, (options.file_limit, options.file_limit))
    store = PackStore(
        options.root,
        options.session,
        durability=options.durability,
        on_create=lambda _: None,
        on_seal=lambda _: None,
        max_pack_bytes=options.max_pack_bytes,
    )
    threads = [threading.Thread(target=write, args=(store, options, n)) for n in range(options.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        store.close()
    except StorageError as error:
        # With a file limit the footer may be what does not fit; the extents are what the test is about.
        print(error, file=sys.stderr)


def write(store: PackStore, options: argparse.Namespace, thread: int) -> None:
    for seed in range(options.first + thread, options.first + options.num, options.threads):
        extent = append_with_retries(store, rows_of(seed))
        entry = {**asdict(extent), "digests": base64.b64encode(extent.digests).decode()}
        # One write of less than PIPE_BUF: lines of several threads do not mix and a kill cuts only the last.
        os.write(1, (json.dumps({"seed": seed, "extent": entry}) + "\n").encode())


def append_with_retries(store: PackStore, batch: pa.RecordBatch) -> Extent:
    """Append again after a failure; windows are shared, so one thread can meet several failures in a row."""
    for _ in range(50):
        try:
            return store.append("plan", batch)
        except StorageError as error:
            print(error, file=sys.stderr)
    raise RuntimeError("fifty packs in a row had no room")


if __name__ == "__main__":
    main()
