"""Looking at worker sessions and fencing one off by hand: what an operator does when a worker hangs or its host is gone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from strawflow import processes
from strawflow.errors import ConflictError, IllegalTransitionError, NotFoundError
from strawflow.flow import journal, returned
from strawflow.flow.journal import EntryKind
from strawflow.flow.rescue import declare_lost
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.index import consumers, leases, sessions, units
from strawflow.index.engine import Connection
from strawflow.index.sessions import Session
from strawflow.index.units import Unit
from strawflow.states import SessionState, UnitState

FENCED = "fenced off by an operator"
"""Why a session was declared lost."""
_TRIES = 3
"""How often the journal is tried to have the units of a worker that goes on leasing and settling. Then it is stopped all the
same, and a rebuild would count these units from 0."""


@dataclass(frozen=True)
class WorkerLine:
    """One worker session as an operator sees it."""

    session_id: str
    kind: str
    host: str
    pid: int
    state: str
    process: str
    """`runs` or `gone` for a process of this machine, else `elsewhere`."""
    expires_in_s: float
    num_units: int
    roles: tuple[str, ...]


def workers_of(run: Run, *, live_only: bool) -> list[WorkerLine]:
    """Return the worker sessions of a run, the oldest first."""
    with run.index.read() as connection:
        listed = sessions.listed(connection, live_only=live_only)
        roles: dict[str, list[str]] = defaultdict(list)
        for role, _, session_id in consumers.roles_listed(connection, run.branch):
            if session_id is not None:
                roles[session_id].append(role)
        held = {s.session_id: leases.num_leased(connection, s.session_id) for s in listed}
    return [
        WorkerLine(
            session_id=s.session_id,
            kind=s.kind,
            host=s.host,
            pid=s.pid,
            state=s.state.value,
            process=_process(s),
            expires_in_s=s.expires_in_s,
            num_units=held[s.session_id],
            roles=tuple(roles[s.session_id]) if s.state is SessionState.LIVE else (),
        )
        for s in listed
    ]


def fence(run: Run, session_id: str, *, force: bool = False) -> int:
    """Declare a session lost now; returns how many units are ready again (or failed, their attempts used up).

    Raises:
        NotFoundError: no such session.
        IllegalTransitionError: it ended or was lost before.
        ConflictError: it seems to live (its process runs here, or its lease still holds elsewhere), and not `force`.
    """
    with run.index.read() as connection:
        found = next((s for s in sessions.listed(connection) if s.session_id == session_id), None)
    if found is None:
        raise NotFoundError(f"there is no worker session {session_id!r}; see `strawflow worker list`")
    if found.state is not SessionState.LIVE:
        raise IllegalTransitionError(f"worker {session_id} is {found.state} already; it holds nothing")
    process = _process(found)
    if not force and (process == "runs" or (process == "elsewhere" and found.expires_in_s > 0)):
        how = (
            f"process {found.pid} runs on this machine"
            if process == "runs"
            else (f"its lease on {found.host} holds for another {found.expires_in_s:.0f} s")
        )
        raise ConflictError(f"worker {session_id} seems to live: {how}; stop it first, or use --force")
    with run.index.read() as connection:
        holds_any = leases.num_leased(connection, session_id) > 0
    if not holds_any:
        return declare_lost(run, session_id, reason=FENCED)
    acting = WorkerSession(run, "fence")
    try:
        for _ in range(_TRIES):
            if (num_units := _take_back(acting, session_id)) is not None:
                return num_units
        return declare_lost(run, session_id, reason=FENCED)
    finally:
        acting.end()


class _MovedOnError(Exception):
    """The worker holds other units than those that the journal has."""


def _take_back(acting: WorkerSession, session_id: str) -> int | None:
    """Declare a session lost with the units that it holds; None to look at them again."""
    run = acting.run
    with run.index.read() as connection:
        held = units.leased_to(connection, session_id)
    after = leases.rescued(held, max_attempts=run.config.rollout.max_attempts)
    # One whose attempts are used up is set aside, not given back.
    back = [unit for unit in after if unit.state is UnitState.READY]
    try:
        with journal.recorded(acting, returned.entries(EntryKind.RELEASE, back, reason=FENCED)) as record:

            def confirm(connection: Connection, found: Sequence[Unit]) -> None:
                record.name(connection)
                if [_standing(u) for u in found] != [_standing(u) for u in after]:
                    raise _MovedOnError

            return declare_lost(run, session_id, reason=FENCED, confirm=confirm)
    except _MovedOnError:
        return None


def _standing(unit: Unit) -> tuple[object, ...]:
    return unit.unit_id, unit.state, unit.fence, unit.seq, unit.attempts, unit.crashes


def who_and_how_to_end(session: Session) -> str:
    """Return a live session as a refusal names it: who it is, where it runs, and the ways to end it."""
    return (
        f"{session.session_id} (process {session.pid} on {session.host}): stop it, or declare it lost with "
        f"`strawflow worker fence RUN {session.session_id}`"
    )


def _process(session: Session) -> str:
    if session.machine != processes.machine_id():
        return "elsewhere"
    return "runs" if processes.started_at(session.pid) == session.process_started else "gone"
