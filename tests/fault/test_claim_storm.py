"""Many processes at one index at once: nobody sees an error, nothing is granted or completed twice, nobody starves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strawflow.testing.postgres import PostgresServer
from strawflow.testing.runs import SmallRun
from tests.fault.store_worker import Nest, Order, StoreWorker, assert_all_done_once, wide_run

pytestmark = pytest.mark.alone

SLOWEST_S = 50.0
"""Below the 60 s after which SQLite gives up waiting for the lock. On two cores that others kept busy as well the slowest
of 64,000 calls took 34 s: SQLite's waiters sleep for up to 0.1 s at a time and do not queue."""


@pytest.fixture(scope="module")
def nest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nest]:
    with Nest(tmp_path_factory.mktemp("nest")) as made:
        yield made


def storm(nest: Nest, small: SmallRun, *, processes: int, claims: int, seconds: float) -> list[StoreWorker]:
    """Let so many processes, released together, claim and complete one unit after the other; returns them at their end."""
    gate = small.run.root / "go"
    order = Order(str(small.run.root), starts_when=str(gate), max_units=claims)
    workers = [nest.start(order) for _ in range(processes)]
    for worker in workers:
        worker.await_line("ready", seconds=seconds)
    gate.touch()
    for worker in workers:
        worker.await_end(seconds=seconds)
    return workers


def assert_calm(
    small: SmallRun, workers: list[StoreWorker], *, claims: int, report: Callable[[str, object], None]
) -> None:
    """No worker met an error, each unit was granted and completed once, and the slowest claim stayed within the bound."""
    unwell = [line for w in workers for line in w.lines() if line["event"] not in CALM]
    assert not unwell, unwell[:5]
    assert [len(w.lines("claimed")) for w in workers] == [claims] * len(workers)
    assert_all_done_once(small.run, workers, num_units=claims * len(workers))
    for verb in ("claimed", "completed"):
        took = sorted(line["took_s"] for w in workers for line in w.lines(verb))
        for name, value in (
            ("p50", took[len(took) // 2]),
            ("p99", took[len(took) * 99 // 100]),
            ("max", took[-1]),
        ):
            report(f"{verb}_{name}_s", round(value, 4))
            print(f"{verb} {name} {value * 1000:.1f} ms")
        assert took[-1] < SLOWEST_S, f"the slowest was {verb} after {took[-1]:.1f} s"


CALM = frozenset({"ready", "claimed", "completed", "ended"})


def settings_of(index_url: str) -> dict[str, str]:
    return {"lease.ttl_s": "600", "run.index_url": index_url}


def test_64_processes_claim_and_complete_on_sqlite_without_an_error(
    tmp_path: Path, nest: Nest, record_property: Callable[[str, object], None]
) -> None:
    with wide_run(tmp_path, 64 * 20, settings_of("")) as small:
        workers = storm(nest, small, processes=64, claims=20, seconds=200)
        assert_calm(small, workers, claims=20, report=record_property)


def test_32_processes_claim_and_complete_on_postgresql_without_an_error(
    tmp_path: Path,
    nest: Nest,
    postgres_server: PostgresServer,
    record_property: Callable[[str, object], None],
) -> None:
    with wide_run(tmp_path, 32 * 8, settings_of(postgres_server.new_url())) as small:
        workers = storm(nest, small, processes=32, claims=8, seconds=200)
        assert_calm(small, workers, claims=8, report=record_property)


@pytest.mark.long
@pytest.mark.parametrize("processes, index", [(64, "sqlite"), (32, "postgresql")])
def test_a_thousand_claims_of_each_of_many_processes(
    tmp_path: Path,
    nest: Nest,
    processes: int,
    index: str,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    url = "" if index == "sqlite" else request.getfixturevalue("postgres_server").new_url()
    with wide_run(tmp_path, processes * 1000, settings_of(url)) as small:
        workers = storm(nest, small, processes=processes, claims=1000, seconds=3600)
        assert_calm(small, workers, claims=1000, report=record_property)
