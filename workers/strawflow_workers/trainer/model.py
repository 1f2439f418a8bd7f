"""The model under training: Megatron's GPTModel made from a Hugging Face directory, and its weights in and
out.

1. Architecture and weights come from the directory alone; nothing is initialised at random.
2. What `hf_tensors` gives is what `load_weights` took, bit for bit, until training changes it.
3. Parameters are fp32; a checkpoint in another type is widened on the way in and narrowed on the way out.
4. Pipeline and tensor parallelism are refused for now; translation of names and layouts lies in `convert`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from strawflow.errors import ConfigError, InvalidInputError, NotFoundError
from strawflow_workers.trainer import configurations, device
from strawflow_workers.trainer.attention import PackedCausalAttention
from strawflow_workers.trainer.convert import family_of
from strawflow_workers.trainer.native_settings import NativeSettings

with device.importing_megatron():
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

EXPORT_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_hf_config(hf_dir: Path) -> dict[str, Any]:
    """Read config.json of a Hugging Face directory.

    Raises:
        NotFoundError: there is none.
    """
    path = hf_dir / "config.json"
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist; the model directory must hold a Hugging Face checkpoint")
    config: dict[str, Any] = json.loads(path.read_text())
    return config


def build_model(hf: Mapping[str, Any], native: NativeSettings) -> GPTModel:
    """Build the model that a Hugging Face configuration describes, with unset weights, on this process's
    device.

    `native` are Megatron's own settings that the run gives.

    Raises:
        ConfigError: the architecture, or more than one tensor- or pipeline-parallel rank, is not supported, or
            Megatron refuses a given setting.
    """
    if (
        parallel_state.get_tensor_model_parallel_world_size()
        * parallel_state.get_pipeline_model_parallel_world_size()
        > 1
    ):
        raise ConfigError(
            "tensor and pipeline parallelism are not supported by this trainer yet; use data parallelism"
        )
    family = family_of(hf)
    config = configurations.transformer(hf, native)
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    spec.submodules.self_attention.submodules.core_attention = PackedCausalAttention
    with device.without_megatron_warnings():
        return GPTModel(config=config, transformer_layer_spec=spec, **family.model_fields(hf))


@torch.no_grad()
def load_weights(model: GPTModel, hf: Mapping[str, Any], hf_dir: Path) -> None:
    """Copy the weights of a Hugging Face directory into the model.

    Raises:
        NotFoundError: a weight file or tensor is missing.
        InvalidInputError: a tensor has another shape than the configuration says.
    """
    family = family_of(hf)
    weights = dict(_stored_tensors(hf_dir))
    for name, parameter in model.named_parameters():
        parts = family.hf_names(name)
        absent = [part for part in parts if part not in weights]
        if absent:
            raise NotFoundError(f"{hf_dir}: no tensor named {absent[0]}")
        try:
            whole = family.join(name, tuple(weights[part] for part in parts), hf)
        except RuntimeError as error:
            raise InvalidInputError(
                f"{hf_dir}: tensors {', '.join(parts)} do not fit config.json: {error}"
            ) from error
        if whole.shape != parameter.shape:
            raise InvalidInputError(
                f"{hf_dir}: {', '.join(parts)} make {tuple(whole.shape)}; "
                f"config.json asks for {tuple(parameter.shape)}"
            )
        parameter.copy_(whole)


def _stored_tensors(hf_dir: Path) -> Iterator[tuple[str, Tensor]]:
    index = hf_dir / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    for name in names:
        path = hf_dir / name
        if not path.is_file():
            raise NotFoundError(f"{path} does not exist; the model directory must hold safetensors weights")
        with safe_open(path, framework="pt") as stored:
            for key in stored.keys():  # noqa: SIM118 - the file object is not a mapping
                yield key, stored.get_tensor(key)


@torch.no_grad()
def hf_tensors(model: GPTModel, hf: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights by their Hugging Face names, contiguous, on the CPU, in the type that config.json
    names."""
    family = family_of(hf)
    dtype = EXPORT_TYPES[str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")]
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        parts = family.split(name, parameter.detach(), hf)
        for hf_name, part in zip(family.hf_names(name), parts, strict=True):
            found[hf_name] = part.to(device="cpu", dtype=dtype).contiguous()
    return dict(sorted(found.items()))
