"""How many pages of the index a call touches, as the databases themselves count them.

SQLite: page-cache hits and misses (sqlite3_db_status) of every connection this process has; Python's module does not offer
that call, so the library it is linked to is asked directly. Looking a page up twice counts twice.
PostgreSQL: shared buffers hit and read by all statements of the database (pg_stat_statements), likewise.
"""

from __future__ import annotations

import ctypes
import gc
import sqlite3

import psycopg

HOW = {"SQLite": "sqlite3_db_status", "PostgreSQL": "pg_stat_statements"}

HOW = {"SQLite": "sqlite3_db_status", "PostgreSQL": "pg_stat_statements"}

_CACHE_HIT, _CACHE_MISS = 7, 8  # SQLITE_DBSTATUS_CACHE_HIT, SQLITE_DBSTATUS_CACHE_MISS


def sqlite_pages() -> int:
    """Return the page look-ups so far of all open SQLite connections of this process."""
    return sum(
        _status(connection, counter)
        for connection in gc.get_objects()
        if issubclass(
            type(connection), sqlite3.Connection
        )  # isinstance would wake lazy proxies of other modules
        for counter in (_CACHE_HIT, _CACHE_MISS)
    )


def postgres_pages(connection: psycopg.Connection) -> int:
    """Return the buffer look-ups so far of all statements of the connection's database but this one."""
    row = connection.execute(
        "SELECT coalesce(sum(shared_blks_hit + shared_blks_read), 0)::bigint FROM pg_stat_statements"
        " WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())"
        " AND query NOT LIKE '%pg_stat_statements%'"
    ).fetchone()
    assert row is not None
    return int(row[0])


def _status(connection: sqlite3.Connection, counter: int) -> int:
    # CPython keeps the handle as the first field of the object, behind its two-word header.
    handle = ctypes.c_void_p.from_address(id(connection) + 2 * ctypes.sizeof(ctypes.c_void_p))
    if not handle.value:
        return 0  # closed
    now, highest = ctypes.c_int(), ctypes.c_int()
    if _library().sqlite3_db_status(handle, counter, ctypes.byref(now), ctypes.byref(highest), 0) != 0:
        raise RuntimeError("sqlite3_db_status refused")
    return now.value


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libsqlite3.so.0")
    library.sqlite3_libversion.restype = ctypes.c_char_p
    if library.sqlite3_libversion().decode() != sqlite3.sqlite_version:
        raise RuntimeError("Python's sqlite3 is linked to another library than libsqlite3.so.0")
    return library
