"""Kill real writers at every fault point and at random instants, flip and cut bytes: nothing acknowledged is lost, and
what is damaged never becomes rows.

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
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strawflow import faults
from strawflow.errors import CorruptPackError, IncompatibleFormatError, StorageError
from strawflow.ids import Extent
from strawflow.packs.reader import PackReader
from strawflow.packs.salvage import salvage
from strawflow.packs.store import PackStore
from strawflow.packs.writer import PackWriter
from strawflow.testing.damage import flip
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
    target = PackWriter(root, pack_id=99, path="packs/plan/new.arrow", kind="plan", durability="host")
    named = {seed: replace(extent, extent_id=seed + 1) for seed, extent in extents.items()}
    result = salvage(root, list(named.values()), target=target)
    assert result.corrupt == ()
    assert_readable(root, {seed: result.moved[extent.extent_id] for seed, extent in named.items()})
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


@dataclass(frozen=True)
class SmallPack:
    """A sealed pack of three extents, and what each must read as."""

    root: Path
    place: Path
    content: bytes
    extents: list[Extent]
    rows: list[pa.RecordBatch]

    @property
    def last(self) -> Extent:
        return self.extents[-1]


def small_pack(root: Path, kind: str) -> SmallPack:
    writer = PackWriter(root, pack_id=7, path=f"packs/{kind}/a.arrow", kind=kind, durability="process")
    rows = [made_up_rows(kind, 2, seed=seed, list_length=2) for seed in range(3)]
    extents = [replace(writer.append(batch), extent_id=seed + 1) for seed, batch in enumerate(rows)]
    writer.seal()
    place = root / writer.path
    return SmallPack(root, place, place.read_bytes(), extents, rows)


def read_or_refuse(pack: SmallPack, *, sealed: bool) -> list[bool]:
    """Return for each extent whether it was read; one that was has its own rows."""
    reader, was_read = PackReader(pack.root), []
    for extent, expected in zip(pack.extents, pack.rows, strict=True):
        try:
            found = reader.read(extent, sealed=sealed)
        except (CorruptPackError, IncompatibleFormatError):
            was_read.append(False)
        else:
            assert found == expected
            was_read.append(True)
    return was_read


# In the gate every 23rd byte, for each kind another; all of them in the long tests.
SPARSE = pytest.mark.parametrize(
    "step", [23, pytest.param(1, marks=[pytest.mark.long, pytest.mark.timeout(1200)])]
)


@SPARSE
@pytest.mark.parametrize("kind", ["plan", "trajectory", "tensor"])
def test_a_flipped_bit_at_any_byte_of_a_pack_never_yields_wrong_rows(
    tmp_path: Path, kind: str, step: int
) -> None:
    pack = small_pack(tmp_path, kind)
    refused_heads = 0
    for position in range(len(kind) % step, len(pack.content), step):
        flip(pack.place, position, 1 << position % 8)
        was_read = read_or_refuse(pack, sealed=position % 2 == 0)
        flip(pack.place, position, 1 << position % 8)
        hit = [e.offset <= position < e.offset + e.length for e in pack.extents]
        if position < pack.extents[0].offset:
            # Magic or schema: all are refused, or the bit means nothing (padding, an unused field).
            assert len(set(was_read)) == 1
            refused_heads += not was_read[0]
        else:
            # A message loses itself and no other; padding between buffers is covered too; the footer is never needed.
            assert was_read == [not is_hit for is_hit in hit]
    assert refused_heads > pack.extents[0].offset / step / 2
    assert pack.place.read_bytes() == pack.content


def test_a_flipped_bit_of_the_version_at_a_packs_head_is_another_version_to_readers_and_to_salvage(
    tmp_path: Path,
) -> None:
    pack = small_pack(tmp_path, "plan")
    name = pack.content.index(b"strawflow.version")
    for bit in range(8 * (name - 8), 8 * (name + len("strawflow.version"))):  # its value lies before it
        flip(pack.place, bit // 8, 1 << bit % 8)
        was_read = read_or_refuse(pack, sealed=bit % 2 == 0)
        target = PackWriter(
            tmp_path, pack_id=8, path=f"packs/plan/{bit}.arrow", kind="plan", durability="process"
        )
        try:
            result = salvage(tmp_path, pack.extents, target=target)
        except IncompatibleFormatError:
            assert not any(was_read)
        else:
            assert [extent.extent_id in result.moved for extent in pack.extents] == was_read
        flip(pack.place, bit // 8, 1 << bit % 8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_many_flips_at_once_never_yield_wrong_rows_and_salvage_tells_them_apart(
    tmp_path: Path, data: st.DataObject
) -> None:
    pack = small_pack(Path(tempfile.mkdtemp(dir=tmp_path)), data.draw(st.sampled_from(["plan", "batch"])))
    bits = data.draw(st.lists(st.integers(0, 8 * len(pack.content) - 1), max_size=5, unique=True))
    damaged = bytearray(pack.content)
    for bit in bits:
        damaged[bit // 8] ^= 1 << bit % 8
    pack.place.write_bytes(damaged)
    was_read = read_or_refuse(pack, sealed=data.draw(st.booleans()))
    target = PackWriter(
        pack.root,
        pack_id=8,
        path=f"packs/{pack.last.kind}/new.arrow",
        kind=pack.last.kind,
        durability="process",
    )
    try:
        result = salvage(pack.root, pack.extents, target=target)
    except IncompatibleFormatError:
        assert not any(was_read)  # the head says it is another version
        return
    assert [e.extent_id in result.moved for e in pack.extents] == was_read
    assert [c.extent.extent_id for c in result.corrupt] == [
        e.extent_id for e, is_read in zip(pack.extents, was_read, strict=True) if not is_read
    ]
    reader = PackReader(pack.root)
    for extent, expected in zip(pack.extents, pack.rows, strict=True):
        if extent.extent_id in result.moved:
            assert reader.read(result.moved[extent.extent_id]) == expected


@SPARSE
@pytest.mark.parametrize("kind", ["plan", "trajectory", "tensor"])
def test_a_tail_torn_at_any_byte_of_the_last_message_loses_that_message_only(
    tmp_path: Path, kind: str, step: int
) -> None:
    pack = small_pack(tmp_path, kind)
    end = pack.last.offset + pack.last.length
    for size in [*range(pack.last.offset, end, step), end - 1]:
        for tail in (b"", bytes(end - size), bytes(end + 4096 - size)):
            # Cut off; or the size grew and the bytes did not come: zeros, as after a loss of power.
            pack.place.write_bytes(pack.content[:size] + tail)
            is_same = (pack.content[:size] + tail)[:end] == pack.content[:end]
            assert read_or_refuse(pack, sealed=size % 2 == 0) == [True, True, is_same]
    target = PackWriter(tmp_path, pack_id=8, path=f"packs/{kind}/new.arrow", kind=kind, durability="process")
    pack.place.write_bytes(pack.content[: end - 1])
    result = salvage(tmp_path, pack.extents, target=target)
    assert list(result.moved) == [1, 2]
    assert "cut off" in result.corrupt[0].reason


LARGE_TEXT = """
import gc, resource, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
import pyarrow as pa
from strawflow.packs.reader import PackReader
from strawflow.packs.salvage import salvage
from strawflow.packs.writer import PackWriter
from strawflow.records import TRAJECTORY
from strawflow.testing.pack_rows import made_up_rows

