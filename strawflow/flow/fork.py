"""Where each consumer goes on when a line forks, and which units the new branch takes up.

1. The branch is made from one consumer's checkpoint. What that consumer had given a fate by then is settled: those units stay
   the parent's. All others admitted by then are taken up, pristine unless their result belongs to the line.
2. Every other consumer goes on after the last of its steps up to which its batches hold nothing but what the line holds. If it
   writes checkpoints, that step is one of a checkpoint whose files are kept: none is ever shown ahead of its position.
3. Settled units that such a consumer had not read by then are taken up with their result and offered to it alone.
4. Nothing is written here; asked twice of one state of the index it answers the same.
5. It knows the parent's consumers. What was settled before the branch is taken up for one that is first made there by
   flow.inherit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from strawflow.flow.retire import moved_rows
from strawflow.flow.run import TRAINER, Run
from strawflow.index import branches, carry, checkpoints, consumers, forks
from strawflow.index.carry import Carried
from strawflow.index.checkpoints import Checkpoint
from strawflow.index.consumers import Consumer
from strawflow.index.engine import Connection
from strawflow.index.forks import Fork

RetiredFates = Sequence[tuple[int, Mapping[str, int]]]
"""(unit id, {consumer: step}) of units that left the index for the history."""


@dataclass(frozen=True)
class Start:
    """Where a consumer goes on."""

    consumer: str
    position: int
    purposes: tuple[str, ...]
    checkpoint_id: str | None
    """The checkpoint that its position is of, if it is one."""


@dataclass(frozen=True)
class Plan:
    """What a branch starts with."""

    weights_step: int
    starts: tuple[Start, ...]
    carried: tuple[Carried, ...]
    """First those that were not settled, then those that other consumers have not read."""
    num_unsettled: int
    seen: Mapping[str, tuple[int, ...]]
    """By consumer: the places in `carried` of units that have their fate by the step it starts after."""
    num_lost: int
    """How often a consumer would have to read again what retention has moved to the history."""

    def positions(self) -> dict[str, int]:
        return {start.consumer: start.position for start in self.starts}


def plan_fork(connection: Connection, start: Checkpoint, *, reuse: bool, retired: RetiredFates = ()) -> Plan:
    """Say what a branch from this checkpoint starts with; `retired` as `retired_fates` returns it, if it is needed."""
    parent_id = start.branch_id
    all_of_them = consumers.listed(connection, parent_id)
    others = [c for c in all_of_them if c.consumer != start.consumer]
    publishers = consumers.publishers(connection, parent_id) or {TRAINER}
    fork = Fork(parent_id, start.consumer, start.step, start.step)
    unsettled = _unsettled(connection, fork, start, reuse=False)
    found: dict[str, tuple[int, str | None]] = {}
    if start.consumer not in publishers:
        # The weights' steps are another consumer's: the newest on the line are those of where it goes on.
        found = {
            c.consumer: _start_of(connection, fork, c, unsettled, retired)
            for c in others
            if c.consumer in publishers
        }
        newest = max((position for position, _ in found.values()), default=0)
        fork = Fork(parent_id, start.consumer, start.step, newest)
    if reuse:
        unsettled = _unsettled(connection, fork, start, reuse=True)
    for c in others:
        if c.consumer not in found:
            found[c.consumer] = _start_of(connection, fork, c, unsettled, retired)
    found[start.consumer] = start.step, start.checkpoint_id
    starts = tuple(
        Start(c.consumer, found[c.consumer][0], c.purposes, found[c.consumer][1]) for c in all_of_them
    )
    return _with_settled(connection, fork, starts, unsettled, _num_lost(fork, starts, retired))


def retired_fates(run: Run, parent_id: str) -> RetiredFates:
    """Return what consumers of a branch made of the units that left the index; reads every pack of the history."""
    return [
        (row["unit_id"], dict(zip(row["consumers"], row["steps"], strict=True)))
        for rows in moved_rows(run, "history")
        for row in rows.select(["branch_id", "unit_id", "consumers", "steps"]).to_pylist()
        if row["branch_id"] == parent_id
    ]


def needs_history(connection: Connection, parent_id: str, plan: Plan) -> bool:
    """Tell whether a plan made without `retired_fates` may be wrong: a batch beyond the fork has left the index."""
    return forks.has_retired_beyond(connection, parent_id, plan.positions())


def _unsettled(connection: Connection, fork: Fork, start: Checkpoint, *, reuse: bool) -> list[Carried]:
    return carry.to_carry(
        connection,
        fork.parent_id,
        fork.consumer,
        last_unit_id=start.last_unit_id or 0,
        step=fork.step,
        reuse_up_to=fork.weights_step if reuse else None,
    )


def _start_of(
    connection: Connection,
    fork: Fork,
    consumer: Consumer,
    unsettled: Iterable[Carried],
    retired: RetiredFates,
) -> tuple[int, str | None]:
    """Return after which step a consumer goes on, and its checkpoint of that step if there is one."""
    kept = {c.unit.unit_id for c in unsettled if c.keeps}
    abandoned = [
        step
        for unit_id, step in forks.unsettled_fates(connection, fork, consumer.consumer)
        if unit_id not in kept
    ]
    abandoned += [
        fates[consumer.consumer]
        for _, fates in retired
        if consumer.consumer in fates and fates.get(fork.consumer, fork.step + 1) > fork.step
    ]
    last = min([consumer.position, *(step - 1 for step in abandoned)])
    made = checkpoints.listed(connection, fork.parent_id, consumer.consumer)
    by_step = {c.step: c.checkpoint_id for c in made if c.step <= last and not c.files_removed}
    if any(c.step > last for c in made):
        last = max(by_step, default=0)
    branch = branches.find(connection, fork.parent_id)
    assert branch is not None  # the checkpoint's own
    position = max(last, branches.start_of(connection, branch, consumer.consumer))
    return position, by_step.get(position)


def _with_settled(
    connection: Connection, fork: Fork, starts: tuple[Start, ...], unsettled: list[Carried], num_lost: int
) -> Plan:
    again: dict[int, Carried] = {}
    for s in starts:
        if s.consumer != fork.consumer:
            found = forks.settled_beyond(connection, fork, s.consumer, purposes=s.purposes, step=s.position)
            again.update((c.unit.unit_id, c) for c in found)
    carried = (*unsettled, *(again[unit_id] for unit_id in sorted(again)))
    place_of = {c.unit.unit_id: place for place, c in enumerate(carried) if c.keeps}
    positions = {s.consumer: s.position for s in starts}
    seen: dict[str, list[int]] = {}
    for unit_id, consumer in forks.fates_by(connection, fork.parent_id, sorted(place_of), positions):
        seen.setdefault(consumer, []).append(place_of[unit_id])
    return Plan(
        weights_step=fork.weights_step,
        starts=starts,
        carried=carried,
        num_unsettled=len(unsettled),
        seen={name: tuple(sorted(places)) for name, places in sorted(seen.items())},
        num_lost=num_lost,
    )


def _num_lost(fork: Fork, starts: Iterable[Start], retired: RetiredFates) -> int:
    return sum(
        fates.get(s.consumer, 0) > s.position
        for s in starts
        if s.consumer != fork.consumer
        for _, fates in retired
        if fates.get(fork.consumer, fork.step + 1) <= fork.step
    )
