"""Calling the log hook when a batch is planned. A log that fails is a warning, never the end of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from strawflow.flow.assemble import BatchPlan
from strawflow.index.batches import Batch
from strawflow_workers.rollout.hooks.interfaces import LogHook

log = logging.getLogger(__name__)

_FATE = ("outcome", "reason", "advantage", "staleness")


def tell_batch(
    hook: LogHook,
    batch: Batch,
    plan: BatchPlan,
    rows: Iterable[Mapping[str, Any]],
    drops: Mapping[str, int],
) -> None:
    """Tell a log hook of a batch: its trajectory rows with what becomes of each, and numbers of the whole."""
    fates = {_key(row): row for row in plan.plan.to_pylist()}
    told = [{**row, **{name: fates[_key(row)][name] for name in _FATE}} for row in rows]
    metrics = {
        "objective": plan.objective,
        "mean_reward": batch.mean_reward,
        "num_sequences": batch.num_sequences,
        "num_tokens": batch.num_tokens,
        "max_staleness": batch.max_staleness,
        "num_masked_tokens": plan.num_masked_tokens,
        "drops": dict(drops),
    }
    try:
        hook(batch.step, told, metrics)
    except Exception:  # a failing log never stops a run
        log.warning("assemble.log raised at step %d", batch.step, exc_info=True)


def _key(row: Mapping[str, Any]) -> tuple[int, int, int]:
    return row["unit_id"], row["member"], row["segment"]
