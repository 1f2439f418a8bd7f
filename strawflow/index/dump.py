"""The whole index as Arrow record batches, and back: what a backup and a restore move.

1. Every table of index.tables is treated alike, parents first: a new table or column is part of the next backup without
   a change here.
2. `snapshot` shows one point in time, whoever writes meanwhile; rows come in chunks, so memory does not grow with them.
3. Values cross dialects exactly: whole numbers as 64 bits, floats as doubles, bytes as bytes, truth values as such.
4. Everything that writes does so in the caller's transaction.

It knows no file of a backup, no checksum, and nothing of what a row means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Connection, make_url

from strawflow.errors import CorruptPackError
from strawflow.index.engine import REVISION, Index
from strawflow.index.prepared import as_sqlalchemy_error
from strawflow.index.tables import metadata

ROWS_PER_CHUNK = 2_000
"""Rows of one record batch: the widest rows are a few KiB of JSON, so a chunk stays at some MiB."""

_RESTORE_LOCK = 0x7374726177
"""Any fixed number: PostgreSQL's advisory lock that two restores into one empty database meet at."""


def table_names() -> list[str]:
    """Return every table, parents before those that refer to them."""
    return [table.name for table in metadata.sorted_tables]


def schema_of(name: str) -> pa.Schema:
    """Return the Arrow schema of a table's rows."""
    table = metadata.tables[name]
    fields = [pa.field(c.name, _arrow_type(c), nullable=bool(c.nullable)) for c in table.columns]
    return pa.schema(fields, metadata={"strawflow.table": name, "strawflow.revision": REVISION})


def _arrow_type(column: sa.Column[Any]) -> pa.DataType:
    match column.type:
        case sa.Boolean():
            return pa.bool_()
        case sa.Integer():
            return pa.int64()
        case sa.Float():
            return pa.float64()
        case sa.LargeBinary():
            return pa.large_binary()
        case sa.String():
            return pa.large_string()
    raise TypeError(f"a backup cannot hold column {column} of type {column.type!r}; give it an Arrow type")


@contextmanager
def snapshot(index: Index) -> Iterator[Connection]:
    """Open a read-only view that shows the same point in time for as long as it is open; writers go on.

    Raises:
        StorageError: the database could not be reached or ended the connection.
    """
    with index.read() as connection:
        if connection.dialect.name == "postgresql":
            # By a statement: the view is open already, and options are set before that.
            connection.execute(sa.text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
            # Before the view is taken: a TRUNCATE in between would show as empty tables in it.
            connection.execute(sa.text(f"LOCK TABLE {_all_tables(connection)} IN ACCESS SHARE MODE"))
        # SQLite: one transaction is one snapshot of the WAL, from its first SELECT on.
        yield connection


def revision(connection: Connection) -> str | None:
    """Return the revision of the tables here; None when there are none."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()


def rows_of(connection: Connection, name: str) -> Iterator[pa.RecordBatch]:
    """Yield a table's rows in the order of its key, a chunk at a time."""
    table, schema = metadata.tables[name], schema_of(name)
    statement = sa.select(table).order_by(*table.primary_key)
    result = connection.execute(statement.execution_options(yield_per=ROWS_PER_CHUNK))
    for rows in result.partitions():
        columns = zip(*rows, strict=True)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def count_rows(connection: Connection) -> dict[str, int]:
    """Return {table: number of rows}."""
    counted = sa.func.count()
    return {
        name: int(connection.execute(sa.select(counted).select_from(table)).scalar_one())
        for name, table in metadata.tables.items()
    }


def hold_alone(connection: Connection) -> None:
    """Keep everyone else from reading and writing until the transaction ends; returns when they let go.

    On SQLite a write transaction is alone already, and readers keep the state of before.
    """
    if connection.dialect.name != "postgresql":
        connection.exec_driver_sql("PRAGMA defer_foreign_keys = ON")
        return
    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_RESTORE_LOCK)))
    if revision(connection) is not None:
        connection.execute(sa.text(f"LOCK TABLE {_all_tables(connection)} IN ACCESS EXCLUSIVE MODE"))


