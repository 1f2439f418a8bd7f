"""Backing the index up while the run goes on: a folder of Arrow files that any dialect is restored from.

RUN/backups/<UTC time>-<random>/
    <table>.arrow   the rows of one table, an ordinary Arrow IPC file
    manifest.json   run, format, index revision, dialect, incarnation, time; rows, bytes and xxh3-128 of every file

1. All files show one point in time; workers are neither stopped nor waited for.
2. A folder of that name is complete and durable: it was written under a hidden name, synced and renamed. A kill leaves a
   hidden folder, which the next backup removes; a failure leaves nothing.
3. A single changed byte in any file is found before anything is restored from it.
4. Packs, weights and checkpoints are not in it: they are immutable files, copied by whatever copies the run's folder.

What becomes of a backup is flow.restore's.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

import strawflow
from strawflow import clock
from strawflow.errors import (
    AlreadyExistsError,
    CorruptPackError,
    IncompatibleFormatError,
    InvalidInputError,
    NotFoundError,
    StorageError,
    StrawflowError,
)
from strawflow.flow.run import Run, identity_of
from strawflow.index import dump, events, meta
from strawflow.index.engine import REVISION
from strawflow.packs.sync import sync_path

FORMAT = 1
FOLDER = "backups"
MANIFEST = "manifest.json"

_PARTIAL = ".partial-"
_NAME = re.compile(r"\d{8}T\d{6}\.\d{6}Z-[0-9a-f]{8}")
_READ_BYTES = 1024 * 1024


@dataclass(frozen=True)
class StoredTable:
    """One file of a backup."""

    table: str
    num_rows: int
    num_bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """What a backup says of itself."""

    run: str
    """Name of the run's folder, for people."""
    program: str
    """Version of strawflow that wrote it."""
    revision: str
    """Of the index: only a program of the same one restores it."""
    dialect: str
    incarnation: int
    created_at: str
    tables: tuple[StoredTable, ...]
    format: int = FORMAT
    run_id: str = ""
    """Which run it is of (flow.run.identity_of)."""

    @property
    def num_rows(self) -> int:
        return sum(table.num_rows for table in self.tables)

    @property
    def num_bytes(self) -> int:
        return sum(table.num_bytes for table in self.tables)


@dataclass(frozen=True)
class Backup:
    """A finished backup, and the older ones that were removed for it."""

    folder: Path
    manifest: Manifest
    removed: tuple[Path, ...] = ()


def backup(run: Run, *, to: Path | None = None, keep: int | None = None) -> Backup:
    """Write a backup of the index into `to`, or a new folder of RUN/backups; workers may go on meanwhile.

    With `keep` only the newest so many of RUN/backups are left afterwards.

    Raises:
        InvalidInputError: `keep` together with `to`, or below 1.
        NotFoundError: the folder that is to hold `to` does not exist.
        AlreadyExistsError: `to` exists and is not empty.
        StorageError: a file could not be written, or the index did not answer; nothing is left behind.
    """
    if keep is not None and (keep < 1 or to is not None):
        raise InvalidInputError(
            "--keep is at least 1 and concerns the backups inside the run: it does not go with --to"
        )
    folder = run.root / FOLDER / _new_name() if to is None else to.absolute()
    with _told_as_storage_error(folder):
        _make_room(folder, inside_run=to is None)
        with partial_folder(folder.parent) as partial:
            manifest = _write(run, partial)
            sync_path(partial)
            partial.rename(folder)
        for changed in (folder.parent, folder.parent.parent):
            sync_path(changed)
    if not run.index.is_read_only:
        with run.index.begin() as connection:  # crash here: a good backup without its event
            events.record(connection, "index.backed_up", incarnation=manifest.incarnation, folder=str(folder))
    if keep is None:
        return Backup(folder, manifest)
    return Backup(folder, manifest, _remove_oldest(run.root, keep=keep, newest=folder))


def backups_of(root: Path) -> list[Path]:
    """Return the finished backups inside a run, the oldest first."""
    found = (path.parent for path in (root / FOLDER).glob(f"*/{MANIFEST}"))
    return sorted(folder for folder in found if _NAME.fullmatch(folder.name))


