"""Packs in a POSIX folder: written by positional gathering writes, read by pread or through a mapping.

1. A name is used once (O_EXCL). At level `host` its directory entry is durable before `create` returns.
2. Pieces go down in one system call and are never joined in memory.
3. A mapping is asked for only within the size of the file as it is now: a touch beyond it would kill the process.
4. A pack that is set aside lies in packs/quarantine/<kind>/ and keeps its path: whoever asks for the path gets it from there,
   while people who open all files of packs/<kind>/ do not. A file that is put back at the path comes first.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from strawflow.errors import InvalidInputError
from strawflow.packs.probe import Durability
from strawflow.packs.sync import sync_path

_PACKS = "packs/"
_QUARANTINE = "packs/quarantine/"
_MAX_PIECES = os.sysconf("SC_IOV_MAX")


class PosixPlace:
    """A folder."""

    appends = True

    def __init__(self, root: Path) -> None:
        self._root = root

    def __str__(self) -> str:
        return str(self._root)

    def create(self, path: str, head: bytes, *, durability: Durability) -> PosixOutput:
        if durability == "store":
            raise InvalidInputError(f"{self._root} is a folder, and level 'store' is that of object stores")
        return PosixOutput(self._root, path, head, syncs=durability == "host")

    def open(self, path: str) -> PosixInput:
        return PosixInput(file_of(self._root, path))

    def sizes(self, folder: str) -> dict[str, int]:
        found: dict[str, int] = {}
        set_aside: dict[str, int] = {}
        for directory, _, names in os.walk(self._root / folder, onerror=_raise_unless_gone):
            for name in names:
                place = Path(directory, name)
                path = str(place.relative_to(self._root))
                try:
                    path.encode()
                    told = place.stat()
                except UnicodeEncodeError:
                    continue  # bytes that are no UTF-8: not written by us, and no text for an index
                except FileNotFoundError:
                    continue  # removed since it was listed
                if not stat.S_ISREG(told.st_mode):
                    continue  # opening a pipe would wait for ever
                if (named := path.removeprefix(_QUARANTINE)) == path:
                    found[path] = told.st_size
                else:
                    set_aside[f"{_PACKS}{named}"] = told.st_size
        return set_aside | found

    def remove(self, path: str) -> None:
        (self._root / path).unlink(missing_ok=True)
        _aside(self._root, path).unlink(missing_ok=True)


def file_of(root: Path, path: str) -> Path:
    """Return the file that a pack's path means: the one that lies there, else the one that was set aside from there."""
    place, aside = root / path, _aside(root, path)
    return aside if aside != place and not place.exists() and aside.exists() else place


def set_aside(root: Path, path: str) -> None:
    """Move a pack's file out of the folder of its kind; nothing to do where none lies there. Atomic and durable."""
    place, aside = root / path, _aside(root, path)
    if not place.exists():
        return
    aside.parent.mkdir(parents=True, exist_ok=True)
    place.rename(aside)
    _sync_both(place, aside)


def put_back(root: Path, path: str) -> None:
    """Bring a pack's file back to where its path says; one that lies there already takes its place."""
    place, aside = root / path, _aside(root, path)
    if not aside.exists():
        return
    if place.exists():
        aside.unlink()
    else:
        aside.rename(place)
    _sync_both(place, aside)


def _aside(root: Path, path: str) -> Path:
    told = path.removeprefix(_PACKS)
    return root / path if told == path else root / f"{_QUARANTINE}{told}"


def _sync_both(place: Path, aside: Path) -> None:
    for directory in (place.parent, aside.parent, aside.parent.parent, place.parent.parent):
        sync_path(directory)


class PosixOutput:
    """A growing file."""

    def __init__(self, root: Path, path: str, head: bytes, *, syncs: bool) -> None:
        self._place, self._syncs, self._length = root / path, syncs, 0
        self._place.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            self.write([head])
            self.sync()
            if syncs:
                # Every level up to the root: another writer may have made one of them and not have synced it yet.
                for directory in self._place.parents:
                    sync_path(directory)
                    if directory == root:
                        break
        except BaseException:
            self.close()
            raise

    def write(self, pieces: Sequence[bytes | pa.Buffer]) -> None:
        views = [memoryview(piece) for piece in pieces]
        done = 0
        while done < len(views):
            written = os.pwritev(self._descriptor, views[done : done + _MAX_PIECES], self._length)
            self._length += written
            while done < len(views) and written >= len(views[done]):
                written -= len(views[done])
                done += 1
            if written:
                views[done] = views[done][written:]

    def sync(self) -> None:
        if self._syncs:
            os.fdatasync(self._descriptor)

    def finish(self) -> None:
        if self._syncs:
            os.fsync(self._descriptor)
            sync_path(self._place.parent)
        self.close()

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class PosixInput:
    """One descriptor; closed when the last reader lets go of it."""

    def __init__(self, place: Path) -> None:
        self._descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        self._map: mmap.mmap | None = None
        self.size = os.fstat(self._descriptor).st_size

    def __del__(self) -> None:
        # The reference count is what tells that no thread reads through it; a mapping outlives its descriptor.
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read(self, offset: int, length: int) -> pa.Buffer:
        target = pa.allocate_buffer(length)
        view = memoryview(target)
        done = 0
        while done < length:
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if count == 0:
                return target.slice(0, done)
            done += count
        return target

    def view(self, offset: int, length: int) -> pa.Buffer:
        size = min(os.fstat(self._descriptor).st_size, self.size)
        if self._map is None and size > 0:
            self._map = mmap.mmap(self._descriptor, self.size, prot=mmap.PROT_READ)
        start = min(offset, size)
        return pa.py_buffer(self._map or b"").slice(start, min(length, size - start))


def _raise_unless_gone(error: OSError) -> None:
    """Let no folder that cannot be listed pass for an empty one."""
    if not isinstance(error, FileNotFoundError):
        raise error