def build(connection: Connection) -> None:
    """Build the tables of this program's revision where there are none."""
    from alembic import command  # costs memory that a backup need not have

    from strawflow.index.migrate import alembic_config

    config = alembic_config()
    config.attributes["connection"] = connection
    command.upgrade(config, REVISION)


def clear(connection: Connection) -> None:
    """Remove every row of every table."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text(f"TRUNCATE {_all_tables(connection)}"))
        return
    for table in reversed(metadata.sorted_tables):
        connection.execute(sa.delete(table))


def load(connection: Connection, name: str, batches: Iterable[pa.RecordBatch]) -> int:
    """Insert rows as `rows_of` gave them; returns how many.

    Raises:
        CorruptPackError: the tables here do not take them (a constraint, or a text the database cannot hold).
    """
    table = metadata.tables[name]
    insert = _copy if connection.dialect.name == "postgresql" else _insert
    num_rows = 0
    try:
        for batch in batches:
            insert(connection, table, zip(*(column.to_pylist() for column in batch.columns), strict=True))
            num_rows += batch.num_rows
    except connection.dialect.loaded_dbapi.Error as error:
        told = as_sqlalchemy_error(error, connection.dialect, statement=f"the rows of table {name}")
        if isinstance(told, (sa.exc.IntegrityError, sa.exc.DataError)):
            raise CorruptPackError(f"the index does not take the rows of table {name}: {error}") from error
        raise told from error
    return num_rows


# Straight on the drivers: SQLAlchemy's handling of each value costs several times what the databases take.


def _insert(connection: Connection, table: sa.Table, rows: Iterable[tuple[Any, ...]]) -> None:
    values = ", ".join("?" for _ in table.columns)
    statement = f"INSERT INTO {_table_and_columns(connection, table)} VALUES ({values})"
    _driver_of(connection).executemany(statement, rows)


def _copy(connection: Connection, table: sa.Table, rows: Iterable[tuple[Any, ...]]) -> None:
    statement = f"COPY {_table_and_columns(connection, table)} FROM STDIN"
    with _driver_of(connection).cursor() as cursor, cursor.copy(statement) as copy:
        for row in rows:
            copy.write_row(row)


def _driver_of(connection: Connection) -> Any:
    return connection.connection.driver_connection


def _table_and_columns(connection: Connection, table: sa.Table) -> str:
    spoken = connection.dialect.identifier_preparer
    return f"{spoken.format_table(table)} ({', '.join(spoken.format_column(c) for c in table.columns)})"


def pass_ids(connection: Connection) -> None:
    """Let the database's own counters go on after every id they gave or that is stored (SQLite always does the latter).

    By ALTER SEQUENCE, which a rollback takes back, as it does not take back `setval`.
    """
    if connection.dialect.name != "postgresql":
        return
    for table in metadata.sorted_tables:
        column = table.autoincrement_column
        if column is None:
            continue
        shown = connection.dialect.identifier_preparer.format_table(table)
        name = connection.execute(sa.select(sa.func.pg_get_serial_sequence(shown, column.name))).scalar_one()
        given = connection.execute(sa.text(f"SELECT last_value FROM {name} WHERE is_called")).scalar() or 0
        stored = connection.execute(sa.select(sa.func.max(column))).scalar() or 0
        connection.execute(sa.text(f"ALTER SEQUENCE {name} RESTART WITH {max(given, stored) + 1}"))


def is_damaged(index: Index) -> bool:
    """Tell whether an SQLite file cannot be trusted any more: not a database, or with broken pages; reads all of it."""
    if index.dialect != "sqlite":
        return False
    try:
        with index.read() as connection:
            return connection.exec_driver_sql("PRAGMA quick_check(1)").scalar() != "ok"
    except CorruptPackError:
        return True


def sqlite_file(url: str) -> Path | None:
    """Return the file of an SQLite address; None when the index lies on a server."""
    parts = make_url(url)
    return Path(parts.database) if parts.get_backend_name() == "sqlite" and parts.database else None


def _all_tables(connection: Connection) -> str:
    spoken = connection.dialect.identifier_preparer
    return ", ".join(spoken.format_table(table) for table in metadata.sorted_tables)
