"""Reading extents: verified before anything is parsed, from open and sealed packs alike.

1. No row leaves here whose bytes did not match their digests; corruption raises and names file, offset and extent.
2. An opened pack kept from before may show older bytes than another client has written: whatever fails through one is
   read once more through a fresh open before it is an error.
3. Sealed packs may be mapped (columns then point into the file); open packs never are.
4. It is safe for many threads (a forked process makes its own), keeps a bounded number of packs open, and for
   `read_rows` a bounded number of bytes; it knows nothing of pack states or the index.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from strawflow.errors import CorruptPackError, InvalidInputError, StorageError
from strawflow.ids import Extent, RowRange
from strawflow.packs.digests import BLOCK_BYTES, num_blocks
from strawflow.packs.messages import MAGIC, check_extent, check_head, ids_of, parse, schema_length, verify
from strawflow.packs.places import Input, Place, open_place
from strawflow.records import schema_of

MAX_OPEN_PACKS = 64
KEPT_BYTES = 32 * 1024 * 1024
_HEAD_BYTES = 8 * 1024
_RUN_BYTES = 8 * 1024 * 1024
_RUN_GAP_BYTES = 16 * 1024

T = TypeVar("T")


class PackReader:
    """Read extents of the packs under one root."""

    def __init__(
        self,
        root: str | Path | Place,
        *,
        max_open_packs: int = MAX_OPEN_PACKS,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """Read under `root`: a folder, an address, or a place already opened.

        `kept_bytes` bounds the verified extents that `read_rows` keeps.

        Raises:
            ConfigError: the back end of an address is unknown or not installed.
        """
        self._place = open_place(root) if isinstance(root, str | Path) else root
        self._max_open_packs = max_open_packs
        self._lock = threading.Lock()
        self._packs: OrderedDict[str, _OpenedPack] = OrderedDict()
        self._kept = _KeptExtents(kept_bytes)

    @property
    def can_map(self) -> bool:
        """Whether sealed packs are mapped here; where not, `sealed` changes nothing."""
        return self._place.appends

    def read(self, extent: Extent, *, sealed: bool = False) -> pa.RecordBatch:
        """Return the rows of one extent.

        `sealed=True` says that the pack is sealed: it is then mapped and uncompressed columns are not copied.

        Raises:
            CorruptPackError: the bytes are damaged or cut off.
            StorageError: the file is missing or cannot be read.
            IncompatibleFormatError: the pack holds another kind or version than this program reads.
        """

        def rows(pack: _OpenedPack, is_mapped: bool) -> pa.RecordBatch:
            message = pack.bytes_at(extent.offset, extent.length, is_mapped=is_mapped)
            verify(message, extent)
            return parse(message, extent, pack.schema)

        return self._read_twice(extent, rows, sealed=sealed)

    def stored_schema(self, extent: Extent) -> pa.Schema:
        """Return the schema that the extent's pack was written by; raises as `read`."""
        return self._read_twice(
            extent,
            lambda pack, _: schema_of(extent.kind) if pack.schema is None else pack.schema,
            sealed=False,
        )

    def read_many(self, extents: Sequence[Extent], *, sealed: bool = False) -> list[pa.RecordBatch]:
        """Return the rows of each extent, in the given order; neighbours in a file are read in one call.

        Uncompressed columns of neighbours share one buffer of at most 8 MiB, which lives as long as any of them.

        Raises:
            CorruptPackError, StorageError, IncompatibleFormatError: as `read`, for the first extent that fails.
        """
        found: dict[int, pa.RecordBatch] = {}
        for run in _runs(extents):
            batches = self._read_run([extents[place] for place in run], sealed=sealed)
            found.update(zip(run, batches, strict=True))
        return [found[place] for place in range(len(extents))]

    def read_rows(self, rows: RowRange, *, sealed: bool = False) -> pa.RecordBatch:
        """Return a range of an extent's rows; the whole extent is verified, and kept for the next range of it.

        Raises:
            InvalidInputError: the range leaves the extent.
            CorruptPackError, StorageError, IncompatibleFormatError: as `read`.
        """
        extent = rows.extent
        if rows.start < 0 or rows.count < 0 or rows.start + rows.count > extent.num_rows:
            raise InvalidInputError(
                f"rows {rows.start} to {rows.start + rows.count} leave {extent.place}, which has {extent.num_rows} rows",
                **ids_of(extent),
            )
        batch = self._kept.find(extent)
        if batch is None:
            batch = self.read(extent, sealed=sealed)
            self._kept.keep(extent, batch)
        return batch.slice(rows.start, rows.count)

    def read_bytes(self, extent: Extent, start: int, stop: int, *, sealed: bool = False) -> pa.Buffer:
        """Return bytes `start .. stop` of an extent's message, having read and verified the 4 MiB blocks they touch.

        Raises:
            InvalidInputError: they leave the message.
            CorruptPackError, StorageError, IncompatibleFormatError: as `read`.
        """
        if not 0 <= start <= stop <= extent.length:
            raise InvalidInputError(f"bytes {start} to {stop} leave {extent.place}", **ids_of(extent))
        first = start // BLOCK_BYTES
        blocks = num_blocks(stop) - first
        if start == stop:
            return pa.py_buffer(b"")

        def part(pack: _OpenedPack, is_mapped: bool) -> pa.Buffer:
            begin = first * BLOCK_BYTES
            length = min(blocks * BLOCK_BYTES, extent.length - begin)
            found = pack.bytes_at(extent.offset + begin, length, is_mapped=is_mapped)
            verify(found, extent, first_block=first, blocks=blocks)
            return found.slice(start - begin, stop - start)

        return self._read_twice(extent, part, sealed=sealed)

    def close(self) -> None:
        """Let go of every open pack and kept row; rows already returned stay valid, and reading again opens anew."""
        with self._lock:
            self._packs.clear()
        self._kept.clear()

    def _read_twice(self, extent: Extent, read: Callable[[_OpenedPack, bool], T], *, sealed: bool) -> T:
        """Read through the pack kept open, and if that fails through a fresh one, whose word is final."""
        check_extent(extent)
        try:
            return read(self._opened(extent), sealed)
        except (CorruptPackError, OSError):
            self._forget(extent.path)
        try:
            # It copies, since a mapping would show the same pages again.
            return read(self._opened(extent), False)
        except CorruptPackError:
            self._forget(extent.path)
            raise
        except FileNotFoundError as error:
            raise StorageError(
                f"{extent.path} is missing under {self._place}; check that the run's storage is mounted there, "
                "or restore the file",
                **ids_of(extent),
            ) from error
        except OSError as error:
            self._forget(extent.path)
            raise StorageError(f"cannot read {extent.path}: {error}", **ids_of(extent)) from error

    def _read_run(self, run: list[Extent], *, sealed: bool) -> list[pa.RecordBatch]:
        if len(run) == 1:
            return [self.read(run[0], sealed=sealed)]
        begin, end = run[0].offset, run[-1].offset + run[-1].length
        try:
            for extent in run:
                check_extent(extent)
            pack = self._opened(run[-1])
            span = pack.bytes_at(begin, end - begin, is_mapped=sealed)
            batches = []
            for extent in run:
                message = span.slice(min(extent.offset - begin, span.size), extent.length)
                verify(message, extent)
                batches.append(parse(message, extent, pack.schema))
            return batches
        except (CorruptPackError, OSError):
            # One by one, each with its second try, so that the error is that of the extent it belongs to.
            return [self.read(extent, sealed=sealed) for extent in run]

    def _opened(self, extent: Extent) -> _OpenedPack:
        with self._lock:
            pack = self._packs.get(extent.path)
            if pack is not None and pack.serves(extent):
                self._packs.move_to_end(extent.path)
                return pack
        # Not kept, or the extent lies beyond what the kept one has seen. Opened outside the lock: opens can be slow.
        pack = _OpenedPack(self._place.open(extent.path), extent)
        with self._lock:
            self._packs[extent.path] = pack
            self._packs.move_to_end(extent.path)
            while len(self._packs) > self._max_open_packs:
                self._packs.popitem(last=False)
        return pack

    def _forget(self, path: str) -> None:
        with self._lock:
            self._packs.pop(path, None)


