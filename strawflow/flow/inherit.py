"""What a consumer gets of the line before a branch that it is first made on.

    plan ▸ ids taken ▸ journal entry durable ▸ transaction(units taken up, consumer, its offers)

1. All that was settled on the line by where the branches left one another, and that the branch has not taken up itself, is
   taken up with its result and offered to the new consumer alone: every other one there had read it, or was made on the
   branch and got it then. Its order is that of all offers: oldest weights first, then first in.
2. While the transaction lasts nobody writes a unit: what is completed, sent back, retired or taken up by another at the
   same time is either seen by it, or sees the new consumer. A plan that does not hold any more is made anew.
3. What retention moved to the history is left out, as it is for a consumer made anywhere.

It also knows how the journal tells units that a branch takes up, for flow.branch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strawflow.errors import ConflictError
from strawflow.flow import history_again, journal
from strawflow.flow.journal import Entry, EntryKind, ExtentRef
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.ids import Extent
from strawflow.index import branches, carry, consumers, datasets, forks, packs, retired, tallies, units
from strawflow.index.carry import Carried, Place
from strawflow.index.engine import Connection


@dataclass(frozen=True)
class Inheritance:
    """What is taken up for a new consumer, and who does not read it."""

    carried: tuple[Carried, ...]
    readers: tuple[tuple[str, int, tuple[str, ...]], ...]
    """(consumer, the step it went on after, what it wants) of those who are there already."""
    num_gone: int
    """Units of the branch that were in the history when it was planned."""


class _IsThereError(Exception):
    """Another made the consumer meanwhile."""


def make_consumer(session: WorkerSession, *, purposes: Collection[str]) -> None:
    """Create the consumer a session is of unless it exists, and offer it every completed unit of its line that it wants."""
    run = session.run
    while True:
        gone = _places_gone(run)
        with run.index.read() as connection:
            if run.consumer in {c.consumer for c in consumers.listed(connection, run.branch)}:
                return
            plan = _plan(connection, run, purposes, gone)
            found = placed(connection, plan.carried)
        first_id = 0
        if plan.carried:
            with run.index.begin() as connection:
                first_id = units.take_ids(connection, len(plan.carried))
        entry = _entry(run, purposes, plan, found, first_id=first_id)
        try:
            with journal.recorded(session, [entry]) as record, run.index.begin() as connection:
                record.name(connection)
                _make(connection, run, purposes, plan, gone=gone, first_id=first_id)
        except _IsThereError:
            return
        except ConflictError:
            continue  # somebody changed what it is made of: each round lost is one that another won
        return


def _make(
    connection: Connection,
    run: Run,
    purposes: Collection[str],
    plan: Inheritance,
    *,
    gone: Collection[Place],
    first_id: int,
) -> None:
    units.hold_all(connection)
    if run.consumer in {c.consumer for c in consumers.listed(connection, run.branch)}:
        raise _IsThereError
    if plan.carried:
        units.require_unused(connection, first_id)
    if _plan(connection, run, purposes, gone) != plan:
        raise ConflictError(f"the run moved on while consumer {run.consumer!r} was made")
    take_up(connection, run.branch, dict(enumerate(plan.carried, first_id)), plan.readers)
    consumers.ensure(connection, run.branch, run.consumer, purposes=purposes)


def _plan(
    connection: Connection, run: Run, purposes: Collection[str], gone: Collection[Place]
) -> Inheritance:
    branch = branches.find(connection, run.branch)
    if branch is None or branch.parent_id is None:
        return Inheritance((), (), 0)
    carried = forks.settled_before(connection, run.branch, purposes=purposes, gone=gone)
    readers = tuple(
        (c.consumer, branches.start_of(connection, branch, c.consumer), c.purposes)
        for c in consumers.listed(connection, run.branch)
    )
    return Inheritance(tuple(carried), readers, sum(retired.units(connection, run.branch).values()))


def _places_gone(run: Run) -> set[Place]:
    """Return the places of a branch's units that are in the history; reads it only if there are any."""
    with run.index.read() as connection:
        branch = branches.find(connection, run.branch)
        has_any = (
            branch is not None and branch.parent_id is not None and retired.units(connection, run.branch)
        )
    return history_again.places_gone(run, run.branch) if has_any else set()


