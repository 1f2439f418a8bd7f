"""What is about to be admitted from one dataset: the units, as they follow from its cursor, and how the journal tells them.

1. Units follow from the cursor that was read and the segments there were: a rebuild makes the same ones again from the entry.
2. Several datasets may be drawn from in one admission; the ids of its units then alternate as the draws did.
3. It opens no transaction and knows no limits: flow.admit's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from strawflow.errors import InvalidInputError
from strawflow.flow.journal import Entry, EntryKind
from strawflow.flow.new_segment import Identities, NewSegment
from strawflow.flow.order import place_in_epoch
from strawflow.flow.run import Run
from strawflow.index import datasets, units
from strawflow.index.datasets import Cursor, Segment
from strawflow.index.engine import Connection
from strawflow.index.units import NewUnit

Maker = Callable[[Segment, int, int], NewUnit]


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


@dataclass(frozen=True)
class SourceStep:
    """What a source of prompts with a state of its own hands in beside them."""

    state: str
    """What it goes on from after them: JSON."""
    version: int
    """Of the dataset's cursor when the state before was read."""


@dataclass(frozen=True)
class Admission:
    """Units about to be admitted from one dataset, as follows from the cursor that was read."""

    profile: str
    before: Cursor
    after: Cursor
    units: Sequence[NewUnit]
    num_segments: int
    """Of the dataset when the cursor was read."""
    read: Sequence[Sequence[Any]]
    """[segment_seq, rows, digest of the first extent] of the segments the units are from."""
    schedule: Schedule = AT_ONCE
    source_state: str | None = None
    """What the dataset's source goes on from after them: JSON."""
    places: Sequence[int] = ()
    """Places of the units among all that are admitted with them, ascending; empty: one after another, from 0."""
    mixture: str | None = None
    """What the draws go on from after all of them, where it was drawn by weight."""
    made: NewSegment | None = None
    """The segment that its units are all the rows of, and that is added with them; they have no segment id before."""
    identities: Identities = ()
    """Of the rows of `made`."""

    def placed_after(self, num_before: int) -> Admission:
        """Return it with its places counted from behind `num_before` others."""
        places = self.places or range(len(self.units))
        return replace(self, places=[num_before + place for place in places])

    def ids(self, first_id: int) -> list[int]:
        """Return the ids of its units where those of all that is admitted begin with `first_id`."""
        return [first_id + place for place in self.places or range(len(self.units))]

    def entries(self, run: Run, *, first_id: int) -> list[Entry]:
        """Return how the journal tells it, the segment that comes with it first."""
        made = [] if self.made is None else [self.made.entry(run.branch)]
        return [*made, self._entry(run, first_id=first_id)]

    def _entry(self, run: Run, *, first_id: int) -> Entry:
        ids = self.ids(first_id)
        body = {
            "dataset": self.before.dataset_id,
            "profile": self.profile,
            "purpose": self.units[0].purpose,
            "before": cursor_fields(self.before),
            "after": cursor_fields(self.after),
            "first_unit_id": ids[0],
            "count": len(self.units),
            "num_segments": self.num_segments,
            "read": self.read,
        }
        if ids[-1] - ids[0] >= len(ids):
            body["unit_ids"] = runs_of(ids)
        if told := self.schedule.fields():
            body["schedule"] = told
        if self.source_state is not None:
            body["source_state"] = self.source_state
        if self.made is not None:
            body["whole_segment"] = self.made.segment_seq
        if self.mixture is not None:
            body["mixture"] = self.mixture
        return Entry(EntryKind.ADMISSION, run.branch, body)


def runs_of(ids: Iterable[int]) -> list[list[int]]:
    """Return ascending ids as [first, how many follow one another] pairs."""
    runs: list[list[int]] = []
    for unit_id in ids:
        if runs and sum(runs[-1]) == unit_id:
            runs[-1][1] += 1
        else:
            runs.append([unit_id, 1])
    return runs


def told_runs(body: Mapping[str, Any]) -> list[list[int]]:
    """Return the ids of an admission's units as its entry tells them: [first, how many follow one another] pairs."""
    return body.get("unit_ids") or [[int(body["first_unit_id"]), int(body["count"])]]


def told_ids(body: Mapping[str, Any]) -> list[int]:
    """Return the ids of an admission's units as its entry tells them."""
    return [unit_id for first, count in told_runs(body) for unit_id in range(first, first + count)]


def cursor_fields(cursor: Cursor) -> list[int]:
    """Return a cursor as the journal holds it."""
    return [cursor.version, cursor.epoch, cursor.segment_seq, cursor.position, cursor.num_admitted]


def take_segment(cursor: Cursor, segment: Segment, *, make: Maker) -> tuple[list[NewUnit], Cursor]:
    """Take all rows of a segment, wherever the cursor stands; returns them and the cursor, behind them.

    What lies between was made on a line of history that a branch left: it is not of this one.
    """
    taken = [make(segment, cursor.epoch, row) for row in range(segment.num_rows)]
    moved = replace(
        cursor,
        version=cursor.version + 1,
        segment_seq=segment.segment_seq,
        position=segment.num_rows,
        num_admitted=cursor.num_admitted + len(taken),
    )
    return taken, moved


def from_segments(
    connection: Connection,
    run: Run,
    before: Cursor,
    segments: list[Segment],
    count: int,
    *,
    profile: str,
    schedule: Schedule,
) -> Admission:
    """Return the admission of the next `count` rows of a dataset's segments, in epoch order."""
    purpose = run.config.profiles()[profile].purpose
    new, after = take_rows(
        before, segments, count, seed=run.config.run.seed, make=schedule.maker(purpose, profile)
    )
    used = {unit.segment_id for unit in new}
    read = [
        [s.segment_seq, s.num_rows, datasets.first_digest(connection, s.segment_id).hex()]
        for s in segments
        if s.segment_id in used
    ]
    return Admission(profile, before, after, new, len(segments), read, schedule)


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
