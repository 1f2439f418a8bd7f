"""Reading a pack file without an index: which messages lie in it, and which of them are whole.

1. A sealed pack's messages are those its footer lists; without a footer that lists all of them they are followed from the
   head, each to the next. Where one cannot be followed the next whole one is looked for behind it.
2. Nothing here vouches for values: without an index only the form of a message can be checked. Checksums are computed for
   whoever has others to compare them with.
3. One message is in memory at a time; the file is only read.

Layout: Arrow columnar format, "Encapsulated message format" and "IPC File Format"; the two flatbuffer tables that are read
here are Message and Footer of format/Message.fbs and format/File.fbs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from strawflow.errors import CorruptPackError, IncompatibleFormatError, StorageError
from strawflow.ids import Extent
from strawflow.packs.digests import digest_blocks
from strawflow.packs.messages import MAGIC, check_head, schema_length
from strawflow.packs.places import Input, Place
from strawflow.records import SCHEMAS, as_present, schema_of

FOLDER = "packs"
_CONTINUATION = 0xFFFFFFFF
_MAX_METADATA_BYTES = 64 * 1024 * 1024
_TAIL = b"ARROW1"
_MARK = b"\xff" * 4
_SEARCH_BYTES = 4 * 1024 * 1024
_CUT_OFF = "is cut off"
_END_BYTES = 16
"""At most so many lie between the last message and the footer: the mark at the end, and what aligns it."""


@dataclass(frozen=True)
class DamagedMessage:
    """Bytes that should be a message and are none."""

    path: str
    offset: int
    length: int
    """0: not known, the rest of the file cannot be followed."""
    reason: str
    is_torn: bool = False
    """Whether it is what a kill amid an append leaves: a beginning, and nothing behind it."""


@dataclass
class PackScan:
    """One pack file; `messages` reads it."""

    path: str
    kind: str
    size: int
    is_sealed: bool
    """Whether it ends with a footer that can be read."""
    damaged: list[DamagedMessage] = field(default_factory=list)
    """What `messages` has met so far."""
    num_messages: int = 0
    num_rows: int = 0
    _place: Place | None = None
    _start: int = 0
    _blocks: list[tuple[int, int]] | None = None
    _schema: pa.Schema | None = None

    def messages(
        self, *, passing: Callable[[int], bool] = lambda offset: False
    ) -> Iterator[tuple[Extent, pa.RecordBatch]]:
        """Yield the whole messages with their rows, in the order of the file; those `passing` says are not read."""
        file = self._open()  # kept open no longer than it is read: a run may have very many packs
        for offset, length in self._places(file):
            if passing(offset):
                continue
            try:
                found = self._read(file, offset, length)
            except CorruptPackError as error:
                self.damaged.append(DamagedMessage(self.path, offset, length, error.message))
                continue
            self.num_messages += 1
            self.num_rows += found[1].num_rows
            yield found

    def places(self) -> list[tuple[int, int]]:
        """Return (offset, length) of every message, whole or not, as far as they can be followed."""
        return list(self._places(self._open()))

    def _open(self) -> Input:
        assert self._place is not None
        try:
            return self._place.open(self.path)
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error}") from error

    def _places(self, file: Input) -> Iterator[tuple[int, int]]:
        if self._blocks is not None:
            yield from self._blocks
            return
        offset = self._start
        while offset < self.size:
            length, reason = self._follow(file, offset)
            if length and (self._leads_on(file, offset + length) or self._is_whole(file, offset)):
                yield offset, length
                offset += length
                continue
            behind = self._next_whole(file, offset + 8)
            if reason or behind is not None:
                is_torn = behind is None and self._is_torn(file, offset, reason)
                self.damaged.append(DamagedMessage(self.path, offset, 0, reason or "is no message", is_torn))
            if behind is None:
                return
            offset = behind

    def _leads_on(self, file: Input, offset: int) -> bool:
        """Tell whether a message begins here, or the file ends: else the length that led here may be the damage."""
        return _MARK.startswith(bytes(file.read(offset, len(_MARK)))) if offset < self.size else True

    def _next_whole(self, file: Input, offset: int) -> int | None:
        """Return where the next whole message begins; None when nothing behind `offset` is one."""
        for start in range(offset, self.size, _SEARCH_BYTES):
            piece = bytes(file.read(start, min(_SEARCH_BYTES, self.size - start)))
            at = piece.find(_MARK)
            while at >= 0:
                if at % 8 == 0 and self._is_whole(file, start + at):
                    return start + at
                at = piece.find(_MARK, at + 1)
        return None

    def _is_whole(self, file: Input, offset: int) -> bool:
        length, _ = self._follow(file, offset)
        try:
            return length > 0 and self._read(file, offset, length)[0].num_rows > 0
        except CorruptPackError:
            return False

    def _is_torn(self, file: Input, offset: int, reason: str) -> bool:
        # After a power loss blocks that were never written read as zeros.
        return reason == _CUT_OFF or not bytes(file.read(offset, self.size - offset)).strip(b"\0")

    def _follow(self, file: Input, offset: int) -> tuple[int, str]:
        """Return the length of the message here, or 0 and why it cannot be told (nothing: it is the end)."""
        head = bytes(file.read(offset, 8))
        if len(head) < 8:
            return 0, _CUT_OFF
        continuation, size = struct.unpack("<Ii", head)
        if continuation == _CONTINUATION and size == 0:
            return 0, ""  # the end of the messages; a footer may follow, whole or torn
        if continuation != _CONTINUATION or not 0 < size <= _MAX_METADATA_BYTES:
            return 0, "is no message"
        metadata = bytes(file.read(offset + 8, size))
        try:
            body = _field(metadata, _table(metadata), 3)
            body_length = 0 if body is None else int(struct.unpack_from("<q", metadata, body)[0])
        except struct.error:
            return 0, "is cut off or damaged in its head"
        length = 8 + size + body_length
        if body_length < 0 or offset + length > self.size:
            return 0, _CUT_OFF
        return length, ""

    def _read(self, file: Input, offset: int, length: int) -> tuple[Extent, pa.RecordBatch]:
        message = file.read(offset, length)
        if message.size < length:
            raise CorruptPackError("is cut off")
        try:
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(message), self._schema)
            # Damaged offsets would be followed out of the message by whoever reads the values.
            batch.validate(full=True)
            batch = as_present(batch, self.kind)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise CorruptPackError(f"is no record batch of kind {self.kind!r}: {error}") from error
        if batch.num_rows == 0:
            raise CorruptPackError("has no rows")
        digests = digest_blocks(memoryview(message))
        return Extent(0, 0, self.kind, self.path, offset, length, batch.num_rows, digests), batch


def list_files(place: Place) -> dict[str, int]:
    """Return the size of every file where a run's packs lie, by path.

    Raises:
        StorageError: a folder cannot be listed; what is in it would pass for missing.
    """
    try:
        return place.sizes(FOLDER)
    except OSError as error:
        raise StorageError(f"the packs cannot be listed: {error}") from error


def list_packs(place: Place) -> dict[str, int]:
    """Return the size of every pack file of a run, by path.

    Raises:
        StorageError: a folder cannot be listed.
    """
    return {
        path: size
        for path, size in sorted(list_files(place).items())
        if path.endswith(".arrow") and kind_of(path) in SCHEMAS
    }


def kind_of(path: str) -> str:
    """Return the kind that a pack's place says it has."""
    parts = path.split("/")
    return parts[1] if len(parts) == 3 and parts[0] == FOLDER else ""


