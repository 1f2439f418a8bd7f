"""Fixtures of the contract tests: a second index beside the one under test, and processes killed at chosen instants."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.backup_instants import Instants
from tests.postgres import PostgresServer


@pytest.fixture
def opposite_url(index_url: str, postgres_server: PostgresServer) -> str:
    """An address for a second index in the database that the first is not in."""
    return "" if index_url else postgres_server.new_database()


@pytest.fixture(scope="session")
def instants() -> Iterator[Instants]:
    with Instants() as started:
        yield started
