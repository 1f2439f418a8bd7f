"""What a branch must know of its parent: which units a consumer's line holds, and what the other consumers made of them.

1. Reads only. A unit is *settled* at a fork when the consumer whose checkpoint it is made from gave it a fate by then.
2. A unit of evaluation is on the line when the weights it tests are; an evaluation that is not whole goes on on the branch.
3. What left the index for the history is asked of packs, which is flow.fork's part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow.errors import NotFoundError
from strawflow.index import branches, checkpoints
from strawflow.index import tables as t
from strawflow.index.branches import Branch
from strawflow.index.carry import (
    BEFORE_BRANCH,
    CARRIED_COLUMNS,
    Carried,
    Place,
    place_of,
    places_taken,
    to_carried,
)
from strawflow.states import BatchState, UnitState, WeightState

_CHUNK = 500
_U, _A, _B = t.units.c, t.assignments.c, t.batches.c


@dataclass(frozen=True)
class Fork:
    """Where a branch leaves its parent."""

    parent_id: str
    consumer: str
    """Whose checkpoint it is made from."""
    step: int
    weights_step: int
    """Newest weights on the line."""


def _is_settled(fork: Fork) -> sa.ColumnElement[bool]:
    a = t.assignments.alias().c
    fate = sa.exists().where(
        a.unit_id == _U.unit_id,
        a.branch_id == fork.parent_id,
        a.consumer == fork.consumer,
        a.epoch == _U.epoch,
        a.at_step <= fork.step,
    )
    return sa.case((_U.purpose == "eval", _U.epoch <= fork.weights_step), else_=fate)


def unsettled_fates(connection: Connection, fork: Fork, consumer: str) -> Iterator[tuple[int, int]]:
    """Yield (unit id, step) of the fates that a consumer gave on the parent to units that are not settled.

    That it had read a unit before the parent began is none of them.
    """
    is_own = sa.or_(_A.reason.is_(None), _A.reason != BEFORE_BRANCH)
    rows = connection.execute(
        sa.select(_A.unit_id, _A.at_step)
        .join(t.units, _U.unit_id == _A.unit_id)
        .where(_A.branch_id == fork.parent_id, _A.consumer == consumer, ~_is_settled(fork), is_own)
    )
    for row in rows:
        yield row.unit_id, row.at_step


def settled_beyond(
    connection: Connection, fork: Fork, consumer: str, *, purposes: Collection[str], step: int
) -> list[Carried]:
    """Return the settled units with a result that a consumer wants and had given no fate by a step of its own.

    Those whose trajectories are in quarantine are left out: it could not read them.
    """
    a = t.assignments.alias().c
    known = sa.exists().where(
        a.unit_id == _U.unit_id,
        a.branch_id == fork.parent_id,
        a.consumer == consumer,
        a.epoch == _U.epoch,
        a.at_step <= step,
    )
    return _settled(connection, fork, purposes, ~known)


def _settled(
    connection: Connection, fork: Fork, purposes: Collection[str], *where: sa.ColumnElement[bool]
) -> list[Carried]:
    rows = connection.execute(
        sa.select(*CARRIED_COLUMNS)
        .join(t.segments, t.segments.c.segment_id == _U.segment_id)
        .where(
            _U.branch_id == fork.parent_id,
            _U.state == UnitState.COMPLETED,
            _U.purpose.in_(sorted(purposes)),
            _is_settled(fork),
            ~sa.exists().where(t.quarantine.c.extent_id == _U.extent_id),
            *where,
        )
    )
    return [to_carried(row, keeps=True) for row in rows]


def open_evaluation(connection: Connection, fork: Fork) -> list[Carried]:
    """Return the units of evaluations on the line that nobody read yet and that lack a result: waiting, given up, or damaged.

    Those whose weights cannot be served any more are left out.
    """
    w, other, a = t.weight_versions.c, t.units.alias().c, t.assignments.alias().c
    is_read = (
        sa.exists()
        .where(a.branch_id == fork.parent_id, a.unit_id == other.unit_id)
        .where(other.branch_id == fork.parent_id, other.purpose == "eval", other.epoch == _U.epoch)
    )
    is_damaged = sa.exists().where(t.quarantine.c.extent_id == _U.extent_id)
    rows = connection.execute(
        sa.select(*CARRIED_COLUMNS)
        .join(t.segments, t.segments.c.segment_id == _U.segment_id)
        .join(t.weight_versions, w.version_id == _U.required_version_id)
        .where(
            _U.branch_id == fork.parent_id,
            _U.purpose == "eval",
            _is_settled(fork),
            sa.or_(_U.state != UnitState.COMPLETED, is_damaged),
            w.files_removed.is_(False),
            w.state != WeightState.DEAD,
            ~is_read,
        )
        .order_by(_U.unit_id)
    )
    return [to_carried(row, keeps=False) for row in rows]


def settled_before(
    connection: Connection, branch_id: str, *, purposes: Collection[str], gone: Collection[Place]
) -> list[Carried]:
    """Return the settled units with a result that lie on a branch's line before it and that it has not taken up itself.

    In order of admission. `gone` are the places of units that the branch had and that are in the history now. Those whose
    trajectories are in quarantine are left out: nobody could read them.
    """
    known = places_taken(connection, branch_id) | set(gone)
    found: list[Carried] = []
    at = branches.find(connection, branch_id)
    while at is not None and at.parent_id is not None:
        for c in _settled(connection, _fork_of(connection, at, at.parent_id), purposes):
            # An ancestor nearer to the branch may have taken it up from one before.
            if (place := place_of(c.unit)) not in known:
                known.add(place)
                found.append(c)
        at = branches.find(connection, at.parent_id)
    return sorted(found, key=lambda c: c.unit.unit_id)


def _fork_of(connection: Connection, branch: Branch, parent_id: str) -> Fork:
    """Return where a branch left its parent."""
    start = checkpoints.find(connection, branch.from_checkpoint_id or "")
    if start is None or branch.from_step is None:
        raise NotFoundError(
            f"the index has no checkpoint {branch.from_checkpoint_id!r}, from which branch {branch.branch_id!r} was made"
        )
    weights_step = branches.start_of(connection, branch, None)
    return Fork(parent_id, start.consumer, branch.from_step, weights_step)


def fates_by(
    connection: Connection, parent_id: str, unit_ids: Sequence[int], starts: Mapping[str, int]
) -> set[tuple[int, str]]:
    """Return the (unit id, consumer) where the consumer had given the unit a fate by the step it starts after."""
    found: set[tuple[int, str]] = set()
    for at in range(0, len(unit_ids), _CHUNK):
        rows = connection.execute(
            sa.select(_A.unit_id, _A.consumer, _A.at_step).where(
                _A.branch_id == parent_id, _A.unit_id.in_(list(unit_ids[at : at + _CHUNK]))
            )
        )
        found.update((r.unit_id, r.consumer) for r in rows if r.at_step <= starts.get(r.consumer, -1))
    return found


def has_retired_beyond(connection: Connection, parent_id: str, starts: Mapping[str, int]) -> bool:
    """Tell whether retention gave up what a consumer read after the step it starts after."""
    rows = connection.execute(
        sa.select(_B.consumer, sa.func.max(_B.step).label("step"))
        .where(_B.branch_id == parent_id, _B.state == BatchState.RETIRED)
        .group_by(_B.consumer)
    )
    return any(row.step > starts.get(row.consumer, 0) for row in rows)
