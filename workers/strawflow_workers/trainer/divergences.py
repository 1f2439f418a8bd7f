"""How far two policies are apart, and how spread out one is: estimates of each token, as pure functions on torch tensors.

1. Estimates of KL(trained || reference) take tokens that the trained policy sampled; `kl_estimate` takes those of the rollout.
2. Entropy is that of the whole distribution, exact, also where the vocabulary is split over tensor-parallel ranks.
3. Nothing here weighs, masks or adds up tokens.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


def kl_estimate(logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Return an estimate, never negative, of KL(rollout policy || trained policy) from each sampled token.

    With d = logprob - rollout logprob: exp(d) - 1 - d, whose mean over tokens of the rollout policy is
    unbiased. Source: Schulman 2020, "Approximating KL Divergence", estimator k3.
    """
    gap = logprobs - rollout_logprobs
    return torch.expm1(gap) - gap


def reference_kl(
    logprobs: Tensor, reference_logprobs: Tensor, estimator: str, old_logprobs: Tensor | None = None
) -> Tensor:
    """Return an estimate of KL(trained policy || reference) from each token that the trained policy sampled.

    With d = reference logprob - logprob:

        k1        -d                     unbiased in value, noisy; as a loss its gradient has mean 0
        k2        d^2 / 2                biased in value; as a loss its gradient is that of the divergence
        k3        exp(d) - 1 - d         unbiased in value, never negative; as a loss its gradient is biased
        unbiased  r * (exp(d) - 1 - d)   r = exp(logprob - old logprob): unbiased in value and, as a loss, in gradient,
                                         for tokens that the old policy sampled

    Sources: Schulman 2020, "Approximating KL Divergence"; DeepSeek-AI 2025, "DeepSeek-V3.2", section 3.1, "Unbiased KL
    Estimate"; on gradients of estimators Tang and Munos 2025, "On a few pitfalls in KL divergence gradient estimation
    for RL".

    Raises:
        ValueError: no such estimator, or `unbiased` without old log-probabilities.
    """
    gap = reference_logprobs - logprobs
    match estimator:
        case "k1":
            return -gap
        case "k2":
            return 0.5 * gap**2
        case "k3":
            return torch.expm1(gap) - gap
        case "unbiased" if old_logprobs is not None:
            return torch.exp(logprobs - old_logprobs) * (torch.expm1(gap) - gap)
        case _:
            raise ValueError(f"estimator {estimator!r}: k1, k2, k3, or unbiased with old log-probabilities")


def vocab_parallel_entropy(logits: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the entropy in nats of softmax(logits) of each row, float32 (float64 for float64 logits), [n].

    `logits` [n, V / ranks] are this rank's part of the vocabulary, `group` the tensor-parallel ranks that hold the others (None:
    there are none). Each rank gets the whole entropy; in the backward pass each gets the gradient of its own part, as
    with Megatron's vocab_parallel_cross_entropy.
    """
    return cast(Tensor, _VocabParallelEntropy.apply(logits, group))  # type: ignore[no-untyped-call]


class _VocabParallelEntropy(torch.autograd.Function):
    """H = log Z - sum(p * z), z the logits less their maximum; dH/dz_j = -p_j * (log p_j + H)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        largest = logits.amax(-1, keepdim=True)
        _all_reduce(largest, group, dist.ReduceOp.MAX)
        shifted = logits - largest
        exponentials = shifted.exp()
        total = exponentials.sum(-1, keepdim=True)
        weighted = (exponentials * shifted).sum(-1, keepdim=True)
        _all_reduce(total, group, dist.ReduceOp.SUM)
        _all_reduce(weighted, group, dist.ReduceOp.SUM)
        entropy = total.log() - weighted / total
        ctx.save_for_backward(shifted, total, entropy)
        return entropy.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        shifted, total, entropy = ctx.saved_tensors
        logprobs = shifted - total.log()
        return gradients[0].unsqueeze(-1) * -logprobs.exp() * (logprobs + entropy), None


def _all_reduce(values: Tensor, group: dist.ProcessGroup | None, op: Any) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(values, op=op, group=group)
