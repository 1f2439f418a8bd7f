"""Quarantining: damaged extents are found, contained, and what they held is told and, on request, done again.

1. Without `do` everything is only told.
2. Quarantined are extents whose bytes do not match, never whole packs; one that is whole again is given back. The file of a
   damaged pack is set aside, out of the folder that people open whole, and is found under its path all the same; what is
   whole in it is copied out first where that can be done now.
3. Trained units are told, never opened again. A planned batch that no trainer has applied is taken back with all after it,
   and its groups wait to be planned again under a new id; one that a trainer has applied is needed for the replay: the
   file is restored, or the run goes on from a checkpoint before it on a branch.
4. With `reopen` completed units without a fate are generated again. One that a consumer has given its fate never is: that
   consumer would get it twice. It is dropped for the consumers that it still waits for.
5. What is in quarantine is not offered to a consumer made later (index.consumers); given back, it is.
6. Whatever touches plans or offers is done under the roles of that consumer's assembler and trainer, which nobody alive may
   hold; the journal has it first. Sessions whose process is gone, or whose lease expired, are declared lost before.
7. What is told without `do` is what is done with it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from strawflow.errors import ConflictError, StorageError
from strawflow.flow import assemble, journal, rescue, returned
from strawflow.flow.check import Looked, read_packs
from strawflow.flow.compact import bring_out
from strawflow.flow.fence import who_and_how_to_end
from strawflow.flow.journal import Entry, EntryKind
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.index import consumers, events, quarantine, sessions
from strawflow.index.consumers import Assignment, Role
from strawflow.index.engine import Connection
from strawflow.index.quarantine import HeldBatch, HeldPrompts, HeldUnit, Voided
from strawflow.packs.posix import file_of, put_back, set_aside
from strawflow.packs.scan import kind_of
from strawflow.states import BatchState, UnitState

CORRUPT = "corrupt"
"""Why a unit is dropped whose trajectories are damaged and that another consumer has given its fate."""

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
    dropped: dict[str, list[int]] = field(default_factory=dict)
    """branch/consumer: units dropped for it, which another consumer has trained or dropped."""
    left_open: list[int] = field(default_factory=list)
    """Units that no consumer has given a fate and whose trajectories are damaged: `--reopen` generates them again."""
    left_waiting: dict[str, list[int]] = field(default_factory=dict)
    """branch/consumer: units before it that another consumer has trained or dropped: `--reopen` drops them for it."""
    trained: list[int] = field(default_factory=list)
    """Units with a fate whose trajectories are damaged: nothing needs them any more."""
    unservable: list[int] = field(default_factory=list)
    """Units that cannot be generated again: the weights they are bound to are gone."""
    stopped: list[str] = field(default_factory=list)
    """What the run cannot go on without, and the choice there is."""
    beside: list[str] = field(default_factory=list)
    """What damaged extents held that the run itself can do without, and what becomes of it."""

    @property
    def has_work(self) -> bool:
        """Whether anything is changed by doing it: extents newly found or whole again, units and batches."""
        is_new = any(not damaged.was_known for damaged in self.damaged)
        return is_new or bool(self.given_back or self.voided or self.reopened or self.dropped)


def quarantine_damage(run: Run, *, do: bool, reopen: bool = False) -> QuarantineReport:
    """Read every stored extent, and contain what is damaged.

    `reopen` has open units of it generated again, or dropped for the consumers they wait for if another has their fate.

    Raises:
        ConflictError: batches or offers are to be changed and a live worker assembles or trains; what was contained is.
        StorageError: none of the pack files is there: the storage is not mounted; or one cannot be read for another reason
            than damage.
    """
    if do:
        rescue.rescue_all(run)  # whoever is gone must not stand in the way until its lease expires
    damaged, given_back = _look(run)
    report = QuarantineReport(do, damaged, given_back)
    voids = _judge(run, report)
    if not do:
        report.voided = {_name(line): [b.step for b in found] for line, found in voids.items()}
        if reopen:
            report.reopened, report.left_open = report.left_open, []
            report.dropped, report.left_waiting = report.left_waiting, {}
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
            elif looked.is_out_of_reach:
                raise StorageError(
                    f"{looked.error.message}: that is no damage, let this user read it, or mend the mount; nothing was "
                    "quarantined"
                ) from looked.error
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
            report.stopped.append(
                f"prompts, {where}: their groups cannot be claimed; restore {damaged.path} from a copy and run "
                "`strawflow index quarantine RUN --yes` again"
            )
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
                    "(`strawflow branch create`, or `strawflow resume --from CHECKPOINT --branch NAME`)"
                )
            else:
                voids[line] = quarantine.batches_from(connection, *line, step=step)
    for damaged in report.damaged:
        for unit in damaged.units:
            _sort_unit(report, _without_voided(unit, voids))
        report.beside += _beside(damaged)
    report.left_open.sort()
    for unit_ids in report.left_waiting.values():
        unit_ids.sort()
    return voids


def _without_voided(unit: HeldUnit, voids: dict[Line, list[Voided]]) -> HeldUnit:
    """Return a unit as it stands once batches are taken back: before their consumers again."""
    for (branch_id, consumer), found in voids.items():
        if branch_id == unit.branch_id and any(unit.unit_id in batch.unit_ids for batch in found):
            fates = tuple(fate for fate in unit.fates if not fate.startswith(f"{consumer}: "))
            unit = replace(unit, fates=fates, offered_to=(*unit.offered_to, consumer))
    return unit


_NOT_OF_THE_RUN = {
    "journal": "entries of the journal: no restore or rebuild can read them, while the index holds what they say; "
    "`strawflow index backup RUN` keeps it",
    "history": "units that retention moved out of the index: `strawflow unit show` cannot tell them any more",
    "event": "events that retention moved out of the index: `strawflow events` cannot tell them any more",
}
"""What extents hold that no unit and no batch names, and what becomes of it, by kind."""


def _beside(damaged: DamagedExtent) -> list[str]:
    """Tell what an extent held that nothing waits for."""
    at = f"{damaged.path}, byte {damaged.offset}"
    if damaged.kind in _NOT_OF_THE_RUN:
        return [f"{at} held {_NOT_OF_THE_RUN[damaged.kind]}"]
    parts = {
        "plan": "plan: what became of each member cannot be shown any more",
        "batch": "packed rows: it cannot be replayed or opened any more",
    }
    what = parts.get(damaged.kind, "trajectories: it cannot be read again")
    told = [
        f"{at} held the batch of step {b.step} of {b.branch_id}/{b.consumer}, which is {b.state}, with its {what}"
        for b in damaged.batches
        if b.state is not BatchState.PLANNED
    ]
    if not (damaged.prompts or damaged.units or damaged.batches):
        told.append(f"{at} held nothing that any row names")
    return told


def _sort_unit(report: QuarantineReport, unit: HeldUnit) -> None:
    if unit.fates:
        for consumer in unit.offered_to:
            report.left_waiting.setdefault(_name((unit.branch_id, consumer)), []).append(unit.unit_id)
        if not unit.offered_to:
            report.trained.append(unit.unit_id)
    elif unit.state is UnitState.COMPLETED and not unit.can_be_served:
        report.unservable.append(unit.unit_id)
    else:
        report.left_open.append(unit.unit_id)


# ---- doing


def _contain(session: WorkerSession, report: QuarantineReport) -> None:
    run, paths = session.run, sorted({damaged.path for damaged in report.damaged})
    with run.index.read() as connection:
        given_back = quarantine.paths_of(connection, report.given_back)
    _note(session, report)
    # crash here: damaged files where they were, and whole ones set aside, until this runs again
    bring_out(session, [p for p in paths if kind_of(p) != journal.KIND and file_of(run.root, p).exists()])
    for path in paths:
        set_aside(run.root, path)
    for path in given_back - set(paths):
        put_back(run.root, path)


def _note(session: WorkerSession, report: QuarantineReport) -> None:
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
            consumers.offer_after_all(connection, report.given_back)
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
                    f"batches and offers are repaired while nobody alive is {role} on branch {branch_id!r}; it is "
                    f"{_holder(connection, branch_id, role)}; then repair again"
                )
            taken.append(found)
        self._held[line] = taken[0], taken[1]

    def require(self, connection: Connection) -> None:
        for roles in self._held.values():
            for role in roles:
                consumers.require_role(connection, role)

    def assembler(self, line: Line) -> Role:
        return self._held[line][0]


def _holder(connection: Connection, branch_id: str, role: str) -> str:
    holders = {name: session_id for name, _, session_id in consumers.roles_listed(connection, branch_id)}
    listed = sessions.listed(connection, live_only=True)
    holder = next((s for s in listed if s.session_id == holders.get(role)), None)
    return "a session that ended just now" if holder is None else who_and_how_to_end(holder)


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
    open_ids, report.left_open = report.left_open, []
    waiting, report.left_waiting = report.left_waiting, {}
    wanted = {*open_ids, *(unit_id for unit_ids in waiting.values() for unit_id in unit_ids)}
    if not wanted:
        return
    branches = sorted({u.branch_id for d in report.damaged for u in d.units})
    with run.index.begin() as connection:
        for branch_id in branches:
            for consumer in consumers.listed(connection, branch_id):
                roles.take(connection, (branch_id, consumer.consumer))
        held = quarantine.held_units(connection, [d.extent_id for d in report.damaged])
    # Looked at again under the roles: a consumer may have given one its fate since.
    fated = [u for u in held if u.unit_id in wanted and u.fates]
    report.dropped = _drop_for_others(session, roles, fated)
    while not _opened_again(session, roles, report, wanted - {u.unit_id for u in fated}):
        pass  # a worker took or settled one that is only parked


def _opened_again(
    session: WorkerSession, roles: _Roles, report: QuarantineReport, unit_ids: Collection[int]
) -> bool:
    """Open units again whose results or progress are damaged; False when one changed meanwhile."""
    run = session.run
    with run.index.read() as connection:
        found = quarantine.openable(connection, unit_ids)
    after = [replace(u, attempts=0, crashes=0) if u.state is UnitState.COMPLETED else u for u in found]
    entries = returned.entries(EntryKind.REOPEN, after, reason=CORRUPT)
    try:
        with journal.recorded(session, entries) as record, run.index.begin() as connection:
            roles.require(connection)
            record.name(connection)
            if quarantine.openable(connection, unit_ids) != found:
                raise _MovedOnError
            report.reopened = quarantine.reopen(connection, [u.unit_id for u in found], reason=CORRUPT)
    except _MovedOnError:
        return False
    return True


class _MovedOnError(Exception):
    """A unit is not as the journal has it: the transaction goes back."""


def _drop_for_others(
    session: WorkerSession, roles: _Roles, fated: Sequence[HeldUnit]
) -> dict[str, list[int]]:
    """Drop units that one consumer has for those they still wait for: no second sample is made of them. Returns which."""
    by_line: dict[Line, list[HeldUnit]] = {}
    for unit in fated:
        for consumer in unit.offered_to:
            by_line.setdefault((unit.branch_id, consumer), []).append(unit)
    for line, units in by_line.items():
        dropped = [Assignment(u.epoch, u.unit_id, "dropped", CORRUPT) for u in units]
        assemble.drop(session, roles.assembler(line), dropped)
    return {_name(line): sorted(u.unit_id for u in units) for line, units in by_line.items()}
