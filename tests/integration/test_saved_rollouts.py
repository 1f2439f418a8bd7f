"""What was generated of groups in flight is saved while it is generated: a worker that is killed loses no more than that, and
whoever goes on asks the engine only for the rest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from strawflow import faults
from strawflow.flow import rescue
from strawflow.flow.run import Run
from strawflow.index import continuations, events, units
from strawflow.index import tables as t
from strawflow.states import UnitState
from strawflow.testing.fake_engine import FakeEngine, FakeEngineOptions, Faults
from tests.integration.rollout_runs import NUM_UNITS, Worker, completed, rows_of, trainer_of
from tests.integration.test_continuations import assert_drawn_without_a_break

LONG = 60


@contextmanager
def slow_engine(**faults: Any) -> Iterator[FakeEngine]:
    """Run an engine whose responses all have LONG tokens of 30 ms, told of four at a time."""
    options = FakeEngineOptions(
        weight_version="unknown",
        mean_tokens=100_000,
        stream_interval=4,
        faults=Faults(**{"token_s": 0.03, **faults}),
    )
    with FakeEngine(options) as engine:
        yield engine


def saved_tokens(run: Run) -> dict[int, int]:
    """Return how many tokens are saved of each unit."""
    with run.index.read() as connection:
        found = units.listed(connection, run.branch)
    return {u.unit_id: u.num_tokens or 0 for u in found if u.state is not UnitState.COMPLETED}


def num_records(run: Run) -> int:
    with run.index.read() as connection:
        ids = [u.unit_id for u in units.listed(connection, run.branch)]
        return sum(len(chain) for chain in continuations.find(connection, ids).values())


def asked(engine: FakeEngine) -> list[dict[str, Any]]:
    bodies: list[dict[str, Any]] = engine.answer("GET", "/requests", None)[1]
    return [b for b in bodies if b["sampling_params"]["max_new_tokens"] > 1]


@pytest.mark.parametrize(
    ("bound", "fault"),
    [({"save_every_s": 0.2}, ""), ({"save_every_s": 0, "save_every_tokens": 8}, "rollout.after_save:4")],
)
def test_a_killed_worker_loses_no_more_than_the_tokens_since_the_last_save(
    make_run: Callable[..., Run], bound: dict[str, Any], fault: str
) -> None:
    run = make_run(samples_per_prompt=1, max_response_tokens=LONG, stream_interval=4, **bound)
    with slow_engine() as engine, trainer_of(run) as publish:
        publish(0)
        command = [sys.executable, "-m", "strawflow.cli.main", "worker", "rollout", str(run.root)]
        environment = {**os.environ, faults.VARIABLE: fault}
        process = subprocess.Popen([*command, "--engine-url", engine.url], env=environment)
        deadline = time.monotonic() + 40
        while process.poll() is None and (fault or num_records(run) < 2 * NUM_UNITS):
            assert time.monotonic() < deadline, "nothing was saved"
            time.sleep(0.02)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        saved = saved_tokens(run)
        num_before = len(asked(engine))
        assert num_before == NUM_UNITS
        assert all(0 < saved[unit_id] < LONG for unit_id in list(saved)[:NUM_UNITS])
        rescue.rescue_all(run)
        with Worker(run, engine_url=engine.url) as worker:
            worker.wait(lambda: len(completed(run)) >= NUM_UNITS)
        again = asked(engine)[num_before:][:NUM_UNITS]
    # The very tokens: what is asked for is what was not saved.
    assert sorted(LONG - b["sampling_params"]["max_new_tokens"] for b in again) == sorted(
        list(saved.values())[:NUM_UNITS]
    )
    assert num_records(run) == 0
    for row in rows_of(run):
        assert len(row["response_tokens"]) == LONG
        assert_drawn_without_a_break(row)
    with run.index.read() as connection:
        told = {e["name"] for e in events.latest(connection, limit=1000)}
    assert "units.saved" in told


def test_an_answer_that_breaks_off_in_the_middle_is_gone_on_with_from_where_it_broke(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(
        samples_per_prompt=1, max_response_tokens=LONG, stream_interval=4, save_every_s=30, max_attempts=20
    )
    with slow_engine(token_s=0.005, cut_stream_after=24) as engine, trainer_of(run) as publish:
        publish(0)
        with Worker(run, engine_url=engine.url) as worker:
            worker.wait(lambda: len(completed(run)) >= NUM_UNITS)
        lengths = {b["sampling_params"]["max_new_tokens"] for b in asked(engine)}
    assert lengths == {LONG, LONG - 24, LONG - 48}
    for row in rows_of(run):
        assert len(row["response_tokens"]) == LONG
        assert_drawn_without_a_break(row)


def test_a_worker_whose_unit_others_hold_gives_up_on_it(make_run: Callable[..., Run]) -> None:
    run = make_run(samples_per_prompt=1, max_response_tokens=LONG, stream_interval=4, save_every_s=0.1)
    with slow_engine() as engine, trainer_of(run) as publish:
        publish(0)
        with Worker(run, engine_url=engine.url) as worker:
            worker.wait(lambda: num_records(run) >= NUM_UNITS)
            with run.index.begin() as connection:
                (first, *_) = units.listed(connection, run.branch, state=UnitState.LEASED)
                later = {"fence": first.fence + 1}  # as if it had been lost and given to another
                connection.execute(t.units.update().where(t.units.c.unit_id == first.unit_id).values(later))
            worker.wait(lambda: len(completed(run)) >= NUM_UNITS - 1)
    assert first.unit_id not in {u.unit_id for u in completed(run)}


def test_an_attached_engine_that_would_repeat_whole_responses_is_not_asked_to_stream(
    make_run: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(samples_per_prompt=1, max_response_tokens=20, stream_interval=4, save_every_s=0.1)
    options = FakeEngineOptions(weight_version="unknown", mean_tokens=100_000, tells_only_new=False)
    with FakeEngine(options) as engine, trainer_of(run) as publish:
        publish(0)
        with Worker(run, engine_url=engine.url) as worker:
            worker.wait(lambda: len(completed(run)) >= NUM_UNITS)
        assert not any(b["stream"] for b in asked(engine))
    assert "start it with --incremental-streaming-output" in caplog.text


def test_without_partial_rollout_nothing_is_saved_or_streamed(make_run: Callable[..., Run]) -> None:
    run = make_run(
        samples_per_prompt=1,
        max_response_tokens=20,
        stream_interval=4,
        save_every_s=0.1,
        partial_rollout=False,
    )
    with slow_engine() as engine, trainer_of(run) as publish:
        publish(0)
        with Worker(run, engine_url=engine.url) as worker:
            worker.wait(lambda: len(completed(run)) >= NUM_UNITS)
        assert not any(b["stream"] for b in asked(engine))
    assert not list(run.root.glob("packs/progress/*"))


def test_nothing_is_saved_of_an_answer_whose_end_is_garbage(make_run: Callable[..., Run]) -> None:
    run = make_run(
        samples_per_prompt=2,
        max_response_tokens=12,
        stream_interval=4,
        save_every_s=0.01,
        quarantine_after=0,
        steps=1,
    )
    # Only the last chunk tells that weights of nobody sampled it: its tokens have no versions then.
    with slow_engine(odd_version=1, token_s=0.02) as engine, trainer_of(run) as publish:
        publish(0)
        with Worker(run, engine_url=engine.url) as worker:
            worker.wait(lambda: len(completed(run)) == NUM_UNITS)
    rows = rows_of(run)
    assert {row["status"] for row in rows} == {"failed"}
    assert all("of nobody" in row["failure"] for row in rows)
    assert num_records(run) == 0
