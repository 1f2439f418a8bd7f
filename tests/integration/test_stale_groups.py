"""What becomes of groups that waited too long: decided when their batch is planned, once, and told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.index import consumers, events, units
from strawflow.states import UnitState
from strawflow_workers.assemble.loop import AssemblerLoop
from strawflow_workers.drain import Drain
from tests.integration.rollout_runs import NUM_UNITS, Worker, completed, trainer_of


@contextmanager
def assembler(run: Run) -> Iterator[None]:
    """An assembler in a thread of this process."""
    drain = Drain()

    def work() -> None:
        with WorkerSession(run, "assemble") as session:
            AssemblerLoop(session, drain).run()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        drain.request()
        thread.join(timeout=30)
        assert not thread.is_alive()


def set_planned(run: Run, step: int) -> None:
    """Say that `step` is planned: as if as many batches had been trained from other groups."""
    with run.index.begin() as connection:
        connection.exec_driver_sql(f"UPDATE consumers SET planned = {step}")


def fates(run: Run) -> list[tuple[str, str | None]]:
    with run.index.read() as connection:
        return [(a.outcome, a.reason) for a in consumers.assignments_of(connection, run.branch, run.consumer)]


def listed(run: Run) -> list[units.Unit]:
    with run.index.read() as connection:
        return units.listed(connection, run.branch)


@pytest.mark.parametrize("max_requeues", [0, 1])
def test_stale_groups_are_sampled_afresh_as_often_as_allowed_and_then_dropped(
    make_run: Callable[..., Run], max_requeues: int
) -> None:
    run = make_run(steps=4, assemble={"max_requeues": max_requeues})
    with trainer_of(run) as publish, Worker(run) as worker:
        publish(0)
        for turn in range(max_requeues + 1):
            worker.wait(lambda: len(completed(run)) >= NUM_UNITS)
            set_planned(run, turn + 1)  # sampled from weights of step `turn`: one too old now
            with assembler(run):
                if turn < max_requeues:
                    worker.wait(lambda: all(u.requeues for u in listed(run)[:NUM_UNITS]))
                    publish(turn + 1)
                else:
                    worker.wait(lambda: len(fates(run)) == NUM_UNITS)
    assert fates(run) == [("dropped", "stale")] * NUM_UNITS
    assert {u.requeues for u in listed(run)[:NUM_UNITS]} == {max_requeues}
    with run.index.read() as connection:
        told = events.latest(connection, limit=100, name_prefix="unit.")
    first = {u.unit_id for u in listed(run)[:NUM_UNITS]}
    counts = [
        sum(e["name"] == name and e["unit_id"] in first for e in told)
        for name in ("unit.requeued", "unit.dropped")
    ]
    assert counts == [max_requeues * NUM_UNITS, NUM_UNITS]


@pytest.mark.parametrize("policy", ["mask", "train"])
def test_by_policy_groups_with_stale_tokens_are_planned(make_run: Callable[..., Run], policy: str) -> None:
    run = make_run(steps=4, assemble={"stale": policy})
    with trainer_of(run) as publish, Worker(run) as worker:
        publish(0)
        worker.wait(lambda: len(completed(run)) >= NUM_UNITS)
        set_planned(run, 1)
        with assembler(run):
            worker.wait(lambda: bool(fates(run)))
    assert {u.state for u in completed(run)} == {UnitState.COMPLETED}
    with run.index.read() as connection:
        (told,) = events.latest(connection, limit=5, name_prefix="batch.planned")
    assert told["facts"]["max_staleness"] == 1
    assert (told["facts"]["num_masked_tokens"] > 0) == (policy == "mask")
