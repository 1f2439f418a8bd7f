"""The model under training: Megatron's GPTModel made from a Hugging Face directory, and its weights in and
out.

1. Architecture and weights come from the directory alone; nothing is initialised at random.
2. What `hf_tensors` gives is what `load_weights` took, bit for bit, until training changes it.
3. Parameters are fp32; a checkpoint in another type is widened on the way in and narrowed on the way out.
4. Which part of the model a rank has is Megatron's choice; `sharding` cuts and gathers, `convert` translates whole tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from strawflow.config_parallel import ParallelSection
from strawflow.errors import ConfigError, InvalidInputError, NotFoundError
from strawflow_workers.trainer import device, sharding
from strawflow_workers.trainer.attention import PackedCausalAttention
from strawflow_workers.trainer.convert import family_of
from strawflow_workers.trainer.layer_spec import with_shared_norms
from strawflow_workers.trainer.ranks import Ranks

with device.importing_megatron():
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

ONE_PROCESS = ParallelSection()
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


def build_model(hf: Mapping[str, Any], parallel: ParallelSection = ONE_PROCESS) -> GPTModel:
    """Build this rank's part of the model that a Hugging Face configuration describes, with unset weights, on this
    process's device.

    Raises:
        ConfigError: the architecture is not supported, or its shapes cannot be shared by so many ranks.
    """
    family = family_of(hf)
    on_cuda = device.target().type == "cuda"
    dtype = torch.bfloat16 if parallel.precision == "bf16" else torch.float32
    architecture = family.config_fields(hf)
    _check_shapes(architecture, parallel)
    config = TransformerConfig(
        **architecture,
        params_dtype=dtype,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        perform_initialization=False,
        use_cpu_initialization=not on_cuda,
        # Megatron's deterministic embedding is for CUDA; the CPU's ordinary one is deterministic and faster.
        deterministic_mode=on_cuda,
        # Sums over tokens, not means of means: data-parallel ranks add their gradients.
        calculate_per_token_loss=True,
        cuda_graph_scope=[],  # what its default becomes, without the warning
        **_parallel_fields(parallel, dtype),
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    spec.submodules.self_attention.submodules.core_attention = PackedCausalAttention
    if parallel.sequence:
        spec = with_shared_norms(spec, config)
    fields = family.model_fields(hf)
    fields["vocab_size"] = sharding.padded_vocabulary(fields["vocab_size"], parallel.tensor)
    with device.without_megatron_warnings():
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            **fields,
        )
    if parallel.tensor > 1:
        sharding.mark_shards(model)
    return model


def _parallel_fields(parallel: ParallelSection, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig that say how the model is spread and what is recomputed."""
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "context_parallel_size": parallel.context,
        "sequence_parallel": parallel.sequence,
    }
    if parallel.pipeline > 1:
        # Packed micro-batches differ in length: stages tell each other the shape first. Megatron refuses that with its
        # default dispatcher of experts, even where there are none.
        fields |= {
            "pipeline_dtype": dtype,
            "variable_seq_lengths": True,
            "moe_token_dispatcher_type": "alltoall",
        }
    if parallel.precision == "bf16":
        fields["bf16"] = True
    match parallel.recompute:
        case "selective":
            fields["recompute_granularity"] = "selective"
        case "full":
            fields |= {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
    return fields


def _check_shapes(architecture: Mapping[str, Any], parallel: ParallelSection) -> None:
    shared = {
        "tensor": ("num_attention_heads", "num_query_groups", "ffn_hidden_size"),
        "pipeline": ("num_layers",),
    }
    for axis, names in shared.items():
        num = getattr(parallel, axis)
        for name in names:
            if (architecture.get(name) or 0) % num:
                raise ConfigError(
                    f"parallel.{axis} {num}: the model has {name} {architecture[name]}, which {num} ranks cannot share equally"
                )


@torch.no_grad()
def load_weights(model: GPTModel, hf: Mapping[str, Any], hf_dir: Path) -> None:
    """Copy this rank's part of the weights of a Hugging Face directory into the model, one tensor at a time.

    Raises:
        NotFoundError: a weight file or tensor is missing.
        InvalidInputError: a tensor has another shape than the configuration says.
    """
    family, rank = family_of(hf), parallel_state.get_tensor_model_parallel_rank()
    stored = _StoredTensors(hf_dir)
    for own_name, parameter in model.named_parameters():
        name = sharding.whole_name(model, own_name)
        parts = family.hf_names(name)
        absent = [part for part in parts if part not in stored.file_of]
        if absent:
            raise NotFoundError(f"{hf_dir}: no tensor named {absent[0]}")
        try:
            whole = family.join(name, tuple(stored.read(part) for part in parts), hf)
        except RuntimeError as error:
            raise InvalidInputError(
                f"{hf_dir}: tensors {', '.join(parts)} do not fit config.json: {error}"
            ) from error
        expected = sharding.whole_shape(parameter)
        if sharding.has_vocabulary(name):
            expected = (int(hf["vocab_size"]), *expected[1:])
        if whole.shape != expected:
            raise InvalidInputError(
                f"{hf_dir}: {', '.join(parts)} make {tuple(whole.shape)}; config.json asks for {expected}"
            )
        if sharding.has_vocabulary(name):
            whole = sharding.with_padding(whole, sharding.whole_shape(parameter)[0])
        parameter.copy_(sharding.cut(whole, parameter, rank=rank))


class _StoredTensors:
    """The tensors of a Hugging Face directory, each read when it is asked for."""

    def __init__(self, hf_dir: Path) -> None:
        index = hf_dir / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            names = ["model.safetensors"]
        self.file_of: dict[str, Any] = {}
        for name in names:
            path = hf_dir / name
            if not path.is_file():
                raise NotFoundError(
                    f"{path} does not exist; the model directory must hold safetensors weights"
                )
            stored = safe_open(path, framework="pt")
            for key in stored.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 - no mapping
                self.file_of[key] = stored

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self.file_of[name].get_tensor(name)
        return tensor


@torch.no_grad()
def hf_tensors(model: GPTModel, hf: Mapping[str, Any], ranks: Ranks) -> dict[str, Tensor]:
    """Return on rank 0 the weights by their Hugging Face names, contiguous, on the CPU, in the type that config.json names.

    The other ranks take part and get nothing.
    """
    family = family_of(hf)
    dtype = EXPORT_TYPES[str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")]
    found: dict[str, Tensor] = {}
    for name, whole in sharding.whole_tensors(model, ranks, vocabulary=int(hf["vocab_size"])):
        for hf_name, part in zip(family.hf_names(name), family.split(name, whole, hf), strict=True):
            found[hf_name] = part.to(device="cpu", dtype=dtype).contiguous()
    return dict(sorted(found.items()))
