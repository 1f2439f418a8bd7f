"""An engine that stops answering: a pause is waited for, a hang ends it, also one while weights are loaded or groups broken off."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from strawflow.errors import EngineError
from strawflow.flow import engines
from strawflow.flow.run import Run
from strawflow.index import units
from strawflow.states import EngineState, UnitState
from strawflow.testing.fake_engine import FakeEngine, FakeEngineOptions, Faults
from strawflow_workers.rollout import engine as engine_module
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


def test_health_checks_that_failed_before_weights_were_loaded_do_not_count_after(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "UPKEEP_S", 0.05)
    run = make_run(health_timeout_s=LIMIT_S)
    with trainer_of(run) as publish, FakeEngine() as engine:
        publish(0)
        with Worker(run, engine_url=engine.url) as worker:
            worker.wait(lambda: len(completed(run)) == NUM_UNITS)
            engine.set_faults(stuck=True, update_s=LIMIT_S)
            worker.sleep(LIMIT_S / 2)  # several checks fail
            publish(1)
            worker.wait(lambda: engine.num_updates == 1)
            engine.set_faults(stuck=False)
            worker.wait(lambda: len(completed(run)) == 2 * NUM_UNITS)


def test_an_engine_that_does_not_end_what_is_broken_off_is_given_up(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "UPKEEP_S", 0.1)
    run = make_run(health_timeout_s=LIMIT_S, on_new_weights="park", max_response_tokens=1000)
    slow = FakeEngineOptions(mean_tokens=10_000, faults=Faults(token_s=0.2))
    with trainer_of(run) as publish, FakeEngine(slow) as engine:
        publish(0)
        with Worker(run, engine_url=engine.url) as worker:
            worker.wait(lambda: any(e.num_units for e in engines.standing(run)))
            engine.set_faults(stuck=True)
            publish(1)
            worker.ended()
    assert isinstance(worker.error, EngineError)
    assert "answered no health check" in str(worker.error)


def test_weights_whose_files_cannot_be_read_in_time_end_the_worker(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(load_timeout_s=1.0)
    is_readable = threading.Event()
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:
            worker.wait(lambda: len(completed(run)) == NUM_UNITS)
            monkeypatch.setattr(engine_module, "verify_weights", lambda *_: is_readable.wait())
            publish(1)
            try:
                worker.wait(lambda: not processes_of(run.root), seconds=10)
            finally:
                is_readable.set()
            worker.ended()
    assert isinstance(worker.error, EngineError)
    assert "rollout.load_timeout_s" in str(worker.error)


def test_an_attached_engine_that_a_killed_worker_left_paused_goes_on(make_run: Callable[..., Run]) -> None:
    run = make_run()
    with trainer_of(run) as publish, FakeEngine() as engine:
        publish(0)
        engine.answer("POST", "/pause_generation", {"mode": "retract"})
        with Worker(run, engine_url=engine.url) as worker:
            worker.wait(lambda: len(completed(run)) == NUM_UNITS, seconds=20)
