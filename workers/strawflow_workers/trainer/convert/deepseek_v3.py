"""DeepSeek V3 (and R1): latent attention, experts chosen by sigmoid and bias within groups, shared experts, YaRN.

The layers for multi-token prediction that published checkpoints hold after the last one are not trained and not
written. Checked against transformers' DeepseekV3ForCausalLM by logits.
"""

from __future__ import annotations

from typing import Any

from strawflow_workers.trainer.convert import decoder, layers, rotary


def _fields(hf: decoder.Hf) -> dict[str, Any]:
    return {**layers.latent_attention(hf), **rotary.latent(hf), **layers.biased_experts(hf)}


def _no_embedding_of_the_model(_hf: decoder.Hf) -> dict[str, Any]:
    """Latent attention has a rotary embedding of its own in each layer."""
    return {}


FAMILY = decoder.Decoder(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    names={
        **decoder.OUTSIDE_LAYERS,
        **decoder.in_layers(
            {
                **layers.LATENT_ATTENTION,
                **layers.GATED_MLP,
                **layers.ROUTED_EXPERTS,
                **layers.SHARED_EXPERTS,
            }
        ),
    },
    fields=_fields,
    rotary=_no_embedding_of_the_model,
    only={"attention_bias": False},
)
