"""The Megatron model against transformers' own Qwen3: logits, packed attention, weights in and out."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from strawflow.errors import AlreadyExistsError, ConfigError, InvalidInputError, NotFoundError
from strawflow_workers.trainer.attention import LONGEST_SHARED, arrange, attend
from strawflow_workers.trainer.megatron import MegatronTrainer
from tests.integration.megatron_cases import GRPO, VOCABULARY, make_hf, make_pack

CPU = torch.device("cpu")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lengths", [[9], [2, 17, 1, 8, 30, 5]])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_each_packed_sequence_equal_transformers_on_it_alone(
    tmp_path: Path, tied: bool, lengths: list[int], temperature: float
) -> None:
    reference = make_hf(tmp_path / "hf", tied=tied)
    trainer = MegatronTrainer(tmp_path / "hf", GRPO, seed=1)
    pack = make_pack(np.random.default_rng(3), lengths, temperature=temperature)
    found = trainer.logprobs(pack)
    for start, end in itertools.pairwise(pack.boundaries.tolist()):
        ids = torch.from_numpy(pack.tokens[start:end].astype(np.int64))
        with torch.no_grad():
            logits = reference(input_ids=ids[None]).logits[0, :-1] / temperature
        expected = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        np.testing.assert_allclose(found[start + 1 : end], expected.numpy(), atol=2e-5)
        assert found[start] == 0


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_transformers_packed_and_as_a_plain_batch(tmp_path: Path, tied: bool) -> None:
    from strawflow_workers.trainer import device, forward

    reference = make_hf(tmp_path / "hf", tied=tied)
    trainer = MegatronTrainer(tmp_path / "hf", GRPO, seed=1)
    ids = torch.randint(0, VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(0))
    pack = make_pack(np.random.default_rng(0), [41] * 3)
    pack.tokens.reshape(3, 41)[:, :40] = ids.numpy()
    with torch.no_grad(), device.trainer_device():
        expected = reference(input_ids=ids).logits
        plain = trainer._model(input_ids=ids, position_ids=None, attention_mask=None)
        packed = forward.run_model(trainer._model, forward.prepare(pack, device=CPU)).view(3, 40, VOCABULARY)
    assert (plain - expected).abs().max() < 2e-5
    assert (packed - expected).abs().max() < 2e-5


def test_padded_classes_and_lone_long_sequences_attend_like_one_call_each_forward_and_backward() -> None:
    lengths = [3, 300, 17, 1, 16, 90, LONGEST_SHARED, 2, 64, 70]
    boundaries = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    layout = arrange(boundaries, device=CPU)
    assert 1 < len(layout.rectangles) < len(lengths)
    generator = torch.Generator().manual_seed(0)
    shapes = [(int(boundaries[-1]), heads, 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    weights = torch.randn(shapes[0], generator=generator)

    found = attend(*inputs, layout, scale=None)
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    parts = []
    for start, end in itertools.pairwise(boundaries.tolist()):
        rows = [x[start:end].transpose(0, 1)[None] for x in inputs]
        alone = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
        parts.append(alone[0].transpose(0, 1))
    expected = torch.cat(parts)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    for got, wanted in zip(gradients, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=5e-6)


def test_changing_one_sequence_changes_no_other_sequence_of_the_pack(tmp_path: Path) -> None:
    make_hf(tmp_path / "hf")
    trainer = MegatronTrainer(tmp_path / "hf", GRPO, seed=1)
    pack = make_pack(np.random.default_rng(3), [9, 12, 30, 7])
    before = trainer.logprobs(pack)
    pack.tokens[9:21] = (pack.tokens[9:21] + 1) % VOCABULARY
    after = trainer.logprobs(pack)
    assert np.array_equal(before[:9], after[:9])
    assert np.array_equal(before[21:], after[21:])
    assert not np.allclose(before[10:21], after[10:21])


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_before_training_is_bit_equal_to_the_checkpoint_it_came_from(
    tmp_path: Path, tied: bool
) -> None:
    make_hf(tmp_path / "hf", tied=tied)
    trainer = MegatronTrainer(tmp_path / "hf", GRPO, seed=1)
    digest = trainer.export_hf(tmp_path / "out")
    original, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "out"))
    assert original.keys() == exported.keys()
    assert all(torch.equal(original[name], exported[name]) for name in original)
    assert digest == trainer.weights_digest()


def test_a_bfloat16_checkpoint_is_exported_bit_equal_too(tmp_path: Path) -> None:
    make_hf(tmp_path / "hf").bfloat16().save_pretrained(tmp_path / "narrow")
    MegatronTrainer(tmp_path / "narrow", GRPO, seed=1).export_hf(tmp_path / "out")
    original, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("narrow", "out"))
    assert all(torch.equal(original[name], exported[name]) for name in original)


def test_an_export_after_training_loads_in_transformers_and_gives_the_trainers_logprobs(
    tmp_path: Path,
) -> None:
    from tests.integration.megatron_cases import make_step

    make_hf(tmp_path / "hf")
    trainer = MegatronTrainer(tmp_path / "hf", GRPO, seed=1)
    before = trainer.weights_digest()
    trainer.train_step(make_step(0))
    assert trainer.export_hf(tmp_path / "out") != before
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    pack = make_pack(np.random.default_rng(5), [20])
    ids = torch.from_numpy(pack.tokens.astype(np.int64))
    with torch.no_grad():
        expected = loaded(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    np.testing.assert_allclose(trainer.logprobs(pack)[1:], expected.numpy(), atol=2e-5)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (
        tmp_path / "hf" / "tokenizer.json"
    ).read_text()


def test_an_export_replaces_nothing_and_leaves_no_temporary_directory(tmp_path: Path) -> None:
    make_hf(tmp_path / "hf")
    trainer = MegatronTrainer(tmp_path / "hf", GRPO, seed=1)
    trainer.export_hf(tmp_path / "out")
    with pytest.raises(AlreadyExistsError, match="out exists"):
        trainer.export_hf(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def test_what_cannot_be_trained_is_refused_by_the_name_of_its_field(tmp_path: Path) -> None:
    make_hf(tmp_path / "hf")
    config = tmp_path / "hf" / "config.json"
    original = json.loads(config.read_text())
    scaled = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}}
    for change in ({"model_type": "mamba"}, {"attention_bias": True}, {"use_sliding_window": True}, scaled):
        config.write_text(json.dumps({**original, **change}))
        with pytest.raises(ConfigError, match=r"model_type|attention_bias|use_sliding_window|rope_type"):
            MegatronTrainer(tmp_path / "hf", GRPO, seed=1)


def test_weights_that_are_absent_or_of_another_shape_are_named(tmp_path: Path) -> None:
    make_hf(tmp_path / "hf")
    config = tmp_path / "hf" / "config.json"
    original = json.loads(config.read_text())
    config.write_text(json.dumps({**original, "num_hidden_layers": 3}))
    with pytest.raises(NotFoundError, match=r"model\.layers\.2\."):
        MegatronTrainer(tmp_path / "hf", GRPO, seed=1)
    config.write_text(json.dumps({**original, "intermediate_size": 64}))
    with pytest.raises(InvalidInputError, match=r"mlp\.gate_proj"):
        MegatronTrainer(tmp_path / "hf", GRPO, seed=1)
    (tmp_path / "hf" / "model.safetensors").unlink()
    with pytest.raises(NotFoundError, match=r"model\.safetensors does not exist"):
        MegatronTrainer(tmp_path / "hf", GRPO, seed=1)
