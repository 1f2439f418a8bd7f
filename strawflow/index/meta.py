"""Facts about the run itself: counters and notes that outlive every process."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow.index import tables as t
from strawflow.index.engine import insert_unless_there, lock_rows


def add(connection: Connection, key: str, amount: float) -> float:
    """Add to a counter (0 when absent) and return its new value; others adding to it wait."""
    connection.execute(insert_unless_there(t.meta, connection).values(key=key, value="0"))
    held = lock_rows(sa.select(t.meta.c.value).where(t.meta.c.key == key), connection)
    value = float(connection.execute(held).scalar_one()) + amount
    connection.execute(sa.update(t.meta).where(t.meta.c.key == key).values(value=str(value)))
    return value


def counter(connection: Connection, key: str) -> float:
    value = connection.execute(sa.select(t.meta.c.value).where(t.meta.c.key == key)).scalar()
    return 0.0 if value is None else float(value)
