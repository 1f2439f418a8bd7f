"""How a trainer is spread over processes: the section `parallel` of a run's configuration.

1. The defaults are one process in fp32, which trains as it always did.
2. A trainer has tensor x pipeline x context x data ranks; data is what remains of `ranks`.
3. The plan of a batch knows nothing of this section: another spread trains the same batches with the same denominators.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strawflow.errors import ConfigError
from strawflow.section import Section


class ParallelSection(Section):
    ranks: int = Field(default=0, ge=0)
    """Processes of the trainer; 0: as many as tensor x pipeline x context. Those beyond share the batch (data parallelism).
    A launcher that sets RANK and WORLD_SIZE (torchrun) has the last word."""
    tensor: int = Field(default=1, ge=1)
    """Ranks that share each layer's matrices."""
    pipeline: int = Field(default=1, ge=1)
    """Ranks that each have a part of the layers."""
    context: int = Field(default=1, ge=1)
    """Ranks that share each sequence's tokens."""
    sequence: bool = False
    """Between the matrices, tensor-parallel ranks share the tokens too (less memory); needs tensor above 1."""
    distributed_optimizer: bool = False
    """Data-parallel ranks each keep a part of the optimizer's state."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel ranks while the rest of the backward pass goes on."""
    overlap_param_gather: bool = False
    """Gather updated parameters while the next forward pass goes on; needs distributed_optimizer."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What is computed again in the backward pass instead of kept: nothing, the attention, or whole layers."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """`bf16`: weights and activations in bfloat16, the optimizer's own copy and the gradients in fp32."""

    @property
    def ranks_of_a_replica(self) -> int:
        """Ranks that hold the model once."""
        return self.tensor * self.pipeline * self.context

    @property
    def world_size(self) -> int:
        """Processes of the trainer, unless a launcher says otherwise."""
        return self.ranks or self.ranks_of_a_replica


def refuse_impossible_ranks(parallel: ParallelSection) -> None:
    """Raise ConfigError for fields that cannot be together."""
    if parallel.ranks % parallel.ranks_of_a_replica:
        raise ConfigError(
            f"parallel.ranks {parallel.ranks} is no multiple of tensor x pipeline x context = {parallel.ranks_of_a_replica}"
        )
    if parallel.sequence and parallel.tensor == 1:
        raise ConfigError("parallel.sequence needs parallel.tensor above 1")
    if parallel.overlap_param_gather and not parallel.distributed_optimizer:
        raise ConfigError("parallel.overlap_param_gather needs parallel.distributed_optimizer")
