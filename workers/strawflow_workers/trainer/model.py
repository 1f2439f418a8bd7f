"""The model under training: Megatron's GPTModel made from a Hugging Face directory, and its weights in and
out.

1. Architecture and weights come from the directory alone; nothing is initialised at random.
2. What `hf_tensors` gives is what `load_weights` took, bit for bit, until training changes it.
3. Parameters are fp32 (or bf16, by configuration); a checkpoint in another type is widened on the way in and narrowed on the
   way out, each tensor to the type it had.
4. Which part of the model a rank has is Megatron's choice; `sharding` cuts and gathers, `convert` translates whole tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strawflow.config_parallel import ParallelSection
from strawflow.errors import InvalidInputError, NotFoundError
from strawflow_workers.trainer import configurations, device, sharding
from strawflow_workers.trainer.attention import PackedCausalAttention
from strawflow_workers.trainer.checkpoints import TensorsDigest
from strawflow_workers.trainer.configurations import ONE_PROCESS
from strawflow_workers.trainer.convert import family_of
from strawflow_workers.trainer.convert.stored import Kind, StoredWeights, hf_tensors_of, write_tensors
from strawflow_workers.trainer.layer_specs import block_spec
from strawflow_workers.trainer.native_settings import NOTHING_GIVEN, NativeSettings
from strawflow_workers.trainer.ranks import Ranks
from strawflow_workers.trainer.shared_norm import with_shared_norms

with device.importing_megatron():
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel


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


def build_model(
    hf: Mapping[str, Any], parallel: ParallelSection = ONE_PROCESS, native: NativeSettings = NOTHING_GIVEN
) -> GPTModel:
    """Build this rank's part of the model that a Hugging Face configuration describes, with unset weights, on this
    process's device.

    `native` are Megatron's own settings that the run gives.

    Raises:
        ConfigError: the architecture is not supported, its shapes cannot be shared by so many ranks, or Megatron refuses a
            given setting.
    """
    family = family_of(hf)
    config = configurations.transformer(hf, native, parallel)
    fields = family.model_fields(hf)
    fields["vocab_size"] = sharding.padded_vocabulary(fields["vocab_size"], parallel.tensor)
    with device.without_megatron_warnings():
        spec = block_spec(
            config,
            core_attention=PackedCausalAttention,
            normalises_outputs=family.normalises_outputs,
        )
        if parallel.sequence:
            spec = with_shared_norms(spec, config)
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            **fields,
        )
    if parallel.tensor > 1:
        sharding.mark_shards(model)
    return model.to(device.target())  # torch's norms and Megatron's routers are made on the CPU anywhere


@torch.no_grad()
def load_weights(model: GPTModel, hf: Mapping[str, Any], hf_dir: Path) -> None:
    """Copy this rank's part of the weights of a Hugging Face directory into the model, one tensor at a time.

    Raises:
        NotFoundError: a weight file or tensor is missing.
        InvalidInputError: a tensor has another shape than the configuration says.
        ConfigError: there are tensors that models of this family do not have.
    """
    family, rank = family_of(hf), parallel_state.get_tensor_model_parallel_rank()
    weights = StoredWeights(hf_dir)
    family.check_names(weights, hf)
    for own_name, tensor in sharding.weights_of(model).items():
        name = sharding.whole_name(model, own_name)
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
        expected = sharding.whole_shape(tensor)
        if sharding.has_vocabulary(name):
            expected = (int(hf["vocab_size"]), *expected[1:])
        if whole.shape != expected:
            raise InvalidInputError(
                f"{hf_dir}: {', '.join(parts)} make {tuple(whole.shape)}; config.json asks for {expected}"
            )
        if sharding.has_vocabulary(name):
            whole = sharding.with_padding(whole, sharding.whole_shape(tensor)[0])
        tensor.copy_(sharding.cut(whole, tensor, rank=rank))
    model.hf_kinds = {name: weights.kind(name) for name in weights}


@torch.no_grad()
def hf_tensors(model: GPTModel, hf: Mapping[str, Any], ranks: Ranks) -> dict[str, Tensor]:
    """Return on rank 0 the weights by their Hugging Face names, in the order of these, contiguous, on the CPU, in the types
    they were loaded in.

    The other ranks take part and get nothing.
    """
    return dict(sorted(_each_gathered(model, hf, ranks)))


def _each_gathered(model: GPTModel, hf: Mapping[str, Any], ranks: Ranks) -> Iterator[tuple[str, Tensor]]:
    family, kinds = family_of(hf), hf_kinds(model)
    for name, whole in sharding.whole_tensors(model, ranks, vocabulary=int(hf["vocab_size"])):
        for hf_name, part in zip(family.hf_names(name), family.split(name, whole, hf), strict=True):
            yield hf_name, part.to(device="cpu", dtype=kinds[hf_name][0]).contiguous()


@torch.no_grad()
def each_hf_tensor(model: GPTModel, hf: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model that one process holds, as `hf_tensors` returns them.

    Each is good until the next is asked for, and may be the model's own: no more than the parts of one Megatron tensor are
    held, and fresh memory for each would cost more than filling it.
    """
    weights, kinds = sharding.weights_of(model), hf_kinds(model)
    buffer = torch.empty(0, dtype=torch.uint8)
    for hf_name, part in hf_tensors_of(family_of(hf), hf, weights, lambda name: weights[name].detach()):
        dtype, shape = kinds[hf_name][0], part.shape
        if part.dtype == dtype and part.device.type == "cpu" and part.is_contiguous():
            yield hf_name, part
            continue
        num_bytes = part.numel() * dtype.itemsize
        if buffer.numel() < num_bytes:
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
        yield hf_name, buffer[:num_bytes].view(dtype).view(shape).copy_(part)


@torch.no_grad()
def export_weights(model: GPTModel, hf: Mapping[str, Any], ranks: Ranks, path: Path) -> str:
    """Write the weights as one safetensors file on rank 0, and return `tensors_digest` of them; a lone process does it tensor
    by tensor, rank 0 of several holds them all first. The others take part by `hf_tensors`."""
    kinds, digest = hf_kinds(model), TensorsDigest()
    if ranks.size > 1:
        tensors = hf_tensors(model, hf, ranks)
        names, each = list(tensors), iter(tensors.items())
    else:
        family = family_of(hf)
        names = [hf_name for name in sharding.weights_of(model) for hf_name in family.hf_names(name)]
        each = each_hf_tensor(model, hf)
    write_tensors(path, {name: kinds[name] for name in names}, digest.passing(each))
    path.chmod(0o644)  # other users of the share may read it, as they may read every other file
    return digest.hexdigest()


def hf_kinds(model: GPTModel) -> Mapping[str, Kind]:
    """Return type and shape of each tensor of the Hugging Face directory that the model was loaded from."""
    kinds: Mapping[str, Kind] = model.hf_kinds
    return kinds
