"""A norm that knows sequence parallelism, in the place of the one Megatron gives its local layers.

1. Without sequence parallelism the norm is torch's own, as Megatron chooses it.
2. With it a rank sees some of the tokens alone: the norm's gradient is marked to be added up over tensor-parallel ranks
   (Megatron's finalize_model_grads does that). Megatron's wrapper of torch's norm refuses the case.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch

from strawflow.errors import ConfigError
from strawflow_workers.trainer import device

with device.importing_megatron():
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )


class SharedRMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm over the last axis, of tokens that tensor-parallel ranks share.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_rest: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def with_shared_norms(spec: Any, config: TransformerConfig) -> Any:
    """Return the spec of a whole block in which every norm may have its tokens shared; `spec` is of a layer or a block.

    Raises:
        ConfigError: the model has another norm than RMSNorm.
    """
    if config.normalization != "RMSNorm":
        raise ConfigError(
            f"parallel.sequence: norms of kind {config.normalization} cannot share tokens here; only RMSNorm can"
        )
    if not isinstance(spec, TransformerBlockSubmodules):
        spec = TransformerBlockSubmodules(
            layer_specs=[spec] * get_num_layers_to_build(config), layer_norm=WrappedTorchNorm
        )
    seen: set[int] = set()
    for layer in spec.layer_specs or []:
        _replace_norms(layer, seen)
    spec.layer_norm = SharedRMSNorm
    return spec


def _replace_norms(node: Any, seen: set[int]) -> None:
    submodules = getattr(node, "submodules", None)
    if id(node) in seen or not is_dataclass(submodules):
        return
    seen.add(id(node))
    for field in fields(submodules):
        value = getattr(submodules, field.name)
        if value is WrappedTorchNorm:
            setattr(submodules, field.name, SharedRMSNorm)
        else:
            _replace_norms(value, seen)
