"""Rotary position embeddings: what config.json says of them, in both of its forms, as Megatron's arguments.

1. `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before) say the same.
2. A scaling that Megatron has no like of, or has with other constants, is refused by field and value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strawflow.errors import ConfigError
from strawflow_workers.trainer.convert.decoder import Hf

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of Megatron's scaling; Llama 3.1 to 3.3 have them."""


def plain_or_llama3(hf: Hf) -> dict[str, Any]:
    """Return GPTModel's arguments for an embedding of the whole head, scaled as in Llama 3 or not at all."""
    kind, rope = _parameters(hf)
    if kind != "llama3":
        return plain(hf, supported="'default' and 'llama3' are")
    for name, wanted in _LLAMA3.items():
        if rope.get(name) != wanted:
            raise ConfigError(
                f"config.json: {name}={rope.get(name)!r} of rope_type 'llama3' is not supported; it must be {wanted!r}"
            )
    return {
        "rotary_base": _base(hf, rope),
        "rope_scaling": True,
        "rope_scaling_factor": rope["factor"],
    }


def plain(hf: Hf, *, supported: str = "'default' is") -> dict[str, Any]:
    """Return GPTModel's arguments for an embedding of the whole head without scaling."""
    kind, rope = _parameters(hf)
    if kind != "default":
        raise _unsupported(hf, kind, supported)
    if (share := _share(hf, rope, otherwise=1.0)) != 1.0:
        raise ConfigError(
            f"config.json: partial_rotary_factor={share!r} is not supported for {hf['model_type']}; it must be 1.0"
        )
    return {"rotary_base": _base(hf, rope)}


def partial(hf: Hf) -> dict[str, Any]:
    """Return GPTModel's arguments for an embedding of the first part of each head (GLM: one half), without scaling."""
    kind, rope = _parameters(hf)
    if kind != "default":
        raise _unsupported(hf, kind, "'default' is")
    return {"rotary_base": _base(hf, rope), "rotary_percent": _share(hf, rope, otherwise=0.5)}


def latent(hf: Hf) -> dict[str, Any]:
    """Return MLATransformerConfig's fields for the embedding of latent attention, plain or scaled by YaRN.

    The factors on cosine and sine and on the softmax are those of transformers' `_compute_yarn_parameters` and
    `yarn_apply_mscale`: both values of mscale given, or neither.
    """
    kind, rope = _parameters(hf)
    if hf.get("rope_interleave", True) is not True:
        raise ConfigError(
            f"config.json: rope_interleave={hf['rope_interleave']!r} is not supported; it must be True"
        )
    fields = {"rope_type": "rope", "rotary_base": _base(hf, rope), "rotary_scaling_factor": 1.0}
    if kind == "default":
        return fields
    if kind != "yarn":
        raise _unsupported(hf, kind, "'default' and 'yarn' are")
    one, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    for name, wrong in {
        "attention_factor": rope.get("attention_factor") is not None,
        "truncate": rope.get("truncate", True) is not True,
        "mscale_all_dim": bool(all_dims) and not one,
    }.items():
        if wrong:
            raise ConfigError(f"config.json: {name}={rope[name]!r} of rope_type 'yarn' is not supported here")
    return {
        **fields,
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": one if one and all_dims else 1.0,
        "mscale_all_dim": all_dims if one and all_dims else 0.0,
    }


def _parameters(hf: Hf) -> tuple[str, Mapping[str, Any]]:
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ConfigError(
            "config.json: rope_parameters differ by kind of layer, which is not supported for "
            f"{hf['model_type']}"
        )
    return str(rope.get("rope_type", rope.get("type", "default"))), rope


def _base(hf: Hf, rope: Mapping[str, Any]) -> float:
    base: float = rope.get("rope_theta") or hf.get("rope_theta") or 10_000
    return base


def _share(hf: Hf, rope: Mapping[str, Any], *, otherwise: float) -> float:
    share: float = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", otherwise))
    return share


def _unsupported(hf: Hf, kind: str, supported: str) -> ConfigError:
    return ConfigError(
        f"config.json: rope_type {kind!r} is not supported for {hf['model_type']}; only {supported}"
    )
