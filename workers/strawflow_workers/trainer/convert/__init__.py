"""Translate between Hugging Face checkpoints and Megatron models; one module for each model family.

1. A family says three things: the Megatron configuration, the names, and how tensors are joined and split.
2. Translation moves numbers and never changes them: a round trip is bit-equal.
3. Tensors are whole here; splitting them over ranks is the model's business.
4. It does no I/O and imports no Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from strawflow.errors import ConfigError


class Family(Protocol):
    """What the module of a model family offers."""

    def config_fields(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of Megatron's TransformerConfig; raise ConfigError for what is not supported."""

    def model_fields(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of Megatron's GPTModel."""

    def hf_names(self, name: str) -> tuple[str, ...]:
        """Return the Hugging Face names whose tensors make up the Megatron parameter `name` (global layer
        number)."""

    def join(self, name: str, parts: tuple[Tensor, ...], hf: Mapping[str, Any]) -> Tensor:
        """Make the Megatron tensor from its Hugging Face parts, in the order of `hf_names`."""

    def split(self, name: str, whole: Tensor, hf: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Undo `join`."""


def family_of(hf: Mapping[str, Any]) -> Family:
    """Return the family of a Hugging Face configuration.

    Raises:
        ConfigError: no translation exists for this `model_type`.
    """
    model_type = hf.get("model_type")
    match model_type:
        case "qwen3":
            from strawflow_workers.trainer.convert import qwen3

            return qwen3
        case _:
            raise ConfigError(f"config.json: model_type {model_type!r} cannot be trained; supported: qwen3")
