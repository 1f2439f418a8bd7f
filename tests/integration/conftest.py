"""Fixtures of tests with a rollout worker and a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from strawflow.flow.run import Run
from strawflow_workers.quickstart.model import TINY, make_model
from tests.integration import rollout_runs


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", seed=0, shape=TINY)


@pytest.fixture
def make_run(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(**settings: Any) -> Run:
        made.append(rollout_runs.make_run(tmp_path, tiny_model, **settings))
        return made[-1]

    yield make
    for run in made:
        run.close()
