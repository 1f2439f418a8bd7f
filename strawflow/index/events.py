"""The event log: one row per transition, written in the transaction that makes it true."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow import clock
from strawflow.index import tables as t


def record(
    connection: Connection,
    name: str,
    *,
    session_id: str | None = None,
    unit_id: int | None = None,
    **facts: Any,
) -> None:
    """Append one event; `name` is noun.verb, `facts` must be small and hold no payload."""
    connection.execute(
        sa.insert(t.events).values(
            at=clock.wall_time(),
            name=name,
            session_id=session_id,
            unit_id=unit_id,
            facts=json.dumps(facts, sort_keys=True),
        )
    )


def latest(connection: Connection, *, limit: int, name_prefix: str = "") -> list[dict[str, Any]]:
    """Return the newest events first."""
    statement = sa.select(t.events).order_by(t.events.c.event_id.desc()).limit(limit)
    if name_prefix:
        statement = statement.where(t.events.c.name.startswith(name_prefix, autoescape=True))
    return [
        {**row._mapping, "facts": json.loads(row.facts)}  # the public row mapping of SQLAlchemy
        for row in connection.execute(statement)
    ]


def count_by_name(connection: Connection) -> dict[str, int]:
    rows = connection.execute(sa.select(t.events.c.name, sa.func.count()).group_by(t.events.c.name))
    return {row[0]: row[1] for row in rows}


def of_unit(connection: Connection, unit_id: int, *, limit: int) -> list[dict[str, Any]]:
    """Return the newest events of one unit first."""
    rows = connection.execute(
        sa.select(t.events)
        .where(t.events.c.unit_id == unit_id)
        .order_by(t.events.c.event_id.desc())
        .limit(limit)
    )
    return [{**row._mapping, "facts": json.loads(row.facts)} for row in rows]
