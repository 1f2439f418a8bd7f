"""Quarantining: damaged extents are found, contained, and what they held is told and, on request, done again.

1. Without `do` everything is only told.
2. Quarantined are extents whose bytes do not match, never whole packs; one that is whole again is given back.
3. Trained units are told, never opened again. A planned batch that no trainer has applied is taken back with all after it,
   and its groups wait to be planned again under a new id; one that a trainer has applied is needed for the replay: the
   file is restored, or the run goes on from a checkpoint before it on a branch.
4. With `reopen` completed units without a fate are generated again. One that another consumer has trained is dropped for
   those it still waits for.
5. Whatever touches plans or offers is done under the roles of that consumer's assembler and trainer, which nobody alive may
   hold; the journal has it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from strawflow.errors import ConflictError, StorageError
from strawflow.flow import assemble, journal
from strawflow.flow.check import Looked, read_packs
from strawflow.flow.journal import Entry, EntryKind
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.index import consumers, events, quarantine, sessions
from strawflow.index.consumers import Assignment, Role
from strawflow.index.engine import Connection
from strawflow.index.quarantine import HeldBatch, HeldPrompts, HeldUnit, Voided
from strawflow.states import BatchState, UnitState

CORRUPT = "corrupt"
"""Why a unit is dropped whose trajectories are damaged and that another consumer has trained."""

Line = tuple[str, str]
"""(branch, consumer)."""


@dataclass(frozen=True)
class DamagedExtent:
    """An extent whose bytes are not what was written, and what it held."""

    extent_id: int
    kind: str
    path: str
    offset: int
    reason: str
    was_known: bool
    """Whether it was in quarantine before."""
    prompts: tuple[HeldPrompts, ...] = ()
    units: tuple[HeldUnit, ...] = ()
    batches: tuple[HeldBatch, ...] = ()


@dataclass
class QuarantineReport:
    """What was found, and what was (or, when not `done`, would be) done about it."""

    done: bool
    damaged: list[DamagedExtent] = field(default_factory=list)
    given_back: list[int] = field(default_factory=list)
    """Extents that were in quarantine and are whole again."""
    voided: dict[str, list[int]] = field(default_factory=dict)
    """branch/consumer: steps of batches taken back, the last first."""
    reopened: list[int] = field(default_factory=list)
    """Units to be generated again."""
    dropped: list[int] = field(default_factory=list)
    """Units that some consumer has trained, dropped for those they still waited for."""
    left_open: list[int] = field(default_factory=list)
    """Completed units that nothing trained and whose trajectories are damaged: `--reopen` generates them again."""
    trained: list[int] = field(default_factory=list)
    """Units with a fate whose trajectories are damaged: nothing needs them any more."""
    unservable: list[int] = field(default_factory=list)
    """Units that cannot be generated again: the weights they are bound to are gone."""
    stopped: list[str] = field(default_factory=list)
    """What the run cannot go on without, and the choice there is."""


def quarantine_damage(run: Run, *, do: bool, reopen: bool = False) -> QuarantineReport:
    """Read every stored extent, and contain what is damaged; `reopen` has open units of it generated again.

    Raises:
        ConflictError: batches or offers are to be changed and a live worker assembles or trains; what was contained is.
        StorageError: none of the pack files is there: the storage is not mounted.
    """
    damaged, given_back = _look(run)
    report = QuarantineReport(do, damaged, given_back)
    voids = _judge(run, report)
    if not do:
        report.voided = {_name(line): [b.step for b in found] for line, found in voids.items()}
        if reopen:
            report.reopened, report.left_open = report.left_open, []
        return report
    session = WorkerSession(run, "quarantine")
    try:
        _contain(session, report)
        roles = _Roles(session)
        for line, found in voids.items():
            _void(session, roles, line, found)
            report.voided[_name(line)] = [batch.step for batch in found]
        if reopen:
            _reopen(session, roles, report)
    finally:
        session.end()  # also after a refusal: a session that lived on would hold the roles
    return report


def _name(line: Line) -> str:
    return "/".join(line)


# ---- looking


def _look(run: Run) -> tuple[list[DamagedExtent], list[int]]:
    with run.index.read() as connection:
        known = quarantine.listed(connection)
    bad: list[Looked] = []
    num_good, given_back = 0, []
    for _, looks in read_packs(run):
        for looked in looks:
            if looked.error is None:
                num_good += 1
                given_back += [looked.extent.extent_id] if looked.extent.extent_id in known else []
            else:
                bad.append(looked)
    if bad and not num_good and all(looked.is_missing for looked in bad):
        raise StorageError(
            f"none of the packs under {run.root / 'packs'} is there: is the storage mounted? Nothing was quarantined"
        )
    return _held(run, bad, set(known)), given_back


def _held(run: Run, bad: Sequence[Looked], known: set[int]) -> list[DamagedExtent]:
    ids = [looked.extent.extent_id for looked in bad]
    with run.index.read() as connection:
        prompts = quarantine.held_prompts(connection, ids)
        units = quarantine.held_units(connection, ids)
        batches = quarantine.held_batches(connection, ids)
    return [
        DamagedExtent(
            extent_id=extent.extent_id,
            kind=extent.kind,
            path=extent.path,
            offset=extent.offset,
            reason=_reason(looked),
            was_known=extent.extent_id in known,
            prompts=tuple(p for p in prompts if p.extent_id == extent.extent_id),
            units=tuple(u for u in units if u.extent_id == extent.extent_id),
            batches=tuple(b for b in batches if b.extent_id == extent.extent_id),
        )
        for looked in bad
        for extent in (looked.extent,)
    ]


def _reason(looked: Looked) -> str:
    return "its file is missing" if looked.is_missing else "its bytes do not match their checksum"


def _judge(run: Run, report: QuarantineReport) -> dict[Line, list[Voided]]:
    """Sort what was held into what can be done; returns the batches to take back, by line."""
    first: dict[Line, int] = {}
    for damaged in report.damaged:
        if damaged.prompts:
            where = ", ".join(
                f"rows {p.first_row} to {p.first_row + p.num_rows - 1} of segment {p.segment_seq} of {p.dataset_id!r}"
                for p in damaged.prompts
            )
            report.stopped.append(f"prompts, {where}: restore {damaged.path} from a copy")
        for batch in damaged.batches:
            if batch.state is BatchState.PLANNED:
                line = batch.branch_id, batch.consumer
                first[line] = min(batch.step, first.get(line, batch.step))
    voids: dict[Line, list[Voided]] = {}
    with run.index.read() as connection:
        for line, step in first.items():
            if quarantine.was_applied(connection, *line, step=step):
                report.stopped.append(
                    f"the batch of step {step} of {_name(line)} is needed for the replay from the last checkpoint: restore "
                    "its file from a copy, or branch from a checkpoint before it "
                    "(`strawflow resume --from CHECKPOINT --branch NAME`)"
                )
            else:
                voids[line] = quarantine.batches_from(connection, *line, step=step)
    for damaged in report.damaged:
        for unit in damaged.units:
            _sort_unit(report, _without_voided(unit, voids))
    return voids


def _without_voided(unit: HeldUnit, voids: dict[Line, list[Voided]]) -> HeldUnit:
    """Return a unit as it stands once batches are taken back: before their consumers again."""
    for (branch_id, consumer), found in voids.items():
        if branch_id == unit.branch_id and any(unit.unit_id in batch.unit_ids for batch in found):
            fates = tuple(fate for fate in unit.fates if not fate.startswith(f"{consumer}: "))
            unit = replace(unit, fates=fates, offered_to=(*unit.offered_to, consumer))
    return unit


def _sort_unit(report: QuarantineReport, unit: HeldUnit) -> None:
    if unit.fates and not unit.offered_to:
        report.trained.append(unit.unit_id)
    elif unit.state is UnitState.COMPLETED and not unit.can_be_served:
        report.unservable.append(unit.unit_id)
    else:
        report.left_open.append(unit.unit_id)


# ---- doing


def _contain(session: WorkerSession, report: QuarantineReport) -> None:
    with session.run.index.begin() as connection:
        sessions.require_live(connection, session.session_id)
        for damaged in report.damaged:
            if quarantine.add(connection, damaged.extent_id, reason=damaged.reason):
                events.record(
                    connection,
                    "extent.quarantined",
                    session_id=session.session_id,
                    extent_id=damaged.extent_id,
                    path=damaged.path,
                    offset=damaged.offset,
                    reason=damaged.reason,
                )
        if quarantine.lift(connection, report.given_back):
            events.record(
                connection,
                "extents.given_back",
                session_id=session.session_id,
                extents=report.given_back,
            )


class _Roles:
    """The roles of assembler and trainer, held for this session: what others plan or commit under older fences is refused."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._held: dict[Line, tuple[Role, Role]] = {}

    def take(self, connection: Connection, line: Line) -> None:
        """Become assembler and trainer of a line, in a transaction of its own.

        Raises:
            ConflictError: a live worker is.
        """
        if line in self._held:
            return
        branch_id, consumer = line
        taken = []
        for role in (f"assemble:{consumer}", f"consume:{consumer}"):
            found = consumers.take_role(connection, branch_id, role, self._session.session_id)
            if found is None:
                raise ConflictError(
                    f"a live worker is {role} on branch {branch_id!r}: stop the run, then repair its batches and offers"
                )
            taken.append(found)
        self._held[line] = taken[0], taken[1]

    def require(self, connection: Connection) -> None:
        for roles in self._held.values():
            for role in roles:
                consumers.require_role(connection, role)

    def assembler(self, line: Line) -> Role:
        return self._held[line][0]


