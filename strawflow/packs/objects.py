"""Packs in an object store, through fsspec: one whole object per pack, read by ranges.

1. An object appears at once and whole when its upload is acknowledged, under a name not in use (a conditional put; a store
   that ignores the condition relies on session ids being unique).
2. A failed upload may have arrived all the same; then it is an object nobody names. One that lost its reply and was
   repeated by the back end finds its own bytes there, which counts as success.
3. A read asks for exactly the bytes wanted; the first of an object also brings its head, once.
4. Whatever a back end raises leaves here as an OSError. Nothing is cached about which objects exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import fsspec
import pyarrow as pa

from strawflow.errors import ConfigError, InvalidInputError, StorageError
from strawflow.packs.probe import Durability, durability_of

HEAD_BYTES = 16 * 1024
_TAKEN = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "412", "409"})


class ObjectPlace:
    """A prefix in an object store."""

    appends = False

    def __init__(self, address: str) -> None:
        """Connect to `address` with what the environment says of endpoints and credentials; nothing is requested yet.

        Raises:
            ConfigError: the protocol is not one of ours, or its back end is not installed.
        """
        probe = durability_of(address)
        try:
            self._filesystem, base = fsspec.url_to_fs(address, use_listings_cache=False)
        except ImportError as error:
            raise ConfigError(
                f"{address} needs a package that is not installed: pip install 'strawflow[{probe.filesystem}]'"
            ) from error
        self._address, self._base, self._level = address.rstrip("/"), base.rstrip("/"), probe.level

    def __str__(self) -> str:
        return self._address

    def create(self, path: str, head: bytes, *, durability: Durability) -> ObjectOutput:
        if durability != self._level:
            raise InvalidInputError(
                f"{self._address} gives durability {self._level!r}, not {durability!r}; configure that"
            )
        return ObjectOutput(self, path, head)

    def open(self, path: str) -> ObjectInput:
        return ObjectInput(self, path)

    def sizes(self, folder: str) -> dict[str, int]:
        with self._translated("list", folder):
            found = self._filesystem.find(f"{self._base}/{folder}", detail=True)
        return {name[len(self._base) + 1 :]: int(entry["size"]) for name, entry in found.items()}

    def remove(self, path: str) -> None:
        try:
            with self._translated("remove", path):
                self._filesystem.rm_file(f"{self._base}/{path}")
        except FileNotFoundError:
            return

    def get(self, path: str, offset: int, length: int) -> pa.Buffer:
        """Return a range of an object; fewer bytes where it ends."""
        try:
            with self._translated("read", path):
                content = self._filesystem.cat_file(f"{self._base}/{path}", start=offset, end=offset + length)
        except StorageError as error:
            if "InvalidRange" not in _codes(error):
                raise
            content = b""
        return pa.py_buffer(content)

    def put(self, path: str, content: bytes) -> None:
        """Upload a whole object under a name not in use."""
        try:
            with self._translated("upload", path):
                self._filesystem.pipe_file(f"{self._base}/{path}", content, mode="create")
        except OSError as error:
            if not isinstance(error, FileExistsError) and not _TAKEN & _codes(error):
                raise
            # The name is taken. By an earlier try of this very upload, whose reply was lost?
            if bytes(self.get(path, 0, len(content) + 1)) != content:
                raise FileExistsError(f"{self._address}/{path} exists") from error

    @contextmanager
    def _translated(self, doing: str, path: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:  # each back end, and the HTTP library under it, has a tree of its own
            raise StorageError(
                f"cannot {doing} {self._address}/{path}: {type(error).__name__}: {error}"
            ) from error


class ObjectOutput:
    """A pack held in memory until it is uploaded."""

    def __init__(self, place: ObjectPlace, path: str, head: bytes) -> None:
        self._place, self._path = place, path
        self._pieces: list[bytes | pa.Buffer] = [head]

    def write(self, pieces: Sequence[bytes | pa.Buffer]) -> None:
        self._pieces.extend(pieces)

    def sync(self) -> None:
        raise StorageError(f"{self._path} is an object, which is durable only once it is sealed")

    def finish(self) -> None:
        self._place.put(self._path, b"".join(self._pieces))
        self.close()

    def close(self) -> None:
        self._pieces = []


class ObjectInput:
    """An object, whose head is kept once it has been asked for."""

    # Objects do not grow: whatever an extent names is there, or will never be.
    size = 2**63 - 1

    def __init__(self, place: ObjectPlace, path: str) -> None:
        self._place, self._path = place, path
        self._head: pa.Buffer | None = None

    def read(self, offset: int, length: int) -> pa.Buffer:
        head = self._head
        if head is None:
            head = self._head = self._place.get(self._path, 0, HEAD_BYTES)
        is_whole = head.size < HEAD_BYTES
        if is_whole or offset + length <= head.size:
            start = min(offset, head.size)
            return head.slice(start, min(length, head.size - start))
        return self._place.get(self._path, offset, length)

    def view(self, offset: int, length: int) -> pa.Buffer:
        return self.read(offset, length)


def _codes(error: BaseException | None) -> set[str]:
    """Return the S3 error codes along the causes of an error."""
    codes = set()
    while error is not None:
        response: Any = getattr(error, "response", None)
        if isinstance(response, dict):
            codes.add(str(response.get("Error", {}).get("Code")))
        error = error.__cause__
    return codes
