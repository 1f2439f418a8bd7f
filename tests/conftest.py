"""Fixtures shared by all tests: one private PostgreSQL per test session, and index addresses of both dialects."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from postgres import PostgresServer, running_server  # noqa: E402  (lies beside this file)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with running_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def index_url(request: pytest.FixtureRequest) -> str:
    """A value for run.index_url: empty (SQLite in the run's folder) or a fresh PostgreSQL database."""
    if request.param == "sqlite":
        return ""
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.new_database()
