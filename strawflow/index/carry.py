"""Units that a branch takes up from the line it leaves: which, and as what.

1. A unit taken up is a unit of the new branch, with an id of its own, pristine or with the result it had.
2. Whoever had read it by where they go on is marked: it is offered to the others alone.
3. It knows rows; who goes on where is flow.fork's part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow.index import tables as t
from strawflow.index.prepared import Prepared
from strawflow.index.units import COLUMN_NAMES, COLUMNS, OFFER_SELECTED, WHO_WANT_IT, Unit, to_unit
from strawflow.states import UnitState

_OFFER_CARRIED = Prepared(
    f"{OFFER_SELECTED} FROM units {WHO_WANT_IT} "
    "WHERE units.branch_id = :branch_id AND units.state = 'completed' AND NOT EXISTS (SELECT 1 FROM assignments "
    "WHERE assignments.unit_id = units.unit_id AND assignments.branch_id = units.branch_id "
    "AND assignments.consumer = consumers.consumer AND assignments.epoch = units.epoch)"
)
_ADMITTED = ("purpose", "profile", "segment_id", "epoch", "position", "required_version_id")
_RESULT = ("extent_id", "row_start", "row_count", "version_step", "mean_reward", "num_tokens")


@dataclass(frozen=True)
class Carried:
    """A unit of a branch that a new one takes up again, with its result or pristine."""

    unit: Unit
    dataset_id: str
    precedence: int
    keeps: bool
    scheduling_key: int = 0
    """0 for one that was parked: the step of its weights has taken the key's place."""
    not_before: float | None = None
    """Index time, seconds."""


_U = t.units.c
CARRIED_COLUMNS = [
    *COLUMNS,
    t.segments.c.dataset_id,
    _U.precedence,
    sa.case((_U.claim_class == 0, 0), else_=_U.scheduling_key).label("key"),
    _U.not_before,
]
"""What `to_carried` needs of units joined with their segments."""


def to_carried(row: Sequence[Any], *, keeps: bool) -> Carried:
    """Return a unit from a row that begins with `CARRIED_COLUMNS`."""
    at = len(COLUMN_NAMES)
    dataset_id, precedence, key, not_before = row[at : at + 4]
    return Carried(to_unit(row[:at]), dataset_id, precedence, keeps, key, not_before)


BEFORE_BRANCH = "before-branch"
"""Why a consumer does not read a unit that a branch took up with its result: it had read it by where it went on."""


def to_carry(
    connection: Connection,
    branch_id: str,
    consumer: str,
    *,
    last_unit_id: int,
    step: int,
    reuse_up_to: int | None,
) -> list[Carried]:
    """Return the units up to `last_unit_id` that had no fate when `step` was planned, for another branch to take up.

    Those completed from weights of at most `reuse_up_to` keep their result, and those that this branch itself took up for
    some of its consumers alone, be it later: others have read it. What is in quarantine is not kept: it is sampled again, or
    left out where others have read it. Units of evaluation are left out (index.forks tells them).
    """
    u, a = t.units.c, t.assignments.c
    settled = sa.exists().where(
        a.branch_id == branch_id,
        a.consumer == consumer,
        a.epoch == u.epoch,
        a.unit_id == u.unit_id,
        a.at_step <= step,
    )
    is_read = sa.exists().where(
        a.branch_id == branch_id, a.epoch == u.epoch, a.unit_id == u.unit_id, a.reason == BEFORE_BRANCH
    )
    is_damaged = sa.exists().where(t.quarantine.c.extent_id == u.extent_id)
    rows = connection.execute(
        sa.select(*CARRIED_COLUMNS, is_read.label("is_read"), is_damaged.label("is_damaged"))
        .join(t.segments, t.segments.c.segment_id == u.segment_id)
        .where(
            u.branch_id == branch_id,
            sa.or_(u.unit_id <= last_unit_id, is_read),
            u.purpose != "eval",
            ~settled,
        )
        .order_by(u.unit_id)
    )
    found = []
    for row in rows:
        is_reused = reuse_up_to is not None and (row.version_step or 0) <= reuse_up_to
        keeps = row.state == UnitState.COMPLETED and (is_reused or bool(row.is_read))
        if not row.is_damaged:
            found.append(to_carried(row, keeps=keeps))
        elif not row.is_read:
            found.append(to_carried(row, keeps=False))
    return found


