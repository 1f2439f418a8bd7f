"""Branching: a new line of history from an older checkpoint; the abandoned future stays listed and is never read.

1. The new branch inherits batches, checkpoints and weights up to the checkpoint, and the cursors as they stood there.
2. Groups admitted but without a fate by then start pristine, as units of the new branch; with `reuse_trajectories` those
   that were completed from weights no later than the checkpoint keep their trajectories.
3. One transaction makes the branch and points the run at it; no worker may be at work meanwhile.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from strawflow.errors import AlreadyExistsError, ConflictError, InvalidInputError, NotFoundError
from strawflow.flow import journal
from strawflow.flow.journal import Entry, EntryKind
from strawflow.flow.run import ACTIVE_BRANCH, Run
from strawflow.flow.session import WorkerSession
from strawflow.ids import NAME_RULE, Extent, is_name
from strawflow.index import (
    branches,
    checkpoints,
    consumers,
    datasets,
    events,
    meta,
    packs,
    sessions,
    tallies,
    units,
)
from strawflow.index.branches import Branch
from strawflow.index.checkpoints import Checkpoint
from strawflow.index.datasets import Cursor
from strawflow.index.engine import Connection
from strawflow.index.units import Carried


@dataclass(frozen=True)
class NewBranch:
    """What a branch starts with."""

    branch_id: str
    parent_id: str
    from_checkpoint_id: str
    from_step: int
    num_pristine: int
    """Groups admitted but not trained by the checkpoint, to be sampled afresh."""
    num_reused: int
    """Groups whose stored trajectories the branch takes over."""


def create_branch(run: Run, *, checkpoint: str, name: str, reuse_trajectories: bool = False) -> NewBranch:
    """Start a branch from a checkpoint (its id, or its step on the run's branch) and make it the run's branch.

    Raises:
        InvalidInputError: the name cannot be part of a folder name, or the checkpoint is another consumer's.
        AlreadyExistsError: there is a branch of that name.
        NotFoundError: no such checkpoint, or its files were removed, be it only now.
        ConflictError: a worker is at work, or the checkpoint was made before branches could start from it.
    """
    if not is_name(name):
        raise InvalidInputError(f"branch name {name!r}: {NAME_RULE}")
    with run.index.read() as connection:
        start = _find_checkpoint(connection, run, checkpoint)
        _require_startable(connection, start, name, own_session_id=None)
    session = WorkerSession(run, "branch")
    try:
        return _start(session, start, name, reuse=reuse_trajectories)
    finally:
        session.end()  # also after a refusal: a session that lived on would stand in the way of the next try


def _require_startable(
    connection: Connection, start: Checkpoint, name: str, *, own_session_id: str | None
) -> None:
    if branches.find(connection, name) is not None:
        raise AlreadyExistsError(f"there is a branch {name!r} already; see `strawflow branch list`")
    listed = sessions.listed(connection, live_only=True)
    if live := [s for s in listed if s.session_id != own_session_id]:
        raise ConflictError(
            f"{len(live)} workers are at work on this run (first: {live[0].kind}, process {live[0].pid} on "
            f"{live[0].host}); stop them before branching"
        )
    if start.cursors is None or start.last_unit_id is None:
        raise ConflictError(
            f"checkpoint {start.checkpoint_id} was made before branches could start from one; take a later one"
        )


def _start(session: WorkerSession, start: Checkpoint, name: str, *, reuse: bool) -> NewBranch:
    run = session.run
    with run.index.read() as connection:
        carried = _to_carry(connection, run, start, reuse=reuse)
        kept = {c.unit.extent_id for c in carried if c.keeps}
        placed = packs.find_extents(connection, [extent_id for extent_id in kept if extent_id is not None])
    with run.index.begin() as connection:
        first_id = units.take_ids(connection, len(carried))
    entry = _entry(run, start, name, carried, placed, first_id=first_id)
    with journal.recorded(session, [entry]) as record, run.index.begin() as connection:
        record.name(connection)
        _require_startable(connection, start, name, own_session_id=session.session_id)
        if not checkpoints.hold_files(connection, start.checkpoint_id):
            raise _files_are_gone(start)
        units.require_unused(connection, first_id)
        if _to_carry(connection, run, start, reuse=reuse) != carried:
            raise ConflictError(f"the run moved on while branch {name!r} was made; try again")
        branches.create(
            connection,
            name,
            parent_id=start.branch_id,
            from_checkpoint_id=start.checkpoint_id,
            from_step=start.step,
        )
        consumers.ensure(connection, name, run.consumer, position=start.step)
        units.carry_over(connection, carried, to_branch=name, consumer=run.consumer, first_id=first_id)
        inherit_cursors(connection, name, start.cursors, Counter(c.dataset_id for c in carried))
        inherit_drops(connection, name, run.consumer, parent_id=start.branch_id, step=start.step)
        meta.put(connection, ACTIVE_BRANCH, name)
        num_reused = sum(c.keeps for c in carried)
        made = NewBranch(
            name,
            start.branch_id,
            start.checkpoint_id,
            start.step,
            len(carried) - num_reused,
            num_reused,
        )
        events.record(connection, "branch.created", **made.__dict__)
    return made


def _to_carry(connection: Connection, run: Run, start: Checkpoint, *, reuse: bool) -> list[Carried]:
    return units.to_carry(
        connection,
        start.branch_id,
        run.consumer,
        last_unit_id=start.last_unit_id or 0,
        step=start.step,
        reuse=reuse,
    )


def _entry(
    run: Run,
    start: Checkpoint,
    name: str,
    carried: Sequence[Carried],
    placed: Mapping[int, Extent],
    *,
    first_id: int,
) -> Entry:
    order = {extent_id: number for number, extent_id in enumerate(placed)}
    body = {
        "parent": start.branch_id,
        "from_checkpoint": start.checkpoint_id,
        "from_step": start.step,
        "cursors": start.cursors,
        "consumer": run.consumer,
        "first_unit_id": first_id,
        "carried": [c.unit.unit_id for c in carried],
        "extents": [journal.extent_ref(extent) for extent in placed.values()],
        # What a unit keeps: its place in `carried`, its extent's in `extents`, and the columns of its result.
        "kept": [
            [
                number,
                order[c.unit.extent_id],
                c.unit.row_start,
                c.unit.row_count,
                c.unit.version_step,
                c.unit.mean_reward,
                c.unit.num_tokens,
            ]
            for number, c in enumerate(carried)
            if c.keeps and c.unit.extent_id is not None
        ],
    }
    return Entry(EntryKind.BRANCH, name, body)


def branches_of(run: Run) -> list[tuple[Branch, int, int]]:
    """Return every branch with its consumer's (position, planned)."""
    with run.index.read() as connection:
        found = []
        for branch in branches.listed(connection):
            consumer = consumers.find(connection, branch.branch_id, run.consumer)
            found.append((branch, consumer.position, consumer.planned))
        return found


def on_branch(run: Run, branch_id: str) -> Run:
    """Return the run as seen from one of its branches.

    Raises:
        NotFoundError: no such branch.
    """
    with run.index.read() as connection:
        if branches.find(connection, branch_id) is None:
            raise NotFoundError(f"there is no branch {branch_id!r}; see `strawflow branch list`")
    return replace(run, branch=branch_id)


def _find_checkpoint(connection: Connection, run: Run, checkpoint: str) -> Checkpoint:
    if checkpoint.isdecimal():
        on_line = checkpoints.listed(connection, run.branch, run.consumer)
        found = next((c for c in on_line if c.step == int(checkpoint)), None)
        what = f"no checkpoint of step {checkpoint} on branch {run.branch!r}"
    else:
        found = checkpoints.find(connection, checkpoint)
        what = f"no checkpoint {checkpoint!r}"
    if found is None:
        raise NotFoundError(f"there is {what}; see `strawflow status`")
    if found.consumer != run.consumer:
        raise InvalidInputError(
            f"checkpoint {found.checkpoint_id} is one of consumer {found.consumer!r}: a branch starts from one of "
            f"{run.consumer!r}"
        )
    if found.files_removed:
        raise _files_are_gone(found)
    return found


def _files_are_gone(start: Checkpoint) -> NotFoundError:
    return NotFoundError(f"the files of checkpoint {start.checkpoint_id} were removed by retention")


def inherit_cursors(
    connection: Connection, name: str, cursors: str | None, carried: Mapping[str, int]
) -> None:
    """Give the branch the cursors as they stood at the checkpoint; `carried` counts units by dataset."""
    for fields in json.loads(cursors or "[]"):
        cursor = Cursor(**fields)
        datasets.insert_cursor(connection, name, cursor)
        passed = cursor.num_admitted - carried.get(cursor.dataset_id, 0)
        tallies.add(connection, name, f"passed/{cursor.dataset_id}", passed)


def inherit_drops(connection: Connection, name: str, consumer: str, *, parent_id: str, step: int) -> None:
    """Give the branch the counts of what its line had dropped outside any batch by the checkpoint."""
    for tally, value in tallies.starting_with(connection, parent_id, f"dropped/{consumer}/").items():
        later = consumers.num_dropped_after(
            connection, parent_id, consumer, purpose=tally.rsplit("/", 1)[1], step=step
        )
        tallies.add(connection, name, tally, value - later)
