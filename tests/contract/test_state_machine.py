"""The store agrees with a plain model whatever is called in whatever order (strawflow.testing.state_machine)."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from strawflow.testing.postgres import PostgresServer
from strawflow.testing.state_machine import StoreMachine

SHORT = settings(
    max_examples=10, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
LONG = settings(SHORT, max_examples=300, stateful_step_count=60)


class PostgresMachine(StoreMachine):
    server: ClassVar[PostgresServer]

    def index_url(self) -> str:
        return self.server.new_url()


def machine(dialect: str, request: pytest.FixtureRequest) -> type[StoreMachine]:
    if dialect == "sqlite":
        return StoreMachine
    PostgresMachine.server = request.getfixturevalue("postgres_server")
    return PostgresMachine


@pytest.mark.parametrize("dialect", ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def test_the_store_agrees_with_the_model(dialect: str, request: pytest.FixtureRequest) -> None:
    run_state_machine_as_test(machine(dialect, request), settings=SHORT)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
def test_the_store_agrees_with_the_model_in_many_histories(
    dialect: str, request: pytest.FixtureRequest
) -> None:
    run_state_machine_as_test(machine(dialect, request), settings=LONG)
