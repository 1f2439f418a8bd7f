"""The signatures of hooks that replace a part of the algorithm: advantages, the loss of a token, what a token weighs.

1. `algorithm.advantage`, `algorithm.loss` and `algorithm.aggregation` take a name of ours or `package.module:function`.
2. They are asked again after a crash and on replay: same arguments, same answer, or a replay differs.
3. Advantages and weights are made by the assembler and stored with the batch; the loss runs in the trainer, on torch tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from strawflow_workers.rollout.hooks.interfaces import CompletedGroup

if TYPE_CHECKING:
    from torch import Tensor


class Advantage(Protocol):
    """`algorithm.advantage`: all groups of a step in; for each group one advantage a member that did not fail, in their order, out.

    Every trained token of the member is weighted by it. No group is dropped for having no signal: give 0, or use
    `assemble.group_filter`. What `assemble.post_process` says of advantages comes first.
    """

    def __call__(self, groups: Sequence[CompletedGroup]) -> Sequence[Sequence[float]]: ...


@dataclass(frozen=True)
class RolloutSize:
    """A rollout that is trained in a mini-batch."""

    unit_id: int
    """That of its prompt's group."""
    member: int
    num_tokens: int
    """Trained tokens of all its segments, at least 1."""


@dataclass(frozen=True)
class Reduction:
    """How the token losses of one update add up: sum(weight * loss) / denominator."""

    weights: Sequence[float]
    """Of each trained token of a rollout, in the order of the rollouts; above 0."""
    denominator: float
    """Above 0."""


class Reducer(Protocol):
    """`algorithm.aggregation`: the rollouts of each mini-batch of a step in, the weights and denominator of each out."""

    def __call__(self, mini_batches: Sequence[Sequence[RolloutSize]]) -> Sequence[Reduction]: ...


@dataclass(frozen=True)
class LossTokens:
    """The n trained tokens of one micro-batch, sequence after sequence; tensors are float32 [n] on the trainer's device."""

    logprobs: Tensor
    """log-softmax(logits / temperature) of the tokens under the model that is trained; what the gradient goes through."""
    old_logprobs: Tensor
    """What a ratio is taken against: by `algorithm.old_logprobs` the engine's, or the trainer's own before the step."""
    rollout_logprobs: Tensor
    """The engine's."""
    advantages: Tensor
    lengths: Tensor
    """int64 [S]: how many of the tokens belong to each sequence, in order; they sum to n."""
    reference_logprobs: Tensor | None = None
    """Under the reference model, where `algorithm.kl` asks for it."""


class Loss(Protocol):
    """`algorithm.loss`: returns the loss of each token, [n], with a gradient through `logprobs`.

    It neither weighs nor divides: sum(weight * loss) / denominator comes after it, and KL and entropy of the configuration are
    added. The loss of a token must not depend on other sequences: they may be in another micro-batch tomorrow.
    """

    def __call__(self, tokens: LossTokens) -> Tensor: ...
