"""Reading extents: verified before anything is parsed, from open and sealed packs alike.

1. No row leaves here whose bytes did not match their digests; corruption raises and names file, offset and extent.
2. A descriptor kept from before may show older bytes than another client has written: whatever fails through one is
   read once more through a fresh open before it is an error.
3. Sealed packs may be mapped (columns then point into the file); open packs never are.
4. It is safe for many threads (a forked process makes its own) and keeps a bounded number of descriptors; it knows
   nothing of pack states or the index.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from pathlib import Path, PurePosixPath

import pyarrow as pa

from strawflow.errors import CorruptPackError, InvalidInputError, StorageError
from strawflow.ids import Extent, RowRange
from strawflow.packs.digests import BLOCK_BYTES, first_bad_block
from strawflow.records import check_schema, schema_of

MAX_DESCRIPTORS = 64
_MAGIC = b"ARROW1\0\0"
_MAX_SCHEMA_BYTES = 1024 * 1024


class PackReader:
    """Read extents of the packs under one root."""

    def __init__(self, root: Path, *, max_descriptors: int = MAX_DESCRIPTORS) -> None:
        self._root = root
        self._max_descriptors = max_descriptors
        self._lock = threading.Lock()
        self._packs: OrderedDict[str, _OpenedPack] = OrderedDict()

    def read(self, extent: Extent, *, sealed: bool = False) -> pa.RecordBatch:
        """Return the rows of one extent.

        `sealed=True` says that the pack is sealed: it is then mapped and uncompressed columns are not copied.

        Raises:
            CorruptPackError: the bytes are damaged or cut off.
            StorageError: the file is missing or cannot be read.
            IncompatibleFormatError: the pack holds another kind or version than this program reads.
        """
        _check_place(extent)
        try:
            return self._read_through(self._opened(extent), extent, sealed=sealed)
        except (CorruptPackError, OSError):
            # Only a fresh open decides; and it copies, since a mapping would show the same pages again.
            self._forget(extent.path)
        try:
            return self._read_through(self._opened(extent), extent, sealed=False)
        except CorruptPackError:
            self._forget(extent.path)
            raise
        except FileNotFoundError as error:
            raise StorageError(
                f"{extent.path} is missing under {self._root}; check that the run's storage is mounted there, "
                "or restore the file",
                extent_id=extent.extent_id,
                pack_id=extent.pack_id,
            ) from error
        except OSError as error:
            self._forget(extent.path)
            raise StorageError(f"cannot read {extent.path}: {error}", extent_id=extent.extent_id) from error

    def read_rows(self, rows: RowRange, *, sealed: bool = False) -> pa.RecordBatch:
        """Return a range of an extent's rows; the whole extent is verified.

        Raises:
            InvalidInputError: the range leaves the extent.
        """
        if rows.start < 0 or rows.count < 0 or rows.start + rows.count > rows.extent.num_rows:
            raise InvalidInputError(
                f"rows {rows.start} to {rows.start + rows.count} leave extent {rows.extent.extent_id} "
                f"of {rows.extent.num_rows} rows"
            )
        return self.read(rows.extent, sealed=sealed).slice(rows.start, rows.count)

    def close(self) -> None:
        """Let go of every descriptor; rows already returned stay valid, and reading again opens anew."""
        with self._lock:
            self._packs.clear()

    def _opened(self, extent: Extent) -> _OpenedPack:
        with self._lock:
            pack = self._packs.get(extent.path)
            if pack is not None and extent.offset + extent.length <= pack.size:
                self._packs.move_to_end(extent.path)
                return pack
        # Not kept, or the extent lies beyond what the kept one has seen. Opened outside the lock: opens can be slow.
        pack = _OpenedPack(self._root / extent.path, extent)
        with self._lock:
            self._packs[extent.path] = pack
            self._packs.move_to_end(extent.path)
            while len(self._packs) > self._max_descriptors:
                self._packs.popitem(last=False)
        return pack

    def _forget(self, path: str) -> None:
        with self._lock:
            self._packs.pop(path, None)

    def _read_through(self, pack: _OpenedPack, extent: Extent, *, sealed: bool) -> pa.RecordBatch:
        message = pack.mapped(extent) if sealed else pack.copied(extent)
        bad = first_bad_block(memoryview(message), extent.digests)
        if bad is not None:
            raise _corrupt(
                extent,
                f"does not match its checksum in the 4 MiB from byte {extent.offset + bad * BLOCK_BYTES}",
            )
        return _parse(message, extent)


class _OpenedPack:
    """One descriptor and what it has seen; closed when the last reader lets go of it."""

    def __init__(self, place: Path, extent: Extent) -> None:
        self._descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        self._map: mmap.mmap | None = None
        self.size = os.fstat(self._descriptor).st_size
        self._check_header(extent)

    def __del__(self) -> None:
        # The reference count is what tells that no thread reads through it; a mapping outlives its descriptor.
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def copied(self, extent: Extent) -> pa.Buffer:
        """Return the extent's bytes in memory of our own."""
        target = pa.allocate_buffer(extent.length)
        view = memoryview(target)
        done = 0
        while done < extent.length:
            count = os.preadv(self._descriptor, [view[done:]], extent.offset + done)
            if count == 0:
                raise _cut_off(extent, extent.offset + done)
            done += count
        return target

    def mapped(self, extent: Extent) -> pa.Buffer:
        """Return the extent's bytes where the kernel has them."""
        # Touching a mapped page beyond the end of the file would kill the process, so ask each time.
        size = os.fstat(self._descriptor).st_size
        if extent.offset + extent.length > min(size, self.size):
            raise _cut_off(extent, min(size, self.size))
        if self._map is None:
            self._map = mmap.mmap(self._descriptor, self.size, prot=mmap.PROT_READ)
        return pa.py_buffer(memoryview(self._map)[extent.offset : extent.offset + extent.length])

    def _check_header(self, extent: Extent) -> None:
        head = os.pread(self._descriptor, 16, 0)
        length = int.from_bytes(head[12:16], "little")
        if len(head) < 16 or not head.startswith(_MAGIC) or length > _MAX_SCHEMA_BYTES:
            raise CorruptPackError(f"{extent.path} does not begin as an Arrow file", pack_id=extent.pack_id)
        message = os.pread(self._descriptor, 8 + length, 8)
        try:
            check_schema(pa.ipc.read_schema(pa.py_buffer(message)), extent.kind, path=extent.path)
        except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: text that is no UTF-8
            raise CorruptPackError(
                f"the schema at the head of {extent.path} is damaged: {error}", pack_id=extent.pack_id
            ) from error


