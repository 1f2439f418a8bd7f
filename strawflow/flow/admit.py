"""Admission: turn prompts into ready units and move the dataset cursor, in one transaction.

    cursor read ▸ ids taken ▸ journal entry durable ▸ transaction(units, cursor)

1. What is admitted follows from the cursor that was read; the transaction asks whether it still stands there, and if another
   worker moved it the admission is planned anew.
2. Unit ids grow in the order of admission; ids that were taken for a refused admission leave a gap.

How far admission may run ahead is bounded by staleness: step s is applied to weights of step s - 1, so with weights w
the newest published and a lag of at most m, groups of steps up to w + 1 + m may be sampled; with schedule `sync` only those
of step w + 1, and in both `over_provision` groups more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from strawflow import eval_datasets
from strawflow.errors import ConflictError, InvalidInputError
from strawflow.flow import journal, quota
from strawflow.flow.journal import Entry, EntryKind
from strawflow.flow.order import place_in_epoch
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.index import consumers, datasets, events, units, weights
from strawflow.index.datasets import Cursor, Segment
from strawflow.index.engine import Connection
from strawflow.index.units import NewUnit

DEMONSTRATIONS = eval_datasets.DEMONSTRATIONS
PROMPTS = eval_datasets.PROMPTS
HELD_OUT = eval_datasets.HELD_OUT

MAX_ADMITTED = 1_000_000
"""Groups admitted in one call: all of them are made in memory and written in one transaction."""

Maker = Callable[[Segment, int, int], NewUnit]
Limits = Callable[[Connection], list[tuple[str, str, int]]]
"""Returns (dataset, profile, how many of it may have been admitted by now)."""


@dataclass(frozen=True)
class Schedule:
    """When and in which order the groups of one admission are granted, also on a branch that takes them up."""

    priority: int | None = None
    """Higher is granted first; None: that of the segment."""
    scheduling_key: int = 0
    """Inside a priority, lower is granted first."""
    not_before: datetime | None = None
    """Wall time, with its time zone, before which nothing of it is granted; None: at once."""

    def require_valid(self) -> None:
        """Raise InvalidInputError for what the index cannot hold, or a time that does not say of which zone it is."""
        if self.priority is not None:
            units.require_priority(self.priority)
        if abs(self.scheduling_key) >= 1 << 63:
            raise InvalidInputError(f"scheduling key {self.scheduling_key} is out of range: it has 64 bits")
        if self.not_before is not None and self.not_before.tzinfo is None:
            raise InvalidInputError(
                f"not_before {self.not_before.isoformat()} has no time zone: give one, as datetime.now(UTC) has"
            )

    def fields(self) -> dict[str, Any]:
        """Return what is set, as the journal holds it."""
        at = self.not_before
        told = {
            "priority": self.priority,
            "scheduling_key": self.scheduling_key or None,
            "not_before": None if at is None else at.astimezone(UTC).isoformat(),
        }
        return {name: value for name, value in told.items() if value is not None}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Schedule:
        at = fields.get("not_before")
        return cls(
            fields.get("priority"),
            fields.get("scheduling_key", 0),
            None if at is None else datetime.fromisoformat(at),
        )

    def maker(self, purpose: str, profile: str) -> Maker:
        """Return what makes the unit of a row (segment, epoch, position)."""
        # Told to the index as a delay: on SQLite its time is not the wall's.
        delay_s = 0.0 if self.not_before is None else (self.not_before - datetime.now(UTC)).total_seconds()

        def make(segment: Segment, epoch: int, position: int) -> NewUnit:
            return NewUnit(
                purpose,
                profile,
                segment.segment_id,
                epoch,
                position,
                priority=segment.priority if self.priority is None else self.priority,
                scheduling_key=self.scheduling_key,
                delay_s=max(0.0, delay_s),
            )

        return make


AT_ONCE = Schedule()


def admit_due(session: WorkerSession) -> int:
    """Admit every group that staleness allows now; returns how many were admitted. Safe to call from any worker.

    A unit dropped outside any batch is owed a replacement of its purpose.
    """
    return _admit(session, lambda connection: _limits(connection, session.run))


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
        rollout = config.rollout
        ahead = rollout.max_staleness if rollout.schedule == "async" else 0
        num_steps = newest.step - warm.steps + 1 + ahead
        # What the last step leaves over would go on for a step that never comes.
        num_groups = min(
            num_steps * rollout.prompts_per_step + rollout.over_provision,
            config.trainer.steps * rollout.prompts_per_step,
        )
        limits.append((PROMPTS, "train", num_groups + dropped("train")))
    return limits


def admit_more(
    session: WorkerSession,
    *,
    count: int,
    dataset_id: str = PROMPTS,
    profile: str = "train",
    schedule: Schedule = AT_ONCE,
) -> int:
    """Admit the next `count` prompts in epoch order, running into further epochs; returns how many were admitted.

    For a run whose trainer is not ours: nothing bounds it but the caller. 0 while too little disk is left to admit any.

    Raises:
        InvalidInputError: the count is no whole number from 0 to MAX_ADMITTED, nothing was ever enqueued to the dataset, or
            the schedule cannot be.
    """
    branch = session.run.branch
    schedule.require_valid()
    _require_admissible(session.run, count, dataset_id)
    return _admit(
        session,
        lambda connection: [
            (dataset_id, profile, datasets.num_admitted(connection, branch, dataset_id) + count)
        ],
        schedule,
    )


@dataclass(frozen=True)
class SourceStep:
    """What a source of prompts with a state of its own hands in beside them."""

    state: str
    """What it goes on from after them: JSON."""
    version: int
    """Of the dataset's cursor when the state before was read."""


