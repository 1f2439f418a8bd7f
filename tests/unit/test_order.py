"""Epoch order is a pure keyed permutation."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strawflow.flow.order import place_in_epoch


def order(num_rows: int, *, seed: int = 0, epoch: int = 0, segment_seq: int = 0) -> list[int]:
    return [
        place_in_epoch(i, num_rows=num_rows, seed=seed, epoch=epoch, segment_seq=segment_seq)
        for i in range(num_rows)
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(0, 2**40), st.integers(0, 1000))
def test_every_row_comes_exactly_once(num_rows: int, seed: int, epoch: int) -> None:
    assert sorted(order(num_rows, seed=seed, epoch=epoch)) == list(range(num_rows))


def test_seed_epoch_and_segment_each_change_the_order() -> None:
    orders = [order(500), order(500, seed=1), order(500, epoch=1), order(500, segment_seq=1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[i + 1 :])


def test_the_order_is_frozen_since_stored_cursors_depend_on_it() -> None:
    assert order(10, seed=7, epoch=3, segment_seq=1) == FROZEN


def test_neighbours_are_spread() -> None:
    rows = order(10_000)
    near = sum(abs(a - b) < 10 for a, b in itertools.pairwise(rows))
    assert near < 60  # about 20 are expected of a random order


def test_a_position_outside_the_segment_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        place_in_epoch(5, num_rows=5, seed=0, epoch=0, segment_seq=0)


FROZEN = [5, 1, 2, 7, 3, 6, 0, 9, 8, 4]
