"""One pack being written: an Arrow IPC file of one kind, by one writer, whose messages are readable before the footer.

1. Magic and schema lie in the file before the first extent; an extent is exactly one IPC message.
2. A name is used once (O_EXCL). At level `host` the file's directory entry is durable before `__init__` returns.
3. A failed write, sync or seal ends the pack for ever: after a failed fsync the kernel may have dropped the bytes, so
   no retry on that descriptor can be believed.
4. It is used by one thread at a time and only by the process that made it; it knows neither sessions nor the index.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from strawflow import faults
from strawflow.errors import AlreadyExistsError, InvalidInputError, StorageError, StrawflowError
from strawflow.ids import Extent, new_id
from strawflow.packs.digests import digest_blocks
from strawflow.packs.probe import Durability
from strawflow.packs.sync import sync_path
from strawflow.records import COMPRESSION, schema_of


def check_batch(batch: pa.RecordBatch, kind: str) -> None:
    """Refuse a record batch that is not of `kind`, is empty, or has nulls where the schema has none.

    Raises:
        InvalidInputError: naming the field.
    """
    schema = schema_of(kind)
    if not batch.schema.equals(schema, check_metadata=True):
        raise InvalidInputError(
            f"the record batch does not have the schema of kind {kind!r}: {_first_difference(batch.schema, schema)}"
        )
    if batch.num_rows == 0:
        raise InvalidInputError(f"a record batch of kind {kind!r} has no rows; leave it out")
    try:
        batch.validate()
    except pa.ArrowInvalid as error:
        raise InvalidInputError(f"a record batch of kind {kind!r} is malformed: {error}") from error
    for field, column in zip(schema, batch.columns, strict=True):
        # Arrow itself does not hold writers to nullable=False.
        if not field.nullable and column.null_count:
            raise InvalidInputError(
                f"field {field.name!r} of kind {kind!r} is required and has {column.null_count} nulls"
            )


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
        self._pieces: list[Any] = []

    def write(self, piece: Any) -> int:
        self._pieces.append(piece)
        self._position += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def take(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)


class PackWriter:
    """Write one pack; see the module for what it guarantees."""

    def __init__(self, root: Path, *, pack_id: str, path: str, kind: str, durability: Durability) -> None:
        """Create `root / path` with magic and schema of `kind`.

        Raises:
            AlreadyExistsError: the name was used before.
            StorageError: the file cannot be created; the name is spent all the same.
        """
        self.pack_id, self.path, self.kind, self.durability = pack_id, path, kind, durability
        self.num_extents = self.num_rows = self.length = 0
        self._place = root / path
        self._pid = os.getpid()
        self._options = pa.ipc.IpcWriteOptions(compression=COMPRESSION[kind])
        self._gather = _Gather()
        self._arrow = pa.ipc.new_file(
            pa.PythonFile(self._gather, mode="w"), schema_of(kind), options=self._options
        )
        self._failure: str | None = None
        self._sealed = False
        self._descriptor = -1
        with self._ended_by_failure("create"):
            self._create(root)

    @property
    def is_open(self) -> bool:
        return self._failure is None and not self._sealed

    def append(self, batch: pa.RecordBatch) -> Extent:
        """Write one record batch as one message and say where it lies; durable only after `sync` or `seal`.

        Raises:
            InvalidInputError: the batch is not of this kind; nothing was written and the pack goes on.
            StorageError: the write failed, and the pack is ended.
        """
        check_batch(batch, self.kind)
        self._require_open()
        with self._ended_by_failure("append to"):
            self._arrow.write_batch(batch)
            message = self._take()
            offset = self.length
            self._put(message)
            faults.at("pack.after_append")
        self.num_extents += 1
        self.num_rows += batch.num_rows
        return Extent(
            extent_id=new_id("ext"),
            pack_id=self.pack_id,
            kind=self.kind,
            path=self.path,
            offset=offset,
            length=len(message),
            num_rows=batch.num_rows,
            digests=digest_blocks(message),
        )

    def sync(self) -> None:
        """Make every append so far durable at this pack's level.

        Raises:
            StorageError: the sync failed, and the pack is ended.
        """
        self._require_open()
        with self._ended_by_failure("sync"):
            if self.durability == "host":
                os.fdatasync(self._descriptor)
            faults.at("pack.after_sync")

    def seal(self) -> None:
        """Write the footer, make the file durable at its level and close it: from now on any Arrow reader reads it.

        Raises:
            StorageError: the footer is torn or not durable; extents synced before are still readable.
        """
        self._require_open()
        with self._ended_by_failure("seal"):
            faults.at("seal.before_footer")
            self._arrow.close()
            self._put(self._take())
            faults.at("seal.after_footer")
            if self.durability == "host":
                os.fsync(self._descriptor)
                sync_path(self._place.parent)
            self._close_descriptor()
        self._sealed = True

    def abandon(self, reason: str) -> None:
        """End the pack without a footer, as the death of its writer would; does nothing to one that has ended."""
        if self.is_open:
            self._failure = reason
            self._close_descriptor()

    def _create(self, root: Path) -> None:
        self._place.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._header = _file_header(self.kind, self._options)
        self._put(self._header)
        if self.durability == "host":
            os.fdatasync(self._descriptor)
            # Every level up to the root: another writer may have made one of them without having synced it yet.
            for directory in self._place.parents:
                sync_path(directory)
                if directory == root:
                    break

    def _take(self) -> bytes:
        # Arrow hands out magic and schema with its first message or its footer; they were written at creation.
        gathered = self._gather.take()
        if self.num_extents > 0:
            return gathered
        if not gathered.startswith(self._header):
            raise StorageError(
                f"{self.path}: pyarrow {pa.__version__} wrote another file header than at creation"
            )
        return gathered[len(self._header) :]

    def _put(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            written = os.pwrite(self._descriptor, view, self.length)
            self.length += written
            view = view[written:]

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

    def _close_descriptor(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    @contextmanager
    def _ended_by_failure(self, doing: str) -> Iterator[None]:
        # BaseException: an interrupt between two pieces of a message leaves the file in no better state than EIO does.
        try:
            yield
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            self._close_quietly()
            if isinstance(error, FileExistsError):
                raise AlreadyExistsError(f"{self.path} exists; the name of a pack is used once") from error
            if isinstance(error, (OSError, pa.ArrowException)) and not isinstance(error, StrawflowError):
                raise StorageError(f"cannot {doing} {self.path}; the pack is ended: {error}") from error
            raise

    def _close_quietly(self) -> None:
        try:
            self._close_descriptor()
        except OSError as error:
            # The pack has failed already and the first failure is the one to tell; this one is kept beside it.
            self._failure = f"{self._failure}; close: {error}"


def _file_header(kind: str, options: pa.ipc.IpcWriteOptions) -> bytes:
    """Return magic and schema message as pyarrow writes them, taken from an empty file made in memory.

    Layout: Arrow columnar format, "IPC File Format": 8 bytes of magic and padding, then an encapsulated message
    (4 bytes of continuation, 4 of metadata length, the metadata; a schema has no body).
    """
    sink = pa.BufferOutputStream()
    pa.ipc.new_file(sink, schema_of(kind), options=options).close()
    empty: bytes = sink.getvalue().to_pybytes()
    return empty[: 16 + int.from_bytes(empty[12:16], "little")]