def admit_rest(
    session: WorkerSession, step: SourceStep, *, dataset_id: str, schedule: Schedule = AT_ONCE
) -> int:
    """Admit all prompts of a dataset that were never admitted, the source's state in the same transaction.

    Returns how many. Nothing is stored where there is nothing to admit, or too little disk is left.

    Raises:
        ConflictError: something was admitted from the dataset since the state before was read; nothing changed.
        InvalidInputError: the schedule cannot be.
    """
    branch = session.run.branch
    schedule.require_valid()

    def limits(connection: Connection) -> list[tuple[str, str, int]]:
        at = datasets.cursor(connection, branch, dataset_id)
        if at.version != step.version:
            raise SourceMovedError(
                f"prompts of dataset {dataset_id!r} were admitted by another since its source was read: read it again",
                dataset_id=dataset_id,
            )
        rest = datasets.num_unadmitted(connection, branch, dataset_id)
        return [(dataset_id, "train", at.num_admitted + min(rest, MAX_ADMITTED))]

    return _admit(session, limits, schedule, step)


class SourceMovedError(ConflictError):
    """Planning the admission anew would store a state that does not belong to it."""


def _require_admissible(run: Run, count: int, dataset_id: str) -> None:
    if not isinstance(count, int) or not 0 <= count <= MAX_ADMITTED:
        raise InvalidInputError(
            f"{count} prompts cannot be admitted at once: give a whole number from 0 to {MAX_ADMITTED:,}"
        )
    with run.index.read() as connection:
        purpose = datasets.purpose_of(connection, dataset_id)
        if purpose == "eval" or dataset_id in run.config.eval_datasets():
            raise InvalidInputError(
                f"dataset {dataset_id!r} is for evaluation: its prompts are admitted with the weights that they test, and "
                "never trained on"
            )
        if datasets.segments_of(connection, dataset_id):
            return
        known = ", ".join(repr(d.dataset_id) for d in datasets.listed(connection, run.branch) if d.num_rows)
    raise InvalidInputError(
        f"dataset {dataset_id!r} holds no prompts: enqueue some first, or name one that does ({known or 'none yet'})"
    )


@dataclass(frozen=True)
class _Admission:
    """Units about to be admitted from one dataset, as follows from the cursor that was read."""

    profile: str
    before: Cursor
    after: Cursor
    units: list[NewUnit]
    num_segments: int
    """Of the dataset when the cursor was read."""
    read: list[list[Any]]
    """[segment_seq, rows, digest of the first extent] of the segments the units are from."""
    schedule: Schedule
    source: SourceStep | None = None

    def entry(self, run: Run, *, first_id: int) -> Entry:
        body = {
            "dataset": self.before.dataset_id,
            "profile": self.profile,
            "purpose": self.units[0].purpose,
            "before": cursor_fields(self.before),
            "after": cursor_fields(self.after),
            "first_unit_id": first_id,
            "count": len(self.units),
            "num_segments": self.num_segments,
            "read": self.read,
        }
        if told := self.schedule.fields():
            body["schedule"] = told
        if self.source is not None:
            body["source_state"] = self.source.state
        return Entry(EntryKind.ADMISSION, run.branch, body)


