"""Workers whose wall clock is ten minutes off: they steal nothing, keep nothing for ever, and judge leases as all others do."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from strawflow.flow import rescue
from strawflow.flow.run import Run
from strawflow.testing.postgres import PostgresServer
from strawflow.testing.runs import SmallRun
from tests.fault.store_worker import (
    Nest,
    Order,
    StoreWorker,
    assert_all_done_once,
    expires_in_s,
    index_time,
    wide_run,
)

pytestmark = pytest.mark.alone

SKEW_S = 600

TTL_S, GRACE_S = 2.5, 0.2

LATE_S = 5.0
"""How much later than it must a loaded machine may take back what it has to."""


@pytest.fixture(scope="module")
def nest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nest]:
    with Nest(tmp_path_factory.mktemp("nest")) as made:
        yield made


def start_skewed(nest: Nest, order: Order, *, skew_s: int) -> StoreWorker:
    """Start a worker under faketime; its monotonic clocks stay the kernel's own, as on a real host with a wrong date."""
    if shutil.which("faketime") is None:
        pytest.fail(
            "the program faketime is missing: install it (Debian: apt-get install faketime), or run `make setup`"
        )
    return nest.start_alone(
        order,
        prefix=["faketime", "-m", "-f", f"{skew_s:+d}s"],
        environment={"FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"},
    )


def assert_skewed(worker: StoreWorker, *, skew_s: int) -> None:
    """Its wall clock is off by so much when it begins, and its monotonic clocks are true."""
    ready = worker.lines("ready")[0]
    assert abs(ready["wall"] - time.time() - skew_s) < 60
    assert abs(ready["uptime"] - time.clock_gettime(time.CLOCK_BOOTTIME)) < 60
    assert abs(ready["monotonic"] - time.monotonic()) < 60


class Skewed:
    """One run with two true workers and one of either skew, each holding two units until told to go on."""

    def __init__(self, small: SmallRun, nest: Nest) -> None:
        self.run, self._folder = small.run, small.run.root
        self.go = self._folder / "go"
        self.true = [nest.start(self._order("true")) for _ in range(2)]
        fast = start_skewed(nest, self._order("fast"), skew_s=SKEW_S)
        slow = start_skewed(nest, self._order("slow"), skew_s=-SKEW_S)
        self.fast, self.slow = fast.itself(), slow.itself()
        assert_skewed(self.fast, skew_s=SKEW_S)
        assert_skewed(self.slow, skew_s=-SKEW_S)
        self.all = [*self.true, self.fast, self.slow]
        for worker in self.all:
            worker.await_line("claimed")

    def let_rescue(self, name: str) -> None:
        """Let a worker (fast, slow) take back what expired, and the other leave off."""
        for each in ("fast", "slow"):
            (self._folder / f"{each}-rescues").unlink(missing_ok=True)
        (self._folder / f"{name}-rescues").touch()

    def _order(self, name: str) -> Order:
        switch = str(self._folder / f"{name}-rescues")
        return Order(str(self._folder), limit=2, max_units=2, holds_until=str(self.go), rescues_while=switch)


def die(run: Run, worker: StoreWorker) -> float:
    """Kill a worker; returns the index time at which its units must be free."""
    worker.kill()
    due_at = index_time(run) + expires_in_s(run, worker.lines("ready")[0]["session_id"]) + GRACE_S
    assert due_at < index_time(run) + TTL_S + GRACE_S + 0.1, "its lease lasts longer than any lease may"
    return due_at


def await_rescue_by(run: Run, rescuer: StoreWorker, *, due_at: float) -> None:
    """Wait for a worker to rescue two units, no sooner than due and not much later, and no other unit meanwhile."""
    while not rescuer.lines("rescued"):
        assert index_time(run) < due_at + LATE_S, "it is held for ever"
        time.sleep(0.02)
    assert index_time(run) > due_at - 0.1
    assert [line["num_units"] for line in rescuer.lines("rescued")] == [2]


def play(small: SmallRun, nest: Nest) -> None:
    """Let workers of one run die in turn, each to be rescued by one whose clock is wrong while all others live on."""
    skewed, run = Skewed(small, nest), small.run
    dying, living = skewed.true

    skewed.let_rescue("fast")
    await_rescue_by(run, skewed.fast, due_at=die(run, dying))
    skewed.let_rescue("slow")
    await_rescue_by(run, skewed.slow, due_at=die(run, skewed.fast))

    due_at = die(run, skewed.slow)
    while not (num_units := rescue.rescue_expired(run)):
        assert index_time(run) < due_at + LATE_S, "it is held for ever"
        time.sleep(0.02)
    assert (num_units, index_time(run) > due_at - 0.1) == (2, True)

    skewed.go.touch()
    living.await_end()
    late = nest.start(Order(str(run.root), limit=8))
    late.await_end()
    assert_all_done_once(run, [*skewed.all, late], num_units=8)


def make(folder: Path, index: dict[str, str]) -> SmallRun:
    settings = {
        "lease.ttl_s": str(TTL_S),
        "lease.heartbeat_s": "0.3",
        "lease.margin_s": "0.2",
        "lease.grace_s": str(GRACE_S),
    }
    folder.mkdir()
    return wide_run(folder, 8, {**settings, **index})


def test_workers_ten_minutes_fast_and_slow_take_nothing_early_and_hold_nothing_for_ever(
    tmp_path: Path, nest: Nest, postgres_server: PostgresServer
) -> None:
    on_postgresql = {"run.index_url": postgres_server.new_url()}
    with (
        make(tmp_path / "sqlite", {}) as first,
        make(tmp_path / "postgresql", on_postgresql) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        # Side by side: they mostly wait.
        for played in [pool.submit(play, small, nest) for small in (first, second)]:
            played.result()
