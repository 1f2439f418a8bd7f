"""Opening the index: two dialects behind one `Index`, and every difference between them.

1. `begin()` is the only way to write: BEGIN IMMEDIATE on SQLite (a read never has to upgrade, so "database is locked"
   cannot follow from a stale snapshot), an ordinary transaction on PostgreSQL.
2. Index time decides expiry: `clock_timestamp()` on PostgreSQL, seconds since boot on SQLite (one host). A new boot id
   expires every session at open.
3. No alembic on hot paths: opening checks one row.
4. `direct()` is `begin()` without SQLAlchemy between: for the statements of index.prepared, on connections of its own,
   as many as were ever in use at once.
5. An index belongs to the process that opened it: one inherited over a fork is refused, not corrupted.
6. An SQLite file that was moved away, or replaced, under an open index is noticed by the next transaction.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection as Connection
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.exc import DBAPIError

from strawflow import clock
from strawflow.errors import (
    CommitUnknownError,
    CorruptPackError,
    IncompatibleFormatError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)
from strawflow.index import tables as t
from strawflow.index.prepared import Direct, as_sqlalchemy_error

REVISION = "0004"
"""The migration this program works with; `strawflow index upgrade` brings an older index here."""

_BUSY_TIMEOUT_S = 60
_IDLE_TRANSACTION_S = 30.0
_WAL_BYTES = 16 * 1024 * 1024


class Index:
    """An open index. Safe for threads (each call takes its own connection); refused in a forked process."""

    def __init__(
        self, url: str, *, durability: str = "host", idle_transaction_s: float = _IDLE_TRANSACTION_S
    ) -> None:
        """Prepare to connect to `url`; nothing is opened yet.

        A PostgreSQL server ends a transaction whose client said nothing for `idle_transaction_s` seconds: a worker
        frozen inside one would keep its row locks, and whoever rescues its leases would wait for it.
        """
        self.url = url
        self._engine = _make_engine(url, durability=durability, idle_transaction_s=idle_transaction_s)
        self._pid = os.getpid()
        parts = make_url(url)
        self._file = parts.database if parts.get_backend_name() == "sqlite" else None
        self._file_id: tuple[int, int] | None = None
        if self._file is not None:
            event.listen(self._engine, "connect", self._learn_file)
        self._idle: list[Any] = []
        self._idle_lock = threading.Lock()

    @property
    def dialect(self) -> str:
        return self._engine.dialect.name

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """Open a write transaction; commits on a clean exit, rolls back on any exception.

        Raises:
            StorageError: the database could not be reached, stayed locked, or ended the connection; nothing changed.
            CommitUnknownError: the commit itself was not answered: repeat with the same submission id, or read back.
        """
        self.require_own_process()
        self._require_same_file()
        is_committing = False
        try:
            with self._told_as_storage_error(), self._engine.begin() as connection:
                yield connection
                is_committing = True
        except StorageError as error:
            if is_committing and not _is_disk_full(error):
                raise CommitUnknownError(error.message, **error.facts) from error
            raise

    @contextmanager
    def direct(self) -> Iterator[Direct]:
        """Open a write transaction on a driver connection; commits and rolls back as `begin` does.

        Raises:
            StorageError: the database could not be reached, stayed locked, or ended the connection; nothing changed.
            CommitUnknownError: the commit itself was not answered.
        """
        self.require_own_process()
        self._require_same_file()
        is_committing = False
        try:
            with self._told_as_storage_error():
                driver = self._take_driver()
                try:
                    if self.dialect == "sqlite":
                        self._drive(driver, "BEGIN IMMEDIATE")
                    yield Direct(driver, self._engine.dialect)
                    is_committing = True
                    self._drive(driver, "COMMIT")
                except BaseException:
                    self._roll_back(driver)
                    raise
                with self._idle_lock:
                    self._idle.append(driver)
        except StorageError as error:
            if is_committing and not _is_disk_full(error):
                raise CommitUnknownError(error.message, **error.facts) from error
            raise

    def _take_driver(self) -> Any:
        with self._idle_lock:
            if self._idle:
                return self._idle.pop()
        try:
            proxied = self._engine.raw_connection()
        except self._engine.dialect.loaded_dbapi.Error as error:
            raise as_sqlalchemy_error(error, self._engine.dialect, statement="connect") from error
        driver = proxied.driver_connection
        proxied.detach()  # it leaves SQLAlchemy's pool for good
        return driver

    def _drive(self, driver: Any, statement: str) -> None:
        try:
            driver.execute(statement)
        except self._engine.dialect.loaded_dbapi.Error as error:
            raise as_sqlalchemy_error(error, self._engine.dialect, statement=statement) from error

    def _roll_back(self, driver: Any) -> None:
        """End a transaction that failed; a connection that cannot even do that, or is broken, is thrown away."""
        error_class = self._engine.dialect.loaded_dbapi.Error
        try:
            driver.rollback()
        except error_class:
            with suppress(error_class):
                driver.close()
            return
        with self._idle_lock:
            self._idle.append(driver)

    def require_own_process(self) -> None:
        """Raise StorageError in a forked process: its connections are the parent's."""
        if os.getpid() != self._pid:
            raise StorageError(
                f"this index was opened by process {self._pid}; a forked process must open the run again"
            )

    def _require_same_file(self) -> None:
        """Raise StorageError once another SQLite file, or none, stands in the place of the one that was opened.

        What is open goes on taking writes that nobody will see, and a new connection would see another index than those
        before it. One look costs two microseconds.
        """
        if self._file is None:
            return
        if self._file_id is None:  # nothing is open yet
            return
        try:
            found = os.stat(self._file)
        except FileNotFoundError:
            raise StorageError(
                f"the index {self._file} was moved or removed while it was open: nothing more is written to it; open the run "
                "again once it is back"
            ) from None
        if self._file_id != (found.st_dev, found.st_ino):
            raise StorageError(
                f"another file stands in the place of the index {self._file} than was opened: nothing more is written to the "
                "old one; open the run again"
            )

    def _learn_file(self, *_: Any) -> None:
        if self._file_id is None and self._file is not None:
            found = os.stat(self._file)
            self._file_id = found.st_dev, found.st_ino

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a read-only view: on SQLite all its statements see one snapshot, on PostgreSQL each its own.

        Raises:
            StorageError: the database could not be reached or ended the connection.
        """
        self.require_own_process()
        self._require_same_file()
        with self._told_as_storage_error(), self._engine.connect() as connection:
            connection.execution_options(reading=True)
            connection.begin()  # a prepared statement that comes first would run before SQLAlchemy begins by itself
            yield connection

    @contextmanager
    def _told_as_storage_error(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            what = " ".join(str(error.orig).split())  # PostgreSQL tells some in several lines
            # InternalError: PostgreSQL refuses in this state, as a standby does that takes no writes yet.
            refused = isinstance(error, sa.exc.OperationalError | sa.exc.InternalError)
            if refused or error.connection_invalidated:
                raise StorageError(f"the index did not answer: {what}", url=self.shown_url) from error
            if isinstance(error, sa.exc.DataError):  # PostgreSQL: NUL in a text, a number out of its range
                raise InvalidInputError(
                    f"the index takes no such value: {what}; nothing changed", url=self.shown_url
                ) from error
            if type(error) is sa.exc.DatabaseError:  # SQLite's word for a file that is damaged or no database
                raise CorruptPackError(f"the index cannot be read: {what}", url=self.shown_url) from error
            raise

    @property
    def shown_url(self) -> str:
        """The address without its password."""
        return make_url(self.url).render_as_string(hide_password=True)

    def close(self) -> None:
        """Let go of every connection; none may be inside a transaction."""
        with self._idle_lock:
            idle, self._idle = self._idle, []
        for driver in idle:
            driver.close()
        self._engine.dispose()

    def check_revision(self) -> None:
        """Refuse an index that is missing, older or newer than this program.

        Raises:
            NotFoundError: there is no strawflow index at this address.
            IncompatibleFormatError: its schema is of another revision.
        """
        with self.read() as connection:
            if not sa.inspect(connection).has_table("alembic_version"):
                raise NotFoundError(
                    "there is no strawflow index here; create a run first", url=self.shown_url
                )
            found = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
        if found != REVISION:
            raise IncompatibleFormatError(
                f"the index is at revision {found}, this program needs {REVISION}; run `strawflow index upgrade`",
                url=self.shown_url,
            )

    def expire_after_reboot(self) -> bool:
        """Expire every session when the host was booted again since (SQLite only); True if it was.

        Times before which units are not offered stay what they are on the wall's clock, though index time began anew.
        """
        if self.dialect != "sqlite":
            return False
        facts = {"boot_id": clock.boot_id(), "booted_at": str(clock.wall_ms() / 1000 - clock.uptime_s())}
        with self.begin() as connection:
            rows = connection.execute(sa.select(t.meta).where(t.meta.c.key.in_(facts)))
            before = {row.key: row.value for row in rows}
            is_same_boot = before.get("boot_id") == facts["boot_id"]
            if is_same_boot and "booted_at" in before:
                return False
            connection.execute(sa.delete(t.meta).where(t.meta.c.key.in_(facts)))
            connection.execute(sa.insert(t.meta), [{"key": k, "value": v} for k, v in facts.items()])
            if is_same_boot or "boot_id" not in before:
                return False
            connection.execute(sa.update(t.sessions).values(expires_at=0.0))
            not_before = t.units.c.not_before
            # Not told by earlier programs, whose units waited a moment before a retry and for nothing else.
            moved = (
                not_before + float(before["booted_at"]) - float(facts["booted_at"])
                if "booted_at" in before
                else sa.null()
            )
            connection.execute(sa.update(t.units).where(not_before.is_not(None)).values(not_before=moved))
            return True


def now(connection: Connection) -> sa.ColumnElement[float]:
    """Return index time as an expression, evaluated where the statement runs."""
    if connection.dialect.name == "postgresql":
        return sa.cast(sa.func.extract("epoch", sa.func.clock_timestamp()), sa.Float)
    return sa.literal(clock.uptime_s(), sa.Float)


def lock_rows(
    statement: sa.Select[Any], connection: Connection, *, of: sa.Table | None = None, refers: bool = False
) -> sa.Select[Any]:
    """Lock the selected rows (of one table), waiting for their holders; with `refers` others may insert rows that name them."""
    if connection.dialect.name != "postgresql":
        return statement
    return statement.with_for_update(of=of, key_share=refers)


def share_rows(statement: sa.Select[Any], connection: Connection) -> sa.Select[Any]:
    """Keep others from changing the selected rows until this transaction ends; readers and sharers go on."""
    return statement.with_for_update(read=True) if connection.dialect.name == "postgresql" else statement


def insert_unless_there(table: sa.Table, connection: Connection) -> Any:
    """Return an INSERT that leaves a row of the same key as it is."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    return insert(table).on_conflict_do_nothing()