def open_scan(place: Place, path: str) -> PackScan:
    """Open a pack for scanning.

    Raises:
        CorruptPackError: its head is damaged, so that no reader could use it.
        IncompatibleFormatError: it holds another version than this program reads.
        StorageError: it cannot be read.
    """
    kind = kind_of(path)
    nowhere = Extent(0, 0, kind, path, len(MAGIC), 1, 0, b"")
    try:
        file = place.open(path)
        start = len(MAGIC) + schema_length(file.read(0, 16), nowhere)
        schema = check_head(file.read(len(MAGIC), start - len(MAGIC)), nowhere)
        blocks = _footer_blocks(file, start)
    except (CorruptPackError, IncompatibleFormatError):
        raise
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error}") from error
    return PackScan(
        path,
        kind,
        file.size,
        is_sealed=blocks is not None,
        _place=place,
        _start=start,
        _blocks=blocks,
        _schema=schema,
    )


def is_torn_head(place: Place, path: str) -> bool:
    """Tell whether a pack is no more than the beginning of a head: its writer was killed before anything lay in it."""
    head = MAGIC + bytes(schema_of(kind_of(path)).serialize())
    file = place.open(path)
    return file.size < len(head) and head.startswith(bytes(file.read(0, file.size)).rstrip(b"\0"))


def _footer_blocks(file: Input, start: int) -> list[tuple[int, int]] | None:
    """Return (offset, length) of the messages that the footer lists; None without one that lists all from `start` on."""
    tail = bytes(file.read(max(0, file.size - 10), 10))
    if not tail.endswith(_TAIL) or len(tail) < 10:
        return None
    size = int.from_bytes(tail[:4], "little")
    begin = file.size - 10 - size
    if begin < len(MAGIC):
        return None
    footer = bytes(file.read(begin, size))
    try:
        vector = _field(footer, _table(footer), 3)
        if vector is None:
            return [] if begin - start <= _END_BYTES else None
        vector += int(struct.unpack_from("<I", footer, vector)[0])
        count = int(struct.unpack_from("<I", footer, vector)[0])
        blocks = [struct.unpack_from("<qi4xq", footer, vector + 4 + 24 * at) for at in range(count)]
    except struct.error:
        return None
    end = start
    for offset, head, body in blocks:
        if offset != end or head <= 0 or body < 0:
            return None
        end = offset + head + body
    return (
        [(offset, head + body) for offset, head, body in blocks] if 0 <= begin - end <= _END_BYTES else None
    )


def _table(buffer: bytes) -> int:
    """Return where the root table of a flatbuffer begins."""
    return int(struct.unpack_from("<I", buffer, 0)[0])


def _field(buffer: bytes, table: int, slot: int) -> int | None:
    """Return where a table's field lies; None when it is absent."""
    vtable = table - int(struct.unpack_from("<i", buffer, table)[0])
    if vtable < 0 or 4 + 2 * slot >= int(struct.unpack_from("<H", buffer, vtable)[0]):
        return None
    at = int(struct.unpack_from("<H", buffer, vtable + 4 + 2 * slot)[0])
    return table + at if at else None
