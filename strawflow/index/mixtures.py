"""What the draws by weight of a branch go on from, and how the groups drawn last fared.

1. It is replaced only by whoever read what stands there, in the transaction that moves the cursors of what was drawn.
"""

from __future__ import annotations

from collections import defaultdict

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow.errors import ConflictError
from strawflow.index import datasets, meta
from strawflow.index import tables as t
from strawflow.states import UnitState


def find(connection: Connection, branch_id: str) -> str | None:
    """Return what the branch's draws go on from, None before the first."""
    return meta.find(connection, datasets.MIXTURE + branch_id)


def replace(connection: Connection, branch_id: str, *, expected: str | None, new: str) -> None:
    """Store what the draws go on from after those of this transaction.

    Raises:
        ConflictError: another drew since `expected` was read.
    """
    if find(connection, branch_id) is None and expected is None:
        meta.put(connection, datasets.MIXTURE + branch_id, new)
        return
    done = connection.execute(
        sa.update(t.meta)
        .where(t.meta.c.key == datasets.MIXTURE + branch_id, t.meta.c.value == expected)
        .values(value=new)
    )
    if done.rowcount != 1:
        raise ConflictError("prompts were drawn by another worker meanwhile", branch_id=branch_id)


def put(connection: Connection, branch_id: str, text: str) -> None:
    """Store what the draws of a branch go on from, whatever stands there."""
    meta.put(connection, datasets.MIXTURE + branch_id, text)


_WINDOW, _NUM_WINDOWS = 4096, 16
"""Units that are looked through at a time, newest first, and how often at most: what it costs does not grow with the run."""


def latest_rewards(
    connection: Connection, branch_id: str, *, num_groups: int
) -> dict[str, tuple[int, float | None]]:
    """Return {dataset: (how many groups, their mean reward)} of the training groups completed that were admitted last.

    Of all datasets together they are `num_groups`, or fewer where not so many are among the newest 65,536 units.
    """
    u = t.units.c
    newest = connection.execute(sa.select(sa.func.max(u.unit_id))).scalar() or 0
    found: list[tuple[int, float | None]] = []
    for number in range(_NUM_WINDOWS):
        end = newest - number * _WINDOW
        if len(found) >= num_groups or end <= 0:
            break
        rows = connection.execute(
            sa.select(u.segment_id, u.mean_reward)
            .where(
                u.unit_id > end - _WINDOW,
                u.unit_id <= end,
                # No plain column: with one SQLite reads all units of the branch by the index that begins with it.
                u.branch_id.concat("") == branch_id,
                u.purpose == "train",
                u.state == UnitState.COMPLETED,
            )
            .order_by(u.unit_id.desc())
            .limit(num_groups - len(found))
        )
        found += [(row.segment_id, row.mean_reward) for row in rows]
    dataset_of = datasets.of_segments(connection, (segment_id for segment_id, _ in found))
    rewards: dict[str, list[float | None]] = defaultdict(list)
    for segment_id, reward in found:
        rewards[dataset_of[segment_id]].append(reward)
    return {name: (len(told), _mean([r for r in told if r is not None])) for name, told in rewards.items()}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
