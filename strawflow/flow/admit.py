"""Admission: turn prompts into ready units and move the dataset cursor, in one transaction.

How far admission may run ahead is bounded by staleness: step s is applied to weights of step s - 1, so with weights w
the newest published and a lag of at most m, groups of steps up to w + 1 + m may be sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from strawflow import config as configuration
from strawflow.flow.order import place_in_epoch
from strawflow.flow.run import Run
from strawflow.index import consumers, datasets, events, units, weights
from strawflow.index.datasets import Cursor, Segment
from strawflow.index.engine import Connection
from strawflow.index.units import NewUnit

DEMONSTRATIONS = "demonstrations"
PROMPTS = "prompts"
HELD_OUT = "held_out"

EVAL_PRIORITY = 10
"""Version-bound units come first: the engine may not move on to newer weights before they are answered."""


def admit_due(run: Run) -> int:
    """Admit every group that staleness allows now; returns how many were admitted. Safe to call from any worker.

    A unit dropped outside any batch is owed a replacement of its purpose.
    """
    with run.index.read() as connection:
        # Almost always there is nothing to do: look before taking the write lock.
        if all(
            datasets.num_admitted(connection, run.branch, dataset_id) >= limit
            for dataset_id, _, limit in _limits(connection, run)
        ):
            return 0
    with run.index.begin() as connection:
        return sum(
            _admit_up_to(connection, run, dataset_id, profile, limit=limit)
            for dataset_id, profile, limit in _limits(connection, run)
        )


def _limits(connection: Connection, run: Run) -> list[tuple[str, str, int]]:
    """Return (dataset, profile, how many of it may have been admitted by now)."""
    config, warm = run.config, run.config.warm_start
    newest = weights.newest(connection, run.branch)
    if newest is None:
        return []

    def dropped(purpose: str) -> int:
        return consumers.num_dropped(connection, run.branch, run.consumer, purpose=purpose)

    limits: list[tuple[str, str, int]] = []
    if warm.steps:
        # Demonstrations are sampled by no weights, so nothing about them goes stale.
        limits.append((DEMONSTRATIONS, "demo", warm.steps * warm.prompts_per_step + dropped("demo")))
    if newest.step >= warm.steps:
        num_steps = min(newest.step - warm.steps + 1 + config.rollout.max_staleness, config.trainer.steps)
        limits.append((PROMPTS, "train", num_steps * config.rollout.prompts_per_step + dropped("train")))
    return limits


def admit_evaluation(connection: Connection, run: Run, *, version_id: str, step: int) -> int:
    """Admit every held-out prompt once per evaluation profile, bound to one weight version.

    Runs inside the transaction that publishes the version, so that no engine can pass it by. Idempotent per step.
    """
    if units.has_epoch(connection, run.branch, purpose="eval", epoch=step):
        return 0
    profiles = ["eval_sampled"] + (["eval_greedy"] if run.config.eval.greedy else [])
    new = [
        NewUnit(
            purpose="eval",
            profile=profile,
            segment_id=segment.segment_id,
            epoch=step,
            position=position,
            required_version_id=version_id,
            priority=EVAL_PRIORITY,
        )
        for segment in datasets.segments_of(connection, HELD_OUT)
        for position in range(segment.num_rows)
        for profile in profiles
    ]
    if not new:
        return 0
    units.admit(connection, run.branch, new)
    events.record(connection, "evaluation.admitted", version_id=version_id, step=step, num_units=len(new))
    return len(new)


def _admit_up_to(connection: Connection, run: Run, dataset_id: str, profile: str, *, limit: int) -> int:
    segments = datasets.segments_of(connection, dataset_id)
    if not segments:
        return 0
    cursor = datasets.cursor_for_update(connection, run.branch, dataset_id)
    wanted = limit - cursor.num_admitted
    if wanted <= 0:
        return 0
    purpose = run.config.profiles()[profile].purpose
    new, moved = take_rows(
        cursor,
        segments,
        wanted,
        seed=run.config.run.seed,
        make=lambda segment_id, epoch, position: NewUnit(purpose, profile, segment_id, epoch, position),
    )
    units.admit(connection, run.branch, new)
    datasets.move_cursor(connection, run.branch, moved, expected_version=cursor.version)
    events.record(connection, "units.admitted", dataset_id=dataset_id, num_units=len(new), epoch=moved.epoch)
    return len(new)


def take_rows(
    cursor: Cursor,
    segments: list[Segment],
    count: int,
    *,
    seed: int,
    make: Callable[[int, int, int], NewUnit],
) -> tuple[list[NewUnit], Cursor]:
    """Take the next `count` rows in epoch order, running into further epochs as needed; returns them and the cursor.

    Segments follow one another inside an epoch, each in its own keyed order.
    """
    taken: list[NewUnit] = []
    epoch, at, position = cursor.epoch, cursor.segment_seq, cursor.position
    while len(taken) < count:
        if at >= len(segments):
            epoch, at, position = epoch + 1, 0, 0
        segment = segments[at]
        if position >= segment.num_rows:
            at, position = at + 1, 0
            continue
        row = place_in_epoch(
            position, num_rows=segment.num_rows, seed=seed, epoch=epoch, segment_seq=segment.segment_seq
        )
        taken.append(make(segment.segment_id, epoch, row))
        position += 1
    moved = replace(
        cursor,
        version=cursor.version + 1,
        epoch=epoch,
        segment_seq=at,
        position=position,
        num_admitted=cursor.num_admitted + len(taken),
    )
    return taken, moved


def steps_with_evaluation(config: configuration.RunConfig) -> frozenset[int]:
    """Return the steps whose weights are evaluated: the warm start's end and the last."""
    return frozenset({config.warm_start.steps, config.total_steps})
