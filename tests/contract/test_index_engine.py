"""The engine under every statement: what the statements of one view see together."""

from __future__ import annotations

from strawflow.index import consumers
from strawflow.index.engine import Connection
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
