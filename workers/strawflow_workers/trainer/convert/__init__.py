"""Translate between Hugging Face checkpoints and Megatron models; one module for each model family.

1. A family says: the Megatron configuration, the names, and how tensors are joined and split.
2. Translation moves numbers and never changes them: a round trip is bit-equal.
3. Tensors are whole here; splitting them over ranks is the model's business.
4. Names carry global layer and expert numbers, whichever rank holds them.
5. What a family cannot express is refused by field and value, never left out; so are tensors it does not know.
6. Only `stored` does I/O; nothing imports Megatron.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from torch import Tensor

from strawflow.errors import ConfigError
from strawflow_workers.trainer.convert import deepseek_v3, glm4, glm4_moe, llama, qwen2, qwen3, qwen3_moe


class Family(Protocol):
    """What a model family offers. `hf` is always the whole config.json."""

    @property
    def model_type(self) -> str:
        """Name of the family in config.json."""

    @property
    def normalises_outputs(self) -> bool:
        """Whether what attention and MLP give is normalised before it is added to their input."""

    def config_fields(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of Megatron's TransformerConfig, or of its MLATransformerConfig where
        `multi_latent_attention` is among them; raise ConfigError for what is not supported."""

    def model_fields(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of Megatron's GPTModel."""

    def check_names(self, stored: Collection[str], hf: Mapping[str, Any]) -> None:
        """Raise ConfigError if a checkpoint holds tensors that this family knows nothing of."""

    def hf_names(self, name: str) -> tuple[str, ...]:
        """Return the Hugging Face names whose tensors make up the Megatron parameter or buffer `name`."""

    def join(self, name: str, parts: tuple[Tensor, ...], hf: Mapping[str, Any]) -> Tensor:
        """Make the Megatron tensor from its Hugging Face parts, in the order of `hf_names`."""

    def split(self, name: str, whole: Tensor, hf: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Undo `join`."""


_FAMILIES: Mapping[str, Family] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (llama, qwen2, qwen3, qwen3_moe, glm4, glm4_moe, deepseek_v3)
}

_LACKING = {
    "qwen2_moe": "a gate of the shared expert",
    "qwen3_next": "gated delta-net layers",
    "qwen3_5": "gated delta-net layers",
    "qwen3_5_moe": "gated delta-net layers",
    "deepseek_v2": "softmax routing limited to groups by their best expert",
    "deepseek_v32": "sparse attention chosen by an indexer",
    "glm_moe_dsa": "sparse attention chosen by an indexer",
    "gpt_oss": "attention sinks",
}
"""Neighbours of the supported families, and what their layers have that no converter here expresses."""


def family_of(hf: Mapping[str, Any]) -> Family:
    """Return the family of a Hugging Face configuration.

    Raises:
        ConfigError: no translation exists for this `model_type`; the message says what is missing where that is
            known, and the nearest family that is supported.
    """
    model_type = str(hf.get("model_type"))
    if model_type in _FAMILIES:
        return _FAMILIES[model_type]
    lacking = f" (it needs {_LACKING[model_type]})" if model_type in _LACKING else ""
    kin = [name for name in _FAMILIES if name.startswith(model_type[:3])]
    near = difflib.get_close_matches(model_type, kin, n=1, cutoff=0.0)
    nearest = f"; the nearest that can is {near[0]}" if near else ""
    raise ConfigError(
        f"config.json: model_type {model_type!r} cannot be trained, there is no converter for it{lacking}{nearest}; "
        f"supported: {', '.join(_FAMILIES)}"
    )
