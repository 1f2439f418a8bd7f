"""What the rows of a batch tell of themselves, for the metrics of their step. Pure, on numpy arrays.

1. Counted are the rows that were read here: of a slice those of the slice.
2. A fact that no row has is None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from strawflow.index.batches import MicroBatchPlace
from strawflow_workers.trainer.batches import MiniBatch


@dataclass
class BatchFacts:
    """Sums over packed rows (records.BATCH), micro-batch by micro-batch."""

    step: int
    lengths: list[npt.NDArray[np.int64]] = field(default_factory=list)
    """[S] each: tokens of each sequence, prompt and response."""
    prompt_lengths: list[npt.NDArray[np.int64]] = field(default_factory=list)
    lags: list[npt.NDArray[np.int64]] = field(default_factory=list)
    """[tokens that are trained and that weights sampled]: staleness of each, in steps."""

    def counted(
        self, rows: Iterable[tuple[MicroBatchPlace, pa.RecordBatch]]
    ) -> Iterator[tuple[MicroBatchPlace, pa.RecordBatch]]:
        """Pass the rows of a batch on, counting them."""
        for place, of_micro_batch in rows:
            self.add(of_micro_batch)
            yield place, of_micro_batch

    def add(self, rows: pa.RecordBatch) -> None:
        """Count the rows of one micro-batch."""
        self.lengths.append(np.diff(np.asarray(rows.column("tokens").offsets)).astype(np.int64))
        self.prompt_lengths.append(np.asarray(rows.column("prompt_length")).astype(np.int64))
        versions = np.asarray(rows.column("version_steps").flatten())
        is_trained = np.asarray(rows.column("loss_mask").flatten()) != 0
        sampled = versions[is_trained & (versions >= 0)]
        self.lags.append(self.step - 1 - sampled.astype(np.int64))

    @property
    def all_lengths(self) -> npt.NDArray[np.int64]:
        """[S]: tokens of each sequence."""
        return _joined(self.lengths)

    def metrics(self) -> dict[str, Any]:
        """Return lengths in tokens and staleness in steps, by name."""
        lengths, prompts, lags = self.all_lengths, _joined(self.prompt_lengths), _joined(self.lags)
        responses = lengths - prompts
        return {
            "total_tokens": int(lengths.sum()),
            "prompt_tokens_mean": _mean(prompts),
            "response_tokens_mean": _mean(responses),
            "response_tokens_max": _max(responses),
            "sequence_tokens_max": _max(lengths),
            "staleness_mean": _mean(lags),
            "staleness_max": _max(lags),
        }


def _joined(parts: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _mean(values: npt.NDArray[np.int64]) -> float | None:
    return float(values.mean()) if values.size else None


def _max(values: npt.NDArray[np.int64]) -> int | None:
    return int(values.max()) if values.size else None


@dataclass(frozen=True)
class BatchContent:
    """What was read of a batch."""

    rows: list[tuple[MicroBatchPlace, pa.RecordBatch]]
    mini_batches: list[MiniBatch]
    """The rows as they are trained."""
    facts: BatchFacts
