"""The plain model that strawflow.testing.state_machine holds a store against: dictionaries, sorted lists and the rules of forks.

It knows the rules of offers, fates, checkpoints and branches as the promises say them, and nothing of SQL, packs or
transactions. Weights are not in it: every sample is of step 0, so offers go by unit id alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from strawflow.states import UnitState

Place = tuple[int, int]
"""(epoch, row)."""

PUBLISHER = "trainer"
"""The consumer whose weights they would be."""


@dataclass
class ModelUnit:
    """What the model knows of one unit."""

    place: Place
    state: UnitState = UnitState.READY
    fence: int = 0
    attempts: int = 0
    crashes: int = 0
    parks: int = 0
    requeues: int = 0
    is_parked: bool = False
    """Whether progress of it is saved, so that it goes before fresh ones once it is ready."""
    saved: list[list[int]] = field(default_factory=list)
    """The tokens of that progress, by member."""
    holder: int | None = None
    sampled_as: tuple[int, int] = (0, 0)
    """(unit, fence) that its trajectories were sampled under, once it is completed."""
    is_taken_up: bool = False
    """Whether it was taken up with its result for some consumers alone."""


@dataclass(frozen=True)
class ModelBatch:
    digest: str
    rows: tuple[tuple[int, int], ...]
    """(unit, fence) of its trajectories, in order."""
    places: tuple[Place, ...]


@dataclass(frozen=True)
class ModelCheckpoint:
    """What was committed, by whom and under which id, and what had been admitted by then."""

    state: str
    session_id: str
    checkpoint_id: str
    branch: str
    num_admitted: int
    last_unit_id: int


@dataclass
class ModelConsumer:
    """A named consumer on one branch."""

    start: int = 0
    """After which step of the line before it goes on."""
    position: int = 0
    handed_out: int = 0
    planned: list[ModelBatch] = field(default_factory=list)
    """Of the whole line, by step."""
    checkpoints: dict[int, ModelCheckpoint] = field(default_factory=dict)
    """Of the whole line, by step."""
    dropped: dict[Place, int] = field(default_factory=dict)
    """Of the whole line: what it was given no batch of, and while which step was planned."""
    offered: list[int] = field(default_factory=list)
    fates: dict[int, int] = field(default_factory=dict)
    """Of units of the branch: in which step."""
    seen: set[int] = field(default_factory=set)
    """Units of the branch that it had read before."""

    def has_by(self, unit_id: int, step: int) -> bool:
        return unit_id in self.seen or self.fates.get(unit_id, step + 1) <= step


@dataclass
class ModelBranch:
    """A line of history: its own units, and its consumers' view of the whole line."""

    name: str
    parent: str | None = None
    fork: tuple[str, int] = ("", 0)
    """(consumer, step) of the checkpoint it was made from."""
    units: dict[int, ModelUnit] = field(default_factory=dict)
    consumers: dict[str, ModelConsumer] = field(default_factory=dict)
    num_admitted: int = 0

    def settled(self, consumer: str, step: int) -> list[int]:
        return sorted(u for u in self.units if self.consumers[consumer].has_by(u, step))


@dataclass(frozen=True)
class ModelFork:
    """What a branch starts with."""

    starts: dict[str, int]
    carried: list[int]
    """Units of the parent that are taken up, in order."""
    kept: set[int]
    num_unsettled: int


def plan_fork(parent: ModelBranch, consumer: str, step: int, *, reuse: bool) -> ModelFork:
    """Say what a branch from a consumer's checkpoint of a step starts with, by the rule of flow.fork."""
    last_unit_id = parent.consumers[consumer].checkpoints[step].last_unit_id
    settled = parent.settled(consumer, step)
    unsettled = [
        u
        for u in sorted(set(parent.units) - set(settled))
        if u <= last_unit_id or parent.units[u].is_taken_up
    ]

    def kept_of(reuse: bool) -> set[int]:
        completed = (u for u in unsettled if parent.units[u].state is UnitState.COMPLETED)
        return {u for u in completed if reuse or parent.units[u].is_taken_up}

    starts = {consumer: step}
    for name, other in parent.consumers.items():
        if name != consumer:
            # Whose weights the line holds is asked before anything is reused.
            known = {*settled, *kept_of(reuse and (name != PUBLISHER or consumer == PUBLISHER))}
            starts[name] = _start_of(other, known)
    again = {
        u
        for name, other in parent.consumers.items()
        for u in settled
        if name != consumer
        and parent.units[u].state is UnitState.COMPLETED
        and not other.has_by(u, starts[name])
    }
    return ModelFork(starts, [*unsettled, *sorted(again)], kept_of(reuse) | again, len(unsettled))