def take_up(
    connection: Connection,
    branch_id: str,
    carried: Mapping[int, Carried],
    readers: Sequence[tuple[str, int, Collection[str]]],
) -> None:
    """Insert units by their new ids into a branch, read by those who are there; the next consumer made gets them."""
    carry.take_up(connection, carried, to_branch=branch_id)
    for consumer, step, wanted in readers:
        epochs = {unit_id: c.unit.epoch for unit_id, c in carried.items() if c.unit.purpose in wanted}
        carry.mark_read(connection, epochs, branch_id=branch_id, consumer=consumer, at_step=step)
    counts = Counter(c.dataset_id for c in carried.values() if c.unit.purpose != "eval")
    for dataset_id, count in sorted(counts.items()):
        if datasets.cursor(connection, branch_id, dataset_id).num_admitted:
            tallies.add(connection, branch_id, retired.PASSED + dataset_id, -count)


# ---- as the journal tells it


def _entry(
    run: Run, purposes: Collection[str], plan: Inheritance, found: Mapping[int, Extent], *, first_id: int
) -> Entry:
    body: dict[str, Any] = {"consumer": run.consumer, "purposes": sorted(purposes), "position": 0}
    if plan.carried:
        body["readers"] = [[consumer, step, sorted(wanted)] for consumer, step, wanted in plan.readers]
        body |= taken_up(plan.carried, found, first_id=first_id)
    return Entry(EntryKind.CONSUMER, run.branch, body)


def placed(connection: Connection, carried: Sequence[Carried]) -> dict[int, Extent]:
    """Return where the results lie that units keep."""
    kept = {c.unit.extent_id for c in carried if c.keeps}
    return packs.find_extents(connection, [extent_id for extent_id in kept if extent_id is not None])


def taken_up(carried: Sequence[Carried], found: Mapping[int, Extent], *, first_id: int) -> dict[str, Any]:
    """Return how an entry tells units that are taken up; their new ids count from `first_id`."""
    order = {extent_id: number for number, extent_id in enumerate(found)}
    return {
        "first_unit_id": first_id,
        "carried": [c.unit.unit_id for c in carried],
        "extents": [journal.extent_ref(extent) for extent in found.values()],
        # [its place in `carried`, its scheduling key]; that of its parent may be gone when this is read.
        "keys": [[number, c.scheduling_key] for number, c in enumerate(carried) if c.scheduling_key],
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


def with_results(
    body: Mapping[str, Any], parents: Mapping[int, Carried], find: Callable[[ExtentRef], Extent]
) -> dict[int, Carried]:
    """Return the units that an entry tells, by their new ids, with what they keep; `parents` may lack some."""
    extents = [find(ExtentRef.of("trajectory", ref)) for ref in body["extents"]]
    kept = {number: told for number, *told in body["kept"]}
    keys: dict[int, int] = dict(body.get("keys", ()))
    found: dict[int, Carried] = {}
    for number, unit_id in enumerate(body["carried"]):
        if unit_id not in parents:
            continue
        is_old = "keys" not in body  # earlier programs took over the priority alone
        carried = replace(
            parents[unit_id],
            scheduling_key=keys.get(number, 0),
            not_before=None if is_old else parents[unit_id].not_before,
        )
        if number in kept:
            at, row_start, row_count, version_step, mean_reward, num_tokens = kept[number]
            unit = replace(
                carried.unit,
                extent_id=extents[at].extent_id,
                row_start=row_start,
                row_count=row_count,
                version_step=version_step,
                mean_reward=mean_reward,
                num_tokens=num_tokens,
            )
            carried = replace(carried, unit=unit, keeps=True)
        found[body["first_unit_id"] + number] = carried
    return found
