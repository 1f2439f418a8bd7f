"""Reading: damage never becomes rows, stale descriptors are opened afresh, descriptors stay bounded."""

from __future__ import annotations

import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from strawflow.errors import CorruptPackError, IncompatibleFormatError, InvalidInputError, StorageError
from strawflow.ids import Extent, RowRange
from strawflow.packs.digests import BLOCK_BYTES, digest_blocks
from strawflow.packs.reader import PackReader
from strawflow.packs.tensors import to_tensor_batches
from strawflow.packs.writer import PackWriter
from strawflow.records import BATCH, SCHEMAS
from strawflow.testing.damage import flip
from strawflow.testing.pack_rows import made_up_rows


def write_pack(root: Path, kind: str, *, name: str = "a", num_extents: int = 3) -> list[Extent]:
    writer = PackWriter(root, pack_id=1, path=f"packs/{kind}/{name}.arrow", kind=kind, durability="process")
    extents = [
        replace(writer.append(made_up_rows(kind, 10, seed=seed)), extent_id=seed + 1)
        for seed in range(num_extents)
    ]
    writer.seal()
    return extents


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("kind", sorted(SCHEMAS))
def test_a_flipped_bit_anywhere_in_an_extent_never_becomes_rows(
    tmp_path: Path, kind: str, sealed: bool
) -> None:
    extents = write_pack(tmp_path, kind)
    place = tmp_path / extents[1].path
    reader, source = PackReader(tmp_path), random.Random(kind)
    for _ in range(250):
        position, mask = extents[1].offset + source.randrange(extents[1].length), 1 << source.randrange(8)
        flip(place, position, mask)
        with pytest.raises(CorruptPackError) as caught:
            reader.read(extents[1], sealed=sealed)
        flip(place, position, mask)
        assert extents[1].path in caught.value.message
        assert f"byte {extents[1].offset}" in caught.value.message
        assert caught.value.facts["extent_id"] == extents[1].extent_id
    assert reader.read(extents[1], sealed=sealed) == made_up_rows(kind, 10, seed=1)


def test_damage_in_one_extent_leaves_its_neighbours_readable(tmp_path: Path) -> None:
    extents = write_pack(tmp_path, "trajectory")
    flip(tmp_path / extents[1].path, extents[1].offset + 100, 4)
    reader = PackReader(tmp_path)
    assert reader.read(extents[0]) == made_up_rows("trajectory", 10, seed=0)
    assert reader.read(extents[2]) == made_up_rows("trajectory", 10, seed=2)


