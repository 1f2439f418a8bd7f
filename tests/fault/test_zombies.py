"""Workers that freeze, die, or work longer than a lease lasts: what they held comes back in time, and late writes are void."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from strawflow.flow import assemble, rescue
from strawflow.flow.check import check
from strawflow.flow.run import Run
from strawflow.flow.status import snapshot
from strawflow.index import events
from strawflow.states import UnitState
from strawflow.testing.postgres import PostgresServer
from strawflow.testing.runs import SmallRun, small_run
from tests.fault.store_worker import (
    Nest,
    Order,
    StoreWorker,
    assert_all_done_once,
    expires_in_s,
    granted,
    index_time,
    num_named_rows,
    state_of,
    wide_run,
)

pytestmark = pytest.mark.alone

TTL_S, GRACE_S = 1.0, 0.2

LEASE = {
    "lease.ttl_s": str(TTL_S),
    "lease.heartbeat_s": "0.2",
    "lease.margin_s": "0.1",
    "lease.grace_s": str(GRACE_S),
}

NO_HEARTBEAT = {"lease.heartbeat_s": "3600"}
"""For workers that stop themselves: the stop shall not catch the heartbeat inside its transaction."""

LATE_S = 5.0
"""How much later than it must a loaded machine may take back what it has to."""


@pytest.fixture(scope="module")
def nest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nest]:
    with Nest(tmp_path_factory.mktemp("nest")) as made:
        yield made


@pytest.fixture
def settings(settings: dict[str, str]) -> dict[str, str]:
    return {**LEASE, **settings}


def take_back(run: Run, *, num_units: int) -> None:
    """Rescue until so many units came back."""
    until = time.monotonic() + TTL_S + GRACE_S + LATE_S
    back = 0
    while (back := back + rescue.rescue_expired(run)) < num_units:
        assert time.monotonic() < until, f"{back} of {num_units} units came back"
        time.sleep(0.02)


def num_rows_of_results(small: SmallRun) -> dict[int, int]:
    """Return {completed unit: how many trajectory rows are its result}."""
    session = small.session("rollout")
    offered = assemble.offered(session, purpose="train", limit=1000)
    return {u: rows.num_rows for u, rows in assemble.read_trajectories(session, offered).items()}


def refused_units(run: Run) -> list[tuple[str | None, list[int]]]:
    """Return (session, units) of what the event log counts as handed in too late."""
    with run.index.read() as connection:
        told = events.latest(connection, limit=1000, name_prefix="units.refused")
    return [(event["session_id"], event["facts"]["units"]) for event in told]


# ---- frozen workers; each claim is a transaction of its own, so the completion's is the second


def quiet_run(folder: Path, settings: dict[str, str]) -> SmallRun:
    """Create a small run in which no session lives, so that only a worker's can expire."""
    small = small_run(folder, settings=settings)
    for session in small.sessions.values():
        session.end()
    small.sessions.clear()
    return small


@pytest.fixture
def frozen_settings(settings: dict[str, str]) -> dict[str, str]:
    return {**settings, **NO_HEARTBEAT}


@pytest.mark.parametrize("frozen", ["holding its leases", "between its bytes and their transaction"])
def test_what_a_frozen_worker_writes_on_waking_is_refused_and_named_by_nothing(
    tmp_path: Path, nest: Nest, frozen_settings: dict[str, str], frozen: str
) -> None:
    with quiet_run(tmp_path, frozen_settings) as small:
        holds = frozen == "holding its leases"
        order = Order(str(small.run.root), limit=3, max_units=3)
        zombie = nest.start(
            replace(order, stops_holding=True) if holds else replace(order, fault="commit.before:2:stop")
        )
        zombie.await_stop()
        assert granted([zombie]) == [(1, 1), (2, 1), (3, 1)]
        take_back(small.run, num_units=3)
        assert rescue.recover_packs(small.session("supervise")) == (0 if holds else 1)
        taken = small.claim(8)
        assert [(g.unit_id, g.fence) for g in taken] == [(n, 2 if n <= 3 else 1) for n in range(1, 9)]
        small.complete(taken[:2])

        zombie.signal(signal.SIGCONT)
        zombie.await_end()
        assert zombie.lines("failed")[0]["error"] == "LeaseLostError"
        assert zombie.lines("completed") == []
        assert refused_units(small.run) == [(zombie.lines("ready")[0]["session_id"], [1, 2, 3])]
        small.complete(taken[2:])
        assert num_rows_of_results(small) == dict.fromkeys(range(1, 9), 2)
        assert num_named_rows(small.run) == 8 * 2
        assert check(small.run).findings == []


def test_a_worker_frozen_after_its_commit_wakes_to_its_receipt_though_it_was_declared_lost(
    tmp_path: Path, nest: Nest, frozen_settings: dict[str, str]
) -> None:
    with quiet_run(tmp_path, frozen_settings) as small:
        order = Order(str(small.run.root), limit=4, max_units=4, resends=True)
        zombie = nest.start(replace(order, fault="commit.after:2:stop"))
        zombie.await_stop()
        session_id = zombie.lines("ready")[0]["session_id"]
        wait_until(lambda: expires_in_s(small.run, session_id) < -GRACE_S)
        assert rescue.rescue_expired(small.run) == 0  # what it held is completed: nothing is offered twice
        assert rescue.recover_packs(small.session("supervise")) == 1
        zombie.signal(signal.SIGCONT)
        zombie.await_end()
        assert zombie.lines("completed")[0]["accepted"] == [1, 2, 3, 4]
        assert zombie.lines("resent")[0]["is_equal"]
        assert small.sample() == 4
        assert num_rows_of_results(small) == dict.fromkeys(range(1, 9), 2)


