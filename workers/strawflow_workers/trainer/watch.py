"""Watching over the steps of a trainer: what is looked at before one and after it, told as events, and when the run stops.

1. A decision about an update is recorded with the step's metrics and found again by whoever trains the step once more: after a
   stop the next start goes on without the update, and a replay leaves it out.
2. The engine is held against the trainer only where both had the same weights, and never the fake engine, which makes its
   log-probabilities up.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from strawflow.errors import ConfigError, WorkerFailedError
from strawflow.flow import consume, history
from strawflow.flow.session import WorkerSession
from strawflow.index.batches import Batch
from strawflow_workers.trainer import guard
from strawflow_workers.trainer.batch_facts import BatchContent
from strawflow_workers.trainer.megatron import MegatronTrainer

log = logging.getLogger(__name__)


class Watch:
    """That of one trainer session."""

    def __init__(self, session: WorkerSession, trainer: MegatronTrainer, *, after_step: int = 0) -> None:
        self._session, self._trainer = session, trainer
        config = session.run.config
        self._guard = config.guard
        self._bounds = guard.bounds_of(config.guard, trainer.dtype)
        if config.guard.agreement == "stop" and trainer.ranks.size > 1:
            raise ConfigError(
                "guard.agreement stop: with several trainer ranks nothing is looked at before a step is trained yet; use warn"
            )
        self._is_compared = config.guard.agreement != "off" and config.rollout.engine != "fake"
        steps = history.steps(session.run)
        self.recorded: dict[int, dict[str, Any]] = {s["step"]: s for s in steps if s["step"] > after_step}
        """Metrics of the steps after `after_step` that were trained before, by step."""

    def before(self, batch: Batch, content: BatchContent) -> None:
        """Look at the first micro-batch before anything of the batch is trained, where the run stops for a disagreement.

        Raises:
            WorkerFailedError: engine and trainer differ by more than the bounds.
        """
        is_asked = self._guard.agreement == "stop" and self._is_compared
        if not is_asked or batch.objective != "grpo" or not content.rows:
            return
        versions = np.asarray(content.rows[0][1].column("version_steps").flatten())
        gaps = guard.probe(
            content.mini_batches[0].micro_batches[0], versions, batch.step, self._trainer.logprobs
        )
        if (told := guard.disagreement(*gaps, self._bounds)) is not None:
            self._tell(
                "step.disagreement", step=batch.step, batch_id=batch.batch_id, told=told, trained=False
            )
            raise WorkerFailedError(
                f"step {batch.step} is not trained: {told} in its first micro-batch. The engine had other weights or settings "
                "than the trainer; mend it, and start its groups afresh with `strawflow resume RUN --from CHECKPOINT --branch "
                "NAME`, or make the run with --guard.agreement warn"
            )

    def disagreement(self, batch: Batch, metrics: dict[str, Any]) -> str | None:
        """Return in words how far engine and trainer differ in a step, if it is too far; tokens of older weights are not judged."""
        if not self._is_compared or batch.objective != "grpo" or batch.max_staleness > 0:
            return None
        return guard.disagreement(metrics["logprob_gap_mean"], metrics["logprob_gap_max"], self._bounds)

    def after(self, batch: Batch, content: BatchContent, metrics: dict[str, Any]) -> None:
        """Tell what went wrong in a step that is recorded.

        Raises:
            WorkerFailedError: an update was left out, and the run stops for that.
        """
        if metrics["disagreement"] is not None:
            told = metrics["disagreement"]
            log.warning("step %d: %s", batch.step, told)
            self._tell("step.disagreement", step=batch.step, batch_id=batch.batch_id, told=told, trained=True)
        before = self.recorded.get(batch.step)
        if not metrics["left_out"] or (before is not None and before.get("batch_digest") == batch.digest):
            return
        worst = self._worst(content, metrics["left_out"])
        facts = {"left_out": list(metrics["left_out"]), "policy": self._guard.on_left_out}
        told = "; ".join(guard.named(record) for record in worst)
        self._tell("step.left_out", step=batch.step, batch_id=batch.batch_id, **facts, worst=_storable(worst))
        message = (
            f"step {batch.step}, batch {batch.batch_id}: {len(metrics['left_out'])} of {len(content.mini_batches)} updates were not "
            f"applied (not finite, or too large). Worst sequences: {told or 'not looked for with several ranks'}"
        )
        log.warning("%s", message)
        if self._guard.on_left_out == "stop":
            raise WorkerFailedError(
                f"{message}. Look at them with `strawflow unit show`; the next start goes on without these updates"
            )

    def _worst(self, content: BatchContent, left_out: Sequence[int]) -> list[dict[str, Any]]:
        if self._trainer.ranks.size > 1:
            return []  # all ranks would have to tell the log-probabilities together
        packed: dict[int, list[pa.RecordBatch]] = {}
        for place, of_micro in content.rows:
            packed.setdefault(place.mini_batch, []).append(of_micro)
        # An update's place among those of the step is not its number where a mini-batch has no rows.
        parts = [packed[number] for number in sorted(packed)]
        settings, logprobs = self._trainer.settings, self._trainer.logprobs
        return guard.worst(
            [
                record
                for at in left_out
                for of_micro, micro in zip(parts[at], content.mini_batches[at].micro_batches, strict=True)
                for record in guard.worst_sequences(of_micro, micro, settings, logprobs)
            ]
        )

    def _tell(self, name: str, **facts: Any) -> None:
        consume.tell(self._session, name, **facts)


def _storable(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records without numbers that JSON does not have."""
    return [
        {k: v if not isinstance(v, float) or np.isfinite(v) else str(v) for k, v in record.items()}
        for record in records
    ]
