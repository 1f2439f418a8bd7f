"""Losses of single tokens, as small pure functions on torch tensors.

1. Every function is elementwise over tokens and keeps their shape, except `masked_sum`, which adds up, and `dpo_loss`, which is
   elementwise over pairs. What a sequence as a whole contributes (GSPO's ratio) comes in as one value a token.
2. None divides by a count: the denominator of an update is planned and stored with its batch.
3. A log-probability is log-softmax(logits / temperature) at the temperature the token was sampled with. `old_logprobs` are those
   of the policy that a ratio is taken against: constants.
4. Nothing here knows of models, ranks, packs or optimizers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Tensor:
    """Return the clipped surrogate loss of each token: PPO, GRPO, DAPO.

    With r = exp(logprob - old logprob) and advantage A:

        loss = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    and, for a token with A < 0 and with a dual clip c > 1, at most -c * A: a bad token that became much likelier has no
    gradient then.

    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7 (clip_low =
    clip_high); the two separate bounds are the "clip-higher" of Yu et al. 2025, "DAPO", equation 10; the dual clip
    is Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning".
    """
    return _clipped_surrogate(torch.exp(logprobs - old_logprobs), advantages, clip_low, clip_high, dual_clip)


def gspo_loss(
    logprobs: Tensor, sequence_gaps: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Return GSPO's loss of each token: the clipped surrogate with the ratio of the whole sequence.

    `sequence_gaps` is, at each token, the mean over the trained tokens of its sequence of logprob - old logprob, a constant
    (`segments.sequence_means`). With s = exp(mean gap), the length-normalised sequence ratio, the token's ratio has the value s
    and the gradient of its own log-probability:

        r_t = s * exp(logprob_t - constant(logprob_t))

    This is the token variant. Where all tokens of a sequence have one advantage and one weight, the sum over its tokens has
    value and gradient of the sequence form -min(s * A, clip(s) * A).

    Source: Zheng et al. 2025, "Group Sequence Policy Optimization", equations 5, 7 (s) and 13, 14 (token variant).
    """
    ratio = torch.exp(sequence_gaps) * torch.exp(logprobs - logprobs.detach())
    return _clipped_surrogate(ratio, advantages, clip_low, clip_high, 0.0)


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Return CISPO's loss of each token: policy gradient weighted by the clipped ratio, which is a constant.

        loss = -constant(clip(r, 1 - clip_low, 1 + clip_high)) * A * logprob

    Every token keeps a gradient; clip_low = 1 leaves the ratio unbounded below, as the authors do.

    Source: MiniMax 2025, "MiniMax-M1", equations 4 and 5.
    """
    ratio = torch.exp(logprobs.detach() - old_logprobs)
    return -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages * logprobs


def reinforce_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return -A * logprob of each token: the policy gradient of the policy that sampled it.

    Source: Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning".
    """
    return -advantages * logprobs


def sft_loss(logprobs: Tensor) -> Tensor:
    """Return the negative log-likelihood of each token: the cross-entropy with the demonstrated token."""
    return -logprobs


def dpo_loss(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, *, beta: float
) -> Tensor:
    """Return the DPO loss of each pair; the arguments are sums of log-probabilities of whole responses, [pairs].

        loss = -log sigmoid(beta * ((chosen - reference_chosen) - (rejected - reference_rejected)))

    Source: Rafailov et al. 2023, "Direct Preference Optimization", equation 7.
    """
    margin = (chosen - reference_chosen) - (rejected - reference_rejected)
    return -logsigmoid(beta * margin)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """Return the critic's loss of each token: half the squared error, of the worse of the value and the clipped value.

        loss = max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2

    Source: Schulman et al., the implementation of PPO in OpenAI baselines (ppo2/model.py); the paper leaves the clip out.
    """
    bounded = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (bounded - returns) ** 2)


def is_clipped(logprobs: Tensor, rollout_logprobs: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Return, for each token, whether its probability ratio lies outside [1 - clip_low, 1 + clip_high]."""
    ratio = torch.exp(logprobs - rollout_logprobs)
    return (ratio < 1.0 - clip_low) | (ratio > 1.0 + clip_high)


def masked_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of values * weights over the tokens whose weight is not 0, whatever the others hold."""
    trained = weights != 0
    return (values.where(trained, 0.0) * weights).sum()


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float
) -> Tensor:
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if not dual_clip:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
