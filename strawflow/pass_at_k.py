"""pass@k: how likely one of k answers to a prompt passes, estimated from n answers of which c passed.

The unbiased estimator of Chen et al. 2021, "Evaluating Large Language Models Trained on Code": 1 - C(n-c, k) / C(n, k), the
chance that k of the n, drawn without putting any back, hold one that passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import comb


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the estimate from `c` of `n` answers; correct to the last digit for any size, as it is a quotient of integers.

    Raises:
        ValueError: not 0 <= c <= n or not 1 <= k <= n: more answers than there are cannot be drawn.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} of {n} answers: 0 <= c <= n and 1 <= k <= n must hold")
    every = comb(n, k)
    return (every - comb(n - c, k)) / every


def ks_of(n: int) -> list[int]:
    """Return the k that are told of n answers: the powers of two up to n, and n."""
    return sorted({1 << power for power in range(n.bit_length())} | {n}) if n else []


def mean_pass_at_k(prompts_by_passed: Mapping[int, int], *, n: int) -> dict[int, float]:
    """Return {k: mean of pass@k over prompts} of n answers each; `prompts_by_passed` maps c to a number of prompts."""
    num_prompts = sum(prompts_by_passed.values())
    if not num_prompts:
        return {}
    return {
        k: sum(count * pass_at_k(n, c, k) for c, count in prompts_by_passed.items()) / num_prompts
        for k in ks_of(n)
    }
