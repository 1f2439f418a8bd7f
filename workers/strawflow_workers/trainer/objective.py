"""The objective of an update on one micro-batch: from logits to the summed loss and its statistics.

1. The loss is a sum over trained tokens of planned weight * token loss; the denominator is divided out elsewhere. Sums add up
   over micro-batches and ranks.
2. The order of additions is fixed, and terms that are not asked for are not computed: default settings give the bits that the
   clipped surrogate alone gives.
3. Quantities of whole sequences (GSPO's ratio, the correction by sequence) are constants from sums over segments. Where
   context-parallel ranks each hold a part of a sequence, `complete` adds their tables (`segments.sequence_sums`).
4. It knows nothing of models, optimizers or where columns come from.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from strawflow.config_algorithm import AlgorithmSection, is_hook
from strawflow_workers.rollout.hooks.interfaces_algorithm import Loss, LossTokens
from strawflow_workers.trainer import divergences, losses, segments
from strawflow_workers.trainer.batches import TrainSettings
from strawflow_workers.trainer.device import importing_megatron
from strawflow_workers.trainer.forward import Prepared, logprobs_of, wanted_logits

with importing_megatron():
    from megatron.core import parallel_state

LOSS, TOKENS, CLIPPED, KL, GAP, ENTROPY, REFERENCE_KL, CORRECTED = range(8)
"""Places in the vector of sums that `loss_and_sums` returns."""
NUM_SUMS = 8


def loss_and_sums(
    logits: Tensor,
    prepared: Prepared,
    settings: TrainSettings,
    *,
    complete: segments.Complete | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss (a scalar to differentiate), the vector of sums, and the largest log-probability
    gap.

    The sums are float64 [NUM_SUMS]: loss, tokens, tokens outside the clipping range, KL estimates, gaps, entropies, estimates of
    the divergence from the reference, tokens whose correction was cut off or masked; all but the first two stay 0 for sft, and
    the last three where the settings do not ask for them.
    """
    sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=logits.device)
    if prepared.rows.numel() == 0:
        return logits.sum() * 0.0, sums, sums.new_zeros(())
    wanted = wanted_logits(logits, prepared)
    if settings.objective == "sft":
        logprobs = logprobs_of(wanted, prepared)
        loss = losses.masked_sum(losses.sft_loss(logprobs), prepared.weights)
        largest = sums.new_zeros(())
    else:
        # First: Megatron's cross-entropy overwrites the logits that it is given.
        entropies = _entropies(wanted, settings.algorithm)
        logprobs = logprobs_of(wanted, prepared)
        loss, largest = _policy(logprobs, entropies, prepared, settings, sums, complete)
    sums[LOSS], sums[TOKENS] = loss.detach(), prepared.rows.numel()
    return loss, sums, largest


def _policy(
    logprobs: Tensor,
    entropies: Tensor | None,
    prepared: Prepared,
    settings: TrainSettings,
    sums: Tensor,
    complete: segments.Complete | None,
) -> tuple[Tensor, Tensor]:
    """Return the summed loss and the largest gap; fills in the sums of the policy's statistics."""
    a, current, rollout = settings.algorithm, logprobs.detach(), prepared.rollout_logprobs
    old = rollout
    if a.old_logprobs == "recomputed":
        # Without a column no update has been made since: this pass is the policy before the step.
        old = current if prepared.old_logprobs is None else prepared.old_logprobs
    per_token = _token_losses(logprobs, old, prepared, settings, complete)
    if a.mismatch != "none":
        ratios = segments.mismatch_ratios(old, rollout, prepared.lengths, level=a.mismatch, complete=complete)
        per_token = per_token * segments.mismatch_weights(
            ratios, mode=a.mismatch_mode, low=a.mismatch_low, high=a.mismatch_high
        )
        is_low = (ratios < a.mismatch_low) & (a.mismatch_mode == "mask")
        sums[CORRECTED] = ((ratios > a.mismatch_high) | is_low).sum()
    if a.kl == "loss" and prepared.reference_logprobs is not None:
        divergence = divergences.reference_kl(logprobs, prepared.reference_logprobs, a.kl_estimator, old)
        per_token = per_token + a.kl_coefficient * divergence
        sums[REFERENCE_KL] = divergence.detach().sum()
    if entropies is not None:
        sums[ENTROPY] = entropies.detach().sum()
        if a.entropy_coefficient:
            per_token = per_token - a.entropy_coefficient * entropies
    loss = losses.masked_sum(per_token, prepared.weights)
    bounds = {"clip_low": settings.clip_low, "clip_high": settings.clip_high}
    gaps = (current - rollout).abs()
    of_ratio = _ratio_gaps(current, old, prepared, a.loss, complete)
    sums[CLIPPED] = losses.is_clipped(of_ratio, torch.zeros_like(of_ratio), **bounds).sum()
    sums[KL] = divergences.kl_estimate(current, rollout).sum()
    sums[GAP] = gaps.sum()
    return loss, gaps.max().double()


