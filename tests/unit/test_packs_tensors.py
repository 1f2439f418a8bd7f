"""Arrays as tensor rows: what is read is what was written, only the blocks touched are read, and nothing is copied twice."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from strawflow.errors import CorruptPackError, InvalidInputError
from strawflow.ids import Extent
from strawflow.packs.digests import BLOCK_BYTES, digest_blocks
from strawflow.packs.reader import PackReader
from strawflow.packs.tensors import (
    EXTENT_BYTES,
    ROW_BYTES,
    Array,
    TensorInfo,
    read_tensor_rows,
    tensor_info,
    to_tensor_batches,
)
from strawflow.packs.writer import PackWriter

DTYPES = ["bool", "int8", "uint16", "int32", "int64", "uint64", "float16", "float32", "float64", "complex64"]
MIB = 2**20


def write(
    root: Path, batches: Sequence[pa.RecordBatch], *, name: str = "a", seals: bool = True
) -> list[Extent]:
    writer = PackWriter(
        root, pack_id=1, path=f"packs/tensor/{name}.arrow", kind="tensor", durability="process"
    )
    extents = [writer.append(batch) for batch in batches]
    if seals:
        writer.seal()
    return extents


def same_bits(found: Array, expected: Array) -> bool:
    return (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


@st.composite
def arrays_and_slices(draw: st.DrawFn) -> tuple[Array, list[int], int, int, int]:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=9))
    array = draw(hnp.arrays(dtype, shape))
    if draw(st.booleans()):
        array = array[::-1]
    cuts = draw(st.lists(st.integers(0, shape[0]), max_size=4))
    start = draw(st.integers(0, shape[0]))
    return array, cuts, start, draw(st.integers(start, shape[0])), draw(st.integers(1, 400))


@settings(max_examples=150, deadline=None)
@given(case=arrays_and_slices(), sealed=st.booleans())
def test_any_slice_of_any_array_reads_back_bit_by_bit(
    case: tuple[Array, list[int], int, int, int], sealed: bool
) -> None:
    array, cuts, start, stop, extent_bytes = case
    with TemporaryDirectory() as folder:
        extents = write(Path(folder), to_tensor_batches("x", array, cuts=cuts, extent_bytes=extent_bytes))
        reader = PackReader(Path(folder))
        found = read_tensor_rows(reader, extents, start, stop, sealed=sealed)
        assert same_bits(found, array[start:stop])
        assert same_bits(read_tensor_rows(reader, extents, 0, len(array), sealed=sealed), array)
        assert tensor_info(reader, extents) == TensorInfo("x", array.dtype.name, array.shape)


@pytest.mark.parametrize("dtype, bits", [("bfloat16", np.uint16), ("float8_e4m3fn", np.uint8)])
def test_types_numpy_lacks_travel_as_their_bits_under_their_own_name(
    tmp_path: Path, dtype: str, bits: type[np.generic]
) -> None:
    array = np.arange(24).astype(bits).reshape(6, 4)
    extents = write(tmp_path, to_tensor_batches("x", array, dtype=dtype))
    reader = PackReader(tmp_path)
    assert tensor_info(reader, extents).dtype == dtype
    assert same_bits(read_tensor_rows(reader, extents, 2, 5), array[2:5])
    with pytest.raises(InvalidInputError, match=f"does not hold the bits of {dtype}"):
        to_tensor_batches("x", array.astype(np.int32), dtype=dtype)


def test_a_big_endian_array_is_stored_little_endian(tmp_path: Path) -> None:
    array = np.arange(5, dtype=">i4")
    extents = write(tmp_path, to_tensor_batches("x", array))
    assert read_tensor_rows(PackReader(tmp_path), extents, 0, 5).tolist() == [0, 1, 2, 3, 4]


def test_an_array_without_axes_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidInputError, match=r"'x' has no axis to cut rows along.*reshape\(1\)"):
        to_tensor_batches("x", np.array(3.0))


@pytest.mark.parametrize(
    "array", [np.array(["a"]), np.array([object()]), np.zeros(2, "M8[s]"), np.zeros(2, np.longdouble)]
)
def test_a_type_that_cannot_be_stored_is_refused(array: Array) -> None:
    with pytest.raises(InvalidInputError, match=r"'x' is of type .*; known: .*bfloat16.*float32"):
        to_tensor_batches("x", array)


@pytest.mark.parametrize("wrong", [{"cuts": [7]}, {"cuts": [-1]}, {"extent_bytes": 0}])
def test_cuts_outside_the_array_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError, match="'x' has 6 rows"):
        to_tensor_batches("x", np.zeros((6, 2)), **wrong)  # type: ignore[arg-type]


def test_rows_of_the_file_are_at_most_four_mib_and_extents_at_most_their_bound() -> None:
    array = np.zeros((100, MIB + 3), np.uint8)
    contents, *parts = to_tensor_batches("x", array)
    assert len(parts) == 2
    assert [part.column("data").nbytes <= EXTENT_BYTES + 1024 for part in parts] == [True, True]
    lengths = [len(value.as_buffer()) for part in parts for value in part.column("data")]
    assert max(lengths) <= ROW_BYTES
    assert sum(lengths) == array.nbytes
    assert [(row["row_start"], row["row_count"], row["data"]) for row in contents.to_pylist()] == [
        (0, 63, b""),
        (63, 37, b""),
    ]


def test_an_array_row_beyond_four_mib_is_cut_along_the_flattened_axis(tmp_path: Path) -> None:
    array = np.arange(3 * (9 * MIB // 8), dtype=np.int64).reshape(3, 3, -1)  # 3 rows of 9 MiB
    batches = to_tensor_batches("x", array, extent_bytes=20 * MIB)
    pieces = [(row["row_start"], row["row_count"], len(row["data"])) for row in batches[1].to_pylist()]
    assert pieces == [
        (r, int(n == 0), length) for r in (0, 1) for n, length in enumerate((4 * MIB, 4 * MIB, MIB))
    ]
    extents = write(tmp_path, batches)
    reader = PackReader(tmp_path)
    for start, stop in [(0, 3), (1, 2), (1, 3), (2, 2)]:
        for sealed in (True, False):
            found = read_tensor_rows(reader, extents, start, stop, sealed=sealed)
            assert same_bits(found, array[start:stop])


def test_the_array_is_not_copied_on_the_way_to_the_record_batch() -> None:
    array = np.zeros((64, MIB), np.uint8)
    before = pa.total_allocated_bytes()
    batches = to_tensor_batches("x", array)
    assert pa.total_allocated_bytes() - before < 64 * 1024
    data = batches[-1].column("data").buffers()[2]
    assert array.ctypes.data <= data.address < array.ctypes.data + array.nbytes


def test_rows_of_a_sealed_extent_are_a_view_of_the_mapped_file(tmp_path: Path) -> None:
    array = np.arange(40 * MIB // 4, dtype=np.int32).reshape(40, -1)
    extents = write(tmp_path, to_tensor_batches("x", array))
    reader = PackReader(tmp_path)
    before = pa.total_allocated_bytes()
    rows = read_tensor_rows(reader, extents, 3, 37, sealed=True)
    assert not rows.flags.owndata
    assert not rows.flags.writeable
    assert pa.total_allocated_bytes() - before < 64 * 1024
    reader.close()
    (tmp_path / extents[0].path).unlink()
    assert np.array_equal(rows, array[3:37])


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("size", [8 * MIB, 40 * MIB])
def test_damage_in_a_block_touched_raises_and_elsewhere_does_not_matter(
    tmp_path: Path, size: int, sealed: bool
) -> None:
    array = np.arange(size // 4, dtype=np.int32).reshape(-1, MIB // 4)
    extents = write(tmp_path, to_tensor_batches("x", array))
    place = tmp_path / extents[-1].path
    with place.open("r+b") as file:
        file.seek(extents[-1].offset + extents[-1].length - 500)
        file.write(b"\x5a\x5a\x5a")
    reader = PackReader(tmp_path)
    with pytest.raises(CorruptPackError, match="4 MiB from byte"):
        read_tensor_rows(reader, extents, len(array) - 1, len(array), sealed=sealed)
    if size > 3 * BLOCK_BYTES:
        assert np.array_equal(read_tensor_rows(reader, extents, 0, 2, sealed=sealed), array[:2])


def test_a_flip_anywhere_in_a_small_tensor_never_becomes_rows(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.int16).reshape(4, 3)
    extents = write(tmp_path, to_tensor_batches("x", array, cuts=[2]))
    place = tmp_path / extents[0].path
    content = place.read_bytes()
    for position in range(extents[0].offset, extents[-1].offset + extents[-1].length, 7):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        place.write_bytes(damaged)
        with pytest.raises(CorruptPackError):
            read_tensor_rows(PackReader(tmp_path), extents, 0, 4)


def test_rows_outside_the_array_are_refused(tmp_path: Path) -> None:
    extents = write(tmp_path, to_tensor_batches("x", np.zeros((4, 2))))
    for start, stop in [(-1, 2), (0, 5), (3, 2)]:
        with pytest.raises(
            InvalidInputError, match=f"rows {start} to {stop} leave tensor 'x', which has 4 rows"
        ):
            read_tensor_rows(PackReader(tmp_path), extents, start, stop)


def test_extents_that_are_not_all_of_one_tensor_are_refused(tmp_path: Path) -> None:
    one = write(tmp_path, to_tensor_batches("x", np.zeros((6, 2)), cuts=[2, 4]))
    other = write(tmp_path, to_tensor_batches("y", np.zeros((6, 2)), cuts=[2, 4]), name="b")
    reader = PackReader(tmp_path)
    for wrong, word in [
        ([], "no extents"),
        (one[:3], "has 3 extents"),
        (one[2:3], "not all of tensor 'x'"),
        ([*one[:2], other[2], one[3]], "belongs to tensor 'y'"),
    ]:
        with pytest.raises(InvalidInputError, match=word):
            read_tensor_rows(reader, wrong, 0, 6)


def test_an_unsealed_pack_serves_its_tensors(tmp_path: Path) -> None:
    array = np.arange(30 * MIB, dtype=np.uint8).reshape(30, MIB)
    extents = write(tmp_path, to_tensor_batches("x", array, extent_bytes=20 * MIB), seals=False)
    assert np.array_equal(read_tensor_rows(PackReader(tmp_path), extents, 11, 29), array[11:29])


PEAK = """
import resource, sys, pickle
from pathlib import Path
from strawflow.packs.reader import PackReader
from strawflow.packs.tensors import read_tensor_rows
extents = pickle.loads(sys.stdin.buffer.read())
reader = PackReader(Path(sys.argv[1]))
read_tensor_rows(reader, extents, 0, 1, sealed=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
bytes_before = int(open("/proc/self/io").read().split()[1])
rows = read_tensor_rows(reader, extents, int(sys.argv[2]), int(sys.argv[3]), sealed=sys.argv[4] == "True")
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
print(rows.nbytes, grown, int(open("/proc/self/io").read().split()[1]) - bytes_before, int(rows.sum()))
"""


@pytest.mark.parametrize("sealed", [True, False])
def test_reading_one_slice_of_a_large_array_takes_its_memory_and_its_bytes(
    tmp_path: Path, sealed: bool
) -> None:
    array = np.ones((256, MIB), np.uint8)
    extents = write(tmp_path, to_tensor_batches("x", array))
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path), "70", "198", str(sealed)],
        input=pickle.dumps(extents),
        capture_output=True,
        check=True,
        timeout=120,
    )
    (tmp_path / extents[0].path).unlink()  # pytest would keep it until the third run from now
    size, grown, num_read, total = map(int, done.stdout.split())
    assert (size, total) == (128 * MIB, 128 * MIB)
    assert grown <= size + 64 * MIB
    assert num_read <= 1.1 * size


def test_extents_of_another_kind_are_refused(tmp_path: Path) -> None:
    extents = write(tmp_path, to_tensor_batches("x", np.zeros((4, 2))))
    with pytest.raises(InvalidInputError, match="of kind 'plan', not 'tensor'"):
        read_tensor_rows(PackReader(tmp_path), [replace(extents[0], kind="plan")], 0, 1)


def test_a_compressed_extent_of_another_writer_is_refused_where_a_part_of_it_is_wanted(
    tmp_path: Path,
) -> None:
    array = np.frombuffer(np.random.default_rng(0).bytes(16 * MIB), np.uint8).reshape(16, MIB)
    (batch,) = to_tensor_batches("x", array)
    place = tmp_path / "packs/tensor/a.arrow"
    place.parent.mkdir(parents=True)
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.OSFile(str(place), "wb") as sink, pa.ipc.new_file(sink, batch.schema, options=options) as writer:
        begin = sink.tell()
        writer.write_batch(batch)
    content = place.read_bytes()
    offset = content.index(b"\xff\xff\xff\xff", 16 if begin < 16 else begin)
    length = 8 + pa.ipc.read_message(content[offset:]).serialize().size - 8
    message = content[offset : offset + length]
    extent = Extent(
        0, 0, "tensor", "packs/tensor/a.arrow", offset, length, batch.num_rows, digest_blocks(message)
    )
    assert PackReader(tmp_path).read(extent) == batch
    for sealed in (True, False):
        with pytest.raises(InvalidInputError, match="is compressed"):
            read_tensor_rows(PackReader(tmp_path), [extent], 0, 1, sealed=sealed)
