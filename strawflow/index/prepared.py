"""Statements of the hot path: written once for both dialects, rendered once, run straight on the driver.

1. A statement here is text with `:name` values and a few `{words}` for what the dialects say differently (`WORDS`).
2. It runs inside whatever transaction it is given: one of `Index.begin()` or one of `Index.direct()`.
3. Many rows travel as one JSON value, read by `{each}`: the number of statements does not grow with the rows.

SQLAlchemy's own execution costs about 70 us a statement and 150 us a transaction, several times what SQLite itself
takes; a durable cycle of claim and complete has about ten statements.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow import clock

WORDS: dict[str, dict[str, str]] = {
    "sqlite": {
        "now": "CAST(:now_s AS REAL)",
        "each": "json_each(:rows) AS r",
        "text_value": "r.value",
        "skip_locked": "",
        "lock": "",
        "share": "",
        "share_both": "",
    },
    "postgresql": {
        "now": "CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)",
        "each": "jsonb_array_elements(CAST(:rows AS jsonb)) AS r(value)",
        "text_value": "r.value #>> '{}'",
        "skip_locked": "FOR UPDATE SKIP LOCKED",
        "lock": "FOR UPDATE",
        "share": "FOR SHARE",
        "share_both": "FOR SHARE OF packs, sessions",
    },
}
"""`{now}`: index time in seconds. `{each}`: the JSON array `:rows`, one row per item in the column r.value. The others end
a SELECT: rows that others hold are passed over, waited for, or shared (SQLite holds the whole file already)."""

_VALUE = re.compile(r"(?<!:):([a-z_]+)")


class Direct:
    """A transaction on the driver's own connection."""

    __slots__ = ("_driver", "dialect")

    def __init__(self, driver: Any, dialect: sa.Dialect) -> None:
        self._driver, self.dialect = driver, dialect

    @property
    def driver(self) -> Any:
        return self._driver


Transaction = Connection | Direct


class Prepared:
    """One statement; `rows` and `count` run it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._rendered: dict[str, str] = {}
        self._tells_now = "{now}" in text

    def rows(self, transaction: Transaction, **values: Any) -> list[Any]:
        """Run it and return its rows as tuples.

        Raises:
            sqlalchemy.exc.DBAPIError: what the driver raised; the transaction is then turned into an error of ours.
        """
        return list(self._run(transaction, values).fetchall())

    def hold(self, transaction: Transaction, **values: Any) -> None:
        """Run it for the locks it takes and nothing else; SQLite holds the whole file already and is not asked."""
        if WORDS[transaction.dialect.name]["lock"]:
            self._run(transaction, values)

    def count(self, transaction: Transaction, **values: Any) -> int:
        """Run it and return how many rows it changed."""
        return int(self._run(transaction, values).rowcount)

    def many(self, transaction: Transaction, values: Sequence[dict[str, Any]]) -> int:
        """Run it once for each of `values`; returns how many rows it changed. For what JSON cannot carry: bytes."""
        if len(values) == 1:
            return self.count(transaction, **values[0])
        text, driver = self._text_for(transaction.dialect), _driver_of(transaction)
        try:
            cursor = driver.cursor()
            cursor.executemany(text, values)
        except transaction.dialect.loaded_dbapi.Error as error:
            raise as_sqlalchemy_error(error, transaction.dialect, statement=text) from error
        return int(cursor.rowcount)

    def _text_for(self, dialect: sa.Dialect) -> str:
        text = self._rendered.get(dialect.name)
        if text is None:
            text = self._rendered[dialect.name] = _render(self._text, dialect.name)
        return text

    def _run(self, transaction: Transaction, values: dict[str, Any]) -> Any:
        dialect = transaction.dialect
        text = self._text_for(dialect)
        if self._tells_now and dialect.name == "sqlite":
            values["now_s"] = clock.uptime_s()
        try:
            return _driver_of(transaction).execute(text, values)
        except dialect.loaded_dbapi.Error as error:
            raise as_sqlalchemy_error(error, dialect, statement=text) from error


def _driver_of(transaction: Transaction) -> Any:
    return transaction.driver if isinstance(transaction, Direct) else transaction.connection.driver_connection


def as_sqlalchemy_error(error: Any, dialect: sa.Dialect, *, statement: str) -> BaseException:
    """Return a driver's error as SQLAlchemy would have raised it."""
    told: BaseException = sa.exc.DBAPIError.instance(
        statement,
        None,
        error,
        dialect.loaded_dbapi.Error,
        dialect=dialect,
        connection_invalidated=dialect.is_disconnect(error, None, None),
    )
    return told


def rows_value(rows: Iterable[Sequence[Any] | int | str]) -> str:
    """Return the JSON value that `{each}` reads."""
    return json.dumps(list(rows), separators=(",", ":"))


def _render(text: str, dialect: str) -> str:
    words = WORDS[dialect]
    # Words first: some hold values themselves.
    worded = re.sub(r"\{([a-z_]+)\}", lambda match: words[match[1]], text)
    if dialect == "sqlite":
        return worded
    return _VALUE.sub(r"%(\1)s", worded.replace("%", "%%"))