class _OpenedPack:
    """One file whose head was found to be of the extent's kind."""

    def __init__(self, file: Input, extent: Extent) -> None:
        self._file, self._kind = file, extent.kind
        head = file.read(0, _HEAD_BYTES)
        length = schema_length(head, extent)
        if len(MAGIC) + length > _HEAD_BYTES:
            head = file.read(0, len(MAGIC) + length)
        stored = check_head(head.slice(len(MAGIC)), extent)
        self.schema = None if stored.equals(schema_of(extent.kind), check_metadata=True) else stored
        """The schema it was written by, where that is not the present one."""

    def serves(self, extent: Extent) -> bool:
        return extent.offset + extent.length <= self._file.size and extent.kind == self._kind

    def bytes_at(self, offset: int, length: int, *, is_mapped: bool) -> pa.Buffer:
        """Return the bytes, or those of them that the file has."""
        return self._file.view(offset, length) if is_mapped else self._file.read(offset, length)


class _KeptExtents:
    """The verified extents used last, bounded by the bytes they hold; one beyond the bound is not kept."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._batches: OrderedDict[Extent, tuple[pa.RecordBatch, int]] = OrderedDict()
        self._bytes = 0

    def find(self, extent: Extent) -> pa.RecordBatch | None:
        with self._lock:
            kept = self._batches.get(extent)
            if kept is None:
                return None
            self._batches.move_to_end(extent)
            return kept[0]

    def keep(self, extent: Extent, batch: pa.RecordBatch) -> None:
        size = batch.get_total_buffer_size()
        with self._lock:
            if size > self._max_bytes or extent in self._batches:
                return
            self._batches[extent] = batch, size
            self._bytes += size
            while self._bytes > self._max_bytes:
                _, (_, dropped) = self._batches.popitem(last=False)
                self._bytes -= dropped

    def clear(self) -> None:
        with self._lock:
            self._batches.clear()
            self._bytes = 0


def _runs(extents: Sequence[Extent]) -> Iterator[list[int]]:
    """Yield the places in `extents` of those that one read covers: neighbours in a file, in the file's order."""
    run: list[int] = []
    for place in sorted(range(len(extents)), key=lambda at: (extents[at].path, extents[at].offset)):
        extent = extents[place]
        if run:
            first, before = extents[run[0]], extents[run[-1]]
            gap = extent.offset - (before.offset + before.length)
            is_near = extent.path == before.path and extent.kind == before.kind and 0 <= gap <= _RUN_GAP_BYTES
            if not is_near or extent.offset + extent.length - first.offset > _RUN_BYTES:
                yield run
                run = []
        run.append(place)
    if run:
        yield run
