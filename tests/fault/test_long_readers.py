"""Snapshots held open for long: writers go on at their pace, and what piled up is given back once the reader is gone."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from strawflow.flow.check import check
from strawflow.index import units
from strawflow.states import UnitState
from strawflow.testing.postgres import PostgresServer
from strawflow.testing.runs import SmallRun
from tests.fault.store_worker import (
    REPOSITORY,
    Nest,
    Order,
    StoreWorker,
    accepted,
    wide_run,
)

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def nest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nest]:
    with Nest(tmp_path_factory.mktemp("nest")) as made:
        yield made


# ---- SQLite: the write-ahead log

CHECKPOINT_BYTES = 4_500_000
"""Somewhat more than SQLite lets the log grow to before it checkpoints by itself (1000 pages of 4096 bytes)."""

READER = """
import sys
from pathlib import Path
from strawflow.flow.run import open_run
from strawflow.index import units
run = open_run(Path(sys.argv[1]))
with run.index.read() as connection:
    print(units.count_by_state(connection, run.branch)[("train", "ready")], flush=True)
    sys.stdin.read()
"""


def log_bytes(small: SmallRun) -> int:
    return (small.run.root / "index.sqlite-wal").stat().st_size


def churn(small: SmallRun, *, num_units: int) -> int:
    """Claim and complete one unit after the other; returns how large the log is then."""
    for _ in range(num_units):
        assert small.sample(1) == 1
    return log_bytes(small)


@pytest.mark.parametrize("ending", ["closes", "is killed while it is stopped"])
def test_a_reader_that_holds_its_view_for_long_stops_no_writer_and_the_log_is_used_again_after_it(
    tmp_path: Path, ending: str
) -> None:
    with wide_run(tmp_path, 600, {"lease.ttl_s": "600"}) as small:
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, str(small.run.root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
        )
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"600\n"
        if ending != "closes":
            reader.send_signal(signal.SIGSTOP)
        num_done = 0
        while log_bytes(small) <= CHECKPOINT_BYTES:
            churn(small, num_units=10)
            num_done += 10
            assert num_done < 550, "the reader held nothing back: this test tests nothing"
        grown = log_bytes(small)
        if ending == "closes":
            reader.communicate()
        else:
            reader.kill()
            reader.wait()
        assert churn(small, num_units=50) < grown + 100_000
        assert small.sample(600) == 600 - num_done - 50
        assert check(small.run).findings == []


def test_a_reader_sees_one_state_of_the_index_however_long_it_reads(tmp_path: Path) -> None:
    with wide_run(tmp_path, 60, {"lease.ttl_s": "600"}) as small, small.run.index.read() as connection:
        assert units.count_by_state(connection, "main") == {("train", "ready"): 60}
        churn(small, num_units=30)
        assert units.count_by_state(connection, "main") == {("train", "ready"): 60}
        assert len(units.listed(connection, "main", state=UnitState.READY)) == 60


# ---- PostgreSQL: rows that no vacuum may remove

SLOW_S = 0.25
"""A p99 below this is no sign of rows that pile up, whatever it was at the start: on two busy cores it is noise."""


def claim_p99_s(workers: Sequence[StoreWorker], *, between: tuple[float, float]) -> float:
    """Return the 99th percentile of the claims' times between two instants."""
    first, last = between
    took = sorted(c["took_s"] for w in workers for c in w.lines("claimed") if first <= c["at"] < last)
    assert took, "nothing was claimed in this time"
    return float(took[len(took) * 99 // 100])


def hold_a_snapshot(
    tmp_path: Path,
    nest: Nest,
    server: PostgresServer,
    report: Callable[[str, object], None],
    *,
    seconds: float,
    num_units: int,
) -> None:
    """Let two workers claim and complete for so long under a snapshot that is held; compare claims at its ends."""
    settings = {"run.index_url": server.new_url(), "lease.ttl_s": "600"}
    with wide_run(tmp_path, num_units, settings) as small, small.run.index.read() as snapshot:
        snapshot.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert units.count_by_state(snapshot, "main") == {("train", "ready"): num_units}
        order = Order(str(small.run.root), limit=4)
        workers = [nest.start(order) for _ in range(2)]
        begun_at = max(w.await_line("claimed")["at"] for w in workers)
        time.sleep(seconds)
        ended_at = time.monotonic()
        assert all(w.is_alive() for w in workers), "the units gave out: this test needs more of them"
        assert units.count_by_state(snapshot, "main") == {("train", "ready"): num_units}  # it is held still
        for worker in workers:
            worker.kill()
        part = seconds / 4
        at_start = claim_p99_s(workers, between=(begun_at, begun_at + part))
        at_end = claim_p99_s(workers, between=(ended_at - part, ended_at))
        ops = 2 * len(accepted(workers)) / (ended_at - begun_at)
        report("ops_per_s", round(ops))
        report("claim_p99_s", (round(at_start, 4), round(at_end, 4)))
        print(
            f"{ops:.0f} claims and completions/s, p99 {at_start * 1e3:.1f} ms, at the end {at_end * 1e3:.1f} ms"
        )
        assert at_end < max(5 * at_start, SLOW_S)
        assert [line for w in workers for line in w.lines("failed")] == []


def test_claims_stay_quick_while_a_snapshot_is_held_on_postgresql(
    tmp_path: Path,
    nest: Nest,
    postgres_server: PostgresServer,
    record_property: Callable[[str, object], None],
) -> None:
    hold_a_snapshot(tmp_path, nest, postgres_server, record_property, seconds=8, num_units=12_000)


@pytest.mark.long
def test_claims_stay_quick_under_a_snapshot_held_for_a_minute_on_postgresql(
    tmp_path: Path,
    nest: Nest,
    postgres_server: PostgresServer,
    record_property: Callable[[str, object], None],
) -> None:
    hold_a_snapshot(tmp_path, nest, postgres_server, record_property, seconds=60, num_units=80_000)