def _check_place(extent: Extent) -> None:
    path = PurePosixPath(extent.path)
    if path.is_absolute() or ".." in path.parts:
        raise InvalidInputError(f"extent {extent.extent_id} names {extent.path}, which is not inside the run")
    if extent.offset < len(_MAGIC) or extent.length < 1:
        raise InvalidInputError(
            f"extent {extent.extent_id} has offset {extent.offset} and length {extent.length}"
        )


def _parse(message: pa.Buffer, extent: Extent) -> pa.RecordBatch:
    try:
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(message), schema_of(extent.kind))
    except (pa.ArrowException, OSError) as error:
        raise _corrupt(
            extent, f"matches its checksum but is no record batch of kind {extent.kind!r}: {error}"
        ) from error
    if batch.num_rows != extent.num_rows:
        raise _corrupt(extent, f"holds {batch.num_rows} rows, expected {extent.num_rows}")
    return batch


def _corrupt(extent: Extent, what: str) -> CorruptPackError:
    return CorruptPackError(
        f"{extent.path}: the extent at byte {extent.offset}, {extent.length} bytes long, {what}; restore the file "
        "from a copy",
        extent_id=extent.extent_id,
        pack_id=extent.pack_id,
    )


def _cut_off(extent: Extent, end: int) -> CorruptPackError:
    return _corrupt(extent, f"is cut off: the file ends at byte {end}")
