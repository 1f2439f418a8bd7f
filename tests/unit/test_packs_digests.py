"""Digests of extents: block borders, and that every flipped bit is seen in its block."""

from __future__ import annotations

import itertools
import random

import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from strawflow.packs.digests import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    digest_blocks,
    digest_pieces,
    first_bad_block,
)

MESSAGE = random.Random(0).randbytes(2 * BLOCK_BYTES + 5)


@pytest.mark.parametrize(
    "length, blocks", [(1, 1), (BLOCK_BYTES - 1, 1), (BLOCK_BYTES, 1), (BLOCK_BYTES + 1, 2)]
)
def test_every_four_mib_have_a_digest_of_their_own(length: int, blocks: int) -> None:
    message = bytes(length)
    digests = digest_blocks(message)
    assert len(digests) == blocks * DIGEST_BYTES
    assert digests[:DIGEST_BYTES] == xxhash.xxh3_128_digest(message[:BLOCK_BYTES])
    assert first_bad_block(message, digests) is None


def test_a_flip_is_reported_in_the_block_it_lies_in() -> None:
    message = bytearray(3 * BLOCK_BYTES + 5)
    digests = digest_blocks(bytes(message))
    for position, block in [(0, 0), (BLOCK_BYTES, 1), (3 * BLOCK_BYTES - 1, 2), (3 * BLOCK_BYTES + 4, 3)]:
        message[position] ^= 1
        assert first_bad_block(bytes(message), digests) == block
        message[position] ^= 1


@given(message=st.binary(min_size=1, max_size=200), bit=st.integers(min_value=0))
def test_any_single_flipped_bit_is_seen(message: bytes, bit: int) -> None:
    digests = digest_blocks(message)
    damaged = bytearray(message)
    damaged[bit // 8 % len(message)] ^= 1 << bit % 8
    assert first_bad_block(bytes(damaged), digests) == 0


@given(message=st.binary(min_size=1, max_size=200), cut=st.integers(min_value=1, max_value=DIGEST_BYTES))
def test_digests_of_another_length_match_nothing(message: bytes, cut: int) -> None:
    digests = digest_blocks(message)
    assert first_bad_block(message, digests[:-cut]) == 0
    assert first_bad_block(message, digests + digests[:cut]) == 0


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 2 * BLOCK_BYTES + 5), max_size=6),
    length=st.sampled_from([1, BLOCK_BYTES, 2 * BLOCK_BYTES + 5]),
)
def test_a_message_in_pieces_has_the_digests_of_the_whole(cuts: list[int], length: int) -> None:
    message = MESSAGE[:length]
    borders = sorted({0, length, *(cut for cut in cuts if cut < length)})
    pieces = [message[start:stop] for start, stop in itertools.pairwise(borders)]
    assert digest_pieces(pieces) == digest_blocks(message)
    assert digest_pieces([pa.py_buffer(piece) for piece in pieces]) == digest_blocks(message)
    assert digest_pieces([b"", *pieces, b""]) == digest_blocks(message)
