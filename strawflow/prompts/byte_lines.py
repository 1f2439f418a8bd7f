"""Physical lines of a text file: decompressed, brought to UTF-8, split on the newline byte alone.

1. Only 0x0A ends a line: U+2028, U+2029, U+0085, form feeds and lone carriage returns are content.
2. Memory is bounded by the line limit, not by the file or by the compression ratio.
3. A damaged or cut-short compressed file, and an encoding that cannot be read, raise; they never look like an end.
4. This module does not know what a line means.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import pyarrow as pa

from strawflow.errors import InvalidInputError
from strawflow.prompts.source import Compression

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

DEFAULT_MAX_LINE_BYTES = 32 * 2**20
"""Longest line that is read (bytes); a longer one is a bad row. At this limit any file is read in 300 MB of memory."""

_BUFFER_BYTES = 1 << 20
_NEWLINE = "\n"

# Longest byte-order mark first: the UTF-32 LE mark begins with the UTF-16 LE one.
_MARKS: tuple[tuple[bytes, str], ...] = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class LineTooLong:
    """Stands in for a line above the limit; its bytes were skipped."""


LINE_TOO_LONG = LineTooLong()


@contextmanager
def open_bytes(path: Path, compression: Compression | None) -> Iterator[IO[bytes]]:
    """Open a file as a buffered stream of its decompressed bytes.

    Reading it raises InvalidInputError where the compressed stream is damaged or ends early.
    """
    if compression is None:
        with open(path, "rb", buffering=_BUFFER_BYTES) as stream:
            yield stream
        return
    if path.stat().st_size == 0:
        raise InvalidInputError(f"{path} is empty, which no {compression} file is; write it again")
    with pa.OSFile(str(path)) as stored:
        raw = _Decompressed(pa.CompressedInputStream(stored, compression), path, compression)
        with io.BufferedReader(raw, _BUFFER_BYTES) as stream:
            yield stream


def read_lines(stream: IO[bytes], *, path: Path, max_line_bytes: int) -> Iterator[bytes | LineTooLong]:
    """Yield the lines of a stream as UTF-8 bytes without their newline, LINE_TOO_LONG in place of an oversized one.

    A byte-order mark is taken off. Text marked as UTF-16 or UTF-32 is converted on the way.

    Raises:
        InvalidInputError: UTF-16 or UTF-32 without a mark, or with bytes that are none; the file is damaged.
    """
    text = _as_utf8(stream, path=path)
    while line := text.readline(max_line_bytes + 1):
        if line.endswith(b"\n"):
            yield line[:-1]
        elif len(line) <= max_line_bytes:
            yield line
        else:
            while rest := text.readline(_BUFFER_BYTES):
                if rest.endswith(b"\n"):
                    break
            yield LINE_TOO_LONG


def _as_utf8(stream: IO[bytes], *, path: Path) -> IO[bytes]:
    head = cast(io.BufferedReader, stream).peek(4)[:4]
    found = next(((mark, encoding) for mark, encoding in _MARKS if head.startswith(mark)), None)
    if found is None:
        if b"\x00" in head:
            raise InvalidInputError(
                f"{path}:1: starts like UTF-16 or UTF-32 text without a byte-order mark; convert it, "
                f"for example: iconv -f UTF-16LE -t UTF-8"
            )
        return stream
    mark, encoding = found
    if encoding == "utf-8":
        stream.read(len(mark))
        return stream
    return io.BufferedReader(_Transcoded(stream, path, encoding), _BUFFER_BYTES)


class _Decompressed(io.RawIOBase):
    """Arrow's decompressing stream, which checks that the stream is whole, with errors that name the file."""

    def __init__(self, source: pa.NativeFile, path: Path, compression: Compression) -> None:
        self._source = source
        self._path = path
        self._compression = compression

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer)
        try:
            piece = self._source.read(len(view))
        except OSError as error:
            if error.errno is not None:  # the disk failed, not the format
                raise
            raise InvalidInputError(
                f"{self._path} cannot be read as {self._compression}: {error}; it is damaged or cut short, write it again"
            ) from error
        view[: len(piece)] = piece
        return len(piece)


class _Transcoded(io.RawIOBase):
    """A stream in another Unicode encoding, as UTF-8 bytes."""

    def __init__(self, source: IO[bytes], path: Path, encoding: str) -> None:
        self._source = source
        self._path = path
        self._encoding = encoding
        self._decoder: Any = codecs.getincrementaldecoder(encoding)("strict")
        self._ready = b""
        self._line = 1
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer)
        while not self._ready and not self._ended:
            self._ready = self._next_piece()
            self._line += self._ready.count(b"\n")
        piece, self._ready = self._ready[: len(view)], self._ready[len(view) :]
        view[: len(piece)] = piece
        return len(piece)

    def _next_piece(self) -> bytes:
        stored = self._source.read(1 << 16)
        self._ended = not stored
        try:
            text: str = self._decoder.decode(stored, final=self._ended)
            return text.encode("utf-8")
        except UnicodeDecodeError as error:
            before = error.object[: error.start].decode(error.encoding, "replace")
            raise InvalidInputError(
                f"{self._path}:{self._line + before.count(_NEWLINE)}: the bytes here are not {self._encoding.upper()} "
                f"({error.reason}), which the file's byte-order mark promises; convert the file to UTF-8"
            ) from error
