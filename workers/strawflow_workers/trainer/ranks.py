"""The ranks of one trainer: joining them, Megatron's groups, and short messages between them.

1. Messages are JSON of at most 64 KiB: ids and references, never payload. They go over a group of their own, on the CPU.
2. Every rank must take part in every call here, in the same order; rank 0 says what comes next (`tell`).
3. A peer that is gone is a StorageError: the trainer starts again as a whole.
4. A lone process sends nothing, and every call is answered at once.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strawflow.config_parallel import ParallelSection, refuse_impossible_ranks
from strawflow.errors import ConfigError, InvalidInputError, StorageError
from strawflow_workers.trainer import device

with device.importing_megatron():
    from megatron.core import parallel_state

MAX_MESSAGE_BYTES = 64 * 1024

_groups: dict[str, Any] = {}
"""`sizes`: those that Megatron's groups have now; `messages`: the group of messages. They last for the process."""


class Ranks:
    """The ranks of the trainer as one of them sees them; `join_ranks` makes it."""

    def __init__(self, layout: Mapping[str, int]) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.layout = dict(layout)
        """How many ranks share what (data, context, tensor, pipeline), and whether data-parallel ones share the optimizer's
        state: a checkpoint is loaded by the same."""

    @property
    def data_rank(self) -> int:
        """Which share of each batch is this rank's."""
        return int(parallel_state.get_data_parallel_rank())

    @property
    def data_size(self) -> int:
        return self.layout["data"]

    def tell(self, message: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return what rank 0 gives here; the others give nothing and wait.

        Raises:
            InvalidInputError: the message is too long. StorageError: a rank is gone.
        """
        if self.size == 1:
            return dict(message or {})
        raw = b"" if message is None else _encoded(message)
        with _peers_there():
            length = torch.tensor([len(raw)])
            dist.broadcast(length, 0, group=_groups["messages"])
            content = _bytes(raw, int(length))
            dist.broadcast(content, 0, group=_groups["messages"])
        return _decoded(content)

    def collect(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what every rank gives here, in their order, on every rank; raises as `tell`."""
        if self.size == 1:
            return [dict(message)]
        raw = _encoded(message)
        with _peers_there():
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(raw)]), group=_groups["messages"])
            longest = max(int(length) for length in lengths)
            found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(found, _bytes(raw, longest), group=_groups["messages"])
        return [_decoded(one[: int(length)]) for one, length in zip(found, lengths, strict=True)]

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to rank 0, which asks for it by `receive`; raises as `tell`."""
        raw = _encoded(message)
        with _peers_there():
            dist.send(torch.tensor([len(raw)]), 0, group=_groups["messages"])
            dist.send(_bytes(raw, len(raw)), 0, group=_groups["messages"])

    def receive(self, source: int) -> dict[str, Any]:
        """Return what rank `source` sends next; raises as `tell`."""
        with _peers_there():
            length = torch.zeros(1, dtype=torch.int64)
            dist.recv(length, source, group=_groups["messages"])
            content = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(content, source, group=_groups["messages"])
        return _decoded(content)

    def all_agree(self, is_so: bool) -> bool:
        """Return whether it is so on every rank."""
        if self.size == 1:
            return is_so
        answer = torch.tensor([int(is_so)])
        with _peers_there():
            dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=_groups["messages"])
        return bool(answer)

    def reduce_statistics(self, sums: Tensor | None, largest: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add up sums (float64 [k]) and find the largest (a scalar) over all data; None where this rank read no logits.

        All ranks get the same bits.
        """
        if sums is not None and largest is not None and self.layout["data"] * self.layout["context"] > 1:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            dist.all_reduce(sums, group=group)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        if self.layout["pipeline"] == 1:
            assert sums is not None
            assert largest is not None
            return sums, largest
        found = None if sums is None else torch.cat([sums, largest.view(1)])  # type: ignore[union-attr]
        found = from_last_stage(found)
        return found[:-1], found[-1]


def from_last_stage(values: Tensor | None) -> Tensor:
    """Return the float64 [k] that the last pipeline stage gives here; the others give None."""
    group = parallel_state.get_pipeline_model_parallel_group()
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    here = device.target()
    count = torch.tensor([0 if values is None else values.numel()], device=here)
    dist.broadcast(count, source, group=group)
    found = torch.empty(int(count), dtype=torch.float64, device=here) if values is None else values.double()
    dist.broadcast(found, source, group=group)
    return found


def join_ranks(parallel: ParallelSection) -> Ranks:
    """Join the ranks that a launcher names in the environment, or be the only one; set up Megatron's groups.

    Raises:
        ConfigError: the ranks cannot be as configured, or a launcher started another number.
    """
    refuse_impossible_ranks(parallel)
    device.join_process_group()
    size, needed = dist.get_world_size(), parallel.ranks_of_a_replica
    if size % needed:
        raise ConfigError(
            f"{size} rank{'s' * (size > 1)} cannot share parallel.tensor {parallel.tensor} x parallel.pipeline {parallel.pipeline} x "
            f"parallel.context {parallel.context}: start a multiple of {needed}"
        )
    sizes = {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "context_parallel_size": parallel.context,
    }
    if parallel_state.model_parallel_is_initialized() and _groups.get("sizes") != sizes:
        parallel_state.destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(**sizes)
        _groups["sizes"] = sizes
    if size > 1 and "messages" not in _groups:
        _groups["messages"] = dist.new_group(backend="gloo")
    return Ranks(
        {
            "tensor": parallel.tensor,
            "pipeline": parallel.pipeline,
            "context": parallel.context,
            "data": size // needed,
            "distributed_optimizer": int(parallel.distributed_optimizer),
        }
    )


@contextlib.contextmanager
def _peers_there() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise StorageError(f"another rank of this trainer is gone: {error}") from error


def _encoded(message: Mapping[str, Any]) -> bytes:
    raw = json.dumps(message, separators=(",", ":")).encode()
    if len(raw) > MAX_MESSAGE_BYTES:
        raise InvalidInputError(
            f"a message between ranks of {len(raw)} bytes; at most {MAX_MESSAGE_BYTES} are sent: references, never payload"
        )
    return raw


def _bytes(raw: bytes, length: int) -> Tensor:
    """Return the bytes as a tensor of a length; what is missing is zeros."""
    return torch.frombuffer(bytearray(raw.ljust(length, b"\0")), dtype=torch.uint8)


def _decoded(content: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(content.numpy().tobytes())
    return found
