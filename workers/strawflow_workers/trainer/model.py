"""The model under training: Megatron's GPTModel made from a Hugging Face directory, and its weights in and
out.

1. Architecture and weights come from the directory alone; nothing is initialised at random.
2. What `each_hf_tensor` gives is what `load_weights` took, bit for bit, until training changes it.
3. Parameters are fp32; a checkpoint in another type is widened on the way in and narrowed on the way out, each tensor to the
   type it had.
4. Pipeline and tensor parallelism are refused for now; translation of names and layouts lies in `convert`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strawflow.errors import ConfigError, InvalidInputError, NotFoundError
from strawflow_workers.trainer import device
from strawflow_workers.trainer.attention import PackedCausalAttention
from strawflow_workers.trainer.checkpoints import TensorsDigest
from strawflow_workers.trainer.convert import family_of
from strawflow_workers.trainer.convert.stored import Kind, StoredWeights, hf_tensors_of, write_tensors
from strawflow_workers.trainer.layer_specs import block_spec

with device.importing_megatron():
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig


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


def build_model(hf: Mapping[str, Any]) -> GPTModel:
    """Build the model that a Hugging Face configuration describes, with unset weights, on this process's
    device.

    Raises:
        ConfigError: the architecture, or more than one tensor- or pipeline-parallel rank, is not supported.
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
    on_cuda = device.target().type == "cuda"
    fields = family.config_fields(hf)
    make_config = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    config = make_config(
        **fields,
        params_dtype=torch.float32,
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
    )
    with device.without_megatron_warnings():
        spec = block_spec(
            config,
            core_attention=PackedCausalAttention,
            normalises_outputs=family.normalises_outputs,
        )
        model = GPTModel(config=config, transformer_layer_spec=spec, **family.model_fields(hf))
    return model.to(device.target())  # torch's norms and Megatron's routers are made on the CPU anywhere


def weights_of(model: Any) -> dict[str, Tensor]:
    """Return what a checkpoint of this model holds, by Megatron's names: parameters, and buffers that routers read."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {name: tensor.detach() for name, tensor in model.named_parameters()} | buffers


@torch.no_grad()
def load_weights(model: GPTModel, hf: Mapping[str, Any], hf_dir: Path) -> None:
    """Copy the weights of a Hugging Face directory into the model.

    Raises:
        NotFoundError: a weight file or tensor is missing.
        InvalidInputError: a tensor has another shape than the configuration says.
        ConfigError: there are tensors that models of this family do not have.
    """
    family, weights = family_of(hf), StoredWeights(hf_dir)
    family.check_names(weights, hf)
    for name, tensor in weights_of(model).items():
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
        if whole.shape != tensor.shape:
            raise InvalidInputError(
                f"{hf_dir}: {', '.join(parts)} make {tuple(whole.shape)}; "
                f"config.json asks for {tuple(tensor.shape)}"
            )
        tensor.copy_(whole)
    model.hf_kinds = {name: weights.kind(name) for name in weights}


@torch.no_grad()
def each_hf_tensor(model: GPTModel, hf: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by their Hugging Face names, in the order of these, contiguous, on the CPU, in the types they were
    loaded in. Each is good until the next is asked for, and may be the model's own: no more than the parts of one Megatron
    tensor are held, and fresh memory for each would cost more than filling it."""
    weights, kinds = weights_of(model), hf_kinds(model)
    buffer = torch.empty(0, dtype=torch.uint8)
    for hf_name, part in hf_tensors_of(family_of(hf), hf, weights, weights.__getitem__):
        dtype, shape = kinds[hf_name][0], part.shape
        if part.dtype == dtype and part.device.type == "cpu" and part.is_contiguous():
            yield hf_name, part
            continue
        num_bytes = part.numel() * dtype.itemsize
        if buffer.numel() < num_bytes:
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
        yield hf_name, buffer[:num_bytes].view(dtype).view(shape).copy_(part)


@torch.no_grad()
def export_weights(model: GPTModel, hf: Mapping[str, Any], path: Path) -> str:
    """Write the weights as one safetensors file, tensor by tensor, and return `tensors_digest` of them."""
    family, kinds, digest = family_of(hf), hf_kinds(model), TensorsDigest()
    names = [hf_name for name in weights_of(model) for hf_name in family.hf_names(name)]
    write_tensors(path, {name: kinds[name] for name in names}, digest.passing(each_hf_tensor(model, hf)))
    path.chmod(0o644)  # other users of the share may read it, as they may read every other file
    return digest.hexdigest()


def hf_kinds(model: GPTModel) -> Mapping[str, Kind]:
    """Return type and shape of each tensor of the Hugging Face directory that the model was loaded from."""
    kinds: Mapping[str, Kind] = model.hf_kinds
    return kinds
