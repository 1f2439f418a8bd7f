"""Qwen3 (dense): grouped queries with a norm on every head of queries and keys, gated MLP.

Checked against transformers' Qwen3ForCausalLM by logits.
"""

from __future__ import annotations

from typing import Any

from strawflow_workers.trainer.convert import decoder, layers, rotary


def _fields(hf: decoder.Hf) -> dict[str, Any]:
    return layers.grouped_attention(hf, head_norms=True)


FAMILY = decoder.Decoder(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    names={
        **decoder.OUTSIDE_LAYERS,
        **decoder.in_layers({**layers.GROUPED_ATTENTION, **layers.HEAD_NORMS, **layers.GATED_MLP}),
    },
    fields=_fields,
    rotary=rotary.plain,
    only={"attention_bias": False},
)
