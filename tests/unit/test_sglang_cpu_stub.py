"""Stubs of packages that SGLang imports unconditionally: they load, they raise when called, and only sglang sees them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import strawflow_workers.rollout as rollout
from strawflow import processes
from strawflow.errors import ConfigError
from strawflow_workers.rollout.sglang_server import (
    SglangOptions,
    SglangServer,
    launch_command,
    launch_environment,
)

SHIM = Path(rollout.__file__).parent / "sglang_cpu"


def shim_module(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, SHIM / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stubs = shim_module("strawflow_sglang_stubs")
attention = shim_module("strawflow_sglang_attention")


@pytest.fixture
def installed() -> Iterator[None]:
    import builtins

    original = builtins.__import__
    stubs.install()
    yield
    builtins.__import__ = original


def run_as(module_name: str, source: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": module_name}
    exec(source, namespace)
    return namespace


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import sgl_kernel; call = lambda: sgl_kernel.rmsnorm(1)", "sgl_kernel.rmsnorm"),
        ("from sgl_kernel import silu_and_mul as call", "sgl_kernel.silu_and_mul"),
        ("from sgl_kernel.flash_attn import fa as call", "sgl_kernel.flash_attn.fa"),
        (
            "import torchvision.transforms.functional as F; call = lambda: F.resize(1)",
            "torchvision.transforms.functional.resize",
        ),
        ("import triton; call = lambda: triton.cdiv(5, 2)", "triton.cdiv"),
        ("import triton.language as tl; call = lambda: tl.load(0)", "triton.language.load"),
        ("import torchvision\nclass Own(torchvision.Dataset): pass\ncall = Own", "torchvision.Dataset"),
    ],
)
def test_calling_a_stub_raises_and_names_the_function(source: str, name: str) -> None:
    call = run_as("sglang.srt.anything", source)["call"]
    with pytest.raises(stubs.StubCalledError, match=name.replace(".", r"\.")) as caught:
        call()
    assert "not installed on this host" in str(caught.value)


KERNELS = """
import triton
import triton.language as tl
BLOCK = tl.constexpr(64)
@triton.autotune(configs=[triton.Config({"B": 1}, num_warps=4)], key=["n"])
@triton.jit
def tuned(x, n: tl.constexpr):
    return tl.load(x)
@triton.jit(do_not_specialize=["n"])
def plain(x, n):
    return x
