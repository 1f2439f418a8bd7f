"""What a step is measured by: facts of the rows, operations and MFU, which numbers go to the sinks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from strawflow.records import BATCH
from strawflow_workers.trainer.batch_facts import BatchFacts
from strawflow_workers.trainer.flops import mfu, peak_of, step_flops, work_of
from strawflow_workers.trainer.sinks import numbers


def rows(*sequences: tuple[int, list[int], list[int]], step: int) -> pa.RecordBatch:
    """Packed rows of (prompt length, mask and version step of each response token)."""
    made = []
    for prompt, mask, versions in sequences:
        length = prompt + len(mask)
        made.append(
            {
                "step": step,
                **dict.fromkeys(("mini_batch", "slice", "micro_batch", "unit_id", "fence", "seq"), 0),
                "member": 0,
                "segment": 0,
                "tokens": [1] * length,
                "loss_mask": [0] * prompt + mask,
                "logprobs": [0.0] * length,
                "advantages": [0.0] * length,
                "version_steps": [-1] * prompt + versions,
                "prompt_length": prompt,
                "temperature": 1.0,
                "reward": 0.0,
            }
        )
    return pa.RecordBatch.from_pylist(made, schema=BATCH)


def test_lengths_and_staleness_are_those_of_all_rows_and_of_trained_sampled_tokens() -> None:
    facts = BatchFacts(step=10)
    # A tool's token was sampled by no weights, a masked one is not trained: neither has a staleness.
    facts.add(rows((3, [1, 1, 1], [9, 8, -1]), (2, [1], [7]), step=10))
    facts.add(rows((4, [0, 1], [1, 9]), step=10))
    assert facts.metrics() == {
        "total_tokens": 15,
        "prompt_tokens_mean": 3.0,
        "response_tokens_mean": 2.0,
        "response_tokens_max": 3,
        "sequence_tokens_max": 6,
        "staleness_mean": (0 + 1 + 2 + 0) / 4,
        "staleness_max": 2,
    }


def test_a_batch_without_rows_has_no_lengths_rather_than_lengths_of_zero() -> None:
    told = BatchFacts(step=1).metrics()
    assert told.pop("total_tokens") == 0
    assert set(told.values()) == {None}


DENSE = SimpleNamespace(
    num_layers=3,
    hidden_size=8,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=5,
    ffn_hidden_size=11,
    gated_linear_unit=True,
    num_moe_experts=None,
)


def test_a_dense_model_costs_six_for_each_weight_and_token_and_causal_attention() -> None:
    # query 8x20, key and value 8x10 each, output 20x8; gate, up and down 8x11 each; output matrix 8x100
    weights = 3 * (160 + 80 + 80 + 160 + 3 * 88) + 800
    work = work_of(DENSE, vocab_size=100)
    assert work.weights_per_token == weights
    # QK^T and its product with V: 2 operations for each of 5 elements, half of the pairs, thrice for the backward pass
    attention = 3 * 4 * (2 * 5 + 2 * 5) * 3 * (7 * 7 + 4 * 4) / 2
    assert step_flops(work, np.array([7, 4])) == 6 * weights * 11 + attention


def test_of_routed_experts_only_those_that_a_token_goes_to_are_counted() -> None:
    moe = SimpleNamespace(
        **{
            **vars(DENSE),
            "num_moe_experts": 16,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 7,
            "moe_shared_expert_intermediate_size": 5,
            "moe_layer_freq": [0, 1, 1],
        }
    )
    attention = 160 + 80 + 80 + 160
    sparse = 3 * 8 * (2 * 7 + 5) + 8 * 16
    assert work_of(moe, vocab_size=100).weights_per_token == 3 * attention + 3 * 88 + 2 * sparse + 800


def test_latent_attention_counts_its_compressed_matrices() -> None:
    mla = SimpleNamespace(
        **{
            **vars(DENSE),
            "multi_latent_attention": True,
            "q_lora_rank": 6,
            "kv_lora_rank": 9,
            "qk_head_dim": 4,
            "qk_pos_emb_head_dim": 2,
            "v_head_dim": 3,
        }
    )
    attention = 8 * 6 + 6 * 24 + 8 * (9 + 2) + 9 * 4 * (4 + 3) + 12 * 8
    work = work_of(mla, vocab_size=100)
    assert work.weights_per_token == 3 * (attention + 3 * 88) + 800
    assert work.attention_width == 3 * 4 * (6 + 3)


def test_mfu_is_the_share_of_the_known_peak_and_none_where_it_is_not_known() -> None:
    peak = peak_of("NVIDIA H200", "bfloat16")
    assert mfu(2 * 989e12, 4.0, num_devices=2, peak=peak) == pytest.approx(0.25)
    assert peak_of("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_of("NVIDIA H200", "float16") is None
    assert mfu(1e12, 1.0, num_devices=1, peak=peak_of("some other", "bfloat16")) is None


def test_sinks_get_numbers_and_those_of_tables_by_their_names() -> None:
    metrics = {
        "step": 3,
        "fence": 1,
        "loss": 0.5,
        "kl": None,
        "objective": "grpo",
        "reward_by_set": {"a": 1, "b": 0.25},
    }
    assert numbers(metrics) == {"loss": 0.5, "reward_by_set/a": 1.0, "reward_by_set/b": 0.25}
