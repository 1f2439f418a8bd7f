"""What a model's layers are made of: Megatron's own specifications, with our attention and, where a family has them, norms
of what attention and MLP give.

1. Which layers have experts, and which attention they have, the Megatron configuration says; a family only adds what it has
   no field for.
2. Layers are those of this process's pipeline stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from strawflow_workers.trainer import device

with device.importing_megatron():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_layer import TransformerLayer

# Without Transformer Engine 0.16.1 asks for names of it all the same: its router for one that it defines only with it, its latent
# attention for a class that is a mock then.
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None
if not isinstance(multi_latent_attention.TELinear, type):
    multi_latent_attention.HAVE_TE = False


def block_spec(config: Any, *, core_attention: type, normalises_outputs: bool) -> Any:
    """Return the specification of the decoder's layers for a TransformerConfig."""
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization
    )
    for spec in block.layer_specs:
        spec.submodules.self_attention.submodules.core_attention = core_attention
        if normalises_outputs:
            spec.module = NormalisingLayer
    if block.layer_specs:
        # By default the last norm may be one that knows no RMSNorm.
        block.layer_norm = block.layer_specs[0].submodules.input_layernorm
    return block


class NormalisingLayer(TransformerLayer):  # type: ignore[misc]
    """A layer that also normalises what attention and MLP give, before adding it to what they were given (GLM-4).

    Megatron-core has no place for such norms in its layer; they are put into the function that adds.
    """

    self_attn_bda: Any
    mlp_bda: Any

    def __init__(self, config: Any, submodules: Any, layer_number: int = 1, **options: Any) -> None:
        super().__init__(config=config, submodules=submodules, layer_number=layer_number, **options)
        self.post_self_attn_layernorm = self._norm(submodules)
        self.post_mlp_layernorm = self._norm(submodules)
        self.self_attn_bda = _after(self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda = _after(self.post_mlp_layernorm, self.mlp_bda)

    def _norm(self, submodules: Any) -> Any:
        return build_module(
            submodules.input_layernorm,
            config=self.config,
            hidden_size=self.config.hidden_size,
            eps=self.config.layernorm_epsilon,
        )


def _after(norm: Callable[[Tensor], Tensor], adding: Callable[..., Any]) -> Callable[..., Any]:
    """Return Megatron's "bias, dropout, add" with the norm before it."""

    def make(training: bool, fused: bool) -> Callable[..., Tensor]:
        add = adding(training, fused)

        def normalise_and_add(
            output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float
        ) -> Tensor:
            output, bias = output_with_bias
            total: Tensor = add(
                (norm(output if bias is None else output + bias), None), residual, probability
            )
            return total

        return normalise_and_add

    return make