"""


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kernel", ["tuned", "plain"])
def test_a_kernel_can_be_declared_and_raises_when_launched(kernel: str) -> None:
    found = run_as("sglang.kernels.ops", KERNELS)
    assert found["BLOCK"].value == 64
    with pytest.raises(stubs.StubCalledError, match=kernel):
        found[kernel][(1,)](1, 2)
    with pytest.raises(stubs.StubCalledError, match=kernel):
        found[kernel](1, 2)
    with pytest.raises(stubs.StubCalledError, match=kernel):
        found[kernel].warmup(1)


@pytest.mark.usefixtures("installed")
def test_only_modules_of_sglang_see_a_stub() -> None:
    run_as("sglang.srt.anything", "import triton, torchvision, sgl_kernel\nfrom triton import language")
    for name in stubs.STUBBED_PACKAGES:
        assert importlib.util.find_spec(name) is None
        assert name not in sys.modules
        for importer in ("transformers.utils", "torch._inductor", "sglang_router", "__main__"):
            with pytest.raises(ModuleNotFoundError):
                run_as(importer, f"import {name}")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


@pytest.mark.usefixtures("installed")
def test_a_stub_can_be_annotated_compared_and_probed_but_is_never_an_instance_of_anything() -> None:
    found = run_as(
        "sglang.srt.anything",
        "from typing import Optional\n"
        "from torchvision import Thing\n"
        "def f(x: Thing | None, y: 'Optional[Thing]' = None) -> Optional[Thing]: return isinstance(x, Thing)\n"
        "class E(Exception): pass\n"
        "from triton import CompileError\n"
        "try:\n    raise E\nexcept (CompileError, E):\n    caught = True\n",
    )
    assert found["f"](1) is False
    assert found["caught"]
    assert "torchvision.Thing" in repr(found["Thing"])


@pytest.mark.usefixtures("installed")
def test_modules_younger_than_the_claimed_version_and_the_trainers_package_are_absent() -> None:
    for name in ("triton.knobs", "megatron.core"):
        with pytest.raises(ModuleNotFoundError, match=name):
            run_as("sglang.srt.anything", f"import {name}")


def test_a_really_installed_package_wins_over_its_stub() -> None:
    import builtins

    original = builtins.__import__
    try:
        assert stubs.install(packages=("json", "triton")) == ("triton",)
        assert run_as("sglang.srt.anything", "import json")["json"] is json
    finally:
        builtins.__import__ = original


class AttentionCase:
    """A KV cache with sequences scattered over it, and attention computed sequence by sequence."""

    def __init__(self, lengths: list[int], prefixes: list[int], heads: int = 8, kv_heads: int = 4) -> None:
        draw = torch.Generator().manual_seed(0)
        self.lengths, self.prefixes = lengths, prefixes
        self.keys = torch.randn(512, kv_heads, 16, generator=draw)
        self.values = torch.randn(512, kv_heads, 16, generator=draw)
        order = torch.randperm(511, generator=draw) + 1
        self.slots = torch.full((len(lengths), max(lengths)), 511)  # places past the end hold anything
        taken = 0
        for row, length in enumerate(lengths):
            self.slots[row, :length] = order[taken : taken + length]
            taken += length
        self.new = [length - prefix for length, prefix in zip(lengths, prefixes, strict=True)]
        self.query = torch.randn(sum(self.new), heads, 16, generator=draw)

    def one_by_one(self) -> torch.Tensor:
        answers, start = [], 0
        for row, (length, prefix) in enumerate(zip(self.lengths, self.prefixes, strict=True)):
            at = self.slots[row, :length]
            repeats = self.query.shape[1] // self.keys.shape[1]
            keys = self.keys[at].repeat_interleave(repeats, dim=1)
            values = self.values[at].repeat_interleave(repeats, dim=1)
            query = self.query[start : start + length - prefix]
            scores = torch.einsum("qhd,khd->hqk", query, keys) * 0.25
            hidden = torch.arange(length)[None, :] > torch.arange(prefix, length)[:, None]
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            answers.append(torch.einsum("hqk,khd->qhd", weights, values))
            start += length - prefix
        return torch.cat(answers)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (4, 4)])
def test_batched_decoding_equals_attention_sequence_by_sequence(heads: int, kv_heads: int) -> None:
    lengths = [7, 1, 30, 12]
    case = AttentionCase(lengths, [length - 1 for length in lengths], heads, kv_heads)
    found = attention.decode(
        case.query,
        torch.empty_like(case.query),
        case.keys,
        case.values,
        case.slots,
        torch.tensor(lengths),
        0.25,
    )
    torch.testing.assert_close(found, case.one_by_one(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (4, 4)])
def test_batched_prefill_with_cached_prefixes_equals_attention_sequence_by_sequence(
    heads: int, kv_heads: int
) -> None:
    case = AttentionCase([7, 1, 30, 12], [0, 0, 11, 8], heads, kv_heads)
    found = attention.extend(
        case.query,
        torch.empty_like(case.query),
        case.keys,
        case.values,
        case.slots,
        torch.tensor(case.prefixes),
        torch.tensor(case.new),
        0.25,
    )
    torch.testing.assert_close(found, case.one_by_one(), rtol=1e-5, atol=1e-5)


def options(tmp_path: Path, device: Any) -> SglangOptions:
    return SglangOptions(
        model_path=tmp_path, log_path=tmp_path / "log", device=device, extra_args=("--tp-size", "2")
    )


def test_a_cuda_host_gets_the_ordinary_server_and_only_the_death_signal(tmp_path: Path) -> None:
    environment = launch_environment(options(tmp_path, "cuda"), {"PYTHONPATH": "/elsewhere"})
    assert environment["PYTHONPATH"] == f"{SHIM}{os.pathsep}/elsewhere"
    assert environment["STRAWFLOW_GUARDIAN_PID"] == str(os.getpid())
    assert not {"STRAWFLOW_SGLANG_CPU", "SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS"} & environment.keys()
    command = launch_command(options(tmp_path, "cuda"), 1234)
    assert command[command.index("--dtype") + 1] == "auto"
    assert command[-2:] == ["--tp-size", "2"]
    assert launch_environment(options(tmp_path, "cpu"), {})["STRAWFLOW_SGLANG_CPU"] == "1"


def test_original_log_probabilities_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    server = SglangServer(options(tmp_path, "cpu"))
    with pytest.raises(ConfigError, match="unset it"):
        server.start()
    assert server.pid is None


TREE = """
import multiprocessing, os, subprocess, sys, time
def child(): print(os.getpid(), flush=True); time.sleep(120)
if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=child).start()
    subprocess.Popen([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(120)"])
    time.sleep(120)
"""


def test_forked_and_spawned_processes_of_a_tree_die_with_the_one_that_is_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": str(SHIM), "STRAWFLOW_GUARDIAN_PID": str(os.getpid())}
    command = [sys.executable, "-c", TREE]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as tree:
        assert tree.stdout is not None
        pids = [int(tree.stdout.readline()) for _ in range(2)]
        os.kill(tree.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while remaining := [pid for pid in pids if processes.started_at(pid) is not None]:
            assert time.monotonic() < deadline, f"{remaining} outlived their parent"
            time.sleep(0.02)


def test_a_process_whose_guardian_is_already_gone_ends_at_once() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    environment = {**os.environ, "PYTHONPATH": str(SHIM), "STRAWFLOW_GUARDIAN_PID": str(gone.pid)}
    assert subprocess.run([sys.executable, "-c", "print(1)"], env=environment, check=False).returncode == -9