def carry_over(
    connection: Connection,
    carried: Sequence[Carried],
    *,
    to_branch: str,
    first_id: int,
    seen: Mapping[str, tuple[int, Sequence[int]]],
) -> None:
    """Admit units again, on another branch whose consumers are there, numbered from `first_id`.

    Those that keep their result are offered to every consumer that wants them, except where `seen` names their place: it
    holds each consumer's position and what that one has read by then.
    """
    if not carried:
        return
    take_up(connection, dict(enumerate(carried, first_id)), to_branch=to_branch)
    for consumer, (position, places) in seen.items():
        epochs = {first_id + place: carried[place].unit.epoch for place in places}
        mark_read(connection, epochs, branch_id=to_branch, consumer=consumer, at_step=position)
    _OFFER_CARRIED.count(connection, branch_id=to_branch)


def take_up(connection: Connection, carried: Mapping[int, Carried], *, to_branch: str) -> None:
    """Insert units by their new ids into the branch that takes them up; they are offered to nobody yet."""
    rows = [
        {
            **{name: getattr(c.unit, name) for name in _ADMITTED},
            **{name: getattr(c.unit, name) if c.keeps else None for name in _RESULT},
            "unit_id": unit_id,
            "branch_id": to_branch,
            "state": UnitState.COMPLETED if c.keeps else UnitState.READY,
            "precedence": c.precedence,
            "scheduling_key": c.scheduling_key,
            "not_before": None if c.keeps else c.not_before,
        }
        for unit_id, c in carried.items()
    ]
    if rows:
        connection.execute(sa.insert(t.units), rows)


def mark_read(
    connection: Connection, epochs: Mapping[int, int], *, branch_id: str, consumer: str, at_step: int
) -> None:
    """Say of units (with their epochs) that a consumer had read them by the step it goes on after."""
    rows = [
        {
            "unit_id": unit_id,
            "branch_id": branch_id,
            "consumer": consumer,
            "epoch": epoch,
            "outcome": "dropped",
            "reason": BEFORE_BRANCH,
            "at_step": at_step,
        }
        for unit_id, epoch in epochs.items()
    ]
    if rows:
        connection.execute(sa.insert(t.assignments), rows)


Place = tuple[str, int, int, int]
"""(profile, segment, epoch, position): what tells a unit from the others of its branch."""


def place_of(unit: Unit) -> Place:
    return unit.profile, unit.segment_id, unit.epoch, unit.position


def places_taken(connection: Connection, branch_id: str) -> set[Place]:
    """Return the places of all units that a branch has in the index."""
    u = t.units.c
    rows = connection.execute(
        sa.select(u.profile, u.segment_id, u.epoch, u.position).where(u.branch_id == branch_id)
    )
    return {(row[0], row[1], row[2], row[3]) for row in rows}


def taken_over(connection: Connection, branch_id: str) -> dict[tuple[int, int], int]:
    """Return {(unit, fence) that sampled: unit of this branch} of the units whose trajectories another branch sampled."""
    mine, other = t.units.alias(), t.units.alias()
    rows = connection.execute(
        sa.select(other.c.unit_id, other.c.fence, mine.c.unit_id)
        .join(
            other,
            sa.and_(other.c.extent_id == mine.c.extent_id, other.c.row_start == mine.c.row_start),
        )
        .where(
            mine.c.branch_id == branch_id,
            other.c.branch_id != branch_id,
            mine.c.state == UnitState.COMPLETED,
            other.c.state == UnitState.COMPLETED,
        )
    )
    return {(row[0], row[1]): row[2] for row in rows}
