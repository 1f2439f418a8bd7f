"""What the decoder-only families share: names by pattern, tensors joined by rows or by query group, fields that all have.

1. A name's numbers (layer, expert) are written `#` in the tables; those of the Megatron name fill the Hugging Face names
   in order.
2. Megatron keeps query, key and value in one matrix, interleaved by query group (the queries of a group, its key, its
   value), and gate and up projection stacked in one. Everything else differs by name only.
3. A field with a value other than those a family was checked with is refused, not passed over.
It does not know ranks, files or devices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strawflow.errors import ConfigError

Hf = Mapping[str, Any]
Names = Mapping[str, tuple[str, ...]]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_NOT_WEIGHTS = {"model.layers.#.self_attn.rotary_emb.inv_freq", "lm_head.weight"}
"""What older checkpoints hold beside weights, and the output matrix, which a tied one may repeat."""

OUTSIDE_LAYERS: Names = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    "output_layer.weight": ("lm_head.weight",),
}
_IN_EVERY_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
}


def in_layers(names: Names) -> Names:
    """Return the names as they are inside the layers of a whole model, with those that every layer has."""
    return {
        f"decoder.layers.#.{ours}": tuple(f"model.layers.#.{part}" for part in theirs)
        for ours, theirs in {**_IN_EVERY_LAYER, **names}.items()
    }


@dataclass(frozen=True)
class Decoder:
    """A family (see `Family`) by its tables and the two functions that say its configuration."""

    model_type: str
    architecture: str
    """The class of transformers that was checked against, as `architectures` names it."""
    names: Names
    """Megatron names and the Hugging Face names of their parts, outside layers and in them."""
    fields: Callable[[Hf], dict[str, Any]]
    """Returns what TransformerConfig gets beside the fields all families have."""
    rotary: Callable[[Hf], dict[str, Any]]
    """Returns what GPTModel gets for its position embedding."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of config.json that must have this value where they are given."""
    normalises_outputs: bool = False

    def config_fields(self, hf: Hf) -> dict[str, Any]:
        """Return the fields of Megatron's TransformerConfig.

        Raises:
            ConfigError: a field has a value that is not supported.
        """
        self._refuse_others(hf)
        return {
            "num_layers": hf["num_hidden_layers"],
            "hidden_size": hf["hidden_size"],
            "ffn_hidden_size": hf["intermediate_size"],
            "num_attention_heads": hf["num_attention_heads"],
            "layernorm_epsilon": hf["rms_norm_eps"],
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            **self.fields(hf),
        }

    def model_fields(self, hf: Hf) -> dict[str, Any]:
        """Return the keyword arguments of Megatron's GPTModel.

        Raises:
            ConfigError: the rotary embedding is scaled in a way that is not supported.
        """
        return {
            "vocab_size": hf["vocab_size"],
            "max_sequence_length": hf["max_position_embeddings"],
            "position_embedding_type": "rope",
            "share_embeddings_and_output_weights": bool(hf.get("tie_word_embeddings", False)),
            **self.rotary(hf),
        }

    def check_names(self, stored: Collection[str], hf: Hf) -> None:
        """Refuse a checkpoint with tensors that the tables do not name; layers after the last one (multi-token prediction)
        are no part of the model that is trained.

        Raises:
            ConfigError: there are such; the message names the first of them.
        """
        known = _NOT_WEIGHTS.union(*self.names.values())
        unknown = sorted(
            name
            for name in stored
            if _NUMBER.sub("#", name) not in known and not _is_after_last(name, hf["num_hidden_layers"])
        )
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise ConfigError(
                f"the checkpoint holds {unknown[0]}{more}, which {self.model_type} models of this trainer do not have: "
                "it is of another architecture than config.json says, or of a newer one"
            )

    def hf_names(self, name: str) -> tuple[str, ...]:
        """Return the Hugging Face names whose tensors make up the Megatron parameter or buffer `name`."""
        pattern = _NUMBER.sub("#", name)
        if pattern not in self.names:
            raise ConfigError(
                f"Megatron parameter {name!r} has no counterpart in a {self.model_type} checkpoint"
            )
        numbers = _NUMBER.findall(name)
        return tuple(_filled(part, numbers) for part in self.names[pattern])

    def join(self, name: str, parts: tuple[Tensor, ...], hf: Hf) -> Tensor:
        """Make the Megatron tensor from its Hugging Face parts, in the order of `hf_names`."""
        if ".linear_qkv." in name:
            groups = num_groups(hf)
            by_group = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
            return torch.cat(by_group, dim=1).flatten(0, 1)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def split(self, name: str, whole: Tensor, hf: Hf) -> tuple[Tensor, ...]:
        """Undo `join`."""
        if ".linear_qkv." in name:
            groups, width = num_groups(hf), head_dim(hf)
            queries = hf["num_attention_heads"] // groups * width
            by_group = whole.reshape(groups, -1, *whole.shape[1:])
            parts = torch.split_with_sizes(by_group, (queries, width, width), dim=1)
            return tuple(part.flatten(0, 1) for part in parts)
        num_parts = len(self.names[_NUMBER.sub("#", name)])
        return (whole,) if num_parts == 1 else whole.chunk(num_parts)

    def _refuse_others(self, hf: Hf) -> None:
        for name, wanted in {**_ONLY, **self.only}.items():
            if hf.get(name, wanted) != wanted:
                raise ConfigError(
                    f"config.json: {name}={hf[name]!r} is not supported for {self.model_type}; it must be {wanted!r}"
                )
        if hf.get("quantization_config") is not None:
            raise ConfigError("config.json: quantization_config: the weights are quantized; widen them first")
        if sliding := [kind for kind in hf.get("layer_types") or () if kind != "full_attention"]:
            raise ConfigError(
                f"config.json: layer_types holds {sliding[0]!r}, which is not supported for {self.model_type}; "
                "only 'full_attention' is"
            )
        if (given := hf.get("architectures")) and self.architecture not in given:
            raise ConfigError(
                f"config.json: architectures={given!r} is not supported for {self.model_type}; only "
                f"{self.architecture} is"
            )


_ONLY = {"attention_dropout": 0.0, "hidden_act": "silu", "use_sliding_window": False}


def _filled(part: str, numbers: list[str]) -> str:
    for number in numbers:
        part = part.replace("#", number, 1)
    return part


def _is_after_last(name: str, num_layers: int) -> bool:
    match = _LAYER.match(name)
    return match is not None and int(match[1]) >= num_layers


def num_groups(hf: Hf) -> int:
    """Return how many heads of keys and values there are."""
    return int(hf.get("num_key_value_heads") or hf["num_attention_heads"])


def head_dim(hf: Hf) -> int:
    return int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])
