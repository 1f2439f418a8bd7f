"""One pack: readable at every moment, sealed into an ordinary Arrow file, ended by its first failure."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from strawflow.errors import AlreadyExistsError, InvalidInputError, StorageError
from strawflow.packs.posix import PosixOutput, PosixPlace
from strawflow.packs.probe import Durability
from strawflow.packs.reader import PackReader
from strawflow.packs.tensors import to_tensor_batches
from strawflow.packs.writer import PackWriter
from strawflow.records import COMPRESSION, SCHEMAS
from strawflow.testing.pack_rows import made_up_rows

KINDS = sorted(SCHEMAS)


def new_writer(root: Path, kind: str, *, name: str = "a", durability: Durability = "host") -> PackWriter:
    return PackWriter(root, pack_id=1, path=f"packs/{kind}/{name}.arrow", kind=kind, durability=durability)


@pytest.mark.parametrize("durability", ["process", "host"])
@pytest.mark.parametrize("kind", KINDS)
def test_extents_read_the_same_before_and_after_sealing(
    tmp_path: Path, kind: str, durability: Durability
) -> None:
    writer = new_writer(tmp_path, kind, durability=durability)
    batches = [made_up_rows(kind, rows, seed=rows) for rows in (1, 3, 50)]
    extents = [writer.append(batch) for batch in batches]
    writer.sync()
    open_rows = [PackReader(tmp_path).read(extent) for extent in extents]
    writer.seal()
    sealed_rows = [PackReader(tmp_path).read(extent, sealed=True) for extent in extents]
    assert open_rows == sealed_rows == batches
    assert [rows.schema.metadata for rows in open_rows] == [SCHEMAS[kind].metadata] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_pyarrow_polars_and_duckdb_read_a_sealed_pack_without_strawflow(tmp_path: Path, kind: str) -> None:
    writer = new_writer(tmp_path, kind)
    batches = [made_up_rows(kind, 20, seed=seed) for seed in range(3)]
    for batch in batches:
        writer.append(batch)
    writer.seal()
    place = tmp_path / writer.path
    expected = pa.Table.from_batches(batches)

    with pa.ipc.open_file(place) as file:
        assert file.read_all() == expected
        assert file.schema.metadata == SCHEMAS[kind].metadata
    assert pl.read_ipc(place).to_dicts() == expected.to_pylist()
    assert pl.scan_ipc(place).collect().to_dicts() == expected.to_pylist()
    found = duckdb.from_arrow(ds.dataset(place, format="ipc")).fetchall()
    assert found == [tuple(row.values()) for row in expected.to_pylist()]


def test_an_extent_is_exactly_one_block_of_the_footer(tmp_path: Path) -> None:
    writer = new_writer(tmp_path, "plan")
    extents = [writer.append(made_up_rows("plan", 5, seed=seed)) for seed in range(3)]
    writer.seal()
    content = (tmp_path / writer.path).read_bytes()
    assert writer.length == len(content)
    for earlier, later in itertools.pairwise(extents):
        assert earlier.offset + earlier.length == later.offset
    for extent in extents:
        # An encapsulated message begins with its continuation marker at a multiple of 8.
        assert content[extent.offset : extent.offset + 4] == b"\xff\xff\xff\xff"
        assert extent.offset % 8 == extent.length % 8 == 0


def test_magic_and_schema_lie_in_the_file_before_the_first_extent(tmp_path: Path) -> None:
    writer = new_writer(tmp_path, "trajectory")
    content = (tmp_path / writer.path).read_bytes()
    assert content.startswith(b"ARROW1\0\0")
    assert pa.ipc.read_schema(pa.py_buffer(content[8:])) == SCHEMAS["trajectory"]
    assert writer.append(made_up_rows("trajectory", 1)).offset == len(content)
    writer.seal()


def test_a_pack_without_extents_seals_into_an_empty_arrow_file(tmp_path: Path) -> None:
    writer = new_writer(tmp_path, "plan")
    writer.seal()
    with pa.ipc.open_file(tmp_path / writer.path) as file:
        assert file.read_all().num_rows == 0


def test_kinds_are_compressed_as_their_table_says(tmp_path: Path) -> None:
    for kind in KINDS:
        # One row two thousand times over: anything that squeezes at all shows.
        one = made_up_rows(kind, 1)
        batch = one.take(pa.array([0] * 2000))
        writer = new_writer(tmp_path, kind)
        extent = writer.append(batch)
        writer.seal()
        assert (extent.length < batch.nbytes / 2) == (COMPRESSION[kind] is not None), kind


def test_a_slice_stores_only_its_own_rows(tmp_path: Path) -> None:
    writer = new_writer(tmp_path, "batch")
    whole = made_up_rows("batch", 1000)
    extent = writer.append(whole.slice(500, 2))
    writer.seal()
    assert extent.length < whole.nbytes / 20
    assert PackReader(tmp_path).read(extent) == whole.slice(500, 2)


def test_a_batch_of_another_schema_is_refused_by_field_and_the_pack_goes_on(tmp_path: Path) -> None:
    writer = new_writer(tmp_path, "plan")
    good = made_up_rows("plan", 2)
    position = good.schema.get_field_index("staleness")
    widened = good.set_column(
        position, pa.field("staleness", pa.int64(), nullable=False), good["staleness"].cast("int64")
    )
    for bad, word in [
        (made_up_rows("prompt", 2), "fields are"),
        (widened, "'staleness'"),
        (good.replace_schema_metadata({"strawflow.kind": "plan", "strawflow.version": "2"}), "metadata"),
        (good.slice(0, 0), "no rows"),
    ]:
        with pytest.raises(InvalidInputError, match=word):
            writer.append(bad)
    assert PackReader(tmp_path).read(writer.append(good)) == good
    writer.seal()


def test_nulls_in_a_required_field_are_refused_by_name(tmp_path: Path) -> None:
    rows = made_up_rows("plan", 3).to_pylist()
    rows[1]["outcome"] = None
    writer = new_writer(tmp_path, "plan")
    with pytest.raises(InvalidInputError, match=r"'outcome'.*1 nulls"):
        writer.append(pa.RecordBatch.from_pylist(rows, schema=SCHEMAS["plan"]))
    writer.seal()


def test_a_name_is_used_once_and_the_first_pack_keeps_its_bytes(tmp_path: Path) -> None:
    first = new_writer(tmp_path, "plan")
    extent = first.append(made_up_rows("plan", 2))
    with pytest.raises(AlreadyExistsError, match="used once"):
        new_writer(tmp_path, "plan")
    first.seal()
    assert PackReader(tmp_path).read(extent) == made_up_rows("plan", 2)


def test_a_failed_sync_ends_the_pack_for_ever(tmp_path: Path) -> None:
    writer = new_writer(tmp_path, "plan")
    kept = writer.append(made_up_rows("plan", 2))
    writer.sync()
    # A descriptor that is gone gives a real errno to the next system call.
    assert isinstance(writer._output, PosixOutput)
    os.close(writer._output._descriptor)
    with pytest.raises(StorageError, match=r"cannot sync .* the pack is ended"):
        writer.sync()
    for retry in (writer.sync, writer.seal, lambda: writer.append(made_up_rows("plan", 2))):
        with pytest.raises(StorageError, match="ended by an earlier failure"):
            retry()
    assert not writer.is_open
    assert PackReader(tmp_path).read(kept) == made_up_rows("plan", 2)


def test_a_sealed_pack_takes_no_more_appends(tmp_path: Path) -> None:
    writer = new_writer(tmp_path, "plan")
    writer.seal()
    with pytest.raises(StorageError, match="is sealed"):
        writer.append(made_up_rows("plan", 1))


def test_a_pack_cannot_be_made_where_a_file_stands_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "packs").write_text("not a folder")
    with pytest.raises((StorageError, AlreadyExistsError), match=r"packs/plan/a\.arrow"):
        new_writer(tmp_path, "plan")


def test_a_forked_process_cannot_write_its_parents_pack(tmp_path: Path) -> None:
    writer = new_writer(tmp_path, "plan")
    kept = writer.append(made_up_rows("plan", 2))
    child = os.fork()
    if child == 0:
        refused = 0
        for verb in (writer.sync, writer.seal, lambda: writer.append(made_up_rows("plan", 2))):
            try:
                verb()
            except StorageError as error:
                refused += "forked" in error.message
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert (tmp_path / kept.path).stat().st_size == kept.offset + kept.length
    writer.seal()


def test_a_message_of_thousands_of_pieces_and_partial_writes_lies_whole_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = [bytes([n % 251]) * (n % 7) for n in range(3000)]
    output = PosixPlace(tmp_path).create("a", b"head", durability="process")
    real = os.pwritev

    def pwritev(descriptor: int, views: list[memoryview], offset: int) -> int:
        # The system may always write less than asked: here it takes a part of what it was given.
        taken, room = [], 11
        for view in views:
            taken.append(view[:room])
            room -= len(taken[-1])
            if not room:
                break
        return real(descriptor, taken, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    output.write(pieces)
    output.write([pa.py_buffer(b"tail")])
    monkeypatch.undo()
    output.finish()
    assert (tmp_path / "a").read_bytes() == b"head" + b"".join(pieces) + b"tail"


def test_a_large_column_goes_to_the_file_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.arange(8 * 2**20, dtype=np.uint8)
    (batch,) = to_tensor_batches("x", array)
    writer, real = new_writer(tmp_path, "tensor", durability="process"), os.pwritev
    seen: list[int] = []

    def pwritev(descriptor: int, views: list[memoryview], offset: int) -> int:
        seen.extend(pa.py_buffer(view).address for view in views)
        return real(descriptor, views, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    extent = writer.append(batch)
    assert array.ctypes.data in seen
    assert PackReader(tmp_path).read(extent) == batch


@pytest.mark.parametrize("wrapped_at, value", [(2, -3), (1, -(2**31)), (1, 2**31 - 1)])
def test_offsets_that_wrapped_are_refused_and_nothing_is_written(
    tmp_path: Path, wrapped_at: int, value: int
) -> None:
    good = made_up_rows("trajectory", 2)
    offsets = np.array([0, 2, 5], np.int32)
    wrapped = pa.ListArray.from_buffers(
        pa.list_(pa.int32()), 2, [None, pa.py_buffer(offsets)], children=[pa.array([1] * 5, pa.int32())]
    )
    place = good.schema.get_field_index("response_tokens")
    columns = [*good.columns[:place], wrapped, *good.columns[place + 1 :]]
    bad = pa.RecordBatch.from_arrays(columns, schema=good.schema)
    # Now, since Arrow refuses to make such an array; code that computes offsets in 32 bits fills them in like this.
    offsets[wrapped_at] = value
    writer = new_writer(tmp_path, "trajectory")
    length = writer.length
    with pytest.raises(InvalidInputError, match=r"kind 'trajectory' is malformed.*offset"):
        writer.append(bad)
    assert writer.length == length
    assert PackReader(tmp_path).read(writer.append(good)) == good
