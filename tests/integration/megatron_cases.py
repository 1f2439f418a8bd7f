"""What the tests of the Megatron trainer share: tiny Qwen3 checkpoints made by transformers, and packed
batches from a seed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from strawflow_workers.trainer.batches import MiniBatch, PackedMicroBatch, TrainSettings

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

VOCABULARY = 96
SFT = TrainSettings(objective="sft", lr=3e-3, lr_warmup_updates=4, weight_decay=0.01)
GRPO = TrainSettings(objective="grpo", lr=1e-3)


def make_hf(directory: Path, *, tied: bool = True, seed: int = 0, **fields: Any) -> Qwen3ForCausalLM:
    """Write a small Qwen3 with random weights, norms included, as a Hugging Face checkpoint; return the
    model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # seconds; ranks that only train do without

    torch.manual_seed(seed)
    config = Qwen3Config(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": tied,
            **fields,
        }
    )
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text('{"stands": "for a tokenizer file"}')
    return model


def make_pack(rng: np.random.Generator, lengths: list[int], *, temperature: float = 1.0) -> PackedMicroBatch:
    """Pack random sequences of these lengths; about the last half of each is trained."""
    tokens = rng.integers(0, VOCABULARY, sum(lengths)).astype(np.int32)
    mask = np.concatenate([np.arange(n) >= max(1, n // 2) for n in lengths]).astype(np.float32)
    return PackedMicroBatch(
        tokens=tokens,
        boundaries=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_mask=mask,
        advantages=rng.normal(size=tokens.size).astype(np.float32),
        rollout_logprobs=rng.uniform(-6, -3, tokens.size).astype(np.float32),
        temperatures=np.full(len(lengths), temperature, dtype=np.float32),
    )


def make_step(seed: int, *, num_updates: int = 2) -> list[MiniBatch]:
    """Make the mini-batches of one training step: some of one micro-batch, some of two."""
    rng = np.random.default_rng(seed)
    step = []
    for index in range(num_updates):
        packs = [make_pack(rng, rng.integers(2, 20, 6).tolist()) for _ in range(1 + index % 2)]
        step.append(MiniBatch(tuple(packs), denominator=float(sum(pack.loss_mask.sum() for pack in packs))))
    return step
