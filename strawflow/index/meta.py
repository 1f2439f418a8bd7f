"""Facts about the run itself: counters and notes that outlive every process."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow.index import tables as t


def add(connection: Connection, key: str, amount: float) -> float:
    """Add to a counter (0 when absent) and return its new value."""
    row = connection.execute(sa.select(t.meta.c.value).where(t.meta.c.key == key)).first()
    value = (0.0 if row is None else float(row.value)) + amount
    if row is None:
        connection.execute(sa.insert(t.meta).values(key=key, value=str(value)))
    else:
        connection.execute(sa.update(t.meta).where(t.meta.c.key == key).values(value=str(value)))
    return value


def counter(connection: Connection, key: str) -> float:
    value = connection.execute(sa.select(t.meta.c.value).where(t.meta.c.key == key)).scalar()
    return 0.0 if value is None else float(value)
