"""Branching: a new line of history from an older checkpoint; the abandoned future stays listed and is never read.

1. The new branch inherits batches, checkpoints and weights up to the checkpoint, and the cursors as they stood there.
2. Groups admitted but without a fate by then start pristine, as units of the new branch; with `reuse_trajectories` those
   that were completed from weights no later than the checkpoint keep their trajectories.
3. The future is abandoned for every consumer. Where those go on whose checkpoint it is not is flow.fork's part.
4. One transaction makes the branch and points the run at it; no worker may be at work meanwhile.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from strawflow.errors import AlreadyExistsError, ConflictError, InvalidInputError, NotFoundError
from strawflow.flow import fork, history_again, inherit, journal, rescue
from strawflow.flow.fence import who_and_how_to_end
from strawflow.flow.fork import Plan
from strawflow.flow.history_again import RetiredUnit
from strawflow.flow.journal import Entry, EntryKind
from strawflow.flow.run import ACTIVE_BRANCH, Run
from strawflow.flow.session import WorkerSession
from strawflow.ids import NAME_RULE, Extent, is_name
from strawflow.index import (
    branches,
    carry,
    checkpoints,
    consumers,
    datasets,
    events,
    meta,
    mixtures,
    packs,
    sessions,
    tallies,
    units,
)
from strawflow.index.branches import Branch
from strawflow.index.carry import Carried
from strawflow.index.checkpoints import Checkpoint
from strawflow.index.datasets import Cursor
from strawflow.index.engine import Connection
from strawflow.index.retired import PASSED


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
    positions: Mapping[str, int]
    """After which step each consumer goes on."""
    num_again: int
    """Groups of the line that a consumer other than the checkpoint's has not read by then, and gets."""
    num_lost: int
    """How often a consumer would have to read a group again that retention has moved to the history and whose trajectories are
    gone since: it does not."""


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
    rescue.rescue_all(run)  # whoever is gone must not stand in the way until its lease expires
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
            f"{len(live)} workers are at work on this run, and a branch is made while nobody is; the first is "
            f"{who_and_how_to_end(live[0])}"
        )
    if start.cursors is None or start.last_unit_id is None:
        raise ConflictError(
            f"checkpoint {start.checkpoint_id} was made before branches could start from one; take a later one"
        )


def _start(session: WorkerSession, start: Checkpoint, name: str, *, reuse: bool) -> NewBranch:
    run = session.run
    retired: Sequence[RetiredUnit] = ()
    readable: Mapping[int, Carried] = {}
    with run.index.read() as connection:
        plan = fork.plan_fork(connection, start, reuse=reuse)
        is_partial = fork.needs_history(connection, start.branch_id, plan)
    if is_partial:
        retired = history_again.retired_units(run, start.branch_id)
        with run.index.read() as connection:
            plan = fork.plan_fork(connection, start, reuse=reuse, retired=retired)
        if lost := set(plan.lost):
            readable = history_again.readable(run, [r for r in retired if r.unit_id in lost])
        with run.index.read() as connection:
            plan = fork.plan_fork(connection, start, reuse=reuse, retired=retired, readable=readable)
    with run.index.read() as connection:
        placed = inherit.placed(connection, plan.carried)
        gone = history_again.told(plan.carried, connection, readable)
    with run.index.begin() as connection:
        first_id = units.take_ids(connection, len(plan.carried))
    entry = _entry(start, name, plan, placed, gone, first_id=first_id)
    made = _made(start, name, plan)
    with journal.recorded(session, [entry]) as record, run.index.begin() as connection:
        record.name(connection)
        _require_startable(connection, start, name, own_session_id=session.session_id)
        if not checkpoints.hold_files(connection, start.checkpoint_id):
            raise _files_are_gone(start)
        units.require_unused(connection, first_id)
        are_held = [
            checkpoints.hold_files(connection, s.checkpoint_id)
            for s in plan.starts
            if s.checkpoint_id is not None
        ]
        is_there = packs.are_there(connection, placed)
        again = fork.plan_fork(connection, start, reuse=reuse, retired=retired, readable=readable)
        if not all(are_held) or not is_there or again != plan:
            raise ConflictError(f"the run moved on while branch {name!r} was made; try again")
        _insert(connection, start, name, plan, first_id=first_id)
        events.record(connection, "branch.created", **asdict(made))
    return made


