"""Whole tensors and what one rank holds of them: parameter names over all ranks, cutting, joining, gathering.

1. What a rank holds of a tensor is said by Megatron's own marks on its parameter (`partition_dim`, `partition_stride`); where
   Megatron leaves them out because it initialises nothing, `mark_shards` sets the same ones.
2. Cutting and joining move bits and change none. Names have global layer numbers.
3. The vocabulary is padded with zero rows to a multiple of the tensor-parallel ranks; padding never leaves this module, and
   no softmax sees it (forward).
4. One tensor is whole at a time. A copy of the embedding on the last pipeline stage is loaded from the embedding and not
   gathered.
5. Expert parallelism has no place here yet: experts are shared like other matrices, over tensor-parallel ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strawflow_workers.trainer.device import importing_megatron
from strawflow_workers.trainer.ranks import Ranks

with importing_megatron():
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        set_tensor_model_parallel_attributes,
    )

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..+)")


def padded_vocabulary(size: int, num_ranks: int) -> int:
    """Return the rows of the embedding of a vocabulary that tensor-parallel ranks share equally."""
    return -(-size // num_ranks) * num_ranks


def mark_shards(model: Any) -> None:
    """Mark on each parameter how ranks share it, where that is not done: gradient norms and `cut` need to know."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None or hasattr(weight, "partition_dim"):
            continue
        if isinstance(module, ColumnParallelLinear):
            # Gate and up projection lie above one another: each rank has a part of both.
            is_double = name.endswith("linear_fc1") and model.config.gated_linear_unit
            set_tensor_model_parallel_attributes(weight, True, 0, 2 if is_double else 1)
        elif isinstance(module, VocabParallelEmbedding):
            set_tensor_model_parallel_attributes(weight, True, 0, 1)
        elif isinstance(module, RowParallelLinear):
            set_tensor_model_parallel_attributes(weight, True, 1, 1)


def weights_of(model: Any) -> dict[str, Tensor]:
    """Return what a checkpoint of this rank's model holds, by its own names: parameters, and buffers that routers read."""
    kept = model.state_dict().keys()
    return dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name in kept
    }


def whole_name(model: Any, name: str) -> str:
    """Return a parameter's name with the layer's number over all pipeline stages; a copy has the name of its original."""
    if is_copy(model, name):
        return EMBEDDING
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    return f"{match[1]}{model.decoder.layers[int(match[2])].layer_number - 1}{match[3]}"


def is_copy(model: Any, name: str) -> bool:
    """Whether a parameter is the last stage's copy of the embedding, which the first stage owns."""
    return bool(
        name == OUTPUT
        and getattr(model, "share_embeddings_and_output_weights", False)
        and not model.pre_process
    )


def has_vocabulary(name: str) -> bool:
    """Whether the parameter has one row for each token of the padded vocabulary."""
    return name in (EMBEDDING, OUTPUT)


def num_shards(parameter: Tensor) -> int:
    """Return over how many ranks a parameter is shared."""
    is_shared = getattr(parameter, "tensor_model_parallel", False)
    return int(parallel_state.get_tensor_model_parallel_world_size()) if is_shared else 1


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the tensor that the ranks share, padding of the vocabulary included."""
    shape = list(parameter.shape)
    if (num := num_shards(parameter)) > 1:
        shape[parameter.partition_dim] *= num  # type: ignore[attr-defined]
    return tuple(shape)


def cut(whole: Tensor, parameter: Tensor, *, rank: int) -> Tensor:
    """Return what rank `rank` of the tensor-parallel group holds of a whole tensor."""
    num = num_shards(parameter)
    if num == 1:
        return whole
    dim, stride = parameter.partition_dim, parameter.partition_stride  # type: ignore[attr-defined]
    return torch.cat([part.chunk(num, dim)[rank] for part in whole.chunk(stride, dim)], dim)


def joined(shards: Sequence[Tensor], parameter: Tensor) -> Tensor:
    """Undo `cut`: make the whole tensor of what the ranks hold, in their order."""
    dim, stride = parameter.partition_dim, parameter.partition_stride  # type: ignore[attr-defined]
    parts = [shard.chunk(stride, dim) for shard in shards]
    return torch.cat([part[at] for at in range(stride) for part in parts], dim)


def with_padding(whole: Tensor, rows: int) -> Tensor:
    """Return a tensor with zero rows added up to `rows`."""
    return torch.nn.functional.pad(whole, (0, 0, 0, rows - whole.shape[0]))


@torch.no_grad()
def whole_tensors(model: Any, ranks: Ranks, *, vocabulary: int) -> Iterator[tuple[str, Tensor]]:
    """Yield each whole tensor by name on rank 0, stage after stage; the other ranks take part and get nothing.

    Tensors are on the model's device, valid until the next one is asked for.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    stage, stages = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
        for name, parameter in weights_of(model).items():
            if is_copy(model, name):
                continue
            whole = _gathered(parameter.detach(), parameter, group)
            if has_vocabulary(name):
                whole = whole[:vocabulary]
            if ranks.rank == 0:
                yield whole_name(model, name), whole
            elif parallel_state.get_tensor_model_parallel_rank() == 0:
                _send(whole_name(model, name), whole, ranks)
        if stage > 0 and parallel_state.get_tensor_model_parallel_rank() == 0:
            ranks.send({"end": True})
    if ranks.rank == 0 and stages > 1:
        first_of_stage = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        for source in first_of_stage[1:]:
            yield from _received(source, ranks, like=next(model.parameters()))


def _gathered(own: Tensor, parameter: Tensor, group: Any) -> Tensor:
    if num_shards(parameter) == 1:
        return own
    shards = [torch.empty_like(own) for _ in range(num_shards(parameter))]
    dist.all_gather(shards, own.contiguous(), group=group)
    return joined(shards, parameter)


def _send(name: str, whole: Tensor, ranks: Ranks) -> None:
    ranks.send({"name": name, "shape": list(whole.shape), "dtype": str(whole.dtype).removeprefix("torch.")})
    dist.send(whole.contiguous(), 0)


def _received(source: int, ranks: Ranks, *, like: Tensor) -> Iterator[tuple[str, Tensor]]:
    while "end" not in (header := ranks.receive(source)):
        whole = torch.empty(header["shape"], dtype=getattr(torch, header["dtype"]), device=like.device)
        dist.recv(whole, source)
        yield header["name"], whole
