"""The join in the README that tells which rows of the packs count on a branch, asked of runs with branches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import sqlalchemy as sa

from strawflow.flow.branch import create_branch
from strawflow.flow.run import Run, open_run
from strawflow.index import units
from strawflow.states import UnitState
from strawflow.testing.runs import SmallRun, small_run
from tests.contract.stored import end_sessions

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def small(tmp_path: Path, settings: dict[str, str]) -> Iterator[SmallRun]:
    with small_run(tmp_path, num_prompts=24, settings={**settings, "trainer.steps": "5"}) as made:
        yield made


def accepted(run: Run) -> set[tuple[int, int, int]]:
    """Ask the README's question of a branch."""
    found = re.search(r'ACCEPTED = """(.*?)"""', README.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    assert found[1].count("'main'") == 1
    with run.index.read() as connection:
        rows = connection.execute(sa.text(found[1].replace("'main'", f"'{run.branch}'")))
        return {tuple(row) for row in rows}


def places(run: Run) -> set[tuple[int, int, int]]:
    """Return the identities of all rows in trajectory packs."""
    tables = [
        pa.ipc.open_file(path).read_all().select(["unit_id", "fence", "seq"])
        for path in (run.root / "packs" / "trajectory").glob("*.arrow")
    ]
    return {tuple(row.values()) for table in tables for row in table.to_pylist()}


def ids(found: set[tuple[int, int, int]]) -> set[int]:
    return {unit_id for unit_id, _, _ in found}


def completed(run: Run) -> set[int]:
    with run.index.read() as connection:
        return {u.unit_id for u in units.listed(connection, run.branch, state=UnitState.COMPLETED)}


@pytest.mark.parametrize("reuse", [False, True], ids=["pristine", "trajectories reused"])
def test_what_counts_on_a_branch_is_its_own_and_what_it_inherits(small: SmallRun, reuse: bool) -> None:
    small.advance(3)
    small.sample()
    end_sessions(small)
    everything = completed(small.run)
    assert ids(accepted(small.run)) == everything
    assert accepted(small.run) == places(small.run)
    created = create_branch(small.run, checkpoint="1", name="second", reuse_trajectories=reuse)
    root = small.run.root
    small.run.close()
    with SmallRun(open_run(root)) as second:
        inherited = {1, 2, 3, 4}  # what step 1 trained
        assert created.num_reused == (4 if reuse else 0)
        taken_over = ids(accepted(second.run)) - inherited - completed(second.run)
        assert len(taken_over) == created.num_reused
        assert ids(accepted(second.run)) & everything == inherited | taken_over
        second.advance(1)
        end_sessions(second)
        counts = accepted(second.run) & places(second.run)
        own = completed(second.run)
        assert len(counts) == len(inherited) + len(own)
        assert places(second.run) - counts  # the abandoned future lies there still, and does not count