def cursor_fields(cursor: Cursor) -> list[int]:
    """Return a cursor as the journal holds it."""
    return [cursor.version, cursor.epoch, cursor.segment_seq, cursor.position, cursor.num_admitted]


def _admit(
    session: WorkerSession, limits: Limits, schedule: Schedule = AT_ONCE, source: SourceStep | None = None
) -> int:
    run = session.run
    while True:
        with run.index.read() as connection:  # almost always there is nothing to do
            planned = [
                admission
                for dataset_id, profile, limit in limits(connection)
                if (
                    admission := _planned(
                        connection,
                        run,
                        dataset_id,
                        profile,
                        limit=limit,
                        schedule=schedule,
                        source=source,
                    )
                )
                is not None
            ]
        if not planned or quota.gauge(run).watch():
            return 0
        with run.index.begin() as connection:
            first_id = units.take_ids(connection, sum(len(admission.units) for admission in planned))
        try:
            return _commit(session, planned, first_id, limits)
        except SourceMovedError:
            raise
        except ConflictError:
            continue  # another worker admitted meanwhile: each round lost is one that another won


def _planned(
    connection: Connection,
    run: Run,
    dataset_id: str,
    profile: str,
    *,
    limit: int,
    schedule: Schedule,
    source: SourceStep | None,
) -> _Admission | None:
    before = datasets.cursor(connection, run.branch, dataset_id)
    wanted = limit - before.num_admitted
    segments = datasets.segments_of(connection, dataset_id) if wanted > 0 else []
    if not segments:
        return None
    purpose = run.config.profiles()[profile].purpose
    new, after = take_rows(
        before,
        segments,
        wanted,
        seed=run.config.run.seed,
        make=schedule.maker(purpose, profile),
    )
    used = {unit.segment_id for unit in new}
    read = [
        [s.segment_seq, s.num_rows, datasets.first_digest(connection, s.segment_id).hex()]
        for s in segments
        if s.segment_id in used
    ]
    return _Admission(profile, before, after, new, len(segments), read, schedule, source)


def _commit(session: WorkerSession, planned: Sequence[_Admission], first_id: int, limits: Limits) -> int:
    run = session.run
    firsts = [first_id]
    for admission in planned:
        firsts.append(firsts[-1] + len(admission.units))
    entries = [
        admission.entry(run, first_id=first) for admission, first in zip(planned, firsts, strict=False)
    ]
    with journal.recorded(session, entries) as record, run.index.begin() as connection:
        record.name(connection)
        units.require_unused(connection, first_id)
        allowed = {(dataset_id, profile): limit for dataset_id, profile, limit in limits(connection)}
        for admission, first in zip(planned, firsts, strict=False):
            dataset_id = admission.before.dataset_id
            held = datasets.cursor_for_update(connection, run.branch, dataset_id)
            limit = allowed.get((dataset_id, admission.profile), 0)
            if held.version != admission.before.version or admission.after.num_admitted > limit:
                raise ConflictError("the dataset cursor was moved meanwhile", dataset_id=dataset_id)
            units.admit(connection, run.branch, admission.units, first_id=first)
            datasets.move_cursor(
                connection, run.branch, admission.after, expected_version=admission.before.version
            )
            if admission.source is not None:
                datasets.put_source_state(connection, run.branch, dataset_id, admission.source.state)
            events.record(
                connection,
                "units.admitted",
                dataset_id=dataset_id,
                num_units=len(admission.units),
                epoch=admission.after.epoch,
            )
    return firsts[-1] - first_id


def take_rows(
    cursor: Cursor,
    segments: list[Segment],
    count: int,
    *,
    seed: int,
    make: Maker,
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
        taken.append(make(segment, epoch, row))
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
