"""Dealing micro-batches over data-parallel ranks."""

from __future__ import annotations

import numpy as np
import pytest

from strawflow_workers.trainer.batches import MiniBatch
from strawflow_workers.trainer.shares import deal, empty_micro_batch, share_of


def test_the_longest_go_first_to_the_rank_with_the_fewest_tokens() -> None:
    assert deal([5, 9, 1, 7, 3, 4], 2) == [[1, 2, 5], [0, 3, 4]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_every_micro_batch_goes_to_one_rank_and_no_rank_takes_more_than_its_part(num_ranks: int) -> None:
    rng = np.random.default_rng(num_ranks)
    for num in range(12):
        sizes = rng.integers(1, 100, num).tolist()
        dealt = deal(sizes, num_ranks)
        assert sorted(at for places in dealt for at in places) == list(range(num))
        assert max(map(len, dealt)) == -(-num // num_ranks)
        assert deal(sizes, num_ranks) == dealt


def test_equal_ones_are_dealt_in_order_so_that_every_rank_finds_the_same() -> None:
    assert deal([4, 4, 4, 4], 2) == [[0, 2], [1, 3]]


def test_ranks_that_are_short_get_empty_micro_batches_with_the_same_denominator() -> None:
    step = [MiniBatch((empty_micro_batch(),) * 3, 7.0)]
    shares = [share_of(step, rank=rank, num_ranks=2) for rank in range(2)]
    assert [len(share[0].micro_batches) for share in shares] == [2, 2]
    assert {share[0].denominator for share in shares} == {7.0}
    assert not empty_micro_batch().loss_mask.any()
