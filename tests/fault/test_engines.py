"""Engines that others started: used by address, each by one worker; one that goes away is nobody else's fault."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path

import pytest

from strawflow.errors import ConflictError
from strawflow.flow import engines
from strawflow.flow.progress import standing
from strawflow.flow.run import Run, open_run
from strawflow.flow.session import WorkerSession
from strawflow.index import units
from strawflow.states import UnitState
from strawflow.testing.fake_engine import FakeEngine, FakeEngineOptions, Faults
from strawflow_workers.drain import Drain
from strawflow_workers.rollout.loop import RolloutLoop
from tests.fault.kill_run import SupervisedRun, check_finished, make_run, wait_until
from tests.integration.rollout_runs import Worker, trainer_of


def num_generated(engine: FakeEngine) -> int:
    with urllib.request.urlopen(f"{engine.url}/faults", timeout=10) as answer:
        return int(json.loads(answer.read())["counts"]["generate"])


def num_planned(run: Run) -> int:
    return standing(run).planned


def test_a_run_goes_on_with_the_engines_that_are_left(tmp_path: Path) -> None:
    root = tmp_path / "run"
    slow = FakeEngineOptions(model_path="somebody/elses", faults=Faults(delay_s=0.1))
    with FakeEngine(slow) as stays:
        leaves = FakeEngine(slow)
        leaves.__enter__()
        urls = [stays.url, leaves.url]
        make_run(root, engine="fake", steps=8, seed=3, engine_urls=urls, units_in_flight=2).close()
        supervised = SupervisedRun(root)
        supervised.start()
        run = open_run(root)
        wait_until(lambda: num_planned(run) >= 4, seconds=90, what="the fourth step")
        assert num_generated(stays) > 0
        assert num_generated(leaves) > 0
        leaves.close()
        supervised.finish(seconds=150)
        with run.index.read() as connection:
            failed = units.listed(connection, run.branch, state=UnitState.FAILED)
        run.close()
        assert not failed, "the engine's end was held against the groups it had"
    check_finished(root, {})


def test_an_engine_of_one_worker_is_refused_to_another(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", engine="fake", steps=2, seed=3)
    with FakeEngine() as engine, trainer_of(run) as publish:
        publish(0)
        with Worker(run, engine_url=engine.url) as first:
            first.wait(lambda: num_serving(run) == 1)
            with (
                WorkerSession(run, "rollout") as second,
                pytest.raises(ConflictError, match="another worker"),
            ):
                asyncio.run(RolloutLoop(second, Drain(), engine_url=f"{engine.url}/").run())
    run.close()


def num_serving(run: Run) -> int:
    return sum(bool(e.url) for e in engines.listed(run))