def _start_of(consumer: ModelConsumer, known: set[int]) -> int:
    """Return the last step up to which a consumer's batches hold nothing but known units, one of a checkpoint if it has any."""
    abandoned = [step for u, step in consumer.fates.items() if u not in known]
    last = min([consumer.position, *(step - 1 for step in abandoned)])
    if any(step > last for step in consumer.checkpoints):
        last = max((step for step in consumer.checkpoints if step <= last), default=0)
    return max(last, consumer.start)


def forked(
    parent: ModelBranch, name: str, fork: ModelFork, made_from: tuple[str, int], ids: list[int]
) -> ModelBranch:
    """Return the new branch; `ids` are those that its units got, in order."""
    consumer, step = made_from
    made = ModelBranch(name, parent.name, made_from)
    made.num_admitted = parent.consumers[consumer].checkpoints[step].num_admitted
    for other, start in fork.starts.items():
        old = parent.consumers[other]
        made.consumers[other] = ModelConsumer(
            start=start,
            position=start,
            handed_out=start,
            planned=old.planned[:start],
            checkpoints={at: c for at, c in old.checkpoints.items() if at <= start},
            dropped={place: at for place, at in old.dropped.items() if at <= start},
        )
    for new_id, unit_id in zip(ids, fork.carried, strict=True):
        unit = made.units[new_id] = ModelUnit(parent.units[unit_id].place)
        if unit_id not in fork.kept:
            continue
        unit.state, unit.sampled_as = UnitState.COMPLETED, parent.units[unit_id].sampled_as
        for other, start in fork.starts.items():
            if parent.consumers[other].has_by(unit_id, start):
                made.consumers[other].seen.add(new_id)
                unit.is_taken_up = True
            else:
                made.consumers[other].offered.append(new_id)
    return made


def settled_before(branches: Mapping[str, ModelBranch], name: str) -> list[ModelUnit]:
    """Return the units that the line of a branch had settled before it and that the branch has not taken up, in order."""
    at = branches[name]
    known = {unit.place for unit in at.units.values()}
    found: dict[int, ModelUnit] = {}
    while at.parent is not None:
        parent = branches[at.parent]
        for unit_id in parent.settled(*at.fork):
            unit = parent.units[unit_id]
            if unit.state is UnitState.COMPLETED and unit.place not in known:
                known.add(unit.place)
                found[unit_id] = unit
        at = parent
    return [found[unit_id] for unit_id in sorted(found)]


def take_up(branch: ModelBranch, units: Mapping[int, ModelUnit]) -> None:
    """Take units of the line before up with their results; everybody who is there has read them."""
    for unit_id, unit in units.items():
        branch.units[unit_id] = ModelUnit(
            unit.place, UnitState.COMPLETED, sampled_as=unit.sampled_as, is_taken_up=bool(branch.consumers)
        )
        for consumer in branch.consumers.values():
            consumer.seen.add(unit_id)


def places_of(branch: ModelBranch, name: str) -> list[Place]:
    """Return where every admitted prompt of a line is for a consumer: in a batch, dropped, offered, or not sampled yet."""
    consumer = branch.consumers[name]
    waiting = [u for u in branch.units.values() if u.state is not UnitState.COMPLETED]
    return sorted(
        [
            *(place for batch in consumer.planned for place in batch.places),
            *consumer.dropped,
            *(branch.units[u].place for u in consumer.offered),
            *(unit.place for unit in waiting),
        ]
    )
