"""Branches: lines of history; unit states, plans, cursors and positions are keyed by them.

1. A branch sees its own rows and, of its ancestors, those up to the step it started from; what came later there is listed
   and never read.
2. Every consumer has a step of its own from which it goes on, and so have the weights: tallies of the branch hold them.
   `from_step` is that of the consumer whose checkpoint the branch was made from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow import clock
from strawflow.errors import NotFoundError
from strawflow.index import tables as t
from strawflow.index import tallies
from strawflow.index.prepared import Prepared

_FROM = "from/"
"""Of a tally: with a consumer's name, the step after which that consumer goes on here."""
_FROM_WEIGHTS = "from_weights"


@dataclass(frozen=True)
class Branch:
    branch_id: str
    parent_id: str | None
    from_checkpoint_id: str | None
    from_step: int | None
    """Step of the checkpoint it was made from; None for the first branch."""
    created_at: str


@dataclass(frozen=True)
class Stretch:
    """A branch and the last of its steps that is seen; None: all."""

    branch_id: str
    up_to_step: int | None


def create(
    connection: Connection,
    branch_id: str,
    *,
    parent_id: str | None = None,
    from_checkpoint_id: str | None = None,
    from_step: int | None = None,
    starts: Mapping[str, int] | None = None,
    weights_step: int | None = None,
) -> None:
    """Insert a branch; `starts` says after which step each consumer of the parent goes on, `weights_step` whose weights are
    the newest that it sees of the parent. Without them all go on after `from_step`."""
    connection.execute(
        sa.insert(t.branches).values(
            branch_id=branch_id,
            parent_id=parent_id,
            from_checkpoint_id=from_checkpoint_id,
            from_step=from_step,
            created_at=clock.wall_time(),
        )
    )
    for consumer, step in sorted((starts or {}).items()):
        tallies.add(connection, branch_id, _FROM + consumer, step)
    if weights_step is not None:
        tallies.add(connection, branch_id, _FROM_WEIGHTS, weights_step)


def start_of(connection: Connection, branch: Branch, consumer: str | None) -> int:
    """Return the last step of the parent that a consumer sees on a branch; without a consumer that of the weights."""
    if branch.from_step is None:
        return 0
    told = tallies.starting_with(connection, branch.branch_id, "from")
    if consumer is None:
        return told.get(_FROM_WEIGHTS, branch.from_step)
    if not any(name.startswith(_FROM) for name in told):
        return branch.from_step
    return told.get(_FROM + consumer, 0)


def is_start_of_consumer(consumer: sa.Column[str], step: sa.Column[int]) -> sa.ColumnElement[bool]:
    """Return the condition that a consumer goes on after this step on some branch."""
    tally = t.tallies.c
    return sa.exists().where(tally.name == sa.literal(_FROM) + consumer, tally.value == step)


_FIND = Prepared(
    "SELECT branch_id, parent_id, from_checkpoint_id, from_step, created_at FROM branches WHERE branch_id = :branch_id"
)


def find(connection: Connection, branch_id: str) -> Branch | None:
    rows = _FIND.rows(connection, branch_id=branch_id)
    return Branch(*rows[0]) if rows else None


def listed(connection: Connection) -> list[Branch]:
    """Return the branches, the first one first."""
    rows = connection.execute(sa.select(t.branches).order_by(t.branches.c.created_at, t.branches.c.branch_id))
    return [Branch(**row._mapping) for row in rows]


def lineage(connection: Connection, branch_id: str, consumer: str | None = None) -> list[Stretch]:
    """Return what a consumer sees of a branch: itself, then each ancestor up to the step where the line left it.

    Without a consumer the steps are those of the weights.

    Raises:
        NotFoundError: no such branch.
    """
    stretches: list[Stretch] = []
    at: str | None = branch_id
    bound: int | None = None
    while at is not None:
        branch = find(connection, at)
        if branch is None:
            raise NotFoundError(f"there is no branch {at!r}")
        stretches.append(Stretch(at, bound))
        if branch.from_step is not None:
            start = start_of(connection, branch, consumer)
            bound = start if bound is None else min(bound, start)
        at = branch.parent_id
    return stretches


def seen(
    connection: Connection, table: sa.Table, branch_id: str, consumer: str | None = None
) -> sa.ColumnElement[bool]:
    """Return the condition that a row with `branch_id` and `step` lies on a branch's line, as a consumer sees it.

    Raises:
        NotFoundError: no such branch.
    """
    c: Any = table.c
    return sa.or_(
        *(
            c.branch_id == s.branch_id
            if s.up_to_step is None
            else sa.and_(c.branch_id == s.branch_id, c.step <= s.up_to_step)
            for s in lineage(connection, branch_id, consumer)
        )
    )
