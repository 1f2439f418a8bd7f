"""Every model family against transformers' own: logits of packed sequences, weights in and out, training."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from strawflow.errors import ConfigError
from strawflow_workers.trainer import device, forward
from strawflow_workers.trainer.megatron import MegatronTrainer
from tests.integration.families import CASES, VOCABULARY
from tests.integration.megatron_cases import GRPO, make_pack, make_step

CPU = torch.device("cpu")
LENGTHS = [9, 2, 300, 31, 1]
"""The long one makes the scaling of rotary embeddings show."""


@dataclass(frozen=True)
class Made:
    """A checkpoint, transformers' model of it, and a trainer that took it in."""

    hf_dir: Path
    reference: Any
    trainer: MegatronTrainer

    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.hf_dir / "model.safetensors")


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    directory = tmp_path_factory.mktemp("family") / "hf"
    reference = CASES[request.param].make(directory)
    return Made(directory, reference, MegatronTrainer(directory, GRPO, seed=1))


def logits_of(trainer: MegatronTrainer, pack: Any) -> Iterator[Tensor]:
    """Yield the logits of each sequence of a pack, without those of its last token."""
    with torch.no_grad(), device.trainer_device():
        logits = forward.run_model(trainer._model, forward.prepare(pack, device=CPU))[0]
    ends = np.cumsum(np.diff(pack.boundaries) - 1)
    return iter(logits.tensor_split(torch.from_numpy(ends[:-1])))


def largest_difference(trainer: MegatronTrainer, reference: Any) -> float:
    """Return by how much logits of packed sequences differ from transformers' of each alone."""
    pack = make_pack(np.random.default_rng(3), LENGTHS)
    largest = 0.0
    for (start, end), found in zip(
        itertools.pairwise(pack.boundaries.tolist()), logits_of(trainer, pack), strict=True
    ):
        if end - start == 1:
            continue
        with torch.no_grad():
            ids = torch.from_numpy(pack.tokens[start : end - 1].astype(np.int64))
            expected = reference(input_ids=ids[None]).logits[0]
        largest = max(largest, float((found - expected).abs().max()))
    return largest


def test_logits_of_packed_sequences_equal_transformers_on_each_alone(made: Made) -> None:
    assert largest_difference(made.trainer, made.reference) < 1e-4


def test_an_export_has_every_tensor_of_the_source_bit_for_bit_and_no_other(
    made: Made, tmp_path: Path
) -> None:
    made.trainer.export_hf(tmp_path / "out")
    original, exported = made.tensors(), load_file(tmp_path / "out" / "model.safetensors")
    assert original.keys() == exported.keys()
    for name, tensor in original.items():
        assert tensor.dtype == exported[name].dtype
        assert torch.equal(tensor, exported[name]), name


def test_a_bfloat16_checkpoint_is_exported_in_the_types_it_had_correction_biases_in_float32(
    made: Made, tmp_path: Path
) -> None:
    narrow = AutoModelForCausalLM.from_pretrained(made.hf_dir, dtype=torch.bfloat16)
    narrow.save_pretrained(tmp_path / "narrow")
    MegatronTrainer(tmp_path / "narrow", GRPO, seed=1).export_hf(tmp_path / "out")
    original, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("narrow", "out"))
    assert {name: tensor.dtype for name, tensor in original.items()} == {
        name: tensor.dtype for name, tensor in exported.items()
    }
    wide = {name for name, tensor in original.items() if tensor.dtype == torch.float32}
    assert wide == {name for name in original if name.endswith("e_score_correction_bias")}
    assert all(torch.equal(tensor, exported[name]) for name, tensor in original.items())


def test_a_step_changes_every_weight_but_the_correction_bias_and_what_is_exported_gives_the_same_logits(
    made: Made, tmp_path: Path
) -> None:
    trainer = MegatronTrainer(made.hf_dir, GRPO, seed=1)
    metrics = trainer.train_step(make_step(0))
    assert metrics.skipped_updates == 0
    assert metrics.grad_norm is not None
    assert metrics.grad_norm > 0
    trainer.export_hf(tmp_path / "out")
    before, after = made.tensors(), load_file(tmp_path / "out" / "model.safetensors")
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    of_experts = {name for name in before if ".mlp.experts." in name}
    assert unchanged - of_experts == {name for name in before if name.endswith("e_score_correction_bias")}
    assert len(unchanged & of_experts) <= len(of_experts) / 2, "these were sent no token"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert largest_difference(trainer, loaded) < 1e-4


def test_a_checkpoint_keeps_the_correction_bias_of_routers(tmp_path: Path) -> None:
    CASES["glm4_moe"].make(tmp_path / "hf")
    trainer, other = (MegatronTrainer(tmp_path / "hf", GRPO, seed=1) for _ in range(2))
    before = trainer.weights_digest()
    trainer._model.module.decoder.layers[1].mlp.router.expert_bias[2] += 1.0
    assert trainer.weights_digest() != before
    trainer.save_checkpoint(tmp_path / "kept")
    other.load_checkpoint(tmp_path / "kept")
    assert other.weights_digest() == trainer.weights_digest()


def test_a_tensor_that_the_family_does_not_know_is_named(tmp_path: Path) -> None:
    CASES["qwen3"].make(tmp_path)
    path = tmp_path / "model.safetensors"
    sinks = {f"model.layers.{layer}.self_attn.sinks": torch.zeros(4) for layer in range(2)}
    save_file({**load_file(path), **sinks}, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.self_attn\.sinks and 1 more, which qwen3"):
        MegatronTrainer(tmp_path, GRPO, seed=1)


def test_layers_for_multi_token_prediction_are_left_out_and_nothing_else(tmp_path: Path) -> None:
    CASES["glm4_moe"].make(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    original = load_file(path)
    extra = {
        "model.layers.2.eh_proj.weight": torch.ones(32, 64),
        "model.layers.2.enorm.weight": torch.ones(32),
    }
    save_file({**original, **extra}, path, metadata={"format": "pt"})
    MegatronTrainer(tmp_path / "hf", GRPO, seed=1).export_hf(tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == original.keys()


def test_a_checkpoint_in_several_files_is_read_as_one(tmp_path: Path) -> None:
    model = CASES["deepseek_v3"].make(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 3
    digests = [MegatronTrainer(tmp_path / name, GRPO, seed=1).weights_digest() for name in ("one", "many")]
    assert digests[0] == digests[1]


def test_an_export_is_the_file_that_safetensors_would_write(made: Made, tmp_path: Path) -> None:
    made.trainer.export_hf(tmp_path / "out")
    save_file(made.tensors(), tmp_path / "expected.safetensors", metadata={"format": "pt"})
    written = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert written == (tmp_path / "expected.safetensors").read_bytes()
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_configuration_travels_with_an_export(made: Made, tmp_path: Path) -> None:
    made.trainer.export_hf(tmp_path / "out")
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported == json.loads((made.hf_dir / "config.json").read_text())
    assert exported["vocab_size"] == VOCABULARY
