"""Evaluation of a weight version: which steps have one, and the units that are admitted for it.

1. They are admitted in the transaction that publishes the version, bound to it, so that no engine can pass it by.
2. What they are follows from the configuration and from how many segments each dataset had: the journal tells the latter
   alone, and a rebuild makes the same units again.
3. A step is evaluated once on a branch, under the weights that were published first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strawflow.config import RunConfig
from strawflow.eval_datasets import HELD_OUT
from strawflow.flow.run import Run
from strawflow.index import datasets, units
from strawflow.index.datasets import Segment
from strawflow.index.engine import Connection
from strawflow.index.units import NewUnit

PURPOSE = "eval"

EVAL_PRIORITY = 10
"""Version-bound units come first: the engine may not move on to newer weights before they are answered."""

Segments = Mapping[str, Sequence[Segment]]
"""By dataset."""


def is_evaluated(config: RunConfig, step: int) -> bool:
    """Tell whether the weights of a step are evaluated: the first that sample, the last, and those at the interval."""
    first, last = config.warm_start.steps, config.total_steps
    if step == first:
        return not config.eval.skip_first
    at_interval = bool(config.eval.interval) and first < step < last
    return step == last or (at_interval and (step - first) % config.eval.interval == 0)


def segments_to_evaluate(connection: Connection, run: Run, *, step: int) -> Segments:
    """Return what a step is evaluated over, by dataset; empty if it is not, or has its evaluation already."""
    if not is_evaluated(run.config, step):
        return {}
    if units.has_epoch(connection, run.branch, purpose=PURPOSE, epoch=step):
        return {}
    found = {name: datasets.segments_of(connection, name) for name in run.config.eval_datasets()}
    return {name: segments for name, segments in found.items() if segments}


def evaluation_of(config: RunConfig, segments: Segments, *, version_id: str, step: int) -> list[NewUnit]:
    """Return the evaluation of a version over these segments, in the order of their unit ids."""
    profiles: dict[str, list[str]] = {}
    for found in config.eval_profiles():
        profiles.setdefault(found.dataset, []).append(found.profile)
    return [
        NewUnit(
            purpose=PURPOSE,
            profile=profile,
            segment_id=segment.segment_id,
            epoch=step,
            position=position,
            required_version_id=version_id,
            priority=EVAL_PRIORITY,
        )
        for name, names in profiles.items()
        for segment in segments.get(name, ())
        for position in range(segment.num_rows)
        for profile in names
    ]


def fields_of(segments: Segments, *, first_id: int, count: int) -> dict[str, Any]:
    """Return an evaluation as the journal holds it."""
    return {
        "first_unit_id": first_id,
        "count": count,
        "num_segments": len(segments.get(HELD_OUT, ())),
        "datasets": [[name, len(found)] for name, found in segments.items()],
    }


def segments_told(connection: Connection, fields: Mapping[str, Any]) -> Segments:
    """Return what an evaluation was made over, as the journal tells it; earlier programs knew `held_out` alone."""
    told = fields.get("datasets", [[HELD_OUT, fields["num_segments"]]])
    return {name: datasets.segments_of(connection, name)[:count] for name, count in told}
