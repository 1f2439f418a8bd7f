"""The trainer's own costs beside plain ways to do the same.

    python bench/trainer.py [--quick] [--json] [--folder DIR] [--rounds N] [--only SECTION]

1. convert: a Hugging Face checkpoint (Qwen3, bf16, random) read into a Megatron model's parameters and written out again,
   beside safetensors reading the same file whole and writing it. Neither side is synced; both replace the file of their last turn.
2. Everything runs in this process, on one thread, as the trainer does by default.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rows import Bench, Row, Side, at_least, compare, main, take_turns
from safetensors.torch import load_file, save_file

from strawflow_workers.trainer import device
from strawflow_workers.trainer.convert.stored import Kind, write_tensors

_HEADS, _GROUPS, _HEAD_DIM = 16, 8, 128


def convert(bench: Bench) -> Iterable[Row]:
    """Measure both directions together, with and without the digest that an export has."""
    from strawflow_workers.trainer.model import (
        ONE_PROCESS,
        build_model,
        each_hf_tensor,
        export_weights,
        hf_kinds,
        load_weights,
    )
    from strawflow_workers.trainer.ranks import join_ranks

    folder = bench.path("convert")
    hf, num_bytes = _make_checkpoint(folder, num_layers=bench.pick(6, 28))
    out = bench.path("converted")
    device.prepare_process(threads=1)
    with device.trainer_device():
        ranks = join_ranks(ONE_PROCESS)
        model = build_model(hf)

        def both_ways() -> None:
            load_weights(model, hf, folder)
            write_tensors(out / "model.safetensors", hf_kinds(model), each_hf_tensor(model, hf))

        def with_digest() -> None:
            load_weights(model, hf, folder)
            export_weights(model, hf, ranks, out / "model.safetensors")

        def one_way() -> None:
            load_weights(model, hf, folder)

        def copy() -> None:
            save_file(
                load_file(folder / "model.safetensors"), out / "copy.safetensors", metadata={"format": "pt"}
            )

        rates = take_turns(
            {
                "both": _rate(both_ways, out / "model.safetensors", num_bytes),
                "digest": _rate(with_digest, out / "model.safetensors", num_bytes),
                "one": _rate(one_way, out / "model.safetensors", num_bytes),
                "copy": _rate(copy, out / "copy.safetensors", num_bytes),
            },
            bench.rounds,
        )
    plain: dict[str, Any] = {"against": "safetensors load and save", "theirs": rates["copy"]}
    size = f"{num_bytes / 1e6:.0f} MB of bf16"
    yield compare(
        f"Hugging Face -> Megatron -> Hugging Face, {size}",
        rates["both"],
        "MB/s",
        target=at_least(0.5),
        **plain,
    )
    yield compare("the same with the digest of an export", rates["digest"], "MB/s", **plain)
    yield compare("Hugging Face -> Megatron alone", rates["one"], "MB/s", **plain)


def _rate(work: Any, written: Path, num_bytes: int) -> Side:
    def measure() -> float:
        written.unlink(missing_ok=True)
        started = time.perf_counter()
        work()
        return num_bytes / (time.perf_counter() - started) / 1e6

    return measure


def _make_checkpoint(folder: Path, *, num_layers: int) -> tuple[dict[str, Any], int]:
    """Write a checkpoint with layers as those of Qwen3-0.6B; return its config.json and the bytes of its tensors."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config: Any = Qwen3Config(
        vocab_size=32768,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=num_layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=_GROUPS,
        head_dim=_HEAD_DIM,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        architecture: Any = Qwen3ForCausalLM
        shapes = {name: tuple(tensor.shape) for name, tensor in architecture(config).state_dict().items()}
    config.save_pretrained(str(folder))
    kinds: dict[str, Kind] = {name: (torch.bfloat16, shape) for name, shape in shapes.items()}
    generator = torch.Generator().manual_seed(0)
    write_tensors(
        folder / "model.safetensors",
        kinds,
        ((name, torch.randn(shape, generator=generator).bfloat16()) for name, shape in shapes.items()),
    )
    hf: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return hf, sum(2 * torch.Size(shape).numel() for shape in shapes.values())


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", {"convert": convert}))
