"""What a context-parallel rank has of a pack, and the order Megatron's rotary embedding counts on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strawflow_workers.trainer.context import Share, arrange_across, own_tokens

CPU = torch.device("cpu")


def test_two_ranks_have_the_outer_and_the_inner_chunks_of_each_sequence() -> None:
    boundaries = np.array([0, 8, 13], np.int32)
    first, second = (own_tokens(boundaries, Share(num_ranks=2, rank=rank)) for rank in range(2))
    assert first.boundaries.tolist() == [0, 8, 16]
    assert first.token_of_place.tolist() == [0, 1, 6, 7, 8, 9, -1, -1]
    assert second.token_of_place.tolist() == [2, 3, 4, 5, 10, 11, 12, -1]
    assert second.place_of_token(13).tolist() == [-1, -1, 0, 1, 2, 3, -1, -1, -1, -1, 4, 5, 6]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("multiple", [1, 2, 3])
def test_every_token_is_with_one_rank_and_all_have_equally_many(num_ranks: int, multiple: int) -> None:
    boundaries = np.array([0, 1, 4, 37, 50], np.int32)
    shares = [Share(num_ranks=num_ranks, rank=rank, multiple=multiple) for rank in range(num_ranks)]
    own = [own_tokens(boundaries, share).token_of_place for share in shares]
    assert sorted(token for places in own for token in places if token >= 0) == list(range(50))
    assert {places.size for places in own} == {own[0].size}
    assert own[0].size % multiple == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_query_sees_the_keys_up_to_itself_of_its_own_sequence(rank: int) -> None:
    boundaries, share = np.array([0, 8, 12, 300], np.int32), Share(num_ranks=2, rank=rank)
    own = own_tokens(boundaries, share)
    arranged = arrange_across(own.boundaries, share, device=CPU)
    # Number the gathered tokens by their place in the pack: rank 0's first, then rank 1's.
    gathered = np.concatenate(
        [own_tokens(boundaries, Share(num_ranks=2, rank=r)).token_of_place for r in range(2)]
    )
    slots = []
    for each in arranged.rectangles:
        for row in range(each.queries.size(0)):
            for at in range(each.queries.size(1)):
                seen = gathered[each.keys[row][each.mask[row, 0, at]].numpy()]
                slots.append(seen.tolist())
    for place, token in enumerate(own.token_of_place.tolist()):
        start = max(b for b in boundaries.tolist()[:-1] if b <= token)
        assert slots[int(arranged.slot_of_token[place])] == list(range(start, token + 1))