def _insert(connection: Connection, start: Checkpoint, name: str, plan: Plan, *, first_id: int) -> None:
    positions = plan.positions()
    branches.create(
        connection,
        name,
        parent_id=start.branch_id,
        from_checkpoint_id=start.checkpoint_id,
        from_step=start.step,
        starts=positions,
        weights_step=plan.weights_step,
    )
    for s in plan.starts:
        consumers.ensure(connection, name, s.consumer, purposes=s.purposes, position=s.position)
    carry.carry_over(
        connection,
        plan.carried,
        to_branch=name,
        first_id=first_id,
        seen={consumer: (positions[consumer], places) for consumer, places in plan.seen.items()},
    )
    inherit_cursors(connection, name, start.cursors, Counter(c.dataset_id for c in plan.carried))
    for consumer, position in positions.items():
        inherit_drops(connection, name, consumer, parent_id=start.branch_id, step=position)
    meta.put(connection, ACTIVE_BRANCH, name)


def _made(start: Checkpoint, name: str, plan: Plan) -> NewBranch:
    unsettled = plan.carried[: plan.num_unsettled]
    num_reused = sum(c.keeps for c in unsettled)
    return NewBranch(
        branch_id=name,
        parent_id=start.branch_id,
        from_checkpoint_id=start.checkpoint_id,
        from_step=start.step,
        num_pristine=len(unsettled) - num_reused,
        num_reused=num_reused,
        positions=plan.positions(),
        num_again=len(plan.carried) - plan.num_unsettled,
        num_lost=len(plan.lost),
    )


def _entry(
    start: Checkpoint,
    name: str,
    plan: Plan,
    placed: Mapping[int, Extent],
    gone: Sequence[Sequence[Any]],
    *,
    first_id: int,
) -> Entry:
    body = {
        "parent": start.branch_id,
        "from_checkpoint": start.checkpoint_id,
        "from_step": start.step,
        "weights_step": plan.weights_step,
        "cursors": start.cursors,
        "consumer": start.consumer,
        "starts": [[s.consumer, s.position, sorted(s.purposes)] for s in plan.starts],
        "seen": plan.seen,
        # An index restored from a backup may not have them any more.
        "retired": gone,
        **inherit.taken_up(plan.carried, placed, first_id=first_id),
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
        what = f"no checkpoint of step {checkpoint} of consumer {run.consumer!r} on branch {run.branch!r}"
    else:
        found = checkpoints.find(connection, checkpoint)
        what = f"no checkpoint {checkpoint!r}"
    if found is None:
        raise NotFoundError(f"there is {what}; see `strawflow checkpoint list {run.root}`")
    if found.consumer != run.consumer:
        raise InvalidInputError(
            f"checkpoint {found.checkpoint_id} is one of consumer {found.consumer!r}, not of {run.consumer!r}: "
            f"`strawflow branch create` starts from it with --consumer {found.consumer}"
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
        if (drawn := fields.get("mixture")) is not None:
            mixtures.put(connection, name, drawn)
            continue
        state = fields.pop("source_state", None)
        cursor = Cursor(**fields)
        datasets.insert_cursor(connection, name, cursor)
        if state is not None:
            datasets.put_source_state(connection, name, cursor.dataset_id, state)
        passed = cursor.num_admitted - carried.get(cursor.dataset_id, 0)
        tallies.add(connection, name, PASSED + cursor.dataset_id, passed)


def inherit_drops(connection: Connection, name: str, consumer: str, *, parent_id: str, step: int) -> None:
    """Give the branch the counts of what its line had dropped outside any batch by the checkpoint."""
    for tally, value in tallies.starting_with(connection, parent_id, f"dropped/{consumer}/").items():
        later = consumers.num_dropped_after(
            connection, parent_id, consumer, purpose=tally.rsplit("/", 1)[1], step=step
        )
        tallies.add(connection, name, tally, value - later)
