"""The device the trainer runs on, and the one place where Megatron's CUDA assumptions are met on a CPU.

Megatron-core says `torch.cuda.current_device()`, `device="cuda"` or `tensor.cuda()` where it means "where the
model lives". On a machine without CUDA that place is the CPU, and this module makes exactly that
substitution; the package is not edited.

1. With CUDA present every function here leaves torch and Megatron as they are.
2. Substitutions of module functions last for the process; rewriting of device arguments only inside
   `trainer_device()`.
3. A substitute does what the CUDA call would do for the CPU, or nothing where program order already gives it.
4. It knows nothing of models, losses or batches.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def target() -> torch.device:
    """Return the device that parameters and batches of this process live on."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return CPU


@contextlib.contextmanager
def importing_megatron() -> Iterator[None]:
    """Import Megatron modules inside this block.

    Without CUDA `torch.compile` is a pass-through meanwhile: the fusions Megatron decorates at import would
    pull in the compiler stack (2-3 s of start-up) and need a C++ tool chain, for code a CPU run does not
    profit from.
    """
    with without_megatron_warnings():
        if torch.cuda.is_available():
            yield
            return
        compile_function = torch.compile
        torch.compile = _leave_uncompiled  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.compile = compile_function


@contextlib.contextmanager
def without_megatron_warnings() -> Iterator[None]:
    """Silence what Megatron warns of at import and set-up: absent fused kernels, and calls inside itself it
    deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _leave_uncompiled(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    return _leave_uncompiled if function is None else function


def prepare_process(*, threads: int) -> None:
    """Fix the thread count, choose deterministic kernels and make CUDA calls mean the CPU. Idempotent.

    Floating-point sums depend on how they are split over threads, so equal weights need an equal thread
    count.
    """
    # Megatron's own calls use forms it deprecates, on every forward pass.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.")
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # The deterministic switch also fills every fresh tensor with NaN; no value read here is ever unwritten,
    # and it is slow.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if not torch.cuda.is_available():
        _substitute_cuda_functions()


def join_process_group() -> None:
    """Join the ranks of this trainer: those a launcher names in the environment, otherwise this process
    alone.

    A lone process uses an in-memory store: no port, no file, so any number of trainers share a host.
    """
    if dist.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend)
        return
    # Gloo otherwise resolves the host's own name, which fails or waits on machines without DNS.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


def trainer_device() -> contextlib.AbstractContextManager[Any]:
    """Return a block in which every torch call that names CUDA works on this process's device instead."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _CudaMeansCpu()


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrite the device of torch calls, by the mechanism that `with torch.device(...)` uses itself."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if kwargs:
            kwargs = _on_cpu(kwargs)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(result, str):
            # The optimizer recognises its parameters by the type name they have on CUDA.
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _names_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.startswith("cuda")


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    if _names_cuda(kwargs.get("device")):
        kwargs = {**kwargs, "device": CPU}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    return kwargs


class _ProgramOrder:
    """Stand for a CUDA stream or event: work on a CPU is done by the time its call returns."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
        return None

    record = wait = wait_event = wait_stream = synchronize = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or _ProgramOrder()

    def query(self) -> bool:
        return True


def _substitute_cuda_functions() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = lambda *_args, **_kwargs: None
    cuda.current_stream = cuda.default_stream = _ProgramOrder
    cuda.Stream = cuda.Event = _ProgramOrder
    cuda.stream = lambda _stream: contextlib.nullcontext()
    # Megatron's tracker of CUDA generators follows the CPU's one generator.
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(
        state
    )
    with importing_megatron():
        from megatron.core.tensor_parallel import random as megatron_random
    megatron_random._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
