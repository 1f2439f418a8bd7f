"""How far engine and trainer may differ, and which sequences are the worst."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from strawflow.config_guard import GuardSection
from strawflow_workers.trainer import guard
from strawflow_workers.trainer.batches import PackedMicroBatch, TrainSettings
from strawflow_workers.trainer.guard import Bounds


def test_bounds_are_the_configured_ones_or_those_of_the_checkpoints_type() -> None:
    assert guard.bounds_of(GuardSection(), "float32") == Bounds(1e-3, 0.1)
    assert guard.bounds_of(GuardSection(), "bfloat16") == Bounds(0.05, 5.0)
    assert guard.bounds_of(GuardSection(max_gap=0.5), "float32") == Bounds(1e-3, 0.5)


def test_a_gap_above_a_bound_is_told_and_one_that_is_no_number_passes_both() -> None:
    bounds = Bounds(0.01, 0.5)
    assert guard.disagreement(0.01, 0.5, bounds) is None
    assert guard.disagreement(None, None, bounds) is None
    assert guard.disagreement(0.02, 0.4, bounds) == "mean log-probability gap 0.02 above 0.01"
    assert guard.disagreement(0.001, 0.6, bounds) == "largest log-probability gap 0.6 above 0.5"
    assert guard.disagreement(float("nan"), float("nan"), bounds) == (
        "mean log-probability gap nan above 0.01, largest log-probability gap nan above 0.5"
    )


def pack() -> PackedMicroBatch:
    """Three sequences of a prompt token and two, three and one trained ones."""
    boundaries = np.array([0, 3, 7, 9], np.int32)
    mask = np.ones(9, np.float32)
    mask[boundaries[:-1]] = 0
    return PackedMicroBatch(
        tokens=np.arange(9, dtype=np.int32),
        boundaries=boundaries,
        loss_mask=mask,
        advantages=np.array([0, 1, 1, 0, -2, -2, -2, 0, 0.5], np.float32),
        rollout_logprobs=np.full(9, -1.0, np.float32),
        temperatures=np.ones(3, np.float32),
    )


def engine_off_by(*gaps: float) -> Any:
    return lambda batch: batch.rollout_logprobs + np.array(gaps, np.float32)


def test_the_probe_compares_tokens_of_the_weights_before_the_step_alone() -> None:
    versions = np.array([-1, 4, 4, -1, 3, 4, 4, -1, 3], np.int32)
    logprobs = engine_off_by(9, 0.1, -0.3, 9, 5, 0, 0.2, 9, 7)
    mean, largest = guard.probe(pack(), versions, 5, logprobs)
    assert (mean, largest) == (pytest.approx(0.15), pytest.approx(0.3))
    assert guard.probe(pack(), versions, 9, logprobs) == (None, None)


def records(logprobs: Any) -> list[dict[str, Any]]:
    ids = {name: pa.array([1, 2, 3]) for name in ("unit_id", "fence", "seq", "member", "segment")}
    rows = pa.RecordBatch.from_pydict(ids)
    return guard.worst_sequences(rows, pack(), TrainSettings(objective="grpo", lr=1e-3), logprobs)


def test_the_worst_sequences_come_first_with_loss_gap_and_advantage() -> None:
    # ratios: e^0.1, 1 | 1, e^-0.5, 1 | e^0.2; bounds 0.8 and 1.2
    found = records(engine_off_by(0, 0.1, 0, 0, 0, -0.5, 0, 0, 0.2))
    assert [r["unit_id"] for r in found] == [2, 3, 1]
    expected = {1: -np.exp(0.1) - 1, 2: 2 + 2 * 0.8 + 2, 3: -1.2 * 0.5}
    for r in found:
        assert r["loss"] == pytest.approx(expected[r["unit_id"]], rel=1e-5)
    assert [r["largest_gap"] for r in found] == pytest.approx([0.5, 0.2, 0.1], rel=1e-5)
    assert [r["largest_advantage"] for r in found] == [2.0, 0.5, 1.0]
    assert guard.named(found[0]).startswith("unit 2 member 2 segment 2 (loss 5.6, largest gap 0.5, ")


def test_a_sequence_whose_loss_is_not_finite_is_worse_than_any_gap() -> None:
    found = records(engine_off_by(0, np.nan, 0, 0, 0, -5, 0, 0, 0))
    assert [r["unit_id"] for r in found] == [1, 2, 3]
    assert not np.isfinite(found[0]["loss"])
