"""Trainer checkpoints and the per-step metrics recorded beside them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow import clock
from strawflow.index import branches
from strawflow.index import tables as t
from strawflow.index.engine import share_rows


@dataclass(frozen=True)
class Checkpoint:
    checkpoint_id: str
    branch_id: str
    consumer: str
    step: int
    fence: int
    path: str
    state_digest: str
    batch_digest: str
    created_at: str
    cursors: str | None
    """JSON list of the dataset cursors when it was committed: where a branch from here starts. None before revision 0002."""
    last_unit_id: int | None
    """Last unit admitted when it was committed."""
    files_removed: bool = False


def insert(connection: Connection, checkpoint: Checkpoint) -> None:
    """Store a checkpoint whose files are durable; one per (branch, consumer, step)."""
    connection.execute(sa.insert(t.checkpoints).values(**checkpoint.__dict__))


def newest(connection: Connection, branch_id: str, consumer: str) -> Checkpoint | None:
    """Return the newest checkpoint on the branch's line whose files are kept."""
    row = connection.execute(
        sa.select(t.checkpoints)
        .where(
            branches.seen(connection, t.checkpoints, branch_id, consumer),
            t.checkpoints.c.consumer == consumer,
            t.checkpoints.c.files_removed.is_(False),
        )
        .order_by(t.checkpoints.c.step.desc())
        .limit(1)
    ).first()
    return None if row is None else Checkpoint(**row._mapping)


def find(connection: Connection, checkpoint_id: str) -> Checkpoint | None:
    row = connection.execute(
        sa.select(t.checkpoints).where(t.checkpoints.c.checkpoint_id == checkpoint_id)
    ).first()
    return None if row is None else Checkpoint(**row._mapping)


def of_step(connection: Connection, branch_id: str, consumer: str, step: int) -> Checkpoint | None:
    """Return the checkpoint that a consumer committed of a step on this very branch, whether its files are kept or not."""
    c = t.checkpoints.c
    row = connection.execute(
        sa.select(t.checkpoints).where(c.branch_id == branch_id, c.consumer == consumer, c.step == step)
    ).first()
    return None if row is None else Checkpoint(**row._mapping)


def hold_files(connection: Connection, checkpoint_id: str) -> bool:
    """Keep a checkpoint's files from being given up until this transaction ends; False if they were already.

    Whoever gives them up locks the row exclusively first. After a wait for that, PostgreSQL asks the condition again of
    what the row has become.
    """
    c = t.checkpoints.c
    kept = sa.select(c.step).where(c.checkpoint_id == checkpoint_id, c.files_removed.is_(False))
    return connection.execute(share_rows(kept, connection)).first() is not None


def listed(connection: Connection, branch_id: str, consumer: str) -> list[Checkpoint]:
    """Return the checkpoints on the branch's line in step order."""
    rows = connection.execute(
        sa.select(t.checkpoints)
        .where(
            branches.seen(connection, t.checkpoints, branch_id, consumer),
            t.checkpoints.c.consumer == consumer,
        )
        .order_by(t.checkpoints.c.step)
    )
    return [Checkpoint(**row._mapping) for row in rows]


def record_step(
    connection: Connection, branch_id: str, consumer: str, *, step: int, fence: int, metrics: dict[str, Any]
) -> None:
    """Store what a trainer measured in a step; a replay after a crash has another fence and keeps its own row."""
    connection.execute(
        sa.insert(t.steps).values(
            branch_id=branch_id,
            consumer=consumer,
            step=step,
            fence=fence,
            metrics=json.dumps(metrics, sort_keys=True),
            recorded_at=clock.wall_time(),
        )
    )


def steps_recorded(connection: Connection, branch_id: str, consumer: str) -> list[dict[str, Any]]:
    """Return one record per step, of the newest trainer session that applied it, in step order."""
    rows = connection.execute(
        sa.select(t.steps)
        .where(branches.seen(connection, t.steps, branch_id, consumer), t.steps.c.consumer == consumer)
        .order_by(t.steps.c.step, t.steps.c.fence)
    )
    newest_of: dict[int, dict[str, Any]] = {}
    for r in rows:
        newest_of[r.step] = {
            "step": r.step,
            "fence": r.fence,
            "recorded_at": r.recorded_at,
            **json.loads(r.metrics),
        }
    return list(newest_of.values())