def _ratio_gaps(
    current: Tensor, old: Tensor, prepared: Prepared, loss: str, complete: segments.Complete | None
) -> Tensor:
    """Return the logarithm of the ratio that a loss takes of each token: its own, or with gspo that of its sequence."""
    gaps = current - old
    return segments.sequence_means(gaps, prepared.lengths, complete) if loss == "gspo" else gaps


def _token_losses(
    logprobs: Tensor,
    old: Tensor,
    prepared: Prepared,
    settings: TrainSettings,
    complete: segments.Complete | None,
) -> Tensor:
    bounds = {"clip_low": settings.clip_low, "clip_high": settings.clip_high}
    advantages, name = prepared.advantages, settings.algorithm.loss
    match name:
        case "ppo":
            dual_clip = settings.algorithm.dual_clip
            return losses.policy_loss(logprobs, old, advantages, dual_clip=dual_clip, **bounds)
        case "gspo":
            gaps = _ratio_gaps(logprobs.detach(), old, prepared, name, complete)
            return losses.gspo_loss(logprobs, gaps, advantages, **bounds)
        case "cispo":
            return losses.cispo_loss(logprobs, old, advantages, **bounds)
        case "reinforce":
            return losses.reinforce_loss(logprobs, advantages)
        case _:
            return _hook(name)(
                LossTokens(
                    logprobs=logprobs,
                    old_logprobs=old,
                    rollout_logprobs=prepared.rollout_logprobs,
                    advantages=advantages,
                    lengths=prepared.lengths,
                    reference_logprobs=prepared.reference_logprobs,
                )
            )


def sequence_losses(logprobs: Tensor, prepared: Prepared, settings: TrainSettings) -> Tensor:
    """Return float64 [S]: the weighted losses of each sequence's tokens by the loss alone, for whoever looks for the worst.

    `logprobs` [n] are the log-probabilities of the rows; corrections, KL and entropy are left out.
    """
    old = prepared.rollout_logprobs if prepared.old_logprobs is None else prepared.old_logprobs
    if settings.objective == "sft":
        per_token = losses.sft_loss(logprobs)
    else:
        with torch.enable_grad():  # a hook's answer must have a gradient
            per_token = _token_losses(logprobs.detach().requires_grad_(), old, prepared, settings, None)
    return segments.sequence_sums(per_token.detach() * prepared.weights, prepared.lengths)[:, 0]


def require_loss(settings: TrainSettings) -> None:
    """Load the loss hook that the settings name, so that a wrong one ends the worker before it trains.

    Raises:
        ConfigError: it cannot be imported or called.
    """
    if is_hook(settings.algorithm.loss):
        _hook(settings.algorithm.loss)


@cache
def _hook(path: str) -> Loss:
    from strawflow_workers.rollout.hooks.load_algorithm import load_loss

    return load_loss(path)


def _entropies(wanted: Tensor, a: AlgorithmSection) -> Tensor | None:
    """Return the entropy of each row's distribution, with a gradient where it is in the loss; None: nothing asks for it."""
    if not (a.entropy_coefficient or a.measure_entropy):
        return None
    size = parallel_state.get_tensor_model_parallel_world_size()
    group = parallel_state.get_tensor_model_parallel_group() if size > 1 else None
    if a.entropy_coefficient:
        return divergences.vocab_parallel_entropy(wanted, group)
    with torch.no_grad():
        return divergences.vocab_parallel_entropy(wanted, group)
