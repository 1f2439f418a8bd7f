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


def hold(connection: Connection, key: str) -> None:
    """Make others that add to this counter, or hold it, wait until the transaction ends."""
    connection.execute(insert_unless_there(t.meta, connection).values(key=key, value="0"))
    connection.execute(lock_rows(sa.select(t.meta.c.value).where(t.meta.c.key == key), connection)).all()


INCARNATION = "incarnation"
"""Key of the count of times this index was restored, rebuilt or taken over by a standby."""


def incarnation(connection: Connection) -> int:
    """Return how often the index was restored, rebuilt or promoted; fences of earlier incarnations are void."""
    return int(counter(connection, INCARNATION))


def raise_incarnation(connection: Connection, *, above: int = 0) -> int:
    """Start a new incarnation, above the stored one and `above`; returns it. Every session must be declared lost too."""
    new = max(incarnation(connection), above) + 1
    put(connection, INCARNATION, str(new))
    return new


def put(connection: Connection, key: str, value: str) -> None:
    """Store a note, in place of the one of that key."""
    done = connection.execute(sa.update(t.meta).where(t.meta.c.key == key).values(value=value))
    if done.rowcount == 0:
        connection.execute(sa.insert(t.meta).values(key=key, value=value))


def find(connection: Connection, key: str) -> str | None:
    return connection.execute(sa.select(t.meta.c.value).where(t.meta.c.key == key)).scalar()


def remove(connection: Connection, key: str) -> None:
    connection.execute(sa.delete(t.meta).where(t.meta.c.key == key))


def counter(connection: Connection, key: str) -> float:
    value = connection.execute(sa.select(t.meta.c.value).where(t.meta.c.key == key)).scalar()
    return 0.0 if value is None else float(value)