def wait_until(holds: Callable[[], bool], *, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "what was waited for did not happen"
        time.sleep(0.02)


def test_a_worker_frozen_inside_a_transaction_is_seen_by_every_reader_and_holds_nothing_once_it_is_killed(
    tmp_path: Path, nest: Nest, frozen_settings: dict[str, str]
) -> None:
    with quiet_run(tmp_path, frozen_settings) as small:
        zombie = nest.start(Order(str(small.run.root), limit=3, max_units=3, stops_inside=True))
        zombie.await_stop()
        session_id = zombie.lines("ready")[0]["session_id"]
        wait_until(lambda: expires_in_s(small.run, session_id) < -GRACE_S)
        shown = {s.session_id: s.pid for s in snapshot(small.run).sessions if s.expires_in_s < -GRACE_S}
        assert shown[session_id] == zombie.pid
        zombie.kill()
        take_back(small.run, num_units=3)
        assert small.sample() == 8
        assert num_rows_of_results(small) == dict.fromkeys(range(1, 9), 2)


def test_a_worker_frozen_inside_a_transaction_on_postgresql_loses_its_locks_with_its_lease(
    tmp_path: Path, nest: Nest, postgres_server: PostgresServer
) -> None:
    with quiet_run(tmp_path, {**LEASE, **NO_HEARTBEAT, "run.index_url": postgres_server.new_url()}) as small:
        zombie = nest.start(Order(str(small.run.root), limit=3, max_units=3, stops_inside=True))
        zombie.await_stop()
        with ThreadPoolExecutor(1) as pool:
            rescued = pool.submit(take_back, small.run, num_units=3)
            try:
                rescued.result(timeout=TTL_S + GRACE_S + 3.0)
            finally:
                zombie.kill()


# ---- dead workers


def test_units_of_a_killed_worker_come_back_after_its_lease_and_grace_not_before_and_not_much_later(
    tmp_path: Path, nest: Nest, settings: dict[str, str]
) -> None:
    with small_run(tmp_path, settings=settings) as small:
        worker = nest.start(Order(str(small.run.root), limit=3, holds_until="/never"))
        worker.await_line("claimed")
        worker.kill()
        killed_at = index_time(small.run)
        session_id = worker.lines("ready")[0]["session_id"]
        due_at = index_time(small.run) + expires_in_s(small.run, session_id) + GRACE_S
        assert due_at < killed_at + TTL_S + GRACE_S + 0.1
        while not (num_units := rescue.rescue_expired(small.run)):
            assert index_time(small.run) < due_at + LATE_S
            time.sleep(0.02)
        assert num_units == 3
        assert index_time(small.run) > due_at - 0.1
        assert small.sample() == 8


# ---- leases that would not last


def test_ten_units_of_a_fifth_of_a_lease_each_are_kept_to_the_last_and_run_once(
    tmp_path: Path, nest: Nest
) -> None:
    ttl_s = 2.5
    with wide_run(tmp_path, 10, {**LEASE, "lease.ttl_s": str(ttl_s)}) as small:
        slow = nest.start(Order(str(small.run.root), limit=10, unit_s=ttl_s / 5))
        slow.await_line("claimed")
        switch = tmp_path / "rescues"
        switch.touch()
        other = nest.start(Order(str(small.run.root), limit=10, rescues_while=str(switch)))
        slow.await_end()
        other.await_end()
        lines = slow.lines("completed")
        assert [line["accepted"] for line in lines] == [[n] for n in range(1, 11)]
        assert lines[-1]["at"] - slow.lines("claimed")[0]["at"] > 1.9 * ttl_s
        assert [line["event"] for line in other.lines()] == ["ready", "ended"]
        assert_all_done_once(small.run, [slow], num_units=10)
        assert granted([slow]) == [(n, 1) for n in range(1, 11)]


# ---- units that kill


def test_a_unit_that_always_kills_its_worker_is_set_aside_with_its_error_and_its_neighbours_are_done(
    tmp_path: Path, nest: Nest, settings: dict[str, str]
) -> None:
    culprit = 3
    lives: list[StoreWorker] = []
    with small_run(tmp_path, settings={**settings, "lease.ttl_s": "600"}) as small:
        while state_of(small.run, culprit).state is not UnitState.FAILED:
            assert len(lives) < 40, "the culprit was not found out"
            worker = nest.start(Order(str(small.run.root), limit=4, poison=(culprit,)))
            lives.append(worker)
            worker.await_end()
            rescue.declare_dead_processes_lost(small.run)
        lives.append(nest.start(Order(str(small.run.root), limit=4)))
        lives[-1].await_end()
        unit = state_of(small.run, culprit)
        assert unit.attempts == small.run.config.rollout.max_attempts
        assert unit.last_error == f"its process {lives[-2].pid} is gone"
        # While it could be another's doing its attempt was given back; alone, each counts when it is granted.
        assert attempts_of(lives, culprit)[-unit.attempts :] == list(range(1, unit.attempts + 1))
        assert num_rows_of_results(small) == {n: 2 for n in range(1, 9) if n != culprit}
        assert all(state_of(small.run, n).state is UnitState.COMPLETED for n in range(1, 9) if n != culprit)
        assert check(small.run).findings == []


def attempts_of(workers: list[StoreWorker], unit_id: int) -> list[int]:
    """Return the attempt that each grant of a unit counted as."""
    return [
        attempts
        for w in workers
        for line in w.lines("claimed")
        for unit, _, attempts in line["units"]
        if unit == unit_id
    ]
