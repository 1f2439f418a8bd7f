"""Filling an index with millions of finished units: copies, in SQL, of the rows that real work has left behind.

1. The copies differ from their originals in their ids, steps, epochs and submission ids alone, so every table and index has
   the size and shape that as much real work would have given it, but for one thing: receipts, whose key is
   random, are inserted in its order.
2. It is set-up. It goes past strawflow and its checks (foreign keys are off), into an index nobody else has open.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psycopg

CHUNK = 250_000
"""Copied units a transaction."""

SHIFTED = {
    "unit_id": "unit",
    "last_unit_id": "unit",
    "extent_id": "extent",
    "plan_extent_id": "extent",
    "batch_id": "batch",
    "event_id": "event",
    "step": "step",
    "at_step": "step",
    "version_step": "step",
    "epoch": "epoch",
}
"""Columns that grow from copy to copy, and with what."""

NAMED = ("version_id", "checkpoint_id")
"""Names that must differ: the number of the copy is appended."""

COPIED = {
    "extents": "pack_id IN (SELECT pack_id FROM packs WHERE kind <> 'prompt')",
    "units": "state = 'completed'",
    "batches": "true",
    "batch_extents": "true",
    "assignments": "true",
    "weight_versions": "step > 0",
    "checkpoints": "true",
    "steps": "true",
    "receipts": "true",
    "events": "true",
}
PRISTINE = {
    "state": "'ready'",
    "fence": "0",
    "seq": "0",
    "attempts": "0",
    "extent_id": "NULL",
    "row_start": "NULL",
    "row_count": "NULL",
    "version_step": "NULL",
    "mean_reward": "NULL",
    "num_tokens": "NULL",
}
"""What a ready unit has in place of a finished one's values."""


class Database(Protocol):
    """What differs between the dialects, and how to run a statement."""

    series: str
    random_hex: str

    def run(self, statement: str) -> list[tuple[Any, ...]]: ...
    def commit(self) -> None: ...
    def columns(self, table: str) -> list[str]: ...
    def begin(self) -> None: ...
    def settle(self) -> None: ...


class Sqlite:
    series = "(WITH RECURSIVE s(k) AS (SELECT {first} UNION ALL SELECT k + 1 FROM s WHERE k < {last}) SELECT k FROM s) AS g"
    random_hex = "lower(hex(randomblob(8)))"

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path)
        for pragma in ("synchronous=OFF", "foreign_keys=OFF", "cache_size=-1000000"):
            self._connection.execute(f"PRAGMA {pragma}")

    def run(self, statement: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(statement).fetchall()

    def commit(self) -> None:
        self._connection.commit()
        self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def columns(self, table: str) -> list[str]:
        return [row[1] for row in self._connection.execute(f"PRAGMA table_info({table})")]

    def begin(self) -> None: ...

    def settle(self) -> None:
        self._connection.commit()
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self._connection.close()


class Postgres:
    series = "generate_series({first}, {last}) AS g(k)"
    random_hex = "substr(md5(random()::text), 1, 16)"

    def __init__(self, conninfo: str) -> None:
        self._connection = psycopg.connect(conninfo)
        self.run("SET session_replication_role = replica")  # no foreign keys, no triggers
        self.run("SET synchronous_commit = off")
        self.run("SET maintenance_work_mem = '512MB'")
        self._set_aside: list[str] = []
        self.commit()

    def run(self, statement: str) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []

    def commit(self) -> None:
        self._connection.commit()

    def columns(self, table: str) -> list[str]:
        cursor = self._connection.execute(f"SELECT * FROM {table} LIMIT 0".encode())
        assert cursor.description is not None
        return [column.name for column in cursor.description]

    def begin(self) -> None:
        """Take the secondary indexes away: building them anew is quicker than keeping them up."""
        named = ", ".join(f"'{table}'::regclass" for table in COPIED)
        for table, name, definition in self.run(
            "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint"
            f" WHERE contype = 'u' AND conrelid IN ({named})"
        ):
            self._set_aside.append(f'ALTER TABLE {table} ADD CONSTRAINT "{name}" {definition}')
            self.run(f'ALTER TABLE {table} DROP CONSTRAINT "{name}"')
        for name, definition in self.run(
            "SELECT indexrelid::regclass::text, pg_get_indexdef(indexrelid) FROM pg_index"
            f" WHERE NOT indisprimary AND indrelid IN ({named})"
        ):
            self._set_aside.append(definition)
            self.run(f"DROP INDEX {name}")
        self.commit()

    def settle(self) -> None:
        for statement in self._set_aside:
            self.run(statement)
        for table, column in _identities(self._connection):
            self.run(
                f"SELECT setval(pg_get_serial_sequence('{table}', '{column}'),"
                f" (SELECT coalesce(max({column}), 0) + 1 FROM {table}), false)"
            )
        self._connection.commit()
        self._connection.autocommit = True
        self.run("VACUUM ANALYZE")
        self.run("CHECKPOINT")

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True)
class Filled:
    """How far the copies reach."""

    num_finished: int
    num_ready: int
    last_unit_id: int


