"""The engine under every statement: what the statements of one view see together."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from strawflow.errors import StorageError
from strawflow.index import consumers, meta
from strawflow.index.engine import Connection, Index
from strawflow.testing.runs import SmallRun


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
