"""Quantities of whole sequences at each of their tokens, and the weights that correct for an engine which is not the trainer.

1. `lengths` [S] counts the given tokens of each sequence, in order; they sum to n. A sequence may have none.
2. Nothing here has a gradient: arguments are detached, results are constants.
3. Sums are additive: where a sequence is split over context-parallel ranks, each rank calls with its own tokens and the
   lengths of its own part, and `complete` adds the [S, 2] float64 table of sums and counts over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Complete = Callable[[Tensor], Tensor]


def sequence_sums(values: Tensor, lengths: Tensor, complete: Complete | None = None) -> Tensor:
    """Return float64 [S, 2]: the sum of each sequence's values and their number, over all ranks.

    `segment_reduce` adds in the order of the tokens: the same bits each time, on a GPU too.
    """
    sums = torch.segment_reduce(values.detach().double(), "sum", lengths=lengths, initial=0.0)
    table = torch.stack([sums, lengths.double()], dim=1)
    return table if complete is None else complete(table)


def sequence_means(values: Tensor, lengths: Tensor, complete: Complete | None = None) -> Tensor:
    """Return, at each token, the mean of the values of its sequence, [n] in the type of the values."""
    table = sequence_sums(values, lengths, complete)
    means = table[:, 0] / table[:, 1].clamp(min=1.0)
    return means.repeat_interleave(lengths).to(values.dtype)


def mismatch_ratios(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    lengths: Tensor,
    *,
    level: str,
    complete: Complete | None = None,
) -> Tensor:
    """Return, at each token, the ratio pi_old / pi_rollout: how the trainer's policy and the engine's differ.

    `token`: that of the token. `sequence`: that of its whole sequence, the product of the tokens' ratios. `geometric`: the
    geometric mean of them.

    Sources: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (token); Liu et
    al. 2025, "When Speed Kills Stability" (sequence, and the geometric mean against its bias by length).

    Raises:
        ValueError: no such level.
    """
    gaps = old_logprobs.detach() - rollout_logprobs
    if level == "token":
        return gaps.exp()
    table = sequence_sums(gaps, lengths, complete)
    match level:
        case "sequence":
            of_sequence = table[:, 0]
        case "geometric":
            of_sequence = table[:, 0] / table[:, 1].clamp(min=1.0)
        case _:
            raise ValueError(f"level {level!r}: token, sequence or geometric")
    return of_sequence.exp().repeat_interleave(lengths).to(gaps.dtype)


def mismatch_weights(ratios: Tensor, *, mode: str, low: float, high: float) -> Tensor:
    """Return what each token's loss is multiplied by.

    `truncate`: min(ratio, high), truncated importance sampling. `mask`: 1 where low <= ratio <= high, else 0: tokens (or whole
    sequences) on which engine and trainer disagree are not trained, and the others are not weighted.

    Sources: Ionides 2008, "Truncated Importance Sampling"; as for `mismatch_ratios`.

    Raises:
        ValueError: no such mode.
    """
    match mode:
        case "truncate":
            return ratios.clamp(max=high)
        case "mask":
            return ((ratios >= low) & (ratios <= high)).to(ratios.dtype)
        case _:
            raise ValueError(f"mode {mode!r}: truncate or mask")