def find_backup(root: Path, given: str) -> Path:
    """Return the folder of a backup: a path to one, or the name of one of RUN/backups or its number, 1 being the oldest.

    Raises:
        NotFoundError: it is none of them; the message lists what is there.
    """
    there = backups_of(root)
    if given.isdecimal() and 1 <= int(given) <= len(there):
        return there[int(given) - 1]
    for folder in (Path(given), root / FOLDER / given):
        if (folder / MANIFEST).exists():
            return folder.absolute()
    listed = ", ".join(f"{number}: {folder.name}" for number, folder in enumerate(there, start=1))
    raise NotFoundError(
        f"{given!r} is no backup: it is no folder with a {MANIFEST} and not among those of {root / FOLDER}, which has "
        f"{listed or 'none'}"
    )


def read_manifest(folder: Path) -> Manifest:
    """Return what a backup says of itself, its own checksum verified.

    Raises:
        NotFoundError: the folder holds no backup.
        CorruptPackError: the manifest was changed.
        IncompatibleFormatError: another program's format or index revision.
    """
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{folder} is no backup: it has no {MANIFEST}") from None
    try:
        content: dict[str, Any] = json.loads(raw)["content"]
        is_whole = raw == rendered(content)
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise CorruptPackError(f"{path} does not match its checksum; use another backup")
    if content["format"] != FORMAT:
        raise IncompatibleFormatError(
            f"{folder} is a backup of format {content['format']}, this program reads {FORMAT}; "
            f"restore it with strawflow {content['program']}"
        )
    if content["revision"] != REVISION:
        raise IncompatibleFormatError(
            f"{folder} holds an index of revision {content['revision']}, this program works with {REVISION}; restore it "
            f"with strawflow {content['program']}, then run `strawflow index upgrade` with the newer of the two"
        )
    tables = tuple(StoredTable(**table) for table in content["tables"])
    return Manifest(**{**content, "tables": tables})


def verify(folder: Path, manifest: Manifest) -> None:
    """Read every file of a backup against its checksum.

    Raises:
        CorruptPackError: a file is missing, shorter, longer or changed; the message names it.
        IncompatibleFormatError: a file holds other columns than this program's table.
    """
    for stored in manifest.tables:
        path = table_path(folder, stored.table)
        try:
            num_bytes, digest = _digest_of(path)
        except FileNotFoundError:
            raise CorruptPackError(f"{path} is missing; use another backup") from None
        if (num_bytes, digest) != (stored.num_bytes, stored.xxh3_128):
            raise CorruptPackError(
                f"{path} does not match its checksum; use another backup",
                num_bytes=num_bytes,
                expected_bytes=stored.num_bytes,
            )
    if [stored.table for stored in manifest.tables] != dump.table_names():
        raise IncompatibleFormatError(f"{folder} does not hold the tables of this program's index")
    for name in dump.table_names():
        with _opened(table_path(folder, name)) as file:
            if not file.schema.equals(dump.schema_of(name)):
                raise IncompatibleFormatError(
                    f"{table_path(folder, name)} does not hold the columns of this program's table {name}"
                )


def table_batches(folder: Path, name: str) -> Iterator[pa.RecordBatch]:
    """Yield the stored rows of a table, a chunk at a time."""
    with _opened(table_path(folder, name)) as file:
        for number in range(file.num_record_batches):
            yield file.get_batch(number)


def table_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.arrow"


@contextmanager
def partial_folder(parent: Path) -> Iterator[Path]:
    """Give a hidden folder that is gone afterwards unless it was renamed; removes what killed processes left of theirs.

    A lock, which the kernel drops with the process, tells a folder in the making from one that was left.
    """
    for left in parent.glob(f"{_PARTIAL}*"):
        _remove_if_left(left)
    folder = parent / f"{_PARTIAL}{secrets.token_hex(6)}"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Where folders cannot be locked, nobody can tell that one was left either: it stays.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        if folder.exists():
            shutil.rmtree(folder)
        os.close(descriptor)


