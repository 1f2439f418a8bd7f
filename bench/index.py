"""How the index behaves as it grows: latency, pages, opening, size; and many processes on PostgreSQL beside procrastinate.

    python bench/index.py [--quick] [--json] [--folder DIR] [--only SECTION]

Rows and rounds are explained in bench/rows.py; what bounds each figure in bench/README.md.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import apart
import crews
import fill
import pages
import psycopg
from crowd import Crowd
from loop import Loop, create
from peers import procrastinate
from rows import Bench, Row, alone, at_least, at_most, compare, main, timed
from server import new_database, running_server, version

import strawflow
from strawflow.flow.retain import Policy, retain
from strawflow.flow.session import WorkerSession
from strawflow.flow.sweep import sweep
from strawflow.testing.postgres import PostgresServer

STEP = 64
"""Groups of a training step wherever a run is filled."""
SMALL_INDEX = 10_000
EVERYTHING = Policy(
    keep_checkpoints=1,
    keep_checkpoints_every=0,
    keep_weights=1,
    keep_weights_every=0,
    keep_steps=1,
    receipt_age_s=0.0,
    event_age_s=0.001,
)
"""Retention that lets go of all but the newest step."""
MS = 1e3


@dataclass(frozen=True)
class Filled:
    """A run whose index was filled with finished units."""

    folder: Path
    num_finished: int


def flat(bench: Bench) -> Iterator[Row]:
    """Latency of each call with a large index against a small one, level process, both dialects."""
    size = bench.pick(1_000_000, 10_000_000)
    yield from _flat(bench, "SQLite", size, None)
    with running_server() as server:
        yield from _flat(bench, version(server), size, server)


def _flat(bench: Bench, dialect: str, size: int, server: PostgresServer | None) -> Iterator[Row]:
    # Both are filled before either is opened: a worker that waited for minutes would count as hung.
    places = [filled(bench, SMALL_INDEX, server), filled(bench, size, server)]
    with ExitStack() as stack:
        small, large = [stack.enter_context(Probe(place, server)) for place in places]
        for number in range(-1, bench.rounds):  # the round before the first is not counted
            for probe in (small, large) if number % 2 == 0 else (large, small):
                probe.round(bench.pick(120, 400), is_counted=number >= 0)
    for call in small.seconds:
        for label, share, target in (("p50", 0.5, 1.5), ("p99", 0.99, 2.0)):
            yield compare(
                f"{call} {label}, {size // 1_000_000} million units, {dialect}",
                [percentile(each, share) * MS for each in large.seconds[call]],
                "ms",
                against=f"{SMALL_INDEX} units",
                theirs=[percentile(each, share) * MS for each in small.seconds[call]],
                target=at_most(target),
            )
        yield compare(
            f"{call}: pages touched a call, {dialect} ({pages.HOW['SQLite' if server is None else 'PostgreSQL']})",
            large.pages[call],
            "pages",
            against=f"{SMALL_INDEX} units",
            theirs=small.pages[call],
        )


class Probe:
    """An open store whose calls are timed one by one and whose pages are counted."""

    GROUPS = 8

    def __init__(self, where: Filled, server: PostgresServer | None) -> None:
        self.seconds: dict[str, list[list[float]]] = {"claim": [], "complete": [], "next_batch": []}
        self.pages: dict[str, list[float]] = {call: [] for call in self.seconds}
        self._where, self._server = where, server

    def __enter__(self) -> Probe:
        self._stack = ExitStack()
        self._loop = self._stack.enter_context(Loop(strawflow.open(self._where.folder), tokens=16))
        self._consumer = self._stack.enter_context(self._loop.store.consumer("trainer"))
        self._counting: psycopg.Connection | None = None
        if self._server is not None:
            self._counting = self._stack.enter_context(self._server.connect(self._where.folder.name))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def round(self, count: int, *, is_counted: bool) -> None:
        """Claim one by one, complete one by one, and take what was completed in batches."""
        works: dict[str, Callable[[], list[float]]] = {
            "claim": lambda: self._loop.each_claimed(count),
            "complete": self._loop.each_completed,
            "next_batch": lambda: [self._next_batch() for _ in range(count // self.GROUPS)],
        }
        for call, work in works.items():
            before = self._pages()
            seconds = work()
            touched = self._pages() - before
            if is_counted:
                self.seconds[call].append(seconds)
                self.pages[call].append(touched / len(seconds))
            if call == "next_batch":
                self._consumer.advance()

    def _next_batch(self) -> float:
        seconds, batch = timed(lambda: self._consumer.next_batch(self.GROUPS))
        assert batch is not None
        return seconds

    def _pages(self) -> int:
        return pages.sqlite_pages() if self._counting is None else pages.postgres_pages(self._counting)


def open_(bench: Bench) -> Iterator[Row]:
    """Open a run with a million finished units in a fresh process, and claim."""
    where = filled(bench, 1_000_000, None)
    found = [apart.run("open", str(where.folder)) for _ in range(bench.rounds)]
    small = filled(bench, SMALL_INDEX, None)
    found_small = [apart.run("open", str(small.folder)) for _ in range(bench.rounds)]
    name = f"open a run of {where.num_finished // 1_000_000} million finished units and claim"
    yield alone(f"{name}, beyond imports", [f["seconds"] for f in found], "s", target=at_most(0.5))
    yield compare(
        f"{name}, beyond imports",
        [f["seconds"] for f in found],
        "s",
        against=f"{SMALL_INDEX} units",
        theirs=[f["seconds"] for f in found_small],
    )
    yield alone(
        f"{name}: memory beyond imports", [f["memory"] / 1e6 for f in found], "MB", target=at_most(200)
    )
    if not bench.quick:
        yield from _open_straw(bench)


def _open_straw(bench: Bench) -> Iterator[Row]:
    from peers import straw  # brings torch along, which only this section needs

    count = 20_000
    folder = bench.path("open-straw")
    queue = straw.StrawQueue(folder, [b"x"])
    queue.in_chunks(count, 16)
    queue.submit(10 * bench.rounds)
    queue.close()
    found = [apart.run("straw", str(folder)) for _ in range(bench.rounds)]
    name = f"{straw.LABEL}: recover a queue of {count} finished tasks and acquire"
    yield alone(name, [f["seconds"] for f in found], "s")
    yield alone(f"{name}: memory beyond imports", [f["memory"] / 1e6 for f in found], "MB")


def processes(bench: Bench) -> Iterator[Row]:
    """8 processes empty a queue on the same PostgreSQL, 16 in hand each, default durability."""
    size, at_once = 8, procrastinate.CONCURRENCY
    ours_count, peer_count = bench.pick(1600, 6400), bench.pick(320, 1600)
    with ExitStack() as stack:
        server = stack.enter_context(running_server())
        folder = bench.path("processes")
        store = create(folder, index_url=server.url(new_database(server)))
        conninfo = server.conninfo(new_database(server))
        queue = procrastinate.JobQueue(conninfo)
        ours = stack.enter_context(Crowd(size, crews.worker, str(folder), at_once))
        peers = stack.enter_context(Crowd(size, procrastinate.worker, conninfo))
        rates: dict[str, list[float]] = {"ours": [], "peers": []}
        for number in range(-1, bench.rounds):
            store.admit(ours_count)
            queue.put(peer_count)
            mine, theirs = ours.round(), peers.round()
            assert sum(mine.done) == ours_count
            assert queue.num_finished() == (number + 2) * peer_count
            if number >= 0:
                rates["ours"].append(ours_count / mine.seconds)
                rates["peers"].append(peer_count / theirs.seconds)
        queue.close()
        store.close()
    yield compare(
        f"{size} processes on PostgreSQL, batches of {at_once}",
        rates["ours"],
        "units/s",
        against=procrastinate.LABEL,
        theirs=rates["peers"],
        target=at_least(3),
    )


def size(bench: Bench) -> Iterator[Row]:
    """Index bytes of a unit that was completed and trained, and what they are."""
    rounds = bench.pick(1, 15)
    for at_once in (1, 16):
        how = "one by one" if at_once == 1 else f"{at_once} at a time"
        yield from _size(
            f"SQLite, completed {how}", rounds, at_once, bench.path(f"size-{at_once}"), None, 400
        )
    with running_server() as server:
        for at_once in (1, 16):
            how = "one by one" if at_once == 1 else f"{at_once} at a time"
            folder = bench.path(f"size-pg-{at_once}")
            yield from _size(f"PostgreSQL, completed {how}", rounds, at_once, folder, server, 900)


def _size(
    name: str, rounds: int, at_once: int, folder: Path, server: PostgresServer | None, limit: int
) -> Iterator[Row]:
    """Finish 1,024 units, then `rounds` times as many, which are counted; then let retention take all it may.

    The first ones pay for what is there once: empty pages of every table, and rows that come and go.
    """
    database = None if server is None else new_database(server)
    url = "" if server is None or database is None else server.url(database)
    store = create(folder, durability="process", index_url=url, prompts=1024)

    def sizes(*, rewritten: bool = False) -> dict[str, int]:
        if server is None or database is None:
            return _sqlite_sizes(folder / "index.sqlite", rewritten=rewritten)
        return _postgres_sizes(server, database, rewritten=rewritten)

    empty = sizes(rewritten=True)
    with Loop(store, tokens=16) as loop, store.consumer("trainer") as consumer:
        seen = []
        for _ in range(1 + rounds):
            loop.finish(1024, at_once=at_once)
            while consumer.next_batch(STEP) is not None:
                consumer.advance()
            seen.append(sizes())
    grown = _growth(seen[0], seen[-1], rounds * 1024)
    yield alone(f"index bytes a finished unit, {name}", [sum(grown.values())], "bytes", target=at_most(limit))
    yield from _largest(grown)
    with strawflow.open(folder) as again, WorkerSession(again.run, "retention") as session:
        retain(session, EVERYTHING)
        sweep(session)  # the rows of extents that nothing names any more
    left = _growth(empty, sizes(rewritten=True), (1 + rounds) * 1024)
    yield alone(f"the same after retention, {name}", [sum(left.values())], "bytes", target=at_most(100))
    yield from _largest(left)


def _growth(before: dict[str, int], after: dict[str, int], count: int) -> dict[str, float]:
    return {table: (after[table] - before.get(table, 0)) / count for table in after}


def _largest(grown: dict[str, float]) -> Iterator[Row]:
    for table, part in sorted(grown.items(), key=lambda item: -item[1]):
        if part >= 5:
            yield alone(f"  of these: {table}", [part], "bytes")


def _sqlite_sizes(path: Path, *, rewritten: bool) -> dict[str, int]:
    """Return the bytes of each table with its indexes, after a checkpoint, if told so without free space."""
    connection = sqlite3.connect(path)
    try:
        if rewritten:
            connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        rows = connection.execute(
            "SELECT m.tbl_name, sum(s.pgsize) FROM dbstat AS s JOIN sqlite_schema AS m ON m.name = s.name GROUP BY 1"
        ).fetchall()
        (whole,) = connection.execute(
            "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
        ).fetchone()
        found = {str(table): int(size) for table, size in rows}
        return {**found, "free pages and the schema": int(whole) - sum(found.values())}
    finally:
        connection.close()


def _postgres_sizes(server: PostgresServer, database: str, *, rewritten: bool) -> dict[str, int]:
    """Return the bytes of each table with its indexes, after a vacuum, if told so without free space."""
    with server.connect(database) as connection:
        connection.execute(b"VACUUM FULL" if rewritten else b"VACUUM")
        rows = connection.execute(
            "SELECT relname, pg_total_relation_size(oid) FROM pg_class"
            " WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
        ).fetchall()
        return {str(table): int(size) for table, size in rows}


def filled(bench: Bench, size: int, server: PostgresServer | None) -> Filled:
    """Return a run with `size` finished units and a tenth as many ready ones; made once for each size and dialect."""
    name = f"filled_{size}"
    folder = bench.folder / (name if server is None else f"{name}_pg")
    if not folder.exists():
        url = "" if server is None else server.url(new_database(server, folder.name))
        store = create(folder, durability="process", index_url=url, prompts=1024)
        with Loop(store, tokens=16) as loop, store.consumer("trainer") as consumer:
            loop.finish(1024, at_once=16)
            while consumer.next_batch(STEP) is not None:
                consumer.advance()
        database = (
            fill.Sqlite(folder / "index.sqlite")
            if server is None
            else fill.Postgres(server.conninfo(folder.name))
        )
        fill.fill(database, num_finished=size, num_ready=max(size // 10, 4096))
        database.close()
    return Filled(folder, size)


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


if __name__ == "__main__":
    raise SystemExit(
        main(
            __doc__ or "",
            {"flat": flat, "open": open_, "processes": processes, "size": size},
        )
    )
