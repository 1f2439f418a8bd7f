"""Groups leased ahead: one begins while another's results are stored, and none is kept from other workers or from newer weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest

from strawflow.flow import complete
from strawflow.flow.claim import Grant, Prompt
from strawflow.flow.run import Run
from strawflow.index import units
from strawflow.index.units import COLUMN_NAMES, to_unit
from strawflow.sampling import SamplingProfile
from strawflow.states import UnitState
from strawflow.testing.fake_engine import FakeEngine, FakeEngineOptions, Faults
from strawflow_workers.rollout import loop, reserve
from strawflow_workers.rollout.generate import UnitGenerator
from strawflow_workers.rollout.reserve import Reserve
from tests.integration.rollout_runs import Worker, completed, trainer_of

PROMPTS = 40
IN_FLIGHT = 4
MANY: dict[str, Any] = {
    "prompts": PROMPTS,
    "steps": PROMPTS // 4,
    "max_staleness": PROMPTS,
    "units_in_flight": IN_FLIGHT,
    "engine_options": {"token-s": "0.01"},
}


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "AFTER_S", 0.0)


def leased(run: Run) -> int:
    with run.index.read() as connection:
        return len(units.listed(connection, run.branch, state=UnitState.LEASED))


@pytest.mark.usefixtures("_at_once")
def test_a_group_begins_while_the_results_of_another_are_stored(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_stored, ahead = 0, 0
    begun: list[UnitGenerator] = []
    really_complete, really_generate = complete.complete, UnitGenerator.generate

    def slow_complete(session: Any, results: Any, **others: Any) -> Any:
        nonlocal num_stored, ahead
        time.sleep(0.3)
        # What began so far beyond what was stored before and what may be in flight: begun while these are stored.
        ahead = max(ahead, len(begun) - num_stored - IN_FLIGHT)
        answer = really_complete(session, results, **others)
        num_stored += len(results)
        return answer

    async def noted(self: UnitGenerator, *args: Any) -> Any:
        begun.append(self)
        return await really_generate(self, *args)

    monkeypatch.setattr(complete, "complete", slow_complete)
    monkeypatch.setattr(UnitGenerator, "generate", noted)
    run = make_run(**MANY)
    most = 0
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:

            def all_done() -> bool:
                nonlocal most
                most = max(most, leased(run))
                return len(completed(run)) == PROMPTS

            worker.wait(all_done)
    assert ahead >= IN_FLIGHT // 2
    # In flight, in reserve, and as many again at most that wait for their rewards; those not stored yet beside them.
    assert IN_FLIGHT < most <= 4 * IN_FLIGHT
    assert {u.attempts for u in completed(run)} == {1}


@pytest.mark.usefixtures("_at_once")
def test_a_reserve_is_given_back_before_newer_weights_are_loaded(make_run: Callable[..., Run]) -> None:
    run = make_run(**MANY)
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:
            worker.wait(lambda: len(completed(run)) >= 8 and leased(run) > IN_FLIGHT)
            publish(1)
            worker.wait(lambda: len(completed(run)) == PROMPTS)
    # One that was given back has its attempt refunded.
    assert {u.attempts for u in completed(run)} == {1}


@pytest.mark.usefixtures("_at_once")
def test_a_drain_gives_the_reserve_back(make_run: Callable[..., Run]) -> None:
    run = make_run(**MANY, partial_rollout=False)
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:
            worker.wait(lambda: len(completed(run)) >= 4 and leased(run) > IN_FLIGHT)
        with run.index.read() as connection:
            found = units.listed(connection, run.branch)
    assert {(u.state, u.attempts) for u in found} == {(UnitState.COMPLETED, 1), (UnitState.READY, 0)}


ENOUGH = 4 * IN_FLIGHT
"""Some are left when a worker has finished its first groups and leased all it can."""


@contextmanager
def worker_with_all_it_can_lease(run: Run, engine: FakeEngine) -> Iterator[Worker]:
    """A worker whose first groups are done, and as many each in flight (for ever) and in reserve."""
    engine.set_faults(delay_s=1.0)
    with Worker(run, engine_url=engine.url) as worker:
        worker.wait(lambda: engine.num_generated >= IN_FLIGHT)
        engine.set_faults(delay_s=600.0)
        worker.wait(lambda: leased(run) == 2 * IN_FLIGHT)
        yield worker


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("more", [{"prompts": ENOUGH, "steps": ENOUGH // 4}, {"max_backlog": ENOUGH}])
def test_a_reserve_is_given_back_once_nothing_is_left_for_others(
    make_run: Callable[..., Run], more: dict[str, int]
) -> None:
    run = make_run(**{**MANY, **more})
    with trainer_of(run) as publish, FakeEngine() as slow, FakeEngine() as quick:
        publish(0)
        with (
            worker_with_all_it_can_lease(run, slow),
            Worker(run, engine_url=quick.url) as other,
        ):
            other.wait(lambda: len(completed(run)) == ENOUGH - IN_FLIGHT, seconds=15)


@pytest.mark.usefixtures("_at_once")
def test_a_reserve_is_given_back_while_nothing_is_begun_for_errors_of_the_engine(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(**MANY, max_attempts=100)
    slow = FakeEngineOptions(faults=Faults(delay_s=0.3))
    with trainer_of(run) as publish, FakeEngine(slow) as engine:
        publish(0)
        with Worker(run, engine_url=engine.url) as worker:
            worker.wait(lambda: leased(run) > IN_FLIGHT)
            engine.set_faults(error_rate_every_nth=1)
            worker.wait(lambda: leased(run) == 0, seconds=15)


@pytest.mark.usefixtures("_at_once")
def test_a_drain_gives_the_reserve_back_before_it_waits_for_the_engine(make_run: Callable[..., Run]) -> None:
    run = make_run(**MANY)
    with trainer_of(run) as publish, FakeEngine() as engine:
        publish(0)
        with worker_with_all_it_can_lease(run, engine) as worker:
            engine.set_faults(stuck=True)  # aborts are acknowledged and end nothing
            worker.drain.request()
            worker.wait(lambda: leased(run) == IN_FLIGHT, seconds=loop.BREAK_OFF_S / 2)
            engine.set_faults(stuck=False)


def grant(unit_id: int, *, purpose: Literal["train", "eval"] = "train", continuation: Any = None) -> Grant:
    row = dict.fromkeys(COLUMN_NAMES, 0) | {"unit_id": unit_id, "state": UnitState.LEASED}
    profile = SamplingProfile(
        purpose=purpose, num_samples=1, temperature=1.0, top_p=1.0, max_response_tokens=8
    )
    prompt = Prompt("p", "text", None, None, None)
    return Grant(to_unit([row[name] for name in COLUMN_NAMES]), prompt, profile, continuation)


def ids(grants: list[Grant]) -> list[int]:
    return [g.unit_id for g in grants]


class Clock:
    """A clock that is set by hand."""

    at = 0.0

    def __call__(self) -> float:
        return self.at


def test_nothing_is_leased_ahead_until_there_has_been_plenty_for_a_while() -> None:
    clock = Clock()
    ahead = Reserve(4, clock)
    assert ahead.room == 0
    clock.at = reserve.AFTER_S
    assert ahead.room == 4
    begin, back = ahead.sort([grant(n) for n in range(6)], asked=6, room=3)
    assert (ids(begin), back, len(ahead), ahead.room) == ([0, 1, 2], [], 3, 1)
    begin, back = ahead.sort([grant(6)], asked=2, room=1)  # less than was asked for: others may need them
    assert (ids(begin), ids(back), len(ahead), ahead.room) == ([3], [4, 5, 6], 0, 0)


def test_evaluation_and_saved_progress_do_not_wait() -> None:
    ahead = Reserve(4, Clock())
    granted = [grant(1), grant(2, purpose="eval"), grant(3, continuation=object()), grant(4)]
    begin, back = ahead.sort(granted, asked=4, room=1)
    assert (ids(begin), back) == ([2, 3], [])
    taken = [ahead.take(), ahead.take(), ahead.take()]
    assert [g and g.unit_id for g in taken] == [1, 4, None]
