"""What a trainer must remember: every tensor and value of one rank that decides the next update, out of
Megatron and back in.

1. Optimizer state is taken for each parameter by its name, every step counter included, and put back the same
   way; Megatron's own loading is not used, because with torch's AdamW it shares or forgets step counters.
2. Restoring copies bits. Whether a state fits the model is checked before anything is touched.
3. Random generators are those of torch, Megatron's tracker, numpy and python.
4. Files, digests and directories are the business of `checkpoints`.
"""

from __future__ import annotations

import platform
import random
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strawflow.errors import CorruptCheckpointError
from strawflow_workers.trainer.checkpoints import RankState
from strawflow_workers.trainer.device import importing_megatron
from strawflow_workers.trainer.sharding import weights_of

with importing_megatron():
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

PARAMETER, OPTIMIZER, GENERATOR = "parameter/", "optimizer/", "generator/"
MASTER = "master"
"""Under this name lies the optimizer's own fp32 copy of a parameter in another type."""
_PACKAGES = ("torch", "megatron-core", "numpy", "safetensors")


def collect(model: Any, optimizer: Any, values: dict[str, Any]) -> RankState:
    """Take the state of this rank; tensors are not copied, so use it before the next update."""
    tensors = {PARAMETER + name: tensor.detach() for name, tensor in weights_of(model).items()}
    for name, slot in _optimizer_slots(model, optimizer):
        tensors.update({f"{OPTIMIZER}{name}/{key}": tensor for key, tensor in slot.items()})
    tensors[GENERATOR + "torch"] = torch.get_rng_state()
    for name, generator in get_cuda_rng_tracker().get_states().items():
        tensors[f"{GENERATOR}megatron/{name}"] = generator
    kind, keys, *rest = np.random.get_state(legacy=True)
    return RankState(
        tensors=tensors,
        values={
            **values,
            "numpy_generator": [kind, np.asarray(keys).tolist(), *rest],
            "python_generator": random.getstate(),
            "threads": torch.get_num_threads(),
            "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
        },
    )


def check_fits(found: RankState, model: Any, *, path: Path) -> None:
    """Raise CorruptCheckpointError unless the state holds exactly this model's parameters, in their shapes
    and types."""
    expected = {PARAMETER + name: _kind(tensor) for name, tensor in weights_of(model).items()}
    stored = {name: _kind(tensor) for name, tensor in found.tensors.items() if name.startswith(PARAMETER)}
    for name in sorted(expected.keys() | stored.keys()):
        if expected.get(name) != stored.get(name):
            raise CorruptCheckpointError(
                f"{path}: {name} is {stored.get(name)} there and {expected.get(name)} in this model; "
                "the checkpoint is of another model"
            )


def _kind(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype)


@torch.no_grad()
def restore(found: RankState, model: Any, optimizer: Any) -> None:
    """Put a state that fits back into the model, a fresh optimizer and the generators."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for name, tensor in weights_of(model).items():
        tensor.copy_(found.tensors[PARAMETER + name])
    for slots, parameter, own in _owned(optimizer):
        prefix = f"{OPTIMIZER}{names[parameter]}/"
        slot = {
            key.removeprefix(prefix): tensor
            for key, tensor in found.tensors.items()
            if key.startswith(prefix)
        }
        if MASTER in slot:
            own.copy_(slot.pop(MASTER))
        if slot:
            slots[own] = slot
    torch.set_rng_state(found.tensors[GENERATOR + "torch"])
    prefix = f"{GENERATOR}megatron/"
    tracked = {
        key.removeprefix(prefix): value for key, value in found.tensors.items() if key.startswith(prefix)
    }
    get_cuda_rng_tracker().set_states(tracked)
    kind, keys, *rest = found.values["numpy_generator"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    layout, internal, gauss = found.values["python_generator"]
    random.setstate((layout, tuple(internal), gauss))


def _optimizer_slots(model: Any, optimizer: Any) -> Iterator[tuple[str, dict[str, Tensor]]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    for slots, parameter, own in _owned(optimizer):
        slot = dict(slots[own]) if slots.get(own) else {}
        if own.dtype != parameter.dtype:
            slot[MASTER] = own.detach()
        if slot:
            yield names[parameter], slot


def _owned(optimizer: Any) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Yield, for each tensor that a torch optimizer inside Megatron's moves on this rank, that optimizer's state, the
    model's parameter and the tensor: the parameter itself, its fp32 copy, or this rank's part of either."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is None:  # this rank's stage has no such parameter
            continue
        parameter_of = {own: parameter for parameter, own in _pairs(part)}
        for group in part.optimizer.param_groups:
            for own in group["params"]:
                yield part.optimizer.state, parameter_of.get(own, own), own


def _pairs(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (parameter, what is moved for it) where the two differ, as Megatron's optimizers keep them."""
    for of_model, moved in (
        ("model_fp32_groups", "shard_fp32_groups"),
        ("model_float16_groups", "shard_fp32_from_float16_groups"),
        ("float16_groups", "fp32_from_float16_groups"),
    ):
        for parameters, own in zip(getattr(part, of_model, []), getattr(part, moved, []), strict=True):
            yield from zip(parameters, own, strict=True)
