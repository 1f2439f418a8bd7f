"""Fixtures shared by all tests: one private PostgreSQL per test session, and index addresses of both dialects."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from strawflow.cli.main import main
from strawflow.testing.postgres import PostgresServer, running_server
from strawflow.testing.runs import SmallRun, small_run

# Test processes that run side by side are told to be 80 wide, for which the program would break its lines.
os.environ.pop("COLUMNS", None)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with running_server(settings={"shared_buffers": "16MB"}) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def index_url(request: pytest.FixtureRequest) -> str:
    """A value for run.index_url: empty (SQLite in the run's folder) or a fresh PostgreSQL database."""
    if request.param == "sqlite":
        return ""
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.new_url()


@pytest.fixture
def settings(index_url: str) -> dict[str, str]:
    """The settings of a run whose index is at `index_url`; a file that needs more of them adds its own to these."""
    return {"run.index_url": index_url}


@pytest.fixture
def small(tmp_path: Path, settings: dict[str, str]) -> Iterator[SmallRun]:
    with small_run(tmp_path, settings=settings) as made:
        yield made


@dataclass(frozen=True)
class CliResult:
    """What a command of the program answered."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.err)["error"]
        return found


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., CliResult]:
    """Call the program in this process: `cli("run", "list", "--json")`."""

    def call(*arguments: object) -> CliResult:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        seen = capsys.readouterr()
        return CliResult(int(ended.value.code or 0), seen.out, seen.err)

    return call
