"""What a trainer is given and what it answers: packed micro-batches, settings of a stage, metrics of a step.

1. Arrays are aligned to tokens: entry t describes the token at t, which the model predicts from the tokens
   before it. The first token of a sequence is predicted from nothing and never trained.
2. Parallel arrays have equal length, and whatever is trained is finite; a value that breaks this is refused
   when it is made.
3. The denominator of an update is given, never counted here: it was planned and stored with the batch.
4. Importing this module imports numpy and the configuration only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from strawflow.config_algorithm import AlgorithmSection
from strawflow.errors import InvalidInputError

Objective = Literal["sft", "grpo"]


@dataclass(frozen=True)
class PackedMicroBatch:
    """S sequences (prompt, then response) laid end to end: T tokens that one forward pass takes."""

    tokens: npt.NDArray[np.int32]
    """[T]"""
    boundaries: npt.NDArray[np.int32]
    """[S+1]: sequence s is tokens[boundaries[s]:boundaries[s+1]]; from 0 to T, strictly rising."""
    loss_mask: npt.NDArray[np.float32]
    """[T]: weight of the token in the loss, 0 where it is not trained."""
    advantages: npt.NDArray[np.float32]
    """[T]"""
    rollout_logprobs: npt.NDArray[np.float32]
    """[T]: log-probability under the forward pass that sampled the token, at the row's temperature."""
    temperatures: npt.NDArray[np.float32]
    """[S]: sampling temperature of each sequence."""
    old_logprobs: npt.NDArray[np.float32] | None = None
    """[T]: what ratios are taken against, computed by the trainer before the step. None: the rollout's, or, where the
    settings ask for recomputed ones, those of the very forward pass that is trained."""
    reference_logprobs: npt.NDArray[np.float32] | None = None
    """[T]: under the reference model; None where nothing asks for it."""

    def __post_init__(self) -> None:
        _check_shapes(self)
        if self.tokens.size == self.boundaries.size - 1:
            raise InvalidInputError("tokens: every sequence has one token only; there is nothing to predict")
        trained = self.loss_mask != 0
        if trained[self.boundaries[:-1]].any():
            raise InvalidInputError(
                "loss_mask: the first token of a sequence is predicted from nothing; its mask must be 0"
            )
        for name in ("loss_mask", "advantages", "rollout_logprobs"):
            values: npt.NDArray[np.float32] = getattr(self, name)
            if not np.isfinite(values[trained]).all():
                raise InvalidInputError(f"{name}: a trained token has a value that is not finite")
        if not (np.isfinite(self.temperatures).all() and (self.temperatures > 0).all()):
            raise InvalidInputError("temperatures: every sequence needs a finite temperature above 0")


def _check_shapes(batch: PackedMicroBatch) -> None:
    tokens, boundaries = batch.tokens, batch.boundaries
    if boundaries.ndim != 1 or boundaries.size < 2 or boundaries[0] != 0 or boundaries[-1] != tokens.size:
        raise InvalidInputError(f"boundaries: must run from 0 to the number of tokens ({tokens.size})")
    if (np.diff(boundaries) <= 0).any():
        raise InvalidInputError("boundaries: must rise strictly; an empty sequence cannot be packed")
    for name in ("loss_mask", "advantages", "rollout_logprobs", "old_logprobs", "reference_logprobs"):
        values = getattr(batch, name)
        if values is not None and values.shape != tokens.shape:
            raise InvalidInputError(f"{name}: has shape {values.shape}, tokens have {tokens.shape}")
    if batch.temperatures.shape != (boundaries.size - 1,):
        raise InvalidInputError(
            f"temperatures: has shape {batch.temperatures.shape} for {boundaries.size - 1} sequences"
        )


@dataclass(frozen=True)
class MiniBatch:
    """The micro-batches of one optimizer update; loss = sum of weighted token losses / denominator."""

    micro_batches: tuple[PackedMicroBatch, ...]
    denominator: float

    def __post_init__(self) -> None:
        if not self.micro_batches:
            raise InvalidInputError("micro_batches: an update needs at least one")
        if not (np.isfinite(self.denominator) and self.denominator > 0):
            raise InvalidInputError(f"denominator: must be finite and above 0, is {self.denominator}")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Objective and optimizer of one stage of training. Weight decay leaves out one-dimensional parameters
    (norms, biases)."""

    objective: Objective
    lr: float
    lr_warmup_updates: int = 0
    """The k-th of these updates uses lr * k / lr_warmup_updates; afterwards the rate is constant."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    """Largest norm of the whole gradient; 0 leaves it unclipped."""
    max_grad_norm: float = 0.0
    """An update whose gradient norm, before clipping, is above this is not applied; 0: no bound."""
    clip_low: float = 0.2
    """grpo: the probability ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = 0.2
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    """grpo: loss of a token, correction for the engine, KL and entropy."""

    def __post_init__(self) -> None:
        if self.objective not in ("sft", "grpo"):
            raise InvalidInputError(f"objective: must be 'sft' or 'grpo', is {self.objective!r}")
        for name in (
            "lr",
            "weight_decay",
            "clip_grad",
            "max_grad_norm",
            "clip_low",
            "clip_high",
            "lr_warmup_updates",
        ):
            if not (np.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InvalidInputError(f"{name}: must be finite and not negative, is {getattr(self, name)}")
        object.__setattr__(self, "betas", tuple(self.betas))  # a list after a round trip through JSON
        object.__setattr__(self, "algorithm", AlgorithmSection.model_validate(self.algorithm))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-able values; `TrainSettings(**fields)` undoes it."""
        algorithm = self.algorithm.model_dump(mode="json")
        return {**asdict(self), "betas": list(self.betas), "algorithm": algorithm}


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What one training step (all its mini-batches) did. A field that the objective does not define is
    None."""

    loss: float | None
    """Mean over the applied updates; None if none was applied."""
    grad_norm: float | None
    """Mean over the applied updates, before clipping; None if none was applied."""
    num_tokens: int
    """Tokens with a mask other than 0, over all mini-batches."""
    clip_fraction: float | None
    """Share of trained tokens whose probability ratio lay outside the clipping range."""
    kl: float | None
    """Mean estimate of KL(rollout policy || trained policy) per trained token, each at the time of its
    update."""
    logprob_gap_mean: float | None
    """Mean |trainer - rollout| log-probability over the first mini-batch, before its update."""
    logprob_gap_max: float | None
    entropy: float | None = None
    """Mean entropy per trained token in nats, where the settings ask for it."""
    reference_kl: float | None = None
    """Mean estimate of KL(trained policy || reference) per trained token, where it is in the loss."""
    corrected_fraction: float | None = None
    """Share of trained tokens whose correction for the engine was cut off or masked."""
    lr: float
    """Learning rate of the last update."""
    skipped_updates: int
    """Mini-batches left out because their loss or gradient was not finite or too large; weights and optimizer
    did not move for them."""
    left_out: tuple[int, ...] = ()
    """Which mini-batches these were, in order from 0."""
    seconds: float

    @property
    def skipped(self) -> bool:
        """Whether any update of this step was left out."""
        return self.skipped_updates > 0