def _void(session: WorkerSession, roles: _Roles, line: Line, found: Sequence[Voided]) -> None:
    run = session.run
    with run.index.begin() as connection:
        roles.take(connection, line)
    branch_id, consumer = line
    from_step = min(batch.step for batch in found)
    body = {
        "consumer": consumer,
        "fence": roles.assembler(line).fence,
        "from_step": from_step,
        "digests": [batch.digest for batch in found],
    }
    entry = Entry(EntryKind.VOID, branch_id, body)
    with journal.recorded(session, [entry]) as record, run.index.begin() as connection:
        roles.require(connection)
        record.name(connection)
        if quarantine.batches_from(connection, *line, step=from_step) != list(found):
            raise ConflictError(f"batches of {_name(line)} were planned meanwhile; look again")
        quarantine.void(connection, branch_id, consumer, found)


def _reopen(session: WorkerSession, roles: _Roles, report: QuarantineReport) -> None:
    run = session.run
    wanted, report.left_open = report.left_open, []
    if not wanted:
        return
    branches = sorted({u.branch_id for d in report.damaged for u in d.units})
    with run.index.begin() as connection:
        for branch_id in branches:
            for consumer in consumers.listed(connection, branch_id):
                roles.take(connection, (branch_id, consumer.consumer))
        held = quarantine.held_units(connection, [d.extent_id for d in report.damaged])
    fated = [u for u in held if u.unit_id in set(wanted) and u.fates and u.offered_to]
    _drop_for_others(session, roles, fated)
    with run.index.begin() as connection:
        roles.require(connection)
        report.reopened = quarantine.reopen(connection, wanted, reason=CORRUPT)
    report.dropped = [u.unit_id for u in fated]


def _drop_for_others(session: WorkerSession, roles: _Roles, fated: Sequence[HeldUnit]) -> None:
    """Drop units that one consumer has trained for the consumers they still wait for: no second sample is made of them."""
    by_line: dict[Line, list[HeldUnit]] = {}
    for unit in fated:
        for consumer in unit.offered_to:
            by_line.setdefault((unit.branch_id, consumer), []).append(unit)
    for line, units in by_line.items():
        dropped = [Assignment(u.epoch, u.unit_id, "dropped", CORRUPT) for u in units]
        assemble.drop(session, roles.assembler(line), dropped)
