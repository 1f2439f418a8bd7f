"""GLM-4 (0414): interleaved rotary embedding of half of each head, norms after attention and MLP as well as before.

Gate and up projection lie in one matrix there as here. Checked against transformers' Glm4ForCausalLM by logits.
"""

from __future__ import annotations

from typing import Any

from strawflow_workers.trainer.convert import decoder, layers, rotary


def _fields(hf: decoder.Hf) -> dict[str, Any]:
    return {
        **layers.grouped_attention(hf, qkv_biases=bool(hf.get("attention_bias", True))),
        "rotary_interleaved": True,
    }


FAMILY = decoder.Decoder(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    names={
        **decoder.OUTSIDE_LAYERS,
        **decoder.in_layers(
            {
                **layers.GROUPED_ATTENTION,
                **layers.QKV_BIASES,
                "post_self_attn_layernorm.weight": ("post_self_attn_layernorm.weight",),
                "post_mlp_layernorm.weight": ("post_mlp_layernorm.weight",),
                "mlp.linear_fc1.weight": ("mlp.gate_up_proj.weight",),
                "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
            }
        ),
    },
    fields=_fields,
    rotary=rotary.partial,
    normalises_outputs=True,
)
