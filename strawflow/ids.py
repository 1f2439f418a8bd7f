"""Names of things: typed identifiers and how they are written.

1. Ids made here are unique without coordination and safe as file names.
2. A stored row is known for ever by (unit, fence, seq, member, segment); an extent is only where it lies now.
3. Names that people give (branches, consumers) become parts of file names: they are written so that two names never
   become one, whatever the file system makes of capitals.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from urllib.parse import quote

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_SESSION_KIND = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SESSION_KIND_RULE = "use up to 64 of A-Z, a-z, 0-9, '.', - and _, beginning with a letter or digit"
NAME_RULE = "use up to 40 of a-z, 0-9, - and _, beginning with a letter or digit"


def is_name(text: str) -> bool:
    """Tell whether a branch or a consumer may be called so."""
    return _NAME.fullmatch(text) is not None


def is_session_kind(text: str) -> bool:
    """Tell whether worker sessions may be called so: their packs' file names begin with it."""
    return _SESSION_KIND.fullmatch(text) is not None


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


def checkpoint_id(branch: str, consumer: str, *, fence: int, step: int) -> str:
    """Name of a checkpoint and of its folder: fences are counted for each consumer, so the consumer is part of it.

    No branch has a dot in its name, so the first one ends it. Checkpoints of earlier programs, whose ids name no
    consumer, keep the id and the folder that their rows tell.
    """
    # Earlier programs let a consumer be called anything.
    return f"c{step:06d}-{branch}.{quote(consumer, safe='')}-f{fence}"
