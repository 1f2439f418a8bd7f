"""Columns that a step needs and the trainer computes itself, before the first update: old, reference and teacher log-probabilities.

1. They depend on the stored batch, on the weights before the step and on the frozen models, so a replay computes the same.
2. KL in the reward and distillation change the advantages of the tokens here, once a step; nothing stored changes.
3. Which model gives them is the caller's part: it knows of no Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from strawflow.config_algorithm import AlgorithmSection
from strawflow_workers.trainer import advantages
from strawflow_workers.trainer.batches import MiniBatch, PackedMicroBatch

LogProbs = Callable[[PackedMicroBatch], npt.NDArray[np.float32]]
"""Returns float32 [T]: log-probability of each trained token given those before it; the others may hold anything."""


@dataclass(frozen=True)
class Models:
    """Whoever can tell log-probabilities: the model that is trained, and frozen ones where the settings ask for them."""

    own: LogProbs
    reference: LogProbs | None = None
    teacher: LogProbs | None = None


def with_columns(
    mini_batches: Sequence[MiniBatch], settings: AlgorithmSection, models: Models
) -> Sequence[MiniBatch]:
    """Return the mini-batches of a step with the columns that its loss needs; the same ones where it needs none.

    Of the first mini-batch no old log-probabilities are computed: the pass that trains it has them.
    """
    wants_old = settings.old_logprobs == "recomputed"
    if not (wants_old or models.reference or models.teacher):
        return mini_batches
    return [
        replace(
            mini_batch,
            micro_batches=tuple(
                _with_columns(one, settings, models, wants_old=wants_old and at > 0)
                for one in mini_batch.micro_batches
            ),
        )
        for at, mini_batch in enumerate(mini_batches)
    ]


def _with_columns(
    batch: PackedMicroBatch, settings: AlgorithmSection, models: Models, *, wants_old: bool
) -> PackedMicroBatch:
    found = batch.advantages
    trained = batch.loss_mask != 0
    reference = None if models.reference is None else models.reference(batch)
    if models.teacher is not None:
        found = advantages.distilled(
            found, batch.rollout_logprobs, models.teacher(batch), coefficient=settings.distill_coefficient
        )
    if reference is not None and settings.kl == "reward":
        found = advantages.penalised(
            found,
            _divergences(batch.rollout_logprobs, reference, settings.kl_estimator),
            trained,
            batch.boundaries,
            coefficient=settings.kl_coefficient,
        )
    return replace(
        batch,
        advantages=found,
        old_logprobs=models.own(batch) if wants_old else None,
        reference_logprobs=reference,
    )


def _divergences(
    logprobs: npt.NDArray[np.float32], reference: npt.NDArray[np.float32], estimator: str
) -> npt.NDArray[np.float64]:
    """Return the estimate of each token as `divergences.reference_kl` defines it; what is not trained may hold anything."""
    gap = reference.astype(np.float64) - logprobs
    with np.errstate(all="ignore"):
        if estimator == "k1":
            return -gap
        return 0.5 * gap**2 if estimator == "k2" else np.expm1(gap) - gap
