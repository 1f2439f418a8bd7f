"""Hugging Face weight files: read tensor by tensor, written tensor by tensor, and what a Megatron model gives for them.

1. Neither way holds more than the tensors of one Megatron parameter in memory, whatever the size of the checkpoint.
2. What is written is the file that safetensors itself would write of the same tensors.
3. A file is complete when `write_tensors` returns; making it durable and giving it its name is the caller's business.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from strawflow.errors import InvalidInputError, NotFoundError
from strawflow_workers.trainer.convert import Family

_INDEX, _ONLY_FILE = "model.safetensors.index.json", "model.safetensors"
_NAMES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}
_ORDER = ("U8", "F16", "BF16", "I32", "F32", "F64", "I64")
"""Types as safetensors orders them: the last come first in a file."""

Kind = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a tensor."""


class StoredWeights(Mapping[str, Tensor]):
    """The tensors of a Hugging Face directory by name; each is read when it is asked for, from the mapped file."""

    def __init__(self, hf_dir: Path) -> None:
        """Read the heads of the weight files.

        Raises:
            NotFoundError: there is no weight file, or one that the index names is missing.
        """
        self._hf_dir = hf_dir
        self._file_of: dict[str, Any] = {}
        for name in _file_names(hf_dir):
            path = hf_dir / name
            if not path.is_file():
                raise NotFoundError(
                    f"{path} does not exist; the model directory must hold safetensors weights"
                )
            file: Any = safe_open(path, framework="pt")
            self._file_of.update(dict.fromkeys(file.keys(), file))

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor on the CPU.

        Raises:
            NotFoundError: the checkpoint has none of that name.
        """
        tensor: Tensor = self._file(name).get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def kind(self, name: str) -> Kind:
        """Return type and shape of a tensor, without reading it.

        Raises:
            NotFoundError: the checkpoint has none of that name.
            InvalidInputError: it has a type that weights do not have.
        """
        slice_ = self._file(name).get_slice(name)
        stored = slice_.get_dtype()
        if stored not in _TYPES:
            raise InvalidInputError(
                f"{self._hf_dir}: {name} has type {stored}; weights must be {', '.join(_TYPES)}"
            )
        return _TYPES[stored], tuple(slice_.get_shape())

    def _file(self, name: str) -> Any:
        if name not in self._file_of:
            raise NotFoundError(f"{self._hf_dir}: no tensor named {name}")
        return self._file_of[name]


def _file_names(hf_dir: Path) -> list[str]:
    index = hf_dir / _INDEX
    if index.is_file():
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return [_ONLY_FILE]


def hf_tensors_of(
    family: Family, hf: Mapping[str, Any], names: Iterable[str], whole: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face tensors of a model in the order of their names.

    `names` are those of the Megatron parameters and buffers, with global numbers; `whole(name)` gives one of them
    unsplit. It is asked for when the first of its parts is due and let go after the last, each once.
    """
    parts = sorted(
        (hf_name, name, place) for name in names for place, hf_name in enumerate(family.hf_names(name))
    )
    held: dict[str, list[Tensor]] = {}
    left = {name: len(family.hf_names(name)) for _, name, _ in parts}
    for hf_name, name, place in parts:
        if name not in held:
            held[name] = list(family.split(name, whole(name), hf))
        yield hf_name, held[name][place]
        left[name] -= 1
        if left[name] == 0:
            del held[name]


def write_tensors(path: Path, kinds: Mapping[str, Kind], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a safetensors file of the tensors as they come, in any order; they are made contiguous on the CPU.

    Raises:
        InvalidInputError: a tensor has another type or shape than `kinds` says, or one of `kinds` did not come.
    """
    head, offsets = _head(kinds)
    missing = set(kinds)
    with open(path, "wb") as file:
        file.write(head)
        for name, tensor in tensors:
            if name not in missing or (tensor.dtype, tuple(tensor.shape)) != kinds[name]:
                raise InvalidInputError(
                    f"{path}: {name} is {tensor.dtype} {tuple(tensor.shape)}, announced was {kinds.get(name)}"
                )
            missing.remove(name)
            file.seek(len(head) + offsets[name])
            raw: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            file.write(raw)
    if missing:
        raise InvalidInputError(f"{path}: {min(missing)} was announced and did not come")


def _head(kinds: Mapping[str, Kind]) -> tuple[bytes, dict[str, int]]:
    """Return the bytes before the first tensor, and where each tensor begins after them."""
    ordered = sorted(kinds, key=lambda name: (-_ORDER.index(_NAMES[kinds[name][0]]), name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, used = {}, 0
    for name in ordered:
        dtype, shape = kinds[name]
        offsets[name] = used
        used += math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offsets[name], used]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets
