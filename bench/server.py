"""A private PostgreSQL server with the durability PostgreSQL has by default, and what the benches ask of it.

fsync, synchronous_commit and full_page_writes are left as they come (on); so is everything else but the number of connections
and pg_stat_statements, by which pages are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from strawflow.testing import postgres
from strawflow.testing.postgres import PostgresServer


@contextmanager
def running_server() -> Iterator[PostgresServer]:
    """Start a server in a temporary folder; it and the folder are gone at the end."""
    counting = {"shared_preload_libraries": "pg_stat_statements"}
    with postgres.running_server(syncs=True, settings=counting) as server:
        yield server


def new_database(server: PostgresServer, name: str = "") -> str:
    """Make an empty database that counts its statements' pages; returns its name."""
    name = server.new_database(name)
    with server.connect(name) as connection:
        connection.execute("CREATE EXTENSION pg_stat_statements")
    return name


def version(server: PostgresServer) -> str:
    with server.connect() as connection:
        return f"PostgreSQL {connection.info.server_version // 10000}"
