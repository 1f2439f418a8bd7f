"""Names of things: typed identifiers and how they are written.

1. Ids made here are unique without coordination and safe as file names.
2. A stored row is known for ever by (unit, fence, seq, member, segment); an extent is only where it lies now.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass


def new_id(prefix: str) -> str:
    """Return `prefix-` and 64 random bits in hexadecimal."""
    return f"{prefix}-{secrets.token_hex(8)}"


@dataclass(frozen=True)
class Extent:
    """Where rows lie: one Arrow message of one pack.

    `digests` holds an xxh3-128 (16 bytes, big endian) of every 4 MiB block of the message's bytes.
    """

    extent_id: int
    """Given by the index; 0 until it has named the extent."""
    pack_id: int
    kind: str
    path: str
    """Relative to the run's root."""
    offset: int
    length: int
    num_rows: int
    digests: bytes

    @property
    def place(self) -> str:
        """How messages name it, whether or not the index has."""
        return f"the extent at byte {self.offset} of {self.path}"


@dataclass(frozen=True)
class RowRange:
    """Rows `start .. start + count` of an extent."""

    extent: Extent
    start: int
    count: int


def weight_version_id(branch: str, fence: int, step: int, digest: str) -> str:
    """Name of a weight version: readable step first, then (branch, trainer fence, digest prefix)."""
    return f"v{step:06d}-{branch}-f{fence}-{digest[:12]}"


def checkpoint_id(branch: str, fence: int, step: int) -> str:
    return f"c{step:06d}-{branch}-f{fence}"
