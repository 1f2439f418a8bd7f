"""Losses of single tokens, as small pure functions on torch tensors.

1. Every function is elementwise over tokens and keeps their shape, except `masked_sum`, which adds up.
2. None divides by a count: the denominator of an update is planned and stored with its batch.
3. A log-probability is log-softmax(logits / temperature) at the temperature the token was sampled with.
4. Nothing here knows of models, ranks, packs or optimizers.
"""

from __future__ import annotations

import torch
from torch import Tensor


def policy_loss(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Return the clipped surrogate loss of each token.

    With r = exp(logprob - rollout logprob) and advantage A:

        loss = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7 (clip_low =
    clip_high); the two separate bounds are the "clip-higher" of Yu et al. 2025, "DAPO", equation 10.
    """
    ratio = torch.exp(logprobs - rollout_logprobs)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def sft_loss(logprobs: Tensor) -> Tensor:
    """Return the negative log-likelihood of each token: the cross-entropy with the demonstrated token."""
    return -logprobs


def is_clipped(logprobs: Tensor, rollout_logprobs: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Return, for each token, whether its probability ratio lies outside [1 - clip_low, 1 + clip_high]."""
    ratio = torch.exp(logprobs - rollout_logprobs)
    return (ratio < 1.0 - clip_low) | (ratio > 1.0 + clip_high)


def kl_estimate(logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Return an estimate, never negative, of KL(rollout policy || trained policy) from each sampled token.

    With d = logprob - rollout logprob: exp(d) - 1 - d, whose mean over tokens of the rollout policy is
    unbiased. Source: Schulman 2020, "Approximating KL Divergence", estimator k3.
    """
    gap = logprobs - rollout_logprobs
    return torch.expm1(gap) - gap


def masked_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of values * weights over the tokens whose weight is not 0, whatever the others hold."""
    trained = weights != 0
    return (values.where(trained, 0.0) * weights).sum()
