"""GLM-4-MoE (4.5 to 4.7): grouped queries, rotary embedding of half of each head, experts as in DeepSeek V3.

The layers for multi-token prediction that published checkpoints hold after the last one are not trained and not
written. Checked against transformers' Glm4MoeForCausalLM by logits.
"""

from __future__ import annotations

from typing import Any

from strawflow_workers.trainer.convert import decoder, layers, rotary


def _fields(hf: decoder.Hf) -> dict[str, Any]:
    return {
        **layers.grouped_attention(
            hf,
            head_norms=bool(hf.get("use_qk_norm", False)),
            qkv_biases=bool(hf.get("attention_bias", False)),
        ),
        **layers.biased_experts(hf),
    }


FAMILY = decoder.Decoder(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    names={
        **decoder.OUTSIDE_LAYERS,
        **decoder.in_layers(
            {
                **layers.GROUPED_ATTENTION,
                **layers.QKV_BIASES,
                **layers.HEAD_NORMS,
                **layers.GATED_MLP,
                **layers.ROUTED_EXPERTS,
                **layers.SHARED_EXPERTS,
            }
        ),
    },
    fields=_fields,
    rotary=rotary.partial,
)
