"""Where packs lie: a POSIX folder or an object store, behind one protocol.

1. A path names one file for ever: `create` refuses a name in use, and nothing here replaces or shortens a file.
2. `appends` tells the two apart: a folder's files grow and can be synced on the way; an object is there whole, or not
   at all, once `finish` has returned.
3. Whatever fails raises an OSError: FileExistsError for a name in use, FileNotFoundError for one that is not there.
4. It moves bytes; formats, checksums and the index are unknown here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import pyarrow as pa

from strawflow.packs.posix import PosixPlace
from strawflow.packs.probe import Durability, is_url

Piece: TypeAlias = "bytes | pa.Buffer"


class Output(Protocol):
    """One file being written from front to back, by one thread."""

    def write(self, pieces: Sequence[Piece]) -> None:
        """Put the pieces behind what was written so far; they may be held, unchanged, until `finish`."""

    def sync(self) -> None:
        """Bring what was written to the disk; only where `appends`."""

    def finish(self) -> None:
        """Make the whole file and its name durable and close it."""

    def close(self) -> None:
        """Let go of it as it is; does nothing after `finish`."""


class Input(Protocol):
    """One file being read, by any number of threads."""

    size: int
    """Bytes it is known to have; it may have grown since."""

    def read(self, offset: int, length: int) -> pa.Buffer:
        """Return `length` bytes in memory of our own; fewer where the file ends."""

    def view(self, offset: int, length: int) -> pa.Buffer:
        """Return the bytes where the kernel has them if there is such a place, else as `read`; the file must be sealed."""


class Place(Protocol):
    """A root under which packs lie."""

    appends: bool

    def create(self, path: str, head: bytes, *, durability: Durability) -> Output:
        """Make a new file that begins with `head`; where `appends`, name and head are durable on return."""

    def open(self, path: str) -> Input:
        """Open a file; a fresh one sees what other clients have written."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size of every file under `folder`, by path; a folder that is not there holds none."""

    def remove(self, path: str) -> None:
        """Delete a file; one that is gone already is no error."""


def open_place(root: str | Path) -> Place:
    """Return the place at `root`: a folder, or an fsspec address (`s3://bucket/run`, `memory://run`).

    Credentials and endpoints come from the environment of the back end (AWS_*, FSSPEC_*), never from the address.

    Raises:
        ConfigError: the address is of an unknown protocol, or its back end is not installed.
    """
    if isinstance(root, str) and is_url(root):
        # Imported here: a run on a folder needs no fsspec back end.
        from strawflow.packs.objects import ObjectPlace

        return ObjectPlace(root)
    return PosixPlace(Path(root))