def test_damage_in_a_large_extent_is_placed_within_four_mib(tmp_path: Path) -> None:
    writer = PackWriter(tmp_path, pack_id=1, path="packs/batch/a.arrow", kind="batch", durability="process")
    rows = made_up_rows("batch", 1)
    tokens = pa.ListArray.from_arrays(
        pa.array([0, 3 * BLOCK_BYTES // 4], pa.int32()),
        pa.array(np.arange(3 * BLOCK_BYTES // 4, dtype=np.int32)),
    )
    rows = rows.set_column(BATCH.get_field_index("tokens"), BATCH.field("tokens"), tokens)
    extent = writer.append(rows.replace_schema_metadata(BATCH.metadata))
    writer.seal()
    assert len(extent.digests) == 16 * 4
    assert PackReader(tmp_path).read(extent) == rows
    flip(tmp_path / extent.path, extent.offset + 2 * BLOCK_BYTES + 7, 1)
    with pytest.raises(CorruptPackError, match=f"4 MiB from byte {extent.offset + 2 * BLOCK_BYTES}"):
        PackReader(tmp_path).read(extent)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_file_cut_off_inside_an_extent_raises_and_keeps_the_earlier_ones(
    tmp_path: Path, sealed: bool
) -> None:
    extents = write_pack(tmp_path, "plan")
    reader = PackReader(tmp_path)
    reader.read(extents[2], sealed=sealed)
    os.truncate(tmp_path / extents[2].path, extents[2].offset + extents[2].length - 1)
    with pytest.raises(CorruptPackError, match="cut off"):
        reader.read(extents[2], sealed=sealed)
    assert reader.read(extents[1], sealed=sealed) == made_up_rows("plan", 10, seed=1)


def test_a_missing_file_names_itself_and_what_to_do(tmp_path: Path) -> None:
    extent = write_pack(tmp_path, "plan")[0]
    (tmp_path / extent.path).unlink()
    with pytest.raises(StorageError, match=r"packs/plan/a\.arrow is missing.*restore"):
        PackReader(tmp_path).read(extent)


@pytest.mark.parametrize("sealed", [False, True])
def test_bytes_seen_through_an_old_descriptor_are_read_again_through_a_fresh_one(
    tmp_path: Path, sealed: bool
) -> None:
    extents = write_pack(tmp_path, "plan")
    place = tmp_path / extents[0].path
    good = tmp_path / "good"
    shutil.copy(place, good)
    flip(place, extents[1].offset + 9, 1)
    reader = PackReader(tmp_path)
    reader.read(extents[0], sealed=sealed)
    os.replace(good, place)
    assert reader.read(extents[1], sealed=sealed) == made_up_rows("plan", 10, seed=1)


def test_a_reader_that_opened_a_growing_pack_sees_what_came_later(tmp_path: Path) -> None:
    writer = PackWriter(tmp_path, pack_id=1, path="packs/plan/a.arrow", kind="plan", durability="process")
    reader = PackReader(tmp_path)
    for seed in range(5):
        extent = writer.append(made_up_rows("plan", 3, seed=seed))
        assert reader.read(extent) == made_up_rows("plan", 3, seed=seed)
    writer.seal()
    assert reader.read(extent, sealed=True) == made_up_rows("plan", 3, seed=4)


def test_a_pack_opened_while_it_grew_is_mapped_whole_once_it_is_sealed(tmp_path: Path) -> None:
    writer = PackWriter(tmp_path, pack_id=1, path="packs/batch/a.arrow", kind="batch", durability="process")
    reader = PackReader(tmp_path)
    reader.read(writer.append(made_up_rows("batch", 3, seed=0)))
    later = writer.append(made_up_rows("batch", 50, seed=1))
    writer.seal()
    before = pa.total_allocated_bytes()
    rows = reader.read(later, sealed=True)
    assert pa.total_allocated_bytes() - before < 1024
    assert rows == made_up_rows("batch", 50, seed=1)


def test_sealed_uncompressed_rows_are_not_copied_and_outlive_reader_and_file(tmp_path: Path) -> None:
    extents = write_pack(tmp_path, "batch")
    reader = PackReader(tmp_path)
    before = pa.total_allocated_bytes()
    rows = [reader.read(extent, sealed=True) for extent in extents]
    assert pa.total_allocated_bytes() - before < 1024
    reader.close()
    (tmp_path / extents[0].path).unlink()
    assert rows == [made_up_rows("batch", 10, seed=seed) for seed in range(3)]


def test_a_row_range_gives_its_rows_and_refuses_to_leave_the_extent(tmp_path: Path) -> None:
    extent = write_pack(tmp_path, "plan")[0]
    reader = PackReader(tmp_path)
    assert reader.read_rows(RowRange(extent, 4, 3)) == made_up_rows("plan", 10).slice(4, 3)
    assert reader.read_rows(RowRange(extent, 10, 0)).num_rows == 0
    for start, count in [(-1, 2), (8, 3), (0, 11), (3, -1)]:
        with pytest.raises(InvalidInputError, match="leave the extent at byte"):
            reader.read_rows(RowRange(extent, start, count))


def test_rows_of_an_extent_that_lies_about_its_count_are_refused(tmp_path: Path) -> None:
    extent = write_pack(tmp_path, "plan")[0]
    with pytest.raises(CorruptPackError, match="holds 10 rows, expected 9"):
        PackReader(tmp_path).read(replace(extent, num_rows=9))


def test_bytes_that_match_but_are_no_record_batch_are_refused(tmp_path: Path) -> None:
    extent = write_pack(tmp_path, "plan")[0]
    content = (tmp_path / extent.path).read_bytes()
    for start, length in [
        (8, extent.offset - 8),
        (extent.offset + 8, extent.length - 8),
        (extent.offset, 16),
    ]:
        forged = replace(
            extent, offset=start, length=length, digests=digest_blocks(content[start : start + length])
        )
        with pytest.raises(CorruptPackError, match="no record batch"):
            PackReader(tmp_path).read(forged)


@pytest.mark.parametrize("path", ["/etc/passwd", "packs/../../x.arrow"])
def test_a_path_outside_the_run_is_refused(tmp_path: Path, path: str) -> None:
    extent = write_pack(tmp_path, "plan")[0]
    with pytest.raises(InvalidInputError, match="not inside the run"):
        PackReader(tmp_path).read(replace(extent, path=path))


def test_a_pack_of_another_version_is_not_read(tmp_path: Path) -> None:
    extent = write_pack(tmp_path, "plan")[0]
    place = tmp_path / extent.path
    newer = SCHEMAS["plan"].append(pa.field("cost", pa.int64()))
    with pa.OSFile(str(place), "wb") as sink, pa.ipc.new_file(sink, newer):
        pass
    with pytest.raises(IncompatibleFormatError, match=r"packs/plan/a\.arrow"):
        PackReader(tmp_path).read(extent)


def test_a_damaged_head_raises_or_changes_nothing(tmp_path: Path) -> None:
    extent = write_pack(tmp_path, "plan")[0]
    place, expected = tmp_path / extent.path, made_up_rows("plan", 10)
    messages = []
    for position in range(extent.offset):
        flip(place, position, 0xFF)
        try:
            # Padding and unused fields of the schema message may change without changing what is read.
            assert PackReader(tmp_path).read(extent) == expected
        except (CorruptPackError, IncompatibleFormatError) as error:
            messages.append(error.message)
        flip(place, position, 0xFF)
    assert len(messages) > extent.offset / 2
    assert all(extent.path in message for message in messages)
    assert PackReader(tmp_path).read(extent) == expected


def test_many_packs_and_threads_keep_descriptors_bounded(tmp_path: Path) -> None:
    extents = [write_pack(tmp_path, "plan", name=f"p{n}", num_extents=1)[0] for n in range(60)]
    reader = PackReader(tmp_path, max_open_packs=5)
    expected = made_up_rows("plan", 10)
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: reader.read(extents[n % 60], sealed=n % 2 == 0), range(600)))
    assert all(rows == expected for rows in found)
    del found
    # A mapping holds a descriptor of its own, so a kept pack counts for two at most.
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * 5
    reader.close()
    assert len(os.listdir("/proc/self/fd")) <= before  # what other tests left may have been closed meanwhile


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of every pread from here on; the real calls, watched."""
    lengths: list[int] = []
    real = os.preadv

    def preadv(descriptor: int, targets: list[memoryview], offset: int) -> int:
        lengths.append(real(descriptor, targets, offset))
        return lengths[-1]

    monkeypatch.setattr(os, "preadv", preadv)
    return lengths


@pytest.mark.parametrize("sealed", [False, True])
def test_many_extents_come_in_the_order_asked_for_whatever_the_order_in_the_files(
    tmp_path: Path, sealed: bool
) -> None:
    written = [write_pack(tmp_path, kind, name=name) for name in ("a", "b") for kind in ("plan", "batch")]
    extents = [extent for own in written for extent in own] * 2
    random.Random(0).shuffle(extents)
    reader = PackReader(tmp_path)
    assert reader.read_many(extents, sealed=sealed) == [
        PackReader(tmp_path).read(extent) for extent in extents
    ]
    assert reader.read_many([]) == []


def test_neighbours_are_read_in_one_call_of_bounded_size(tmp_path: Path, reads: list[int]) -> None:
    writer = PackWriter(tmp_path, pack_id=1, path="packs/tensor/a.arrow", kind="tensor", durability="process")
    batches = [to_tensor_batches(f"t{n}", np.full(3 * 2**20, n, np.uint8))[0] for n in range(7)]
    extents = [writer.append(batch) for batch in batches]
    reader = PackReader(tmp_path)
    reader.read(extents[0])
    reads.clear()
    assert reader.read_many(extents) == batches
    assert reads == [2 * extents[0].length] * 3 + [extents[0].length]
    reads.clear()
    assert reader.read_many([extents[0], extents[2]]) == [batches[0], batches[2]]
    assert len(reads) == 2


@pytest.mark.parametrize("sealed", [False, True])
def test_one_damaged_neighbour_is_named_and_the_others_are_read(tmp_path: Path, sealed: bool) -> None:
    extents = write_pack(tmp_path, "plan", num_extents=5)
    flip(tmp_path / extents[3].path, extents[3].offset + 70, 1)
    reader = PackReader(tmp_path)
    with pytest.raises(CorruptPackError) as caught:
        reader.read_many(extents, sealed=sealed)
    assert caught.value.facts["extent_id"] == extents[3].extent_id
    del extents[3]
    assert [batch.num_rows for batch in reader.read_many(extents, sealed=sealed)] == [10] * 4


def test_row_ranges_of_one_extent_read_it_once_and_within_the_bound(tmp_path: Path, reads: list[int]) -> None:
    extents = write_pack(tmp_path, "batch")
    size = made_up_rows("batch", 10).get_total_buffer_size()
    reader = PackReader(tmp_path, kept_bytes=2 * size + size // 2)
    for start in range(10):
        assert reader.read_rows(RowRange(extents[0], start, 1)) == made_up_rows("batch", 10).slice(start, 1)
    assert reads.count(extents[0].length) == 1
    reader.read_rows(RowRange(extents[1], 0, 1))
    reader.read_rows(RowRange(extents[2], 0, 1))
    assert reader._kept._bytes <= 2 * size + size // 2
    reads.clear()
    reader.read_rows(RowRange(extents[2], 5, 1))
    assert reads == []
    reader.read_rows(RowRange(extents[0], 5, 1))
    assert reads == [extents[0].length]
    reader.close()
    assert reader._kept._bytes == 0


def test_an_extent_beyond_the_bound_is_read_and_not_kept(tmp_path: Path) -> None:
    extent = write_pack(tmp_path, "batch")[0]
    reader = PackReader(tmp_path, kept_bytes=10)
    assert reader.read_rows(RowRange(extent, 1, 2)) == made_up_rows("batch", 10).slice(1, 2)
    assert reader._kept._bytes == 0


def test_the_same_place_under_other_digests_is_another_extent(tmp_path: Path) -> None:
    extent = write_pack(tmp_path, "plan")[0]
    reader = PackReader(tmp_path)
    reader.read_rows(RowRange(extent, 0, 1))
    with pytest.raises(CorruptPackError, match="checksum"):
        reader.read_rows(RowRange(replace(extent, digests=bytes(16)), 0, 1))


@pytest.mark.parametrize("sealed", [False, True])
def test_a_part_of_a_message_is_verified_by_the_blocks_it_touches(tmp_path: Path, sealed: bool) -> None:
    writer = PackWriter(tmp_path, pack_id=1, path="packs/tensor/a.arrow", kind="tensor", durability="process")
    (batch,) = to_tensor_batches("x", np.random.default_rng(0).integers(0, 255, 3 * BLOCK_BYTES, np.uint8))
    extent = writer.append(batch)
    writer.seal()
    place = tmp_path / extent.path
    message = place.read_bytes()[extent.offset : extent.offset + extent.length]
    flip(place, extent.offset + BLOCK_BYTES + 9, 1)
    reader = PackReader(tmp_path)
    end = extent.length
    for start, stop in [
        (0, 1),
        (0, BLOCK_BYTES),
        (2 * BLOCK_BYTES, end),
        (3 * BLOCK_BYTES - 1, end),
        (end, end),
        (5, 5),
    ]:
        assert reader.read_bytes(extent, start, stop, sealed=sealed).to_pybytes() == message[start:stop]
    for start, stop in [(0, end), (BLOCK_BYTES - 1, BLOCK_BYTES + 1), (2 * BLOCK_BYTES - 1, 2 * BLOCK_BYTES)]:
        with pytest.raises(CorruptPackError, match=f"4 MiB from byte {extent.offset + BLOCK_BYTES}"):
            reader.read_bytes(extent, start, stop, sealed=sealed)
    for start, stop in [(-1, 2), (3, 2), (0, end + 1)]:
        with pytest.raises(InvalidInputError, match=f"bytes {start} to {stop} leave"):
            reader.read_bytes(extent, start, stop, sealed=sealed)


def test_an_extent_that_claims_another_kind_than_its_open_pack_is_refused(tmp_path: Path) -> None:
    extent = write_pack(tmp_path, "plan")[0]
    reader = PackReader(tmp_path)
    reader.read(extent)
    with pytest.raises(IncompatibleFormatError, match="expected 'batch'"):
        reader.read(replace(extent, kind="batch"))
