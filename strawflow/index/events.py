"""The event log: what changed, written in the transaction that makes it true.

1. A verb that settles many units at once writes one row that names them all (`facts.units`); a row about one unit has
   its id in `unit_id`.
2. Times are wall time, for display; the order is that of `event_id`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow import clock
from strawflow.index import tables as t
from strawflow.index.prepared import Prepared, Transaction, rows_value


@dataclass(frozen=True)
class Event:
    """`name` is noun.verb; `facts` must be small and hold no payload."""

    name: str
    session_id: str | None = None
    unit_id: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


_RECORD = Prepared(
    "INSERT INTO events (at_ms, name, session_id, unit_id, facts) SELECT :at_ms, r.value->>0, r.value->>1, "
    "CAST(r.value->>2 AS BIGINT), r.value->>3 FROM {each}"
)


def record(
    transaction: Transaction,
    name: str,
    *,
    session_id: str | None = None,
    unit_id: int | None = None,
    **facts: Any,
) -> None:
    """Append one event."""
    record_many(transaction, [Event(name, session_id, unit_id, facts)])


def record_many(transaction: Transaction, happened: Iterable[Event]) -> None:
    """Append events in order, in one statement."""
    rows = [
        (e.name, e.session_id, e.unit_id, json.dumps(e.facts, sort_keys=True, separators=(",", ":")))
        for e in happened
    ]
    if rows:
        _RECORD.count(transaction, at_ms=clock.wall_ms(), rows=rows_value(rows))


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the log, or of kind event, as people read it."""
    return {
        "event_id": row["event_id"],
        "at": clock.shown(row["at_ms"]),
        "name": row["name"],
        "session_id": row["session_id"],
        "unit_id": row["unit_id"],
        "facts": json.loads(row["facts"]),
    }


def latest(connection: Connection, *, limit: int, name_prefix: str = "") -> list[dict[str, Any]]:
    """Return the newest events first."""
    statement = sa.select(t.events).order_by(t.events.c.event_id.desc()).limit(limit)
    if name_prefix:
        statement = statement.where(t.events.c.name.startswith(name_prefix, autoescape=True))
    return [shown(dict(row._mapping)) for row in connection.execute(statement)]


def count_by_name(connection: Connection) -> dict[str, int]:
    rows = connection.execute(sa.select(t.events.c.name, sa.func.count()).group_by(t.events.c.name))
    return {row[0]: row[1] for row in rows}


def of_unit(connection: Connection, unit_id: int, *, limit: int) -> list[dict[str, Any]]:
    """Return the newest events of one unit first, those that name it among others included; reads the whole log."""
    e = t.events.c
    # JSON lists are written without spaces, so the id stands between a bracket or comma on either side.
    among = sa.and_(
        e.unit_id.is_(None),
        e.name.like("units.%"),
        sa.or_(*(e.facts.like(f"%{left}{unit_id}{right}%") for left in "[," for right in ",]")),
    )
    rows = connection.execute(
        sa.select(t.events)
        .where(sa.or_(e.unit_id == unit_id, among))
        .order_by(e.event_id.desc())
        .limit(limit)
    )
    return [shown(dict(row._mapping)) for row in rows]
