"""Engines that serve wrong weights or garbage: put in quarantine, their units given back, and tried again before they serve."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from strawflow.errors import EngineQuarantinedError, WorkerFailedError
from strawflow.flow import claim, engines, rescue
from strawflow.flow.claim import PromptShelf
from strawflow.flow.engines import EngineStanding
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.index import events, units
from strawflow.states import EngineState, UnitState
from strawflow.testing.fake_engine import FakeEngine
from strawflow_workers import wanted_engines
from strawflow_workers.drain import Drain
from strawflow_workers.rollout import engine
from strawflow_workers.supervisor import Supervisor
from tests.integration import rollout_runs
from tests.integration.rollout_runs import NUM_UNITS, Worker, completed, rows_of, trainer_of

GARBAGE = {
    "nan_logprobs": "log-probability 0 is nan",
    "masked_logprobs": "log-probability 0 is -9999.0",
    "positive_logprobs": "log-probability 0 is 0.5",
    "short_logprobs": "log-probabilities for",
    "odd_version": "sampled from ['of nobody']",
}


@contextmanager
def supervised(run: Run) -> Iterator[Supervisor]:
    """Run the supervisor with its rollout workers in a thread; the test is trainer and assembler."""
    drain = Drain()
    watched = Supervisor(run, drain)
    watched.children.clear()
    thread = threading.Thread(target=watched.supervise)
    thread.start()
    try:
        yield watched
    finally:
        drain.request()
        thread.join(timeout=40)
        assert not thread.is_alive()


def only(run: Run) -> EngineStanding:
    (found,) = engines.standing(run)
    return found


def bury(run: Run) -> None:
    """Declare the worker lost, as a supervisor does that saw its process end."""
    rescue.declare_lost(run, only(run).session_id or "", reason="its thread ended")


def all_units(run: Run) -> list[units.Unit]:
    with run.index.read() as connection:
        return units.listed(connection, run.branch)


def spoil(url: str | None, **faults: Any) -> None:
    request = urllib.request.Request(f"{url}/faults", json.dumps(faults).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


def asked_of(url: str | None) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/requests", timeout=10) as answer:
        return list(json.loads(answer.read()))


# Each kind in both ways in the long tests; in the gate some whole, some streamed.
@pytest.mark.parametrize(
    ("fault", "is_streamed"),
    [
        pytest.param(fault, way, marks=() if (number % 2 == 1) is way else pytest.mark.long)
        for number, fault in enumerate(GARBAGE)
        for way in (False, True)
    ],
)
def test_an_engine_that_answers_garbage_is_quarantined_and_its_units_go_back(
    make_run: Callable[..., Run], fault: str, is_streamed: bool
) -> None:
    run = make_run(stream_interval=1 if is_streamed else 32)
    with FakeEngine() as attached, trainer_of(run) as publish:
        attached.set_faults(**{fault: 1})
        publish(0)
        with Worker(run, engine_url=attached.url) as worker:
            worker.ended()
        assert isinstance(worker.error, EngineQuarantinedError)
        bury(run)
        standing = only(run)
        assert (standing.state, standing.is_attached) == (EngineState.QUARANTINED, True)
        assert GARBAGE[fault] in (standing.reason or "")
        assert f"{run.config.rollout.quarantine_after} groups in a row" in (standing.reason or "")
        assert {(u.state, u.attempts, u.crashes) for u in all_units(run)} == {(UnitState.READY, 0, 0)}
        with run.index.read() as connection:
            (told,) = events.latest(connection, limit=1, name_prefix="engine.quarantined")
        assert told["facts"]["reason"] == standing.reason
        assert set(told["facts"]["units"]) == {u.unit_id for u in all_units(run)}


def test_an_attached_engine_stays_in_quarantine_until_it_is_released_and_answers_its_probes(
    make_run: Callable[..., Run],
) -> None:
    run = make_run()
    with FakeEngine() as attached, trainer_of(run) as publish:
        attached.set_faults(nan_logprobs=1)
        publish(0)
        with Worker(run, engine_url=attached.url) as worker:
            worker.ended()
        bury(run)
        standing = only(run)
        num_asked = len(asked_of(attached.url))
        with Worker(run, engine_url=attached.url) as second:
            second.ended()
        assert isinstance(second.error, EngineQuarantinedError)
        assert "engine release" in str(second.error)
        engines.release(run, standing.slot_id)
        with Worker(run, engine_url=attached.url) as third:
            third.ended()
        bury(run)
        assert "answer to a probe" in (only(run).reason or "")
        attached.set_faults(nan_logprobs=0)
        engines.release(run, standing.slot_id)
        with Worker(run, engine_url=attached.url) as fourth:
            fourth.wait(lambda: len(completed(run)) == NUM_UNITS)
            assert only(run).state is EngineState.SERVING
        probes = [r for r in asked_of(attached.url)[num_asked:] if r.get("rid") is None]
        assert len(probes) == 1 + engine.NUM_PROBES
    assert {row["status"] for row in rows_of(run)} <= {"finished", "truncated"}


def test_wrong_weights_after_a_reload_quarantine_an_attached_engine(make_run: Callable[..., Run]) -> None:
    run = make_run()
    with FakeEngine() as attached, trainer_of(run) as publish:
        publish(0)
        with Worker(run, engine_url=attached.url) as worker:
            worker.wait(lambda: len(completed(run)) == NUM_UNITS)
            attached.set_faults(wrong_version=True)
            publish(1)
            worker.ended()
        assert isinstance(worker.error, EngineQuarantinedError)
        assert only(run).state is EngineState.QUARANTINED
        assert "reports weight version" in (only(run).reason or "")


def test_nothing_is_granted_to_a_session_whose_engine_is_quarantined_or_drains(
    make_run: Callable[..., Run],
) -> None:
    run = make_run()
    with trainer_of(run) as publish, WorkerSession(run, "rollout") as session:
        version = publish(0)
        rollout_runs.admit.admit_due(session)
        shelf = PromptShelf(session)

        def claimed() -> int:
            return len(claim.claim(session, shelf, limit=1, serving_version_id=version))

        slot = engines.take(session, slot_id=None, url="http://127.0.0.1:9")
        assert claimed() == 1
        engines.quarantine(session, slot.slot_id, reason="it said so")
        assert {u.state for u in all_units(run)} == {UnitState.READY}
        assert claimed() == 0
        engines.release(run, slot.slot_id)
        assert claimed() == 1
        assert engines.drain(run, slot.slot_id) is EngineState.DRAINING
        assert claimed() == 0
        engines.remove(run, slot.slot_id)
        assert claimed() == 0


def test_one_of_our_own_is_started_again_and_probed_before_it_serves(make_run: Callable[..., Run]) -> None:
    run = make_run(steps=2, prompts=2 * NUM_UNITS, max_staleness=1)
    with trainer_of(run) as publish:
        publish(0)
        with supervised(run):
            wait(lambda: len(completed(run)) == 2 * NUM_UNITS)
            first = only(run).url
            spoil(first, nan_logprobs=1)
            more_prompts(run, NUM_UNITS)
            wait(lambda: num_events(run, "engine.quarantined") == 1)
            assert only(run).slot_id == 1
            wait(lambda: len(completed(run)) == 3 * NUM_UNITS)
            again = only(run)
            assert (again.state, again.reason) == (EngineState.SERVING, None)
            assert again.url != first
            probes = asked_of(again.url)[: engine.NUM_PROBES]
            assert [r["sampling_params"]["max_new_tokens"] for r in probes] == [
                engine.PROBE_TOKENS
            ] * engine.NUM_PROBES
    assert {u.attempts for u in all_units(run)} == {1}
    assert {row["status"] for row in rows_of(run)} <= {"finished", "truncated"}


def test_a_run_all_of_whose_engines_stay_in_quarantine_ends_and_says_why(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(engine_options={"nan_logprobs": "1"})
    monkeypatch.setattr(wanted_engines, "MAX_STRIKES", 0)
    with trainer_of(run) as publish:
        publish(0)
        watched = Supervisor(run, Drain())
        watched.children.clear()
        with pytest.raises(
            WorkerFailedError, match=r"every engine is in quarantine.*log-probability 0 is nan"
        ):
            watched.supervise()
    assert only(run).state is EngineState.QUARANTINED


def num_events(run: Run, name: str) -> int:
    with run.index.read() as connection:
        return events.count_by_name(connection).get(name, 0)


def more_prompts(run: Run, num_prompts: int) -> None:
    """Admit further groups of the prompts that were enqueued, as a replay of the epoch would."""
    with run.index.begin() as connection:
        known = units.listed(connection, run.branch)
        new = [
            units.NewUnit("train", "train", u.segment_id, u.epoch + 1, u.position)
            for u in known[:num_prompts]
        ]
        first_id = units.take_ids(connection, len(new))
        units.admit(connection, run.branch, new, ids=range(first_id, first_id + len(new)))


def wait(condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
    from tests.fault.kill_run import wait_until

    wait_until(condition, seconds=seconds, what="the run to get there")
