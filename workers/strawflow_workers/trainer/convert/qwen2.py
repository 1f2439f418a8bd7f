"""Qwen2 and Qwen2.5: as Llama, with biases of queries, keys and values.

Checked against transformers' Qwen2ForCausalLM by logits.
"""

from __future__ import annotations

from typing import Any

from strawflow_workers.trainer.convert import decoder, layers, rotary


def _fields(hf: decoder.Hf) -> dict[str, Any]:
    return layers.grouped_attention(hf, qkv_biases=True)


FAMILY = decoder.Decoder(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    names={
        **decoder.OUTSIDE_LAYERS,
        **decoder.in_layers({**layers.GROUPED_ATTENTION, **layers.QKV_BIASES, **layers.GATED_MLP}),
    },
    fields=_fields,
    rotary=rotary.plain,
)
