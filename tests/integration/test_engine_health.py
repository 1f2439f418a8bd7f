"""An engine that stops answering: a pause is waited for, a hang ends it, also one while weights are loaded."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from strawflow.errors import EngineError
from strawflow.flow import engines
from strawflow.flow.run import Run
from strawflow.index import units
from strawflow.states import EngineState, UnitState
from strawflow_workers.rollout import loop
from tests.fault.kill_run import processes_of
from tests.integration.rollout_runs import NUM_UNITS, Worker, completed, trainer_of

LIMIT_S = 2.0


def test_an_engine_may_pause_and_is_ended_when_it_hangs(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "UPKEEP_S", 0.1)
    run = make_run(health_timeout_s=LIMIT_S, engine_options={"token-s": "0.3", "mean-tokens": "100"})
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:

            def in_flight() -> bool:
                return any(e.state is EngineState.SERVING and e.num_units for e in engines.standing(run))

            worker.wait(in_flight)
            (pid,) = processes_of(run.root)
            os.kill(pid, signal.SIGSTOP)
            worker.sleep(LIMIT_S / 2)  # several checks fail
            os.kill(pid, signal.SIGCONT)
            worker.wait(lambda: len(completed(run)) == NUM_UNITS)
            publish(1)
            worker.wait(in_flight)
            os.kill(pid, signal.SIGSTOP)
            worker.ended()
        assert isinstance(worker.error, EngineError)
        assert "answered no health check" in str(worker.error)
        assert not processes_of(run.root), "the hung engine is left"
    with run.index.read() as connection:
        assert not units.listed(connection, run.branch, state=UnitState.FAILED)


def test_an_engine_that_hangs_while_it_loads_weights_is_ended(make_run: Callable[..., Run]) -> None:
    run = make_run(load_timeout_s=1.0, engine_options={"update-s": "600"})
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:
            worker.wait(lambda: len(completed(run)) == NUM_UNITS)
            publish(1)
            worker.ended()
    assert isinstance(worker.error, EngineError)
    assert "rollout.load_timeout_s" in str(worker.error)
    assert not processes_of(run.root), "the hung engine is left"
