"""What a trainer says of a step that went wrong: how far engine and trainer differ, and which sequences an update was left out for.

1. Pure: numbers in, text or records out. Whether the run goes on is the loop's part.
2. Log-probabilities can be compared only where the weights that sampled a token are those before the step: tokens of older
   weights differ because they should.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from strawflow.config_guard import GuardSection
from strawflow_workers.trainer import forward, objective
from strawflow_workers.trainer.batches import PackedMicroBatch, TrainSettings

LogProbs = Callable[[PackedMicroBatch], npt.NDArray[np.float32]]

NUM_WORST = 5
MEAN_GAP = {"float32": 1e-3}
LARGEST_GAP = {"float32": 0.1}
MEAN_GAP_16_BITS, LARGEST_GAP_16_BITS = 0.05, 5.0


@dataclass(frozen=True)
class Bounds:
    """How far engine and trainer may differ in log-probability."""

    mean: float
    largest: float


def bounds_of(guard: GuardSection, dtype: str) -> Bounds:
    """Return the configured bounds, or those for a checkpoint of this type (`float32`, `bfloat16`, `float16`).

    In float32 the two differ by rounding alone: 2e-7 in the mean between SGLang and Megatron-core on a CPU. In 16 bits kernels
    differ in the order of their sums, and rare tokens by much.
    """
    return Bounds(
        guard.max_mean_gap or MEAN_GAP.get(dtype, MEAN_GAP_16_BITS),
        guard.max_gap or LARGEST_GAP.get(dtype, LARGEST_GAP_16_BITS),
    )


def disagreement(mean: float | None, largest: float | None, bounds: Bounds) -> str | None:
    """Return in words which bound is passed, None for neither; a gap that is not a number passes."""
    if mean is None or largest is None:
        return None
    told = [
        f"{name} log-probability gap {value:.3g} above {bound:g}"
        for name, value, bound in (("mean", mean, bounds.mean), ("largest", largest, bounds.largest))
        if not value <= bound
    ]
    return ", ".join(told) or None


def probe(
    batch: PackedMicroBatch, version_steps: npt.NDArray[np.int32], step: int, logprobs: LogProbs
) -> tuple[float | None, float | None]:
    """Return mean and largest gap over the trained tokens that the weights before `step` sampled; None where there is none.

    `version_steps` [T] are the steps of the weights that sampled the tokens.
    """
    fresh = (batch.loss_mask != 0) & (version_steps == step - 1)
    if not fresh.any():
        return None, None
    gaps = np.abs(logprobs(batch).astype(np.float64) - batch.rollout_logprobs)[fresh]
    return float(gaps.mean()), float(gaps.max())


def worst_sequences(
    rows: pa.RecordBatch, batch: PackedMicroBatch, settings: TrainSettings, logprobs: LogProbs
) -> list[dict[str, Any]]:
    """Return a record of each sequence of a micro-batch, the worst first: those whose loss is not finite, then by largest gap.

    `rows` are the packed rows it was made of. A record has the record id, the sum of the weighted token losses, the largest
    |trainer - engine| log-probability gap and the largest |advantage|, over trained tokens and under the present weights.
    """
    found = logprobs(batch)
    prepared = forward.prepare(batch, device=torch.device("cpu"))
    losses = objective.sequence_losses(torch.from_numpy(found[prepared.positions]), prepared, settings)
    ids = rows.select(["unit_id", "fence", "seq", "member", "segment"]).to_pylist()
    records = []
    for at, (start, end) in enumerate(zip(batch.boundaries[:-1], batch.boundaries[1:], strict=True)):
        trained = batch.loss_mask[start:end] != 0
        gaps = np.abs(found[start:end] - batch.rollout_logprobs[start:end])[trained]
        records.append(
            {
                **ids[at],
                "loss": float(losses[at]),
                "largest_gap": float(gaps.max(initial=0.0)),
                "largest_advantage": float(np.abs(batch.advantages[start:end])[trained].max(initial=0.0)),
            }
        )
    return worst(records)


def worst(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the `NUM_WORST` worst records, the worst first."""

    def badness(record: dict[str, Any]) -> tuple[bool, float]:
        gap = record["largest_gap"]
        return not np.isfinite(record["loss"]), gap if np.isfinite(gap) else np.inf

    return sorted(records, key=badness, reverse=True)[:NUM_WORST]


def named(record: dict[str, Any]) -> str:
    """Return a record in words."""
    where = f"unit {record['unit_id']} member {record['member']}"
    segment = f" segment {record['segment']}" if record["segment"] else ""
    return (
        f"{where}{segment} (loss {record['loss']:.4g}, largest gap {record['largest_gap']:.4g}, "
        f"largest advantage {record['largest_advantage']:.4g})"
    )
