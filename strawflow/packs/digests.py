"""Checksums of extents: an xxh3-128 of every 4 MiB block of a message's bytes.

1. The digests of an extent are concatenated in block order, 16 bytes each, big endian; the last block may be short.
2. They cover the bytes as stored (compressed, framing included), so they are checked before anything is parsed.
3. They tell damage from intact bytes; they are no defence against somebody who forges both.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import xxhash

BLOCK_BYTES = 4 * 1024 * 1024
DIGEST_BYTES = 16


def digest_blocks(message: bytes | memoryview) -> bytes:
    """Return the concatenated digests of `message`."""
    view = memoryview(message)
    return b"".join(
        xxhash.xxh3_128_digest(view[start : start + BLOCK_BYTES])
        for start in range(0, len(view), BLOCK_BYTES)
    )


def digest_pieces(pieces: Sequence[bytes | pa.Buffer]) -> bytes:
    """Return the digests of the message that the pieces make up, without joining them."""
    if len(pieces) == 1:
        return digest_blocks(memoryview(pieces[0]))
    digests, state, room = bytearray(), xxhash.xxh3_128(), BLOCK_BYTES
    for piece in pieces:
        view = memoryview(piece)
        while len(view):
            state.update(view[:room])
            taken = min(room, len(view))
            view, room = view[taken:], room - taken
            if room == 0:
                digests += state.digest()
                state.reset()
                room = BLOCK_BYTES
    if room < BLOCK_BYTES:
        digests += state.digest()
    return bytes(digests)


def num_blocks(length: int) -> int:
    return -(-length // BLOCK_BYTES)


def is_one_block(message: pa.Buffer, digests: bytes) -> bool:
    """Whether `digests` is the digest of `message` as one block."""
    return bool(xxhash.xxh3_128_digest(message) == digests)


def first_bad_block(message: bytes | memoryview, digests: bytes) -> int | None:
    """Return the place of the first block that does not match, or None when all do.

    `digests` of another number of blocks match nothing: block 0 is reported.
    """
    view = memoryview(message)
    if len(digests) != DIGEST_BYTES * num_blocks(len(view)):
        return 0
    for block in range(num_blocks(len(view))):
        stored = digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
        if xxhash.xxh3_128_digest(view[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]) != stored:
            return block
    return None