def fill(database: Database, *, num_finished: int, num_ready: int) -> Filled:
    """Copy the finished units of an index until it has `num_finished`, and add ready ones behind them."""
    for table, condition in COPIED.items():
        database.run(f"CREATE TEMPORARY TABLE first_{table} AS SELECT * FROM {table} WHERE {condition}")
    (per_copy,) = database.run("SELECT count(*) FROM first_units")[0]
    shifts = _shifts(database)
    database.begin()
    copies = num_finished // per_copy - 1
    at_once = max(1, CHUNK // per_copy)
    for table in COPIED:
        for first in range(1, copies + 1, at_once):
            _copy(database, table, shifts, first, min(first + at_once - 1, copies))
            database.commit()
    rounds = -(-num_ready // per_copy)
    _copy(database, "units", shifts, copies + 1, copies + rounds, replaced=PRISTINE)
    moved = copies * shifts["step"]
    database.run(f"UPDATE consumers SET position = position + {moved}, planned = planned + {moved}")
    database.commit()
    database.settle()
    return Filled((copies + 1) * per_copy, rounds * per_copy, (copies + rounds + 1) * shifts["unit"])


def _shifts(database: Database) -> dict[str, int]:
    """Return by how much the ids of one copy differ from those of the one before."""
    highest = {
        "unit": "SELECT max(unit_id) FROM units",
        "extent": "SELECT max(extent_id) FROM extents",
        "batch": "SELECT max(batch_id) FROM batches",
        "event": "SELECT max(event_id) FROM events",
        "step": "SELECT max(step) FROM batches",
        "epoch": "SELECT max(epoch) + 1 FROM units",
    }
    return {name: int(database.run(statement)[0][0] or 0) for name, statement in highest.items()}


def _copy(
    database: Database,
    table: str,
    shifts: dict[str, int],
    first: int,
    last: int,
    *,
    replaced: dict[str, str] | None = None,
) -> None:
    """Insert the copies number `first` to `last` of a table's first rows, copy by copy."""
    columns = database.columns(table)
    values = ", ".join(_value(database, column, shifts, replaced or {}) for column in columns)
    names = ", ".join(f'"{column}"' for column in columns)
    series = database.series.format(first=first, last=last)
    order = "ORDER BY 1" if table == "receipts" else ""
    database.run(
        f"INSERT INTO {table} ({names}) SELECT {values} FROM {series} CROSS JOIN first_{table} AS t {order}"
    )


def _value(database: Database, column: str, shifts: dict[str, int], replaced: dict[str, str]) -> str:
    if column in replaced:
        return replaced[column]
    if column in SHIFTED:
        return f't."{column}" + g.k * {shifts[SHIFTED[column]]}'
    if column in NAMED:
        return f"t.\"{column}\" || '-' || g.k"
    if column == "submission_id":
        return database.random_hex
    return f't."{column}"'


def _identities(connection: psycopg.Connection) -> Iterable[tuple[str, str]]:
    with closing(
        connection.execute(
            "SELECT table_name, column_name FROM information_schema.columns"
            " WHERE table_schema = 'public' AND column_default LIKE 'nextval%' OR is_identity = 'YES'"
        )
    ) as cursor:
        return [(str(table), str(column)) for table, column in cursor.fetchall()]
