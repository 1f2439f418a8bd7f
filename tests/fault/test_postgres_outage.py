"""PostgreSQL killed and restarted under working processes: they are told, they retry, and every unit is completed once."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from strawflow.flow import rescue
from strawflow.testing.postgres import PostgresServer, running_server
from tests.fault.store_worker import Nest, Order, StoreWorker, assert_all_done_once, wide_run

pytestmark = pytest.mark.alone

HELD_UP = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server that syncs, so that what it acknowledged outlives its death."""
    with running_server(syncs=True, settings={"shared_buffers": "16MB"}) as server:
        yield server


@pytest.fixture(scope="module")
def nest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nest]:
    with Nest(tmp_path_factory.mktemp("nest")) as made:
        yield made


def outage(server: PostgresServer, how: signal.Signals, workers: list[StoreWorker]) -> None:
    """End the server in the middle of the work, let every worker see it, and start it again."""
    with each_more(workers, "completed"):
        pass
    with each_more(workers, "error"):
        server.stop(how)
    server.start()


def outage_between_commit_and_reply(server: PostgresServer, workers: list[StoreWorker]) -> None:
    """Kill the server while every worker's commit is done and flushed, and not yet answered.

    A commit that has to wait for a standby which does not exist stays in that very state.
    """
    with each_more(workers, "completed"):
        pass
    with each_more(workers, "error"), server.connect() as connection:
        connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        connection.execute("SELECT pg_reload_conf()")
        deadline = time.monotonic() + 60
        while len(connection.execute(HELD_UP).fetchall()) < len(workers):
            assert time.monotonic() < deadline, "the commits were not held up"
            time.sleep(0.01)
        # Those may be heartbeats, all in step: meanwhile every worker comes to a commit of its own.
        time.sleep(0.5)
        connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
        server.stop(signal.SIGKILL)
    server.start()


@contextmanager
def each_more(workers: list[StoreWorker], event: str) -> Iterator[None]:
    """Wait at the end of the block until each worker told of an event once more than at its start."""
    seen = [len(w.lines(event)) for w in workers]
    yield
    for worker, number in zip(workers, seen, strict=True):
        worker.await_line(event, number=number + 1)


def campaign(
    tmp_path: Path, nest: Nest, server: PostgresServer, ends: list[signal.Signals | None], *, num_units: int
) -> None:
    settings = {"run.index_url": server.new_url(), "lease.ttl_s": "600"}
    with wide_run(tmp_path, num_units, settings) as small:
        order = Order(str(small.run.root), limit=3, retry_s=60, resends=True)
        workers = [nest.start(order) for _ in range(4)]
        for how in ends:
            if how is None:
                outage_between_commit_and_reply(server, workers)
            else:
                outage(server, how, workers)
        for worker in workers:
            worker.await_end(seconds=600)  # that none hangs; how quick they are depends on what else runs
            assert worker.lines("failed") == []
            assert all(line["is_equal"] for line in worker.lines("resent"))
            assert len(worker.lines("resent")) == len(worker.lines("completed"))
        told = Counter(line["error"] for w in workers for line in w.lines("error"))
        assert set(told) == {"StorageError", "CommitUnknownError"}
        print(dict(told), "sessions given up:", sum(len(w.lines("gave_up")) for w in workers))
        rescue.recover_packs(small.session("supervise"))
        assert_all_done_once(small.run, workers, num_units=num_units)


def test_a_server_killed_and_restarted_in_the_middle_of_the_work_loses_and_repeats_nothing(
    tmp_path: Path, nest: Nest, own_server: PostgresServer
) -> None:
    campaign(tmp_path, nest, own_server, [signal.SIGKILL, None, signal.SIGINT], num_units=600)


@pytest.mark.long
def test_a_server_killed_and_restarted_twenty_times_loses_and_repeats_nothing(
    tmp_path: Path, nest: Nest, own_server: PostgresServer
) -> None:
    ends = [signal.SIGKILL, None, signal.SIGINT, signal.SIGQUIT] * 5
    campaign(tmp_path, nest, own_server, ends, num_units=12000)
