"""What the tests of backups and restores share: whole indexes as rows, runs without an index, runs taken to their end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from strawflow import config as configuration
from strawflow.flow import claim as claiming
from strawflow.flow import consume, rescue
from strawflow.flow.claim import Grant, PromptShelf
from strawflow.flow.run import CONFIG_FILE, Run, open_run, write_durably
from strawflow.flow.session import WorkerSession
from strawflow.index import dump, sessions
from strawflow.index import tables as t
from strawflow.index.engine import Index
from strawflow.testing.invariants import check_exactly_once
from strawflow.testing.runs import SmallRun
from tests.contract.stored import assert_sound

PASSING = ("meta", "events", "sessions", "engines", "packs", "extents")
"""Tables that tell of a restore itself: all others are the same after each restore of the same backup."""

Rows = dict[str, list[dict[str, Any]]]


def bare_run(folder: Path, of: Run, url: str = "") -> Path:
    """Make a run's folder with config.json alone; its index is at `url`.

    Without packs a restore has nothing to replay: the index is as it was when it was backed up.
    """
    folder.mkdir()
    section = of.config.run.model_copy(update={"index_url": url})
    text = configuration.to_json(of.config.model_copy(update={"run": section}))
    write_durably(folder / CONFIG_FILE, text.encode())
    return folder


def give_files(folder: Path, of: Run) -> None:
    """Let a bare run share packs, weights and checkpoints with the run it came from."""
    for name in ("packs", "weights", "checkpoints"):
        shutil.copytree(of.root / name, folder / name)


def rows_in(index: Index) -> Rows:
    with dump.snapshot(index) as connection:
        return {
            name: [row for batch in dump.rows_of(connection, name) for row in batch.to_pylist()]
            for name in dump.table_names()
        }


def rows_at(root: Path) -> Rows:
    run = open_run(root)
    try:
        return rows_in(run.index)
    finally:
        run.close()


def differing(one: Rows, other: Rows) -> set[str]:
    # repr tells 0.0 from -0.0, and True from 1
    return {name for name in one if repr(one[name]) != repr(other[name])}


def told_again(rows: Rows) -> Rows:
    """Return what every restore of one backup tells alike: not what passes, and no number that the database gave."""
    return {
        name: [
            {
                key: value
                for key, value in row.items()
                if not key.endswith(("extent_id", "pack_id", "batch_id"))
            }
            for row in kept
        ]
        for name, kept in rows.items()
        if name not in PASSING
    }


def claim_as(session: WorkerSession, limit: int) -> list[Grant]:
    return claiming.claim(session, PromptShelf(session), limit=limit, serving_version_id=None)


@contextmanager
def reopened(root: Path) -> Iterator[SmallRun]:
    with SmallRun(open_run(root)) as again:
        yield again


def go_on_to_the_end(small: SmallRun) -> None:
    """Train what is left of the run and check all that can be asked of a finished one."""
    small.trainer()
    done = 0 if small.resumption is None else small.resumption.step
    for step in range(done + 1, small.run.config.total_steps + 1):
        small.sample()
        batch = consume.batch_of_step(small.run, step) or small.plan()
        assert batch is not None
        assert batch.step == step
        small.train(step)
    fates = check_exactly_once(small.run, finished=True)
    assert len(fates) == small.run.config.total_steps * small.run.config.rollout.prompts_per_step
    assert_sound(small.run)


def lose_all(run: Run) -> None:
    with run.index.read() as connection:
        living = sessions.listed(connection, live_only=True)
    for session in living:
        rescue.declare_lost(run, session.session_id, reason="stopped by the test")


def trained(run: Run) -> int:
    with run.index.read() as connection:
        return int(connection.execute(sa.select(t.consumers.c.position)).scalar_one())
