"""Retention, sweep, compaction and recovery in a tight loop, without any grace, beside a trainer and workers that are killed."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from strawflow.flow import rescue
from strawflow.flow.check import check
from strawflow.flow.compact import compact
from strawflow.flow.retain import policy_of, retain
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.flow.sweep import sweep
from strawflow.index.batches import Batch
from strawflow.testing.invariants import check_exactly_once
from strawflow.testing.runs import SmallRun, small_run
from tests.contract.stored import end_sessions, pack_files, upkeep
from tests.fault.store_worker import Nest, Order, StoreWorker

pytestmark = pytest.mark.alone

STEPS = 9
PROMPTS = 8

SETTINGS = {
    "rollout.prompts_per_step": str(PROMPTS),
    "trainer.steps": str(STEPS),
    "storage.sweep_grace_s": "0",
    "storage.keep_checkpoints": "1",
    "storage.keep_steps": "1",
}


class Upkeep(threading.Thread):
    """Goes round and round until it is told to stop; what went wrong is kept."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run, self._stop_asked = run, threading.Event()
        self.num_rounds = self.num_items = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with upkeep(self._run) as session:
                while not self._stop_asked.is_set():
                    self._round(session)
        except BaseException as error:  # the test looks at it
            self.error = error

    def _round(self, session: WorkerSession) -> None:
        rescue.declare_dead_processes_lost(self._run)
        rescue.recover_packs(session)
        policy = replace(policy_of(self._run.config), event_age_s=0.5)
        self.num_items += len(retain(session, policy).items)
        self.num_items += len(compact(session, min_live=1.0).items)
        self.num_items += len(sweep(session).items)
        self.num_rounds += 1

    def stop(self) -> None:
        self._stop_asked.set()
        self.join()
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("dialect", ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def test_upkeep_in_a_tight_loop_takes_nothing_from_a_run_whose_workers_are_killed(
    tmp_path: Path, request: pytest.FixtureRequest, dialect: str
) -> None:
    server = request.getfixturevalue("postgres_server") if dialect == "postgresql" else None
    settings = {**SETTINGS, **({"run.index_url": server.new_url()} if server else {})}
    with Nest(tmp_path) as nest, small_run(tmp_path, num_prompts=64, settings=settings) as small:
        beside = Upkeep(small.run)
        beside.start()
        try:
            train_beside(small, nest)
        finally:
            beside.stop()
        assert beside.num_rounds > 3
        end_sessions(small)
        with upkeep(small.run) as session:
            rescue.declare_dead_processes_lost(small.run)
            rescue.recover_packs(session)
            retain(session, policy_of(small.run.config))
            sweep(session)
            compact(session)
            sweep(session)
        fates = check_exactly_once(small.run, finished=True)
        assert len(fates) == STEPS * PROMPTS
        assert set(fates.values()) == {"trained"}
        report = check(small.run)
        assert report.findings == [], report.findings
        for kind in ("trajectory", "batch", "history", "event"):
            assert len(pack_files(small.run, kind)) <= 4, sorted(pack_files(small.run))


def train_beside(small: SmallRun, nest: Nest) -> None:
    """Train every step; a worker is killed every third step and another started."""

    def start() -> StoreWorker:
        return nest.start(Order(str(small.run.root), limit=3, max_units=10**6, retry_s=30))

    workers = [start(), start()]
    for step in range(1, STEPS + 1):
        assert await_plan(small).step == step
        small.train(step)
        if step % 3 == 0:
            workers.pop(0).kill()
            workers.append(start())
    for worker in workers:
        worker.kill()
        assert [line for line in worker.lines() if line["event"] == "failed"] == []


def await_plan(small: SmallRun, *, seconds: float = 60) -> Batch:
    deadline = time.monotonic() + seconds
    while (batch := small.plan()) is None:
        assert time.monotonic() < deadline, "too few groups are offered"
        time.sleep(0.02)
    return batch
