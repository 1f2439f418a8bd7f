"""Scanning packs without an index: sealed, open, torn and damaged ones give the messages that are whole, and no others."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from strawflow.errors import CorruptPackError, IncompatibleFormatError
from strawflow.ids import Extent
from strawflow.packs.places import open_place
from strawflow.packs.scan import PackScan, is_torn_head, kind_of, list_packs, open_scan
from strawflow.packs.writer import PackWriter
from strawflow.records import SCHEMAS
from strawflow.testing.damage import flip
from strawflow.testing.pack_rows import made_up_rows


def written(root: Path, kind: str, *, seal: bool, num_extents: int = 3) -> tuple[str, list[Extent]]:
    path = f"packs/{kind}/a.arrow"
    writer = PackWriter(root, pack_id=1, path=path, kind=kind, durability="process")
    extents = [writer.append(made_up_rows(kind, 4, seed=seed)) for seed in range(num_extents)]
    if seal:
        writer.seal()
    return path, extents


def scanned(root: Path, path: str) -> PackScan:
    return open_scan(open_place(root), path)


def places(extents: list[Extent]) -> list[tuple[int, int, int, bytes]]:
    return [(e.offset, e.length, e.num_rows, e.digests) for e in extents]


@pytest.mark.parametrize("seal", [False, True], ids=["open", "sealed"])
@pytest.mark.parametrize("kind", sorted(SCHEMAS))
def test_every_message_is_found_where_it_was_written(tmp_path: Path, kind: str, seal: bool) -> None:
    path, extents = written(tmp_path, kind, seal=seal)
    scan = scanned(tmp_path, path)
    found = list(scan.messages())
    assert (scan.kind, scan.is_sealed, scan.damaged) == (kind, seal, [])
    assert places([extent for extent, _ in found]) == places(extents)
    assert [rows for _, rows in found] == [made_up_rows(kind, 4, seed=seed) for seed in range(3)]
    assert scan.places() == [(e.offset, e.length) for e in extents]
    assert (scan.num_messages, scan.num_rows) == (3, 12)


def test_messages_that_are_known_are_not_read_again(tmp_path: Path) -> None:
    path, extents = written(tmp_path, "plan", seal=True)
    found = scanned(tmp_path, path).messages(passing=lambda offset: offset == extents[1].offset)
    assert [extent.offset for extent, _ in found] == [extents[0].offset, extents[2].offset]


def test_a_torn_pack_gives_what_lies_whole_before_the_tear(tmp_path: Path) -> None:
    path, extents = written(tmp_path, "trajectory", seal=True)
    whole = (tmp_path / path).read_bytes()
    for cut in range(extents[0].offset, len(whole), 97):
        (tmp_path / path).write_bytes(whole[:cut])
        scan = scanned(tmp_path, path)
        found = [extent.offset for extent, _ in scan.messages()]
        assert not scan.is_sealed
        assert found == [e.offset for e in extents if e.offset + e.length <= cut], cut


def test_a_sealed_pack_gives_the_messages_after_a_damaged_one(tmp_path: Path) -> None:
    path, extents = written(tmp_path, "batch", seal=True)
    whole = bytearray((tmp_path / path).read_bytes())
    whole[extents[1].offset] ^= 0xFF  # its head
    (tmp_path / path).write_bytes(whole)
    scan = scanned(tmp_path, path)
    assert [e.offset for e, _ in scan.messages()] == [extents[0].offset, extents[2].offset]
    assert [damaged.offset for damaged in scan.damaged] == [extents[1].offset]


@pytest.mark.parametrize("field", [0, 4], ids=["mark", "length"])
@pytest.mark.parametrize("mask", [0x40, 0xFF])
def test_an_open_pack_gives_the_messages_after_a_damaged_one(tmp_path: Path, field: int, mask: int) -> None:
    path, extents = written(tmp_path, "journal", seal=False)
    flip(tmp_path / path, extents[1].offset + field, mask)
    scan = scanned(tmp_path, path)
    assert [e.offset for e, _ in scan.messages()] == [extents[0].offset, extents[2].offset]
    assert [(d.offset, d.is_torn) for d in scan.damaged] == [(extents[1].offset, False)]


def test_a_footer_that_leaves_a_message_out_is_not_believed(tmp_path: Path) -> None:
    path, extents = written(tmp_path, "journal", seal=True)
    whole = (tmp_path / path).read_bytes()
    footer = len(whole) - 10 - int.from_bytes(whole[-10:-6], "little")
    (count,) = (
        at
        for at in range(footer, len(whole) - 10, 4)
        if whole[at : at + 4] == b"\x03\0\0\0"
        and whole[at + 4 : at + 12] == extents[0].offset.to_bytes(8, "little")
    )
    flip(tmp_path / path, count, 1)  # 3 messages become 2
    scan = scanned(tmp_path, path)
    assert not scan.is_sealed
    assert [e.offset for e, _ in scan.messages()] == [e.offset for e in extents]


@pytest.mark.parametrize("tail", ["a beginning", "zeros", "noise"])
def test_only_the_beginning_of_a_message_or_zeros_are_what_a_kill_leaves(tmp_path: Path, tail: str) -> None:
    path, extents = written(tmp_path, "journal", seal=False)
    whole = (tmp_path / path).read_bytes()
    first = whole[extents[0].offset : extents[0].offset + extents[0].length]
    left = {"a beginning": first[:-8], "zeros": bytes(1000), "noise": bytes(range(1, 200))}[tail]
    (tmp_path / path).write_bytes(whole + left)
    scan = scanned(tmp_path, path)
    assert len(list(scan.messages())) == 3
    assert [d.is_torn for d in scan.damaged] == [tail != "noise"]


def test_a_head_that_was_cut_off_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    path, extents = written(tmp_path, "journal", seal=False)
    whole = (tmp_path / path).read_bytes()
    for size in (0, 3, 12, extents[0].offset - 1):
        (tmp_path / path).write_bytes(whole[:size])
        assert is_torn_head(open_place(tmp_path), path)
    for at in (0, 8, 12):
        (tmp_path / path).write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        assert not is_torn_head(open_place(tmp_path), path)


@pytest.mark.parametrize("kind", ["journal", "trajectory", "batch"])
def test_flipped_bits_anywhere_are_told_or_give_rows_of_the_right_form(tmp_path: Path, kind: str) -> None:
    path, _ = written(tmp_path, kind, seal=True)
    whole = (tmp_path / path).read_bytes()
    for at in random.Random(kind).sample(range(len(whole)), 120):
        (tmp_path / path).write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        try:
            scan = scanned(tmp_path, path)
        except (CorruptPackError, IncompatibleFormatError):
            continue
        for _, rows in scan.messages():
            rows.validate(full=True)
            assert rows.schema.equals(SCHEMAS[kind])


def test_only_packs_of_known_kinds_are_listed(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "plan", seal=True)
    for other in ("packs/plan/notes.txt", "packs/unknown/a.arrow", "packs/a.arrow"):
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_bytes(b"x")
    assert list(list_packs(open_place(tmp_path))) == [path]
    assert (kind_of(path), kind_of("packs/a.arrow")) == ("plan", "")


def test_a_pack_of_another_version_is_refused_not_read(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "plan", seal=True)
    (tmp_path / "packs" / "batch").mkdir()
    (tmp_path / path).rename(tmp_path / "packs" / "batch" / "a.arrow")
    with pytest.raises(IncompatibleFormatError):
        scanned(tmp_path, "packs/batch/a.arrow")