def _remove_if_left(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # in the making, or nobody can tell
        pass
    else:
        _remove(folder)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a folder, under a hidden name first: at no instant does a part of it pass for the whole."""
    hidden = folder.with_name(f"{_PARTIAL}{secrets.token_hex(6)}")
    try:
        folder.rename(hidden)
    except FileNotFoundError:  # another one was faster
        return
    shutil.rmtree(hidden)


def _new_name() -> str:
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{secrets.token_hex(4)}"


def _make_room(folder: Path, *, inside_run: bool) -> None:
    if inside_run:
        folder.parent.mkdir(exist_ok=True)
    elif not folder.parent.is_dir():
        raise NotFoundError(
            f"{folder.parent} does not exist; make it first, the backup's own folder is made in it"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AlreadyExistsError(f"{folder} exists; a backup is written into a new or empty folder")


def _write(run: Run, folder: Path) -> Manifest:
    created_at = clock.wall_time()
    with dump.snapshot(run.index) as connection:
        found = dump.revision(connection)
        if found != REVISION:
            raise IncompatibleFormatError(
                f"the index is at revision {found}, this program needs {REVISION}; run `strawflow index upgrade`"
            )
        incarnation = meta.incarnation(connection)
        tables = tuple(
            _write_table(table_path(folder, name), name, dump.rows_of(connection, name))
            for name in dump.table_names()
        )
    manifest = Manifest(
        run=run.name,
        program=strawflow.__version__,
        revision=REVISION,
        dialect=run.index.dialect,
        incarnation=incarnation,
        created_at=created_at,
        tables=tables,
        run_id=identity_of(run.root),
    )
    with (folder / MANIFEST).open("xb") as sink:
        sink.write(rendered(asdict(manifest)))
        sink.flush()
        os.fsync(sink.fileno())
    return manifest


def _write_table(path: Path, name: str, batches: Iterable[pa.RecordBatch]) -> StoredTable:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    num_rows = 0
    with path.open("xb") as file:
        sink = _CountedSink(file)
        with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), dump.schema_of(name), options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)
                num_rows += batch.num_rows
        file.flush()
        os.fsync(file.fileno())
    return StoredTable(name, num_rows, sink.num_bytes, sink.digest.hexdigest())


class _CountedSink:
    """The sink given to Arrow, which writes a file from front to back: counts and digests what passes."""

    closed = False

    def __init__(self, file: Any) -> None:
        self._file = file
        self.num_bytes = 0
        self.digest = xxhash.xxh3_128()

    def write(self, piece: Any) -> int:
        self._file.write(piece)
        self.digest.update(piece)
        self.num_bytes += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def rendered(content: dict[str, Any]) -> bytes:
    """Return a manifest's file: its content and the checksum of that."""
    digest = xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
    return (json.dumps({"content": content, "xxh3_128": digest}, sort_keys=True, indent=1) + "\n").encode()


def _digest_of(path: Path) -> tuple[int, str]:
    digest, num_bytes = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
            num_bytes += len(piece)
    return num_bytes, digest.hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[pa.ipc.RecordBatchFileReader]:
    try:
        with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as file:
            yield file
    except pa.ArrowInvalid as error:
        raise CorruptPackError(f"{path} cannot be read: {error}; use another backup") from error


def _remove_oldest(root: Path, *, keep: int, newest: Path) -> tuple[Path, ...]:
    # By name, which begins with the time; the one just made stays even if the clock was set back.
    older = [folder for folder in backups_of(root) if folder != newest]
    removed = older[: max(0, len(older) - (keep - 1))]
    for folder in removed:
        try:
            _remove(folder)
        except OSError as error:
            raise StorageError(f"the old backup {folder} could not be removed: {error}") from error
    return tuple(removed)


@contextmanager
def _told_as_storage_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, StrawflowError):
            raise
        raise StorageError(
            f"the backup {folder} could not be written, nothing is left of it: {error}"
        ) from error
