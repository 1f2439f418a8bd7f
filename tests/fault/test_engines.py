"""Engines that others started: used by address, each by one worker; one that goes away is nobody else's fault."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from strawflow.cli.main import main
from strawflow.errors import ConflictError
from strawflow.flow import engines
from strawflow.flow.progress import standing
from strawflow.flow.run import Run, open_run
from strawflow.flow.session import WorkerSession
from strawflow.index import events, units
from strawflow.states import UnitState
from strawflow.testing.fake_engine import FakeEngine, FakeEngineOptions, Faults
from strawflow_workers.drain import Drain
from strawflow_workers.rollout.loop import RolloutLoop
from tests.fault.kill_run import SupervisedRun, check_finished, make_run, wait_until
from tests.integration.rollout_runs import Worker, trainer_of

pytestmark = pytest.mark.alone


def num_generated(engine: FakeEngine) -> int:
    with urllib.request.urlopen(f"{engine.url}/faults", timeout=10) as answer:
        return int(json.loads(answer.read())["counts"]["generate"])


def num_planned(run: Run) -> int:
    return standing(run).planned


@pytest.mark.long
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


@pytest.mark.long
def test_an_engine_added_in_the_middle_takes_over_from_one_that_is_drained(tmp_path: Path) -> None:
    root = tmp_path / "run"
    slow = FakeEngineOptions(mean_tokens=10, faults=Faults(token_s=0.1))
    with FakeEngine(slow) as first, FakeEngine(slow) as second:
        settings: dict[str, Any] = {"max_response_tokens": 12, "units_in_flight": 4, "max_staleness": 2}
        settings["over_provision"] = 4
        make_run(root, engine="fake", steps=9, seed=5, engine_urls=[first.url], **settings).close()
        supervised = SupervisedRun(root)
        supervised.start()
        run = open_run(root)
        wait_until(lambda: num_planned(run) >= 4, seconds=90, what="the fourth step")
        first.set_faults(token_s=1.0)  # what it gets from now on is in flight for seconds
        strawflow("engine", "add", str(root), "--url", second.url)
        wait_until(
            lambda: states(run) == {1: "serving", 2: "serving"} and num_generated(first) > 0,
            seconds=60,
            what="the second engine",
        )
        strawflow("engine", "drain", str(root), "1")
        wait_until(lambda: states(run) == {1: "gone", 2: "serving"}, seconds=30, what="the first to be gone")
        num_before = num_generated(first)
        supervised.finish(seconds=150)
        assert num_generated(first) == num_before
        with run.index.read() as connection:
            drained = [
                e["session_id"] for e in events.latest(connection, limit=5000, name_prefix="engine.draining")
            ]
            parked_by = {
                e["session_id"] for e in events.latest(connection, limit=5000, name_prefix="units.parked")
            }
            assert set(drained) <= parked_by, "what the drained engine had in flight was thrown away"
            assert events.count_by_name(connection).get("worker.restarted", 0) == 0
            assert not units.listed(connection, run.branch, state=UnitState.FAILED)
        run.close()
    check_finished(root, {})


def states(run: Run) -> dict[int, str]:
    return {e.slot_id: e.state.value for e in engines.standing(run, with_gone=True)}


def strawflow(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 0


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
