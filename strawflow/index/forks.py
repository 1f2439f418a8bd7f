"""What a branch must know of its parent: which units a consumer's line holds, and what the other consumers made of them.

1. Reads only. A unit is *settled* at a fork when the consumer whose checkpoint it is made from gave it a fate by then.
2. A unit of evaluation is on the line when the weights it tests are.
3. What left the index for the history is asked of packs, which is flow.fork's part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow.index import tables as t
from strawflow.index.units import COLUMN_NAMES, COLUMNS, Carried, to_unit
from strawflow.states import BatchState, UnitState

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
    """Yield (unit id, step) of the fates that a consumer gave on the parent to units that are not settled."""
    rows = connection.execute(
        sa.select(_A.unit_id, _A.at_step)
        .join(t.units, _U.unit_id == _A.unit_id)
        .where(_A.branch_id == fork.parent_id, _A.consumer == consumer, ~_is_settled(fork))
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
    rows = connection.execute(
        sa.select(*COLUMNS, _U.precedence, t.segments.c.dataset_id)
        .join(t.segments, t.segments.c.segment_id == _U.segment_id)
        .where(
            _U.branch_id == fork.parent_id,
            _U.state == UnitState.COMPLETED,
            _U.purpose.in_(sorted(purposes)),
            _is_settled(fork),
            ~known,
            ~sa.exists().where(t.quarantine.c.extent_id == _U.extent_id),
        )
    )
    return [
        Carried(to_unit(row[: len(COLUMN_NAMES)]), row.dataset_id, row.precedence, keeps=True) for row in rows
    ]


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
