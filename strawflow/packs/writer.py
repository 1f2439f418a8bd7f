"""One pack being written: an Arrow IPC file of one kind, by one writer, whose messages are readable before the footer.

1. Magic and schema lie in the file before the first extent; an extent is exactly one IPC message.
2. A name is used once. Where the place appends, at level `host`, its entry is durable before `__init__` returns; in an
   object store nothing is there before `seal` returns.
3. A failed write, sync or seal ends the pack for ever: after a failed fsync the kernel may have dropped the bytes, so
   no retry on that descriptor can be believed.
4. Arrow's own buffers go to the file: a large column is never copied on the way.
5. It is used by one thread at a time and only by the process that made it; it knows neither sessions nor the index.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import NoReturn

import pyarrow as pa

from strawflow import faults
from strawflow.errors import AlreadyExistsError, InvalidInputError, StorageError, StrawflowError
from strawflow.ids import Extent
from strawflow.packs.digests import digest_pieces
from strawflow.packs.places import Piece, Place, open_place
from strawflow.packs.probe import Durability
from strawflow.records import COMPRESSION, schema_of

# What is smaller is gathered by Arrow, so that a small message of a hundred buffers is one piece and one call.
_GATHERED_BYTES = 256 * 1024


def check_batch(batch: pa.RecordBatch, kind: str, schema: pa.Schema | None = None) -> None:
    """Refuse a record batch that is not of `kind`, is empty, or has nulls where the schema has none.

    `schema` is that of an earlier version; None: the present one.

    Raises:
        InvalidInputError: naming the field.
    """
    required = _present_places(kind) if schema is None else _required_places(schema)
    schema = schema_of(kind) if schema is None else schema
    if not batch.schema.equals(schema, check_metadata=True):
        raise InvalidInputError(
            f"the record batch does not have the schema of kind {kind!r}: {_first_difference(batch.schema, schema)}"
        )
    if batch.num_rows == 0:
        raise InvalidInputError(f"a record batch of kind {kind!r} has no rows; leave it out")
    try:
        # In full: only that sees 32-bit offsets that wrapped and came up again. It looks at offsets and text, not at numbers.
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise InvalidInputError(f"a record batch of kind {kind!r} is malformed: {error}") from error
    # Arrow itself does not hold writers to nullable=False. All columns in one call: each alone costs as much.
    if batch.select(required).drop_null().num_rows == batch.num_rows:
        return
    for place in required:
        if batch.column(place).null_count:
            raise InvalidInputError(
                f"field {schema.names[place]!r} of kind {kind!r} is required and has "
                f"{batch.column(place).null_count} nulls"
            )


@cache
def _present_places(kind: str) -> list[int]:
    return _required_places(schema_of(kind))


def _required_places(schema: pa.Schema) -> list[int]:
    return [place for place, field in enumerate(schema) if not field.nullable]


def _first_difference(found: pa.Schema, expected: pa.Schema) -> str:
    if found.names != expected.names:
        return f"fields are {found.names}, expected {expected.names}"
    for have, want in zip(found, expected, strict=True):
        if not have.equals(want):
            return f"field {want.name!r} is {have}, expected {want}"
    return f"metadata is {found.metadata}, expected {expected.metadata}"


class _Gather:
    """The sink given to Arrow: it keeps the pieces of one message until the writer puts them down in one write."""

    closed = False

    def __init__(self) -> None:
        self._position = 0
        self._pieces: list[Piece] = []

    def write(self, piece: Piece) -> int:
        self._pieces.append(piece)
        self._position += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces


class PackWriter:
    """Write one pack; see the module for what it guarantees."""

    def __init__(
        self,
        root: str | Path | Place,
        *,
        pack_id: int,
        path: str,
        kind: str,
        durability: Durability,
        schema: pa.Schema | None = None,
    ) -> None:
        """Create `path` under `root` (a folder, an address, or a place already opened) for rows of `kind`.

        `schema` is that of an earlier version, for copies of its rows; None: the present one.

        Raises:
            AlreadyExistsError: the name was used before.
            InvalidInputError: the place cannot give that level.
            StorageError: the file cannot be created; the name is spent all the same.
        """
        self.pack_id, self.path, self.kind = pack_id, path, kind
        self.num_extents = self.num_rows = 0
        self._pid = os.getpid()
        # Arrow's threads cost more than they save on the small messages of a running loop.
        self._options = pa.ipc.IpcWriteOptions(compression=COMPRESSION[kind], use_threads=False)
        self._gather = _Gather()
        self._stream = pa.BufferedOutputStream(pa.PythonFile(self._gather, mode="w"), _GATHERED_BYTES)
        self._earlier = schema
        schema = schema_of(kind) if schema is None else schema
        self._arrow = pa.ipc.new_file(self._stream, schema, options=self._options)
        self._header = _file_header(schema, self._options)
        self._failure: str | None = None
        self._sealed = False
        try:
            place = open_place(root) if isinstance(root, str | Path) else root
            self._output = place.create(path, self._header, durability=durability)
        except BaseException as error:
            self._end("create", error)
        self.length = len(self._header)

    @property
    def is_open(self) -> bool:
        return self._failure is None and not self._sealed

    def append(self, batch: pa.RecordBatch, *, is_checked: bool = False) -> Extent:
        """Write one record batch as one message and say where it lies; durable only after `sync` or `seal`.

        `is_checked` says that the batch has passed `check_batch` for this kind.

        Raises:
            InvalidInputError: the batch is not of this kind; nothing was written and the pack goes on.
            StorageError: the write failed, and the pack is ended.
        """
        if not is_checked:
            check_batch(batch, self.kind, self._earlier)
        self._require_open()
        try:
            self._arrow.write_batch(batch)
            pieces = self._take()
            offset = self.length
            self._put(pieces)
            digests = digest_pieces(pieces)
            faults.at("pack.after_append")
        except BaseException as error:
            self._end("append to", error)
        self.num_extents += 1
        self.num_rows += batch.num_rows
        return Extent(
            extent_id=0,
            pack_id=self.pack_id,
            kind=self.kind,
            path=self.path,
            offset=offset,
            length=self.length - offset,
            num_rows=batch.num_rows,
            digests=digests,
        )

    def sync(self) -> None:
        """Make every append so far durable at this pack's level; for places that append.

        Raises:
            StorageError: the sync failed, and the pack is ended.
        """
        self._require_open()
        try:
            self._output.sync()
            faults.at("pack.after_sync")
        except BaseException as error:
            self._end("sync", error)

    def seal(self) -> None:
        """Write the footer, make the file durable at its level and close it: from now on any Arrow reader reads it.

        Raises:
            StorageError: the footer is torn or not durable; extents synced before are still readable.
        """
        self._require_open()
        try:
            faults.at("seal.before_footer")
            self._arrow.close()
            self._put(self._take())
            faults.at("seal.after_footer")
            self._output.finish()
        except BaseException as error:
            self._end("seal", error)
        self._sealed = True

    def abandon(self, reason: str) -> None:
        """End the pack without a footer, as the death of its writer would; does nothing to one that has ended."""
        if self.is_open:
            self._failure = reason
            self._output.close()

    def _take(self) -> list[Piece]:
        self._stream.flush()
        pieces = self._gather.take()
        # Arrow hands out magic and schema with its first message or its footer; they were written at creation.
        if self.length == len(self._header):
            self._drop_header(pieces)
        return pieces

    def _drop_header(self, pieces: list[Piece]) -> None:
        size = len(self._header)
        if bytes(pieces[0][:size]) != self._header:
            raise StorageError(
                f"{self.path}: pyarrow {pa.__version__} wrote another file header than at creation"
            )
        pieces[0] = pieces[0][size:]

    def _put(self, pieces: list[Piece]) -> None:
        self._output.write(pieces)
        self.length += sum(map(len, pieces))

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise StorageError(
                f"{self.path} belongs to process {self._pid}; a forked process must open its own pack"
            )
        if self._failure is not None:
            raise StorageError(
                f"{self.path} was ended by an earlier failure; append to a new pack", cause=self._failure
            )
        if self._sealed:
            raise StorageError(f"{self.path} is sealed; append to a new pack")

    def _end(self, doing: str, error: BaseException) -> NoReturn:
        """End the pack and raise what its caller is to see; an interrupt leaves the file in no better state than EIO."""
        self._failure = f"{type(error).__name__}: {error}"
        self._close_quietly()
        if isinstance(error, FileExistsError):
            raise AlreadyExistsError(f"{self.path} exists; the name of a pack is used once") from error
        if isinstance(error, (OSError, pa.ArrowException)) and not isinstance(error, StrawflowError):
            raise StorageError(f"cannot {doing} {self.path}; the pack is ended: {error}") from error
        raise error

    def _close_quietly(self) -> None:
        if not hasattr(self, "_output"):
            return
        try:
            self._output.close()
        except OSError as error:
            # The pack has failed already and the first failure is the one to tell; this one is kept beside it.
            self._failure = f"{self._failure}; close: {error}"


def _file_header(schema: pa.Schema, options: pa.ipc.IpcWriteOptions) -> bytes:
    """Return magic and schema message as pyarrow writes them, taken from an empty file made in memory.

    Layout: Arrow columnar format, "IPC File Format": 8 bytes of magic and padding, then an encapsulated message
    (4 bytes of continuation, 4 of metadata length, the metadata; a schema has no body).
    """
    sink = pa.BufferOutputStream()
    pa.ipc.new_file(sink, schema, options=options).close()
    empty: bytes = sink.getvalue().to_pybytes()
    return empty[: 16 + int.from_bytes(empty[12:16], "little")]
