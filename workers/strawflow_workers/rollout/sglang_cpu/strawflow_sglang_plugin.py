"""What strawflow changes inside SGLang on a host without CUDA, through SGLang's own plugin loader and hooks.

1. Attention over many short sequences is batched (strawflow_sglang_attention): several times faster, same mathematics.
2. Scheduler and detokenizer are forked from the loaded launcher instead of importing everything again: half the start-up
   time and memory. The launcher has started no thread and no OpenMP pool by then.
Active only with STRAWFLOW_SGLANG_CPU=1. It is found by the entry point in the dist-info folder beside it, so only
processes with this folder on their path see it.
"""

from __future__ import annotations

import multiprocessing
import os

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_AFTER_SPAWN_WAS_CHOSEN = "sglang.srt.entrypoints.engine._set_envs_and_config"


def register() -> None:
    """Entry point of group `sglang.srt.plugins`; SGLang calls it in each of its processes."""
    if os.environ.get("STRAWFLOW_SGLANG_CPU") != "1":
        return
    import strawflow_sglang_attention as attention
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_BACKEND}._run_sdpa_forward_decode", attention.decode_hook, HookType.AROUND)
    HookRegistry.register(f"{_BACKEND}._run_sdpa_forward_extend", attention.extend_hook, HookType.AROUND)
    HookRegistry.register(_AFTER_SPAWN_WAS_CHOSEN, _fork_children, HookType.AFTER)


def _fork_children(*_: object) -> None:
    multiprocessing.set_start_method("fork", force=True)