def _is_disk_full(error: StorageError) -> bool:
    """Tell whether SQLite refused a commit for want of space: it then undid the whole transaction."""
    cause = error.__cause__
    return getattr(getattr(cause, "orig", None), "sqlite_errorname", None) == "SQLITE_FULL"


def unused_id(column: sa.Column[Any], connection: Connection, *, above: int) -> dict[str, int]:
    """Return the column's value for a new row whose id must lie above one that was given up; nothing where it will anyway.

    SQLite counts on from the largest id that is there, PostgreSQL from the largest it ever gave.
    """
    if connection.dialect.name == "postgresql" or not above:
        return {}
    last = connection.execute(sa.select(sa.func.max(column))).scalar() or 0
    return {} if last >= above else {str(column.name): above + 1}


def _make_engine(url: str, *, durability: str, idle_transaction_s: float) -> Engine:
    dialect = make_url(url).get_backend_name()
    if dialect == "postgresql":
        options = f"-c idle_in_transaction_session_timeout={int(idle_transaction_s * 1000)}"
        return sa.create_engine(url, pool_pre_ping=True, connect_args={"options": options})
    engine = sa.create_engine(url, connect_args={"timeout": _BUSY_TIMEOUT_S, "check_same_thread": False})
    synchronous = "FULL" if durability == "host" else "NORMAL"

    @event.listens_for(engine, "connect")
    def _on_connect(dbapi_connection: Any, _record: Any) -> None:
        dbapi_connection.isolation_level = (
            None  # SQLAlchemy's begin event below decides how a transaction starts
        )
        for pragma in (
            "journal_mode=WAL",
            f"synchronous={synchronous}",
            "foreign_keys=ON",
            f"busy_timeout={_BUSY_TIMEOUT_S * 1000}",
            # A reader that stayed open for long lets the log grow; once it has gone the file is cut back to this.
            f"journal_size_limit={_WAL_BYTES}",
        ):
            dbapi_connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        connection.exec_driver_sql(
            "BEGIN" if connection.get_execution_options().get("reading") else "BEGIN IMMEDIATE"
        )

    return engine
