"""Branches: lines of history; unit states, plans, cursors and positions are keyed by them.

A branch sees its own rows and, of its ancestors, those up to the step it started from; what came later there is listed
and never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow import clock
from strawflow.errors import NotFoundError
from strawflow.index import tables as t
from strawflow.index.prepared import Prepared


@dataclass(frozen=True)
class Branch:
    branch_id: str
    parent_id: str | None
    from_checkpoint_id: str | None
    from_step: int | None
    """Batches, checkpoints and weights up to this step are the parent's; None for the first branch."""
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
) -> None:
    connection.execute(
        sa.insert(t.branches).values(
            branch_id=branch_id,
            parent_id=parent_id,
            from_checkpoint_id=from_checkpoint_id,
            from_step=from_step,
            created_at=clock.wall_time(),
        )
    )


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


def lineage(connection: Connection, branch_id: str) -> list[Stretch]:
    """Return what a branch sees: itself, then each ancestor up to the step where the line left it.

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
            bound = branch.from_step if bound is None else min(bound, branch.from_step)
        at = branch.parent_id
    return stretches


def seen(connection: Connection, table: sa.Table, branch_id: str) -> sa.ColumnElement[bool]:
    """Return the condition that a row with `branch_id` and `step` lies on a branch's line.

    Raises:
        NotFoundError: no such branch.
    """
    c: Any = table.c
    return sa.or_(
        *(
            c.branch_id == s.branch_id
            if s.up_to_step is None
            else sa.and_(c.branch_id == s.branch_id, c.step <= s.up_to_step)
            for s in lineage(connection, branch_id)
        )
    )
