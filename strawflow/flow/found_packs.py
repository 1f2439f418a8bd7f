"""Packs as they are found on the disk, matched against the rows of an index that lost some or all of them.

1. Every pack file gets a row; an extent gets one when something names it. What nothing names stays without, for the sweep.
2. An extent that the journal names is taken where its bytes match its checksum: at the place it was written to, or where
   salvage or compaction brought it. If nowhere, its row stays at the old place and it is quarantined: whoever restores the
   file has it back.
3. Bytes of the journal that cannot be read are a hole, unless the index knew already what they told or a kill tore them.
4. Results are named by nothing but themselves: one whose checksum the journal knows must match it, of one that was written
   too short before the end for its checksum to be known only the form is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from strawflow.errors import CorruptPackError, IncompatibleFormatError, StorageError
from strawflow.flow import journal
from strawflow.flow.journal import EntryKind, ExtentRef, StoredEntry
from strawflow.ids import Extent
from strawflow.index import found_extents, liveness, quarantine
from strawflow.index.engine import Connection
from strawflow.index.found_extents import KnownPack
from strawflow.packs.places import open_place
from strawflow.packs.reader import PackReader
from strawflow.packs.scan import PackScan, is_torn_head, kind_of, list_packs, open_scan
from strawflow.states import PackState


@dataclass(frozen=True)
class Loss:
    """Something that should be there and is not; for the report."""

    what: str
    subject: str
    message: str


@dataclass
class FoundPacks:
    """The pack files of a run beside the rows of one transaction."""

    connection: Connection
    root: Path
    losses: list[Loss] = field(default_factory=list)
    num_packs: int = 0
    num_named: int = 0
    num_moved: int = 0
    num_unverified: int = 0
    """Results whose checksum nobody wrote down before the index was lost."""

    def __post_init__(self) -> None:
        self._place = open_place(self.root)
        self._reader = PackReader(self._place)
        self._scans: dict[str, PackScan] = {}
        self._rows = found_extents.packs_by_path(self.connection)
        self._rows_before = dict(self._rows)
        self.holes: list[str] = []
        """Where the journal is damaged."""
        self._extents: dict[int, dict[int, tuple[int, bytes]]] = {}
        self._by_digests: dict[str, dict[bytes, Extent]] = {}
        self._checksums: dict[tuple[str, int], bytes] = {}
        self._known_digests: set[bytes] = set()
        self._first_new = found_extents.last_extent_id(self.connection)
        found_extents.ensure_session(self.connection)
        self._sizes = list_packs(self._place)
        for path, size in self._sizes.items():
            self._take_pack(path, size)

    def _take_pack(self, path: str, size: int) -> None:
        try:
            scan = open_scan(self._place, path)
        except (CorruptPackError, IncompatibleFormatError, StorageError) as error:
            self.losses.append(Loss("pack", path, error.message))
            is_known = self._is_sealed_before(path) or is_torn_head(self._place, path)
            if kind_of(path) == journal.KIND and not is_known:
                self.holes.append(error.message)
            return
        self._scans[path] = scan
        if path not in self._rows:
            self.num_packs += 1
            self._rows[path] = found_extents.add_pack(
                self.connection, kind=scan.kind, path=path, is_sealed=scan.is_sealed, num_bytes=size
            )

    def entries(self) -> list[StoredEntry]:
        """Return every journal entry that is whole, and name them all."""
        found: list[StoredEntry] = []
        for extent, rows in self.messages(journal.KIND):
            entries, num_damaged = journal.from_rows(rows, path=extent.path, offset=extent.offset)
            if num_damaged:
                self._lose(extent, f"{num_damaged} of its entries do not match their checksums")
                self._note_hole(extent.path, extent.offset, f"{num_damaged} of its entries do not match")
            if entries:
                self.name(extent)
                found += entries
        for entry in found:
            if entry.kind is EntryKind.DIGESTS:
                self._learn(entry)
        return found

    def _learn(self, entry: StoredEntry) -> None:
        for path, extents in entry.body["extents"].items():
            for offset, digests in extents:
                self._checksums[path, offset] = bytes.fromhex(digests)
                self._known_digests.add(bytes.fromhex(digests))

    def messages(self, kind: str, *, only_new: bool = False) -> Iterator[tuple[Extent, pa.RecordBatch]]:
        """Yield every whole message of a kind with its pack's id; `only_new`: those the index did not name before."""
        for path, scan in self._scans.items():
            pack = self._rows[path]
            if scan.kind != kind or pack.state is PackState.CONDEMNED:
                continue
            known = self._known_before(pack) if only_new else frozenset()
            num_lost = len(scan.damaged)
            for extent, rows in scan.messages(passing=known.__contains__):
                yield replace(extent, pack_id=pack.pack_id), rows
            for lost in scan.damaged[num_lost:]:
                loss = Loss("message", f"byte {lost.offset} of {path}", lost.reason)
                if loss in self.losses:
                    continue
                self.losses.append(loss)
                if kind == journal.KIND and not lost.is_torn:
                    self._note_hole(path, lost.offset, lost.reason)

    def results(self, kind: str) -> Iterator[tuple[Extent, pa.RecordBatch]]:
        """Yield the messages of results that the index did not name before and whose checksum does not differ."""
        for extent, rows in self.messages(kind, only_new=True):
            expected = self._checksums.get((extent.path, extent.offset))
            if expected is not None and expected != extent.digests:
                self._lose(extent, "does not match the checksum in the journal")
                continue
            self.num_unverified += expected is None and extent.digests not in self._known_digests
            yield extent, rows

    def name(self, extent: Extent) -> Extent:
        """Return an extent of a pack that is there with its id, its row made if it has none."""
        pack = self._pack_of(extent.path, extent.kind)
        known = self._known(pack)
        if extent.offset not in known:
            placed = replace(extent, pack_id=pack.pack_id)
            known[extent.offset] = (found_extents.add_extent(self.connection, placed), extent.digests)
            self.num_named += 1
        return replace(extent, pack_id=pack.pack_id, extent_id=known[extent.offset][0])

    def find(self, ref: ExtentRef) -> Extent | None:
        """Return an extent that an entry names, wherever its bytes lie now; None if nowhere."""
        pack = self._rows.get(ref.path)
        if pack is not None:
            extent = self._at_its_place(ref, pack)
            known = self._known(pack).get(ref.offset)
            if known is not None and known[1] == ref.digests:
                return replace(extent, extent_id=known[0])
            if self._is_whole(extent):
                return self.name(extent)
        elsewhere = self._elsewhere(ref.kind).get(ref.digests)
        return None if elsewhere is None else self.name(elsewhere)

    def find_or_quarantine(self, ref: ExtentRef) -> tuple[Extent, bool]:
        """Return an extent that an entry names, and whether its bytes are there; if nowhere, it is quarantined."""
        found = self.find(ref)
        if found is not None:
            return found, True
        extent = self.name(self._at_its_place(ref, self._pack_of(ref.path, ref.kind)))
        reason = "its bytes were not found whole when the index was rebuilt"
        quarantine.add(self.connection, extent.extent_id, reason=reason)
        self._lose(extent, f"{ref.kind}: {reason}")
        return extent, False

    def find_anyway(self, ref: ExtentRef) -> Extent:
        """Return an extent that an entry names; in quarantine if its bytes are nowhere."""
        return self.find_or_quarantine(ref)[0]

    def read(self, extent: Extent) -> pa.RecordBatch:
        """Return the rows of an extent that was found.

        Raises:
            CorruptPackError, StorageError: its bytes are damaged or gone.
        """
        return self._reader.read(extent)

    def is_in_file(self, ref: ExtentRef) -> bool:
        """Tell whether the file an extent was written to is there and long enough to hold it."""
        scan = self._scans.get(ref.path)
        return scan is not None and scan.size >= ref.offset + ref.length

    def bring_back_moved(self) -> None:
        """Point extents whose pack's file is gone at the bytes that salvage or compaction brought elsewhere since."""
        for extent_id, kind, _, digests, num_rows in found_extents.extents_of_lost_packs(
            self.connection, self._scans
        ):
            place = self._elsewhere(kind).get(digests)
            if place is None or place.num_rows != num_rows:
                continue
            known = self._known(self._rows[place.path])
            if place.offset in known:
                continue
            found_extents.move_extent(self.connection, extent_id, place)
            known[place.offset] = (extent_id, digests)
            self.num_moved += 1

    def missing(self) -> list[Loss]:
        """Return what is missing of the packs that the index names now, by their sizes; quarantine is known and left out."""
        return [
            Loss("pack", end.path, what)
            for end in liveness.pack_ends(self.connection)
            if (what := end.what_is_missing(self._sizes.get(end.path, 0)))
        ]

    def drop_superseded(self) -> None:
        """Remove the rows of new results that a later one took the place of."""
        found_extents.drop_unreferred_results(self.connection, after=self._first_new)

    def close(self) -> None:
        self._reader.close()

    def _note_hole(self, path: str, offset: int, reason: str) -> None:
        """Note damage of the journal at a place that the index did not know before."""
        if self._is_sealed_before(path):
            return
        before = self._rows_before.get(path)
        if before is None or offset not in self._known_before(before):
            self.holes.append(f"{path} is damaged at byte {offset} ({reason})")

    def _is_sealed_before(self, path: str) -> bool:
        """Tell whether the index knew this pack to its end before anything was brought back."""
        before = self._rows_before.get(path)
        return before is not None and before.state is not PackState.OPEN

    def _known_before(self, pack: KnownPack) -> frozenset[int]:
        """Return the offsets that the index named before anything was brought back: what they hold is in it already."""
        known = self._known(pack).items()
        return frozenset(offset for offset, (extent_id, _) in known if extent_id <= self._first_new)

    def _known(self, pack: KnownPack) -> dict[int, tuple[int, bytes]]:
        if pack.pack_id not in self._extents:
            self._extents[pack.pack_id] = found_extents.extents_at(self.connection, pack.pack_id)
        return self._extents[pack.pack_id]

    def _pack_of(self, path: str, kind: str) -> KnownPack:
        """Return a pack's row; one whose file is gone or unreadable gets a row too, so that its extents can be told."""
        if path not in self._rows:
            self._rows[path] = found_extents.add_pack(
                self.connection, kind=kind_of(path) or kind, path=path, is_sealed=True, num_bytes=0
            )
        return self._rows[path]

    def _at_its_place(self, ref: ExtentRef, pack: KnownPack) -> Extent:
        return Extent(0, pack.pack_id, ref.kind, ref.path, ref.offset, ref.length, ref.num_rows, ref.digests)

    def _is_whole(self, extent: Extent) -> bool:
        if extent.path not in self._scans:
            return False
        try:
            self._reader.read(extent)
        except (CorruptPackError, StorageError, IncompatibleFormatError):
            return False
        return True

    def _elsewhere(self, kind: str) -> dict[bytes, Extent]:
        """Return every whole message of a kind by its digests; all of them are read, so this is asked only at need."""
        if kind not in self._by_digests:
            self._by_digests[kind] = {extent.digests: extent for extent, _ in self.messages(kind)}
        return self._by_digests[kind]

    def _lose(self, extent: Extent, message: str) -> None:
        self.losses.append(Loss("extent", extent.place, message))
