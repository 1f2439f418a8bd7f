"""Converters without a model: what is refused and how it is said, names, and the memory that a conversion holds."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from strawflow.errors import ConfigError, InvalidInputError, NotFoundError
from strawflow_workers.trainer.convert import family_of
from strawflow_workers.trainer.convert.stored import StoredWeights, hf_tensors_of, write_tensors

DENSE: Mapping[str, Any] = {
    "num_hidden_layers": 12,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 96,
    "max_position_embeddings": 1024,
}
BIASED = {
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
}
LATENT = {
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
BY_TYPE: Mapping[str, Mapping[str, Any]] = {
    "llama": DENSE,
    "qwen2": DENSE,
    "qwen3": DENSE,
    "qwen3_moe": {**DENSE, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "num_experts": 4},
    "glm4": DENSE,
    "glm4_moe": {**DENSE, **BIASED},
    "deepseek_v3": {**DENSE, **BIASED, **LATENT},
}


def config(model_type: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": model_type, **BY_TYPE[model_type], **fields}


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **fields}}


@pytest.mark.parametrize(
    "model_type, says",
    [
        (
            "mamba",
            "model_type 'mamba' cannot be trained, there is no converter for it; supported: llama, qwen2",
        ),
        ("qwen3_next", r"'qwen3_next' .* \(it needs gated delta-net layers\); the nearest that can is qwen3"),
        (
            "deepseek_v32",
            r"\(it needs sparse attention chosen by an indexer\); the nearest that can is deepseek_v3;",
        ),
        (None, "model_type 'None' cannot be trained"),
    ],
)
def test_an_architecture_without_converter_is_refused_with_what_it_lacks_and_the_nearest(
    model_type: str | None, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        family_of({"model_type": model_type})


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    "model_type, fields, says",
    [
        (
            "llama",
            {"attention_bias": True},
            "attention_bias=True is not supported for llama; it must be False",
        ),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported for llama; it must be 'silu'"),
        (
            "llama",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config: the weights are quantized",
        ),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "only LlamaForCausalLM is"),
        (
            "llama",
            rope("dynamic"),
            "rope_type 'dynamic' is not supported for llama; only 'default' and 'llama3' are",
        ),
        (
            "llama",
            rope("llama3", **{**LLAMA3, "high_freq_factor": 8.0}),
            "high_freq_factor=8.0 .* must be 4.0",
        ),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
        (
            "qwen2",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types holds 'sliding_attention'",
        ),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 .* must be 1.0"),
        (
            "qwen3",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_parameters differ by kind of layer",
        ),
        ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 1}, "norm_topk_prob=True"),
        ("glm4", rope("yarn", **YARN), "rope_type 'yarn' is not supported for glm4; only 'default' is"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob=False .* it must be True"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts=0"),
        (
            "deepseek_v3",
            {"topk_group": 2},
            "topk_group=2 of n_group=8 .* ranks a group by its best 4, .* only topk_group=4",
        ),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05 is not supported with latent attention"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
        (
            "deepseek_v3",
            rope("yarn", **YARN, attention_factor=1.2),
            "attention_factor=1.2 of rope_type 'yarn'",
        ),
        ("deepseek_v3", rope("yarn", **YARN, truncate=False), "truncate=False"),
        ("deepseek_v3", rope("yarn", **YARN, mscale_all_dim=0.5), "mscale_all_dim=0.5"),
    ],
)
def test_a_value_that_the_family_cannot_express_is_refused_by_field_and_value(
    model_type: str, fields: dict[str, Any], says: str
) -> None:
    hf = config(model_type, **fields)
    family = family_of(hf)
    family.config_fields(config(model_type)), family.model_fields(config(model_type))
    with pytest.raises(ConfigError, match=says):
        family.config_fields(hf), family.model_fields(hf)


def test_numbers_of_layers_and_experts_go_from_one_name_to_the_other() -> None:
    family = family_of(config("deepseek_v3"))
    names = family.hf_names("decoder.layers.11.mlp.experts.local_experts.207.linear_fc1.weight")
    assert names == (
        "model.layers.11.mlp.experts.207.gate_proj.weight",
        "model.layers.11.mlp.experts.207.up_proj.weight",
    )
    with pytest.raises(
        ConfigError, match=r"'decoder\.layers\.1\.mlp\.linear_fc3\.weight' has no counterpart"
    ):
        family.hf_names("decoder.layers.1.mlp.linear_fc3.weight")


def test_old_and_new_forms_of_the_rotary_base_say_the_same() -> None:
    family = family_of(config("qwen3"))
    old = family.model_fields(config("qwen3", rope_theta=1e6, rope_scaling=None))
    assert old == family.model_fields(
        config("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    )
    assert old["rotary_base"] == 1e6


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2"])
def test_queries_keys_and_values_lie_by_group_and_come_apart_as_they_were(model_type: str) -> None:
    hf, rows = config(model_type), torch.arange(64)
    family = family_of(hf)
    query, key, value = rows[:32], 100 + rows[:16], 200 + rows[:16]
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    whole = family.join(name, (query, key, value), hf)
    first_group = [*range(16), *range(100, 108), *range(200, 208)]
    assert whole.tolist()[:32] == first_group
    assert all(map(torch.equal, family.split(name, whole, hf), (query, key, value)))


def test_no_more_than_one_megatron_tensor_and_its_neighbour_are_held_and_each_is_asked_for_once() -> None:
    hf = config("qwen3", num_hidden_layers=11)
    inside = (
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.weight",
    )
    names = [f"decoder.layers.{layer}.{name}" for layer in range(11) for name in inside]
    asked: list[str] = []
    alive: set[str] = set()
    most = 0

    def whole(name: str) -> torch.Tensor:
        asked.append(name)
        alive.add(name)
        held = np.zeros((64, 3), dtype=np.float32)  # lives as long as any view of the tensor
        weakref.finalize(held, alive.remove, name)
        return torch.from_numpy(held)

    found = []
    for hf_name, part in hf_tensors_of(family_of(hf), hf, names, whole):
        found.append(hf_name)
        assert part.shape[0] in (64, 32, 16)
        most = max(most, len(alive))
    assert found == sorted(found)
    assert len(found) == 11 * 6
    assert sorted(asked) == sorted(names)
    assert most <= 2


def test_files_are_written_as_safetensors_writes_them_whatever_the_order(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "b.weight": torch.randn(3, 5, generator=generator).bfloat16(),
        "a.weight": torch.randn(7, generator=generator),
        "c": torch.randn(4, 2, generator=generator).half(),
        "count": torch.arange(3),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
        "ü": torch.randn(2, 6, generator=generator).T,
    }
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_tensors(tmp_path / "ours.safetensors", kinds, reversed(tensors.items()))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_a_tensor_that_was_not_announced_or_does_not_come_is_an_error(tmp_path: Path) -> None:
    kinds = {"a": (torch.float32, (2,)), "b": (torch.float32, (2,))}
    with pytest.raises(InvalidInputError, match="b was announced and did not come"):
        write_tensors(tmp_path / "file", kinds, [("a", torch.zeros(2))])
    with pytest.raises(InvalidInputError, match=r"a is torch\.float32 \(3,\), announced was"):
        write_tensors(tmp_path / "file", kinds, [("a", torch.zeros(3))])
    with pytest.raises(InvalidInputError, match=r"c is torch\.float32"):
        write_tensors(tmp_path / "file", kinds, [("c", torch.zeros(3))])


def test_stored_weights_tell_kinds_and_name_what_is_absent(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"model\.safetensors does not exist"):
        StoredWeights(tmp_path)
    save_file({"a": torch.ones(2, 3).half(), "b": torch.tensor([True])}, tmp_path / "model.safetensors")
    stored = StoredWeights(tmp_path)
    assert set(stored) == {"a", "b"}
    assert stored.kind("a") == (torch.float16, (2, 3))
    assert torch.equal(stored["a"], torch.ones(2, 3).half())
    with pytest.raises(NotFoundError, match="no tensor named c"):
        stored["c"]
    with pytest.raises(InvalidInputError, match="b has type BOOL"):
        stored.kind("b")
