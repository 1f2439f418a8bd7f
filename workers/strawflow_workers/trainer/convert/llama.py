"""Llama 3 (and 2): grouped queries, gated MLP, rotary embedding plain or scaled as in Llama 3.1.

Checked against transformers' LlamaForCausalLM by logits.
"""

from __future__ import annotations

from strawflow_workers.trainer.convert import decoder, layers, rotary

FAMILY = decoder.Decoder(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names={
        **decoder.OUTSIDE_LAYERS,
        **decoder.in_layers({**layers.GROUPED_ATTENTION, **layers.GATED_MLP}),
    },
    fields=layers.grouped_attention,
    rotary=rotary.plain_or_llama3,
    only={"attention_bias": False, "mlp_bias": False},
)
