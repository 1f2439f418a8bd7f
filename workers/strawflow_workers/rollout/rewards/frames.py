"""The wire between the reward pool and its processes: JSON values, each behind a 4-byte little-endian length.

1. A reader may be fed any cut of the stream, at any time; it never blocks and never loses a part of a frame.
2. This module reads and writes no file descriptor.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("<I")


def encode_frame(value: Any) -> bytes:
    """Return one frame holding a JSON value."""
    body = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Puts frames together from pieces of a stream."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def push(self, piece: bytes) -> None:
        self._bytes += piece

    def pop_all(self) -> Iterator[Any]:
        """Yield, and take out, the values of all whole frames."""
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            yield json.loads(body)
