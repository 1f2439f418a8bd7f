"""Which data-parallel rank takes which micro-batch of a planned batch.

1. It depends on the plan alone (tokens of each micro-batch) and on the number of ranks: every rank finds it by itself, and
   another number of ranks shares the same batch anew.
2. Every micro-batch goes to exactly one rank. All ranks take equally many, so that their collectives match: one that is
   short takes empty ones, which have no loss.
3. It reads nothing and knows no process group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strawflow_workers.trainer.batches import MiniBatch, PackedMicroBatch


def deal(sizes: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Return for each rank which micro-batches of one update it takes, in rising order; `sizes` are their tokens.

    The longest first, each to the rank with the fewest tokens that still has room (Graham 1969, "Bounds on Multiprocessing
    Timing Anomalies", the LPT rule), at most ceil(n / num_ranks) to a rank; of equal ones the earlier to the lower rank.
    """
    room = -(-len(sizes) // num_ranks)
    taken: list[list[int]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    for at in sorted(range(len(sizes)), key=lambda at: (-sizes[at], at)):
        rank = min((r for r in range(num_ranks) if len(taken[r]) < room), key=lambda r: (tokens[r], r))
        taken[rank].append(at)
        tokens[rank] += sizes[at]
    return [sorted(places) for places in taken]


def empty_micro_batch() -> PackedMicroBatch:
    """Return a micro-batch in which nothing is trained: one sequence of two tokens, masked."""
    return PackedMicroBatch(
        tokens=np.zeros(2, np.int32),
        boundaries=np.array([0, 2], np.int32),
        loss_mask=np.zeros(2, np.float32),
        advantages=np.zeros(2, np.float32),
        rollout_logprobs=np.zeros(2, np.float32),
        temperatures=np.ones(1, np.float32),
    )


def own_share(micro_batches: Sequence[PackedMicroBatch], denominator: float, *, num: int) -> MiniBatch:
    """Return what a rank has of one update, filled up with empty micro-batches to `num`."""
    filled = [*micro_batches, *(empty_micro_batch() for _ in range(num - len(micro_batches)))]
    return MiniBatch(tuple(filled), denominator)


def share_of(mini_batches: Sequence[MiniBatch], *, rank: int, num_ranks: int) -> list[MiniBatch]:
    """Return a rank's share of mini-batches that lie in memory whole."""
    shares = []
    for mini in mini_batches:
        dealt = deal([micro.tokens.size for micro in mini.micro_batches], num_ranks)
        own = [mini.micro_batches[at] for at in dealt[rank]]
        shares.append(own_share(own, mini.denominator, num=max(map(len, dealt))))
    return shares
