"""The engine under every statement: what the statements of one view see together."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from strawflow import clock
from strawflow.errors import StorageError
from strawflow.flow import admit
from strawflow.flow.run import open_run
from strawflow.index import consumers, meta, sessions, tables
from strawflow.index.engine import Connection, Index, now
from strawflow.testing.runs import SmallRun, small_run


def num_waiting(connection: Connection) -> int:
    return consumers.num_waiting(connection, "main", "trainer", purpose="train", at_most=100)


def test_prepared_statements_of_one_view_see_one_snapshot_on_sqlite_and_each_its_own_on_postgresql(
    small: SmallRun,
) -> None:
    index = small.run.index
    small.sample(3)
    with index.read() as view:
        seen = [num_waiting(view)]
        with index.begin() as connection:
            assert consumers.withdraw(connection, "main", "trainer", [1]) == 1
        seen.append(num_waiting(view))
    assert seen == ([3, 3] if index.dialect == "sqlite" else [3, 2])
    with index.read() as view:
        assert num_waiting(view) == 2


@pytest.mark.parametrize("opened", [Index.begin, Index.read, Index.direct])
@pytest.mark.parametrize("is_replaced", [True, False])
def test_an_index_file_that_was_moved_under_an_open_index_is_written_no_more(
    tmp_path: Path, opened: Callable[[Index], AbstractContextManager[Any]], is_replaced: bool
) -> None:
    place = tmp_path / "index.sqlite"
    index, other = Index(f"sqlite:///{place}"), Index(f"sqlite:///{tmp_path / 'other.sqlite'}")
    for each in (index, other):
        with each.begin() as connection:
            connection.execute(sa.text("CREATE TABLE told (word TEXT)"))
    place.rename(tmp_path / "away.sqlite")
    if is_replaced:
        os.rename(tmp_path / "other.sqlite", place)
    told = "another file stands in the place" if is_replaced else "was moved or removed"
    with pytest.raises(StorageError, match=told), opened(index):
        pass
    index.close()
    other.close()


def test_a_database_that_takes_no_writes_now_is_a_storage_error_that_a_heartbeat_outlives(
    small: SmallRun,
) -> None:
    index = small.run.index
    say = {"sqlite": "PRAGMA query_only = ON", "postgresql": "SET TRANSACTION READ ONLY"}[index.dialect]

    def write() -> None:
        with index.begin() as connection:
            connection.exec_driver_sql(say)
            meta.put(connection, "key", "value")

    with pytest.raises(StorageError, match=r"read-?only"):
        write()
    index.close()  # SQLite's connection would keep the word


@pytest.mark.parametrize("told", [True, False], ids=["booted_at", "of_an_earlier_program"])
def test_a_boot_ends_sessions_and_keeps_the_times_before_which_units_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    small = small_run(tmp_path)
    schedule = admit.Schedule(not_before=datetime.now(UTC) + timedelta(seconds=100))
    admit.admit_more(small.session("rollout"), count=1, schedule=schedule)
    with small.run.index.begin() as connection:
        if not told:
            meta.remove(connection, "booted_at")
    for session in small.sessions.values():
        session.__exit__(RuntimeError, RuntimeError("the host went down"), None)
    small.run.close()
    monkeypatch.setattr(clock, "boot_id", lambda: "another")
    monkeypatch.setattr(clock, "uptime_s", lambda: 5.0)
    run = open_run(small.run.root)
    with run.index.read() as connection:
        assert all(s.expires_in_s <= 0 for s in sessions.listed(connection, live_only=True))
        waits_s = connection.execute(
            sa.select(sa.func.max(tables.units.c.not_before) - now(connection))
        ).scalar_one()
    assert not run.index.expire_after_reboot()
    run.close()
    assert waits_s is None if not told else 90 < waits_s <= 100
