"""Epoch order: which prompt comes next, as a pure function with no shuffle state to lose.

A keyed bijection of [0, N): a balanced Feistel network over the smallest even number of bits that holds N, with
cycle-walking back into range (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). The round
function is xxh3-64 keyed by (seed, epoch, segment, round). The key decides the order alone; nothing is stored.
"""

from __future__ import annotations

import struct

import xxhash

_ROUNDS = 6


def place_in_epoch(position: int, *, num_rows: int, seed: int, epoch: int, segment_seq: int) -> int:
    """Return the row served at `position` of this epoch: a permutation of range(num_rows).

    Raises:
        ValueError: position lies outside range(num_rows).
    """
    if not 0 <= position < num_rows:
        raise ValueError(f"position {position} is outside 0..{num_rows - 1}")
    half_bits = max(1, ((num_rows - 1).bit_length() + 1) // 2)
    value = position
    while True:  # at most 4 * num_rows values in the network's domain: two to four walks on average
        value = _feistel(value, half_bits=half_bits, key=(seed, epoch, segment_seq))
        if value < num_rows:
            return value


def _feistel(value: int, *, half_bits: int, key: tuple[int, int, int]) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(_ROUNDS):
        mixed = xxhash.xxh3_64_intdigest(struct.pack("<qqqqq", *key, number, right))
        left, right = right, left ^ (mixed & mask)
    return (left << half_bits) | right
