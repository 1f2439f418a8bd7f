"""What the tests of sweep, compaction and retention share: runs whose packs are old, upkeep sessions, processes killed at named points."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa

from strawflow import faults
from strawflow.flow import quota
from strawflow.flow.check import check
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.index import packs
from strawflow.index.packs import Pack
from strawflow.testing.damage import flip
from strawflow.testing.postgres import PostgresServer
from strawflow.testing.runs import SmallRun

REPOSITORY = Path(__file__).resolve().parents[2]

NO_GRACE = {"storage.sweep_grace_s": "0"}


def with_storage(run: Run, **fields: object) -> Run:
    """Return the run as if its configuration said otherwise about storage."""
    storage = run.config.storage.model_copy(update=fields)
    return replace(run, config=run.config.model_copy(update={"storage": storage}))


@contextmanager
def upkeep(run: Run) -> Iterator[WorkerSession]:
    """Open a session such as `strawflow storage` opens."""
    with WorkerSession(run, quota.UPKEEP) as session:
        yield session


def end_sessions(small: SmallRun, *kinds: str) -> None:
    """End sessions of a small run, all of them unless kinds are named: their packs are sealed and quiet."""
    for kind in kinds or tuple(small.sessions):
        small.sessions.pop(kind).end()
        small.roles.pop(kind, None)


def damage(small: SmallRun, extent_id: int) -> bytes:
    """Flip a bit of a stored extent; returns the whole file as it was."""
    with small.run.index.read() as connection:
        extent = packs.find_extents(connection, [extent_id])[extent_id]
    path = small.run.root / extent.path
    whole = path.read_bytes()
    flip(path, extent.offset + extent.length - 3)
    return whole


def packs_of(run: Run, kind: str | None = None) -> list[Pack]:
    with run.index.read() as connection:
        return [p for p in packs.listed(connection) if kind in (None, p.kind)]


def pack_files(run: Run, kind: str = "*") -> set[str]:
    return {str(path.relative_to(run.root)) for path in run.root.glob(f"packs/{kind}/*.arrow")}


def assert_sound(run: Run) -> None:
    report = check(run)
    assert report.findings == [], report.findings


def await_blocked(server: PostgresServer, run: Run) -> None:
    """Wait until a statement of the run's database waits for a lock."""
    database = sa.make_url(run.index.url).database
    deadline = time.monotonic() + 30
    with server.connect() as connection:
        while True:
            (waiting,) = connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND wait_event_type = 'Lock'",
                (database,),
            ).fetchone() or (0,)
            if waiting:
                return
            assert time.monotonic() < deadline, "nobody waits for a lock"
            time.sleep(0.01)


def run_cli(*words: object, fault: str = "") -> int:
    """Run the program in a process of its own; returns its exit code, negative when a signal ended it."""
    return subprocess.run(
        [sys.executable, "-m", "strawflow.cli.main", *map(str, words)],
        cwd=REPOSITORY,
        env={**os.environ, faults.VARIABLE: fault},
        stdout=subprocess.DEVNULL,
        check=False,
    ).returncode


def kill_cli(*words: object, at: str) -> None:
    """Run the program until the fault point kills it."""
    assert run_cli(*words, fault=at) == -signal.SIGKILL, f"it was not killed at {at}"
