"""Qwen3-MoE: the attention of Qwen3; experts chosen by softmax in all layers but those that config.json leaves dense.

Checked against transformers' Qwen3MoeForCausalLM by logits.
"""

from __future__ import annotations

from typing import Any

from strawflow_workers.trainer.convert import decoder, layers, rotary


def _fields(hf: decoder.Hf) -> dict[str, Any]:
    dense, every = hf.get("mlp_only_layers") or (), hf.get("decoder_sparse_step") or 1
    return {
        **layers.grouped_attention(hf, head_norms=True),
        **layers.routed_experts(
            hf,
            # transformers has renamed the field; published checkpoints have the first.
            num_experts=hf.get("num_experts") or hf["num_local_experts"],
            is_sparse=[
                layer not in dense and (layer + 1) % every == 0 for layer in range(hf["num_hidden_layers"])
            ],
        ),
    }


FAMILY = decoder.Decoder(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    names={
        **decoder.OUTSIDE_LAYERS,
        **decoder.in_layers(
            {
                **layers.GROUPED_ATTENTION,
                **layers.HEAD_NORMS,
                **layers.GATED_MLP,
                **layers.ROUTED_EXPERTS,
            }
        ),
    },
    fields=_fields,
    rotary=rotary.plain,
    only={"attention_bias": False},
)
