"""A real reward model, served by real SGLang on the CPU: its numbers are transformers' own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from strawflow.errors import ConfigError
from strawflow_workers.rollout.rewards.scorer import RewardScorer, ScorerOptions
from strawflow_workers.rollout.rewards.spec import RewardOutcome, RewardRequest, RewardSpec
from strawflow_workers.rollout.sglang_server import SglangOptions, SglangServer

pytestmark = pytest.mark.alone

PROMPT = [256, 5, 7, 9]
RESPONSES = [[11, 40, 257], [12], [*range(60, 100)], [11, 40, 257]]
BIAS = 0.25


def save_reward_model(folder: Path) -> Qwen3ForSequenceClassification:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
        initializer_range=0.2,
        num_labels=1,
    )
    model = Qwen3ForSequenceClassification(config).float().eval()
    model.save_pretrained(folder)
    # SGLang's head has a bias, which it leaves as memory had it where the checkpoint, as transformers writes it, has none.
    weights = load_file(folder / "model.safetensors")
    save_file(
        {**weights, "score.bias": torch.tensor([BIAS])},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return model


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_reward_model_of_sglang_scores_the_sampled_tokens(tmp_path: Path) -> None:
    model = save_reward_model(tmp_path / "model")
    options = SglangOptions(
        model_path=tmp_path / "model",
        log_path=tmp_path / "engine.log",
        device="cpu",
        extra_args=("--is-embedding",),
    )

    async def outcomes(url: str) -> list[RewardOutcome]:
        async with RewardScorer(ScorerOptions(spec=RewardSpec(f"reward_model:{url}"))) as scorer:
            requests = [
                RewardRequest("", "", prompt_tokens=PROMPT, response_tokens=response)
                for response in RESPONSES
            ]
            return list(await asyncio.gather(*map(scorer.score, requests)))

    with SglangServer(options) as server:
        found = asyncio.run(outcomes(server.url))
    with torch.no_grad():
        expected = [
            float(model(input_ids=torch.tensor([[*PROMPT, *response]])).logits) + BIAS
            for response in RESPONSES
        ]
    assert [outcome.failure for outcome in found] == [None] * len(RESPONSES)
    assert [outcome.score for outcome in found] == pytest.approx(expected, abs=1e-3)
    assert len({round(value, 3) for value in expected}) == 3


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_engine_that_generates_is_refused_as_a_reward_model(tmp_path: Path) -> None:
    from strawflow_workers.quickstart.model import TINY, make_model

    model = make_model(tmp_path / "tiny", seed=0, shape=TINY)
    options = SglangOptions(model_path=model, log_path=tmp_path / "engine.log", device="cpu")

    async def start(url: str) -> None:
        async with RewardScorer(ScorerOptions(spec=RewardSpec(f"reward_model:{url}"))):
            pass

    with SglangServer(options) as server, pytest.raises(ConfigError, match="generates, it does not score"):
        asyncio.run(start(server.url))
