"""Salvage: named extents of a dead writer's pack move to a new sealed pack under their old ids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from strawflow.errors import InvalidInputError, StorageError
from strawflow.ids import Extent
from strawflow.packs.places import open_place
from strawflow.packs.reader import PackReader
from strawflow.packs.salvage import salvage
from strawflow.packs.scan import open_scan
from strawflow.packs.writer import PackWriter
from strawflow.records import EARLIER, SCHEMAS, as_written
from strawflow.testing.pack_rows import made_up_rows

PACK_IDS = {name: number for number, name in enumerate(("dead", "new", "a", "b", "c", "one", "two"), 1)}


def new_writer(root: Path, name: str, kind: str = "trajectory") -> PackWriter:
    return PackWriter(
        root, pack_id=PACK_IDS[name], path=f"packs/{kind}/{name}.arrow", kind=kind, durability="host"
    )


def dead_pack(root: Path, kind: str = "trajectory") -> list[Extent]:
    """Write four extents and half a message, and never a footer."""
    writer = new_writer(root, "dead", kind)
    extents = [
        replace(writer.append(made_up_rows(kind, 6, seed=seed)), extent_id=70 + seed) for seed in range(4)
    ]
    writer.sync()
    writer.abandon("test")
    with (root / writer.path).open("ab") as file:
        file.write(b"\xff\xff\xff\xff\x00\x04\x00\x00torn")
    return extents


@pytest.mark.parametrize("kind", sorted(SCHEMAS))
def test_named_extents_move_and_keep_ids_rows_and_order(tmp_path: Path, kind: str) -> None:
    extents = dead_pack(tmp_path, kind)
    source = (tmp_path / extents[0].path).read_bytes()
    result = salvage(tmp_path, [extents[0], extents[3]], target=new_writer(tmp_path, "new", kind))
    assert list(result.moved) == [extents[0].extent_id, extents[3].extent_id]
    assert result.corrupt == ()
    reader = PackReader(tmp_path)
    for seed in (0, 3):
        moved = result.moved[extents[seed].extent_id]
        assert (moved.extent_id, moved.pack_id, moved.num_rows) == (70 + seed, PACK_IDS["new"], 6)
        assert reader.read(moved, sealed=True) == made_up_rows(kind, 6, seed=seed)
    with pa.ipc.open_file(tmp_path / f"packs/{kind}/new.arrow") as file:
        assert file.read_all() == pa.Table.from_batches([made_up_rows(kind, 6, seed=seed) for seed in (0, 3)])
    assert (tmp_path / extents[0].path).read_bytes() == source


EARLIER_VERSIONS = [
    pytest.param(kind, schema, id=f"{kind}-{schema.metadata[b'strawflow.version'].decode()}")
    for kind, schemas in EARLIER.items()
    for schema in schemas
]


@pytest.mark.parametrize("kind, schema", EARLIER_VERSIONS)
def test_rows_of_an_earlier_version_are_read_as_present_ones_and_their_copies_keep_their_bytes(
    tmp_path: Path, kind: str, schema: pa.Schema
) -> None:
    rows = made_up_rows(kind, 6)
    writer = PackWriter(
        tmp_path, pack_id=1, path=f"packs/{kind}/old.arrow", kind=kind, durability="host", schema=schema
    )
    extent = replace(writer.append(as_written(rows, schema)), extent_id=7)
    writer.seal()
    reader = PackReader(tmp_path)
    read = reader.read(extent)
    assert read.schema.equals(SCHEMAS[kind], check_metadata=True)
    for name in SCHEMAS[kind].names:
        known = name in schema.names
        assert read.column(name) == (
            rows.column(name) if known else pa.nulls(6, read.schema.field(name).type)
        )
    (scanned,) = open_scan(open_place(tmp_path), extent.path).messages()
    assert scanned[1] == read
    target = PackWriter(
        tmp_path, pack_id=2, path=f"packs/{kind}/new.arrow", kind=kind, durability="host", schema=schema
    )
    moved = salvage(tmp_path, [extent], target=target).moved[7]
    assert (moved.digests, moved.length, moved.num_rows) == (extent.digests, extent.length, 6)
    assert reader.read(moved) == read


def test_a_damaged_extent_is_reported_and_the_others_are_saved(tmp_path: Path) -> None:
    extents = dead_pack(tmp_path)
    place = tmp_path / extents[1].path
    content = bytearray(place.read_bytes())
    content[extents[1].offset + 50] ^= 1
    place.write_bytes(content[: extents[3].offset + 10])
    result = salvage(tmp_path, extents, target=new_writer(tmp_path, "new"))
    assert list(result.moved) == [extents[0].extent_id, extents[2].extent_id]
    assert [corrupt.extent for corrupt in result.corrupt] == [extents[1], extents[3]]
    assert "checksum" in result.corrupt[0].reason
    assert "cut off" in result.corrupt[1].reason


def test_a_missing_source_is_a_storage_error_and_leaves_no_sealed_pack(tmp_path: Path) -> None:
    extents = dead_pack(tmp_path)
    target = new_writer(tmp_path, "new")
    (tmp_path / extents[0].path).unlink()
    with pytest.raises(StorageError, match="is missing"):
        salvage(tmp_path, extents, target=target)
    assert not target.is_open
    with pytest.raises(pa.ArrowInvalid):
        pa.ipc.open_file(tmp_path / target.path)


def test_extents_named_twice_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    extents = dead_pack(tmp_path)
    with pytest.raises(InvalidInputError, match="twice"):
        salvage(tmp_path, [extents[0], extents[0]], target=new_writer(tmp_path, "a"))
    with pytest.raises(InvalidInputError, match="cannot be salvaged"):
        salvage(tmp_path, extents, target=new_writer(tmp_path, "b", "plan"))
    with pytest.raises(InvalidInputError, match="cannot be salvaged"):
        salvage(tmp_path, [replace(extents[0], pack_id=PACK_IDS["c"])], target=new_writer(tmp_path, "c"))


def test_a_salvaged_pack_can_be_salvaged_again(tmp_path: Path) -> None:
    extents = dead_pack(tmp_path)
    first = salvage(tmp_path, extents, target=new_writer(tmp_path, "one"))
    second = salvage(tmp_path, list(first.moved.values()), target=new_writer(tmp_path, "two"))
    assert list(second.moved) == [extent.extent_id for extent in extents]


def test_an_extent_the_index_has_not_named_is_refused_by_its_place(tmp_path: Path) -> None:
    extent = replace(dead_pack(tmp_path)[0], extent_id=0)
    with pytest.raises(InvalidInputError, match=rf"at byte {extent.offset} of {extent.path} is not named"):
        salvage(tmp_path, [extent], target=new_writer(tmp_path, "new"))
