"""Fixtures of the contract tests: a second index beside the one under test, and processes killed at chosen instants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from strawflow.testing.postgres import PostgresServer
from tests.contract.backup_instants import Instants


@pytest.fixture
def opposite_url(index_url: str, postgres_server: PostgresServer) -> str:
    """An address for a second index in the database that the first is not in."""
    return "" if index_url else postgres_server.new_url()


@pytest.fixture(scope="session")
def instants() -> Iterator[Instants]:
    with Instants() as started:
        yield started


UPKEEP = frozenset(
    f"test_{name}.py"
    for name in (
        "backup",
        "branch_consumers",
        "branches",
        "checkpoints",
        "compaction",
        "consumers",
        "damaged_sources",
        "data_sources",
        "evaluation",
        "journal",
        "mixture",
        "quarantine",
        "rebuild",
        "restore",
        "retention",
        "returned_units",
        "sweep",
    )
)
"""What happens once in a while, to whole runs: its tests take seconds each."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the gate within its time: of these tests on PostgreSQL every eighth stays, the others are long.

    All of them run on SQLite in the gate, and `make test-long` runs every one on both.
    """
    seen: Counter[str] = Counter()
    for item in items:
        callspec = getattr(item, "callspec", None)
        if item.path.name in UPKEEP and callspec is not None and "postgresql" in callspec.id:
            if seen[item.path.name] % 8:
                item.add_marker(pytest.mark.long)
            seen[item.path.name] += 1
