"""Where each consumer goes on when a line forks, and which units the new branch takes up.

1. The branch is made from one consumer's checkpoint. What that consumer had given a fate by then is settled: those units stay
   the parent's. All others admitted by then are taken up, pristine unless their result belongs to the line. So are units
   of evaluations of the line that are not whole.
2. Every other consumer goes on after the last of its steps up to which its batches hold nothing but what the line holds. If it
   writes checkpoints, that step is one of a checkpoint whose files are kept: none is ever shown ahead of its position.
3. Settled units that such a consumer had not read by then are taken up with their result and offered to it alone; of those
   that are in the history, the ones whose trajectories still lie in packs (flow.history_again).
4. Nothing is written here; asked twice of one state of the index it answers the same.
5. It knows the parent's consumers. What was settled before the branch is taken up for one that is first made there by
   flow.inherit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from strawflow.flow.history_again import RetiredUnit
from strawflow.flow.run import TRAINER
from strawflow.index import branches, carry, checkpoints, consumers, forks
from strawflow.index.carry import Carried
from strawflow.index.checkpoints import Checkpoint
from strawflow.index.consumers import Consumer
from strawflow.index.engine import Connection
from strawflow.index.forks import Fork


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
    lost: tuple[int, ...] = ()
    """Units that a consumer would have to read again and that are in the history; once for each consumer."""

    def positions(self) -> dict[str, int]:
        return {start.consumer: start.position for start in self.starts}


def plan_fork(
    connection: Connection,
    start: Checkpoint,
    *,
    reuse: bool,
    retired: Sequence[RetiredUnit] = (),
    readable: Mapping[int, Carried] | None = None,
) -> Plan:
    """Say what a branch from this checkpoint starts with.

    `retired` are the parent's units in the history, if they are needed (`needs_history`), and `readable` those among them
    whose trajectories can still be read.
    """
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
    unsettled += forks.open_evaluation(connection, fork)
    found[start.consumer] = start.step, start.checkpoint_id
    starts = tuple(
        Start(c.consumer, found[c.consumer][0], c.purposes, found[c.consumer][1]) for c in all_of_them
    )
    return _with_settled(connection, fork, starts, unsettled, _Retired(tuple(retired), readable or {}))


def needs_history(connection: Connection, parent_id: str, plan: Plan) -> bool:
    """Tell whether a plan made without the history may be wrong: a batch beyond the fork has left the index."""
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
    retired: Sequence[RetiredUnit],
) -> tuple[int, str | None]:
    """Return after which step a consumer goes on, and its checkpoint of that step if there is one."""
    kept = {c.unit.unit_id for c in unsettled if c.keeps}
    abandoned = [
        step
        for unit_id, step in forks.unsettled_fates(connection, fork, consumer.consumer)
        if unit_id not in kept
    ]
    abandoned += [
        r.fates[consumer.consumer]
        for r in retired
        if consumer.consumer in r.fates and r.fates.get(fork.consumer, fork.step + 1) > fork.step
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


@dataclass(frozen=True)
class _Retired:
    """The parent's units in the history."""

    units: tuple[RetiredUnit, ...]
    readable: Mapping[int, Carried]

    def beyond(self, fork: Fork, start: Start) -> list[int]:
        """Return the settled units with a result that a consumer had read only after the step it goes on after."""
        return [
            r.unit_id
            for r in self.units
            if r.is_completed
            and r.fates.get(fork.consumer, fork.step + 1) <= fork.step
            and r.fates.get(start.consumer, 0) > start.position
        ]

    def fates_by(self, unit_ids: Collection[int], starts: Mapping[str, int]) -> set[tuple[int, str]]:
        """Return the (unit id, consumer) where the consumer had given the unit a fate by the step it goes on after."""
        return {
            (r.unit_id, consumer)
            for r in self.units
            if r.unit_id in unit_ids
            for consumer, step in r.fates.items()
            if step <= starts.get(consumer, -1)
        }


def _with_settled(
    connection: Connection,
    fork: Fork,
    starts: tuple[Start, ...],
    unsettled: list[Carried],
    retired: _Retired,
) -> Plan:
    again: dict[int, Carried] = {}
    lost: list[int] = []
    for s in starts:
        if s.consumer != fork.consumer:
            found = forks.settled_beyond(connection, fork, s.consumer, purposes=s.purposes, step=s.position)
            again.update((c.unit.unit_id, c) for c in found)
            beyond = retired.beyond(fork, s)
            again.update((u, retired.readable[u]) for u in beyond if u in retired.readable)
            lost += [u for u in beyond if u not in retired.readable]
    carried = (*unsettled, *(again[unit_id] for unit_id in sorted(again)))
    place_of = {c.unit.unit_id: place for place, c in enumerate(carried) if c.keeps}
    positions = {s.consumer: s.position for s in starts}
    fates = forks.fates_by(connection, fork.parent_id, sorted(place_of), positions)
    seen: dict[str, list[int]] = {}
    for unit_id, consumer in fates | retired.fates_by(place_of, positions):
        seen.setdefault(consumer, []).append(place_of[unit_id])
    return Plan(
        weights_step=fork.weights_step,
        starts=starts,
        carried=carried,
        num_unsettled=len(unsettled),
        seen={name: tuple(sorted(places)) for name, places in sorted(seen.items())},
        lost=tuple(lost),
    )
