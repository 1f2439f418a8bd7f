"""Qwen3 (dense): Hugging Face names and tensors to Megatron's and back.

Megatron keeps query, key and value in one matrix, interleaved by query group (the queries of a group, its
key, its value), and gate and up projection stacked in one. Everything else differs by name only.

It does not know ranks, files or devices. Layer layout checked against transformers' Qwen3 by logits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strawflow.errors import ConfigError

_OUTSIDE_LAYERS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_INSIDE_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def config_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig.

    Raises:
        ConfigError: the configuration asks for attention biases, sliding windows, dropout or another
        activation.
    """
    unsupported = {
        "attention_bias": False,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
    }
    for field, wanted in unsupported.items():
        if hf.get(field, wanted) != wanted:
            raise ConfigError(
                f"config.json: {field}={hf[field]!r} is not supported for qwen3; it must be {wanted!r}"
            )
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": _head_dim(hf),
        "layernorm_epsilon": hf["rms_norm_eps"],
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": False,
    }


def model_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of Megatron's GPTModel.

    Raises:
        ConfigError: the rotary embedding is scaled, which is not supported.
    """
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"config.json: rope_type {kind!r} is not supported for qwen3; only 'default' is")
    return {
        "vocab_size": hf["vocab_size"],
        "max_sequence_length": hf["max_position_embeddings"],
        "position_embedding_type": "rope",
        "rotary_base": rope.get("rope_theta") or hf.get("rope_theta") or 10_000,
        "share_embeddings_and_output_weights": bool(hf.get("tie_word_embeddings", False)),
    }


def hf_names(name: str) -> tuple[str, ...]:
    """Return the Hugging Face names whose tensors make up the Megatron parameter `name`."""
    if name in _OUTSIDE_LAYERS:
        return (_OUTSIDE_LAYERS[name],)
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _INSIDE_LAYER:
        raise ConfigError(f"Megatron parameter {name!r} has no counterpart in a Qwen3 checkpoint")
    return tuple(f"model.layers.{match[1]}.{part}" for part in _INSIDE_LAYER[match[2]])


def join(name: str, parts: tuple[Tensor, ...], hf: Mapping[str, Any]) -> Tensor:
    """Make the Megatron tensor from its Hugging Face parts, in the order of `hf_names`."""
    if name.endswith("linear_qkv.weight"):
        groups = hf["num_key_value_heads"]
        by_group = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(by_group, dim=1).flatten(0, 1)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def split(name: str, whole: Tensor, hf: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Undo `join`."""
    if name.endswith("linear_qkv.weight"):
        groups, width = hf["num_key_value_heads"], _head_dim(hf)
        queries = hf["num_attention_heads"] // groups * width
        by_group = whole.view(groups, -1, *whole.shape[1:])
        parts = (
            by_group[:, :queries],
            by_group[:, queries : queries + width],
            by_group[:, queries + width :],
        )
        return tuple(part.flatten(0, 1) for part in parts)
    if name.endswith("linear_fc1.weight"):
        return whole.chunk(2)
    return (whole,)


def _head_dim(hf: Mapping[str, Any]) -> int:
    return int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])