ROW = 2**20
letters = np.frombuffer(bytes(range(97, 123)), np.uint8)

def texts(num_rows, seed):
    data = letters[np.random.default_rng(seed).integers(0, 26, num_rows * ROW, dtype=np.uint8)]
    offsets = pa.py_buffer(np.arange(num_rows + 1, dtype=np.int64) * ROW)
    column = pa.LargeStringArray.from_buffers(num_rows, offsets, pa.py_buffer(data))
    base = made_up_rows("trajectory", 1).take(pa.array([0] * num_rows))
    place = TRAJECTORY.get_field_index("response_text")
    return base.set_column(place, TRAJECTORY.field(place), column).replace_schema_metadata(TRAJECTORY.metadata)

def sample(batch, row):
    return batch.column("response_text")[row].as_buffer().to_pybytes()

root = Path(sys.argv[1])
sizes = {1: 2300, 2: 772}
writer = PackWriter(root, pack_id=1, path="packs/trajectory/a.arrow", kind="trajectory", durability="process")
extents, samples = [], {}
for number, num_rows in sizes.items():
    batch = texts(num_rows, number)
    samples[number] = {row: sample(batch, row) for row in (0, 1, num_rows // 2, num_rows - 1)}
    extents.append(replace(writer.append(batch), extent_id=number))
    del batch
    gc.collect()
writer.abandon("test")  # salvage is for packs without a footer

def check(places):
    reader = PackReader(root)
    batches = []
    for number, extent in places.items():
        batch = reader.read(extent)
        assert batch.column("response_text").type == pa.large_string()
        for row, text in samples[number].items():
            assert sample(batch, row) == text
            assert sample(batch.slice(row, 1), 0) == text
            assert sample(batch.take(pa.array([row, 0, row])), 2) == text
        batches.append(batch)
    return batches

batches = check(dict(zip(sizes, extents)))
column = pa.chunked_array([batch.column("response_text") for batch in batches]).combine_chunks()
del batches
assert column.nbytes > 3 * 2**30
for row, text in samples[2].items():
    assert column[sizes[1] + row].as_buffer().to_pybytes() == text
del column
target = PackWriter(root, pack_id=2, path="packs/trajectory/b.arrow", kind="trajectory", durability="process")
result = salvage(root, extents, target=target)
assert not result.corrupt and list(result.moved) == [1, 2]
del check(result.moved)[:]
with pa.ipc.open_file(pa.memory_map(str(root / target.path))) as file:
    assert file.num_record_batches == 2
    assert file.get_batch(0).num_rows == sizes[1]
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_three_gib_of_text_in_one_column_are_written_read_joined_and_salvaged(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LARGE_TEXT, str(tmp_path)], capture_output=True, text=True, timeout=1100
    )
    shutil.rmtree(tmp_path / "packs")  # pytest would keep six gigabytes until the third run from now
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 8 * 2**30


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
        on_create=lambda _: 1,
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
