"""What the draws by weight of a branch go on from, and how the groups drawn last fared.

1. It is replaced only by whoever read what stands there, in the transaction that moves the cursors of what was drawn.
"""

from __future__ import annotations

from collections import defaultdict

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow.errors import ConflictError
from strawflow.index import meta
from strawflow.index import tables as t
from strawflow.states import UnitState

KEY = "mixture/"
"""Begins the key in meta; the branch follows."""


def find(connection: Connection, branch_id: str) -> str | None:
    """Return what the branch's draws go on from, None before the first."""
    return meta.find(connection, KEY + branch_id)


def replace(connection: Connection, branch_id: str, *, expected: str | None, new: str) -> None:
    """Store what the draws go on from after those of this transaction.

    Raises:
        ConflictError: another drew since `expected` was read.
    """
    if find(connection, branch_id) is None and expected is None:
        meta.put(connection, KEY + branch_id, new)
        return
    done = connection.execute(
        sa.update(t.meta).where(t.meta.c.key == KEY + branch_id, t.meta.c.value == expected).values(value=new)
    )
    if done.rowcount != 1:
        raise ConflictError("prompts were drawn by another worker meanwhile", branch_id=branch_id)


def put(connection: Connection, branch_id: str, text: str) -> None:
    """Store what the draws of a branch go on from, whatever stands there."""
    meta.put(connection, KEY + branch_id, text)


def latest_rewards(
    connection: Connection, branch_id: str, *, num_groups: int
) -> dict[str, tuple[int, float | None]]:
    """Return {dataset: (how many groups, their mean reward)} of the training groups completed that were admitted last."""
    u = t.units.c
    newest = (
        sa.select(u.segment_id, u.mean_reward)
        .where(u.branch_id == branch_id, u.purpose == "train", u.state == UnitState.COMPLETED)
        .order_by(u.unit_id.desc())
        .limit(num_groups)
        .subquery()
    )
    rewards: dict[str, list[float]] = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)
    rows = connection.execute(
        sa.select(t.segments.c.dataset_id, newest.c.mean_reward).join(
            newest, newest.c.segment_id == t.segments.c.segment_id
        )
    )
    for dataset_id, reward in rows:
        counts[dataset_id] += 1
        if reward is not None:
            rewards[dataset_id].append(reward)
    return {name: (count, _mean(rewards[name])) for name, count in counts.items()}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
