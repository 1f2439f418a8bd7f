"""Units: the leasable prompt groups, and one guarded statement per transition.

1. A grant raises the fence; every later write must name the fence it was granted.
2. Attempts count at grant. A unit that was lost together with others gets its attempt back (the crash may be another
   unit's doing) and counts a crash; after `CRASHES_BEFORE_ALONE` of them it is granted only alone, so that the culprit
   alone can exhaust its attempts.
3. Claims take priority first, then first in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow.errors import IllegalTransitionError, LeaseLostError, NotFoundError
from strawflow.index import events
from strawflow.index import tables as t
from strawflow.index.engine import skip_locked
from strawflow.states import UnitState

CRASHES_BEFORE_ALONE = 3


@dataclass(frozen=True)
class Unit:
    unit_id: int
    branch_id: str
    purpose: str
    profile: str
    segment_id: int
    epoch: int
    position: int
    state: UnitState
    required_version_id: str | None
    fence: int
    seq: int
    attempts: int
    crashes: int
    session_id: str | None
    last_error: str | None
    extent_id: str | None
    row_start: int | None
    row_count: int | None
    version_step: int | None
    mean_reward: float | None
    num_tokens: int | None


COLUMNS = [t.units.c[name] for name in Unit.__dataclass_fields__]


def to_unit(row: sa.Row[tuple[object, ...]]) -> Unit:
    values = dict(row._mapping)  # the public row mapping of SQLAlchemy
    values["state"] = UnitState(str(values["state"]))
    return Unit(**values)  # type: ignore[arg-type]


@dataclass(frozen=True)
class NewUnit:
    purpose: str
    profile: str
    segment_id: int
    epoch: int
    position: int
    required_version_id: str | None = None
    priority: int = 0


@dataclass(frozen=True)
class Completion:
    """What a completed unit points at."""

    unit_id: int
    fence: int
    seq: int
    extent_id: str
    row_start: int
    row_count: int
    version_step: int
    mean_reward: float | None
    num_tokens: int


def admit(connection: Connection, branch_id: str, units: Sequence[NewUnit]) -> None:
    """Insert ready units; the unique key (branch, profile, segment, epoch, position) forbids a second admission."""
    if units:
        connection.execute(
            sa.insert(t.units),
            [
                {
                    "branch_id": branch_id,
                    "purpose": u.purpose,
                    "profile": u.profile,
                    "segment_id": u.segment_id,
                    "epoch": u.epoch,
                    "position": u.position,
                    "state": UnitState.READY,
                    "required_version_id": u.required_version_id,
                    "priority": u.priority,
                }
                for u in units
            ],
        )


def claim(
    connection: Connection,
    branch_id: str,
    session_id: str,
    *,
    limit: int,
    serving_version_id: str | None,
    purposes: Sequence[str] | None = None,
) -> list[Unit]:
    """Lease up to `limit` ready units to a session; an empty list when there is none.

    Units that need a certain weight version are granted only to an engine serving it. A unit with a record of crashes
    is granted only when the session holds nothing else, and then alone.
    """
    u = t.units.c
    eligible = [
        u.branch_id == branch_id,
        u.state == UnitState.READY,
        sa.or_(u.required_version_id.is_(None), u.required_version_id == serving_version_id),
    ]
    if purposes is not None:
        eligible.append(u.purpose.in_(purposes))
    order = (u.priority.desc(), u.unit_id)
    picked = [
        row.unit_id
        for row in connection.execute(
            skip_locked(
                sa.select(u.unit_id)
                .where(*eligible, u.crashes < CRASHES_BEFORE_ALONE)
                .order_by(*order)
                .limit(limit),
                connection,
            )
        )
    ]
    if not picked and not num_leased(connection, session_id):
        suspect = sa.select(u.unit_id).where(*eligible).order_by(*order).limit(1)
        picked = [row.unit_id for row in connection.execute(skip_locked(suspect, connection))]
    if not picked:
        return []
    granted = connection.execute(
        sa.update(t.units)
        .where(u.unit_id.in_(picked), u.state == UnitState.READY)
        .values(
            state=UnitState.LEASED,
            session_id=session_id,
            fence=u.fence + 1,
            seq=0,
            attempts=u.attempts + 1,
        )
        .returning(*COLUMNS)
    )
    units = sorted((to_unit(row) for row in granted), key=lambda unit: unit.unit_id)
    events.record(connection, "units.claimed", session_id=session_id, units=[x.unit_id for x in units])
    return units


def any_ready(connection: Connection, branch_id: str, *, purposes: Sequence[str] | None = None) -> bool:
    """Tell whether any unit of these purposes is ready."""
    statement = sa.select(t.units.c.unit_id).where(
        t.units.c.branch_id == branch_id, t.units.c.state == UnitState.READY
    )
    if purposes is not None:
        statement = statement.where(t.units.c.purpose.in_(purposes))
    return connection.execute(statement.limit(1)).first() is not None


def num_leased(connection: Connection, session_id: str) -> int:
    return int(
        connection.execute(sa.select(sa.func.count()).where(t.units.c.session_id == session_id)).scalar_one()
    )


def complete(connection: Connection, session_id: str, completion: Completion) -> None:
    """Store a unit's result under the fence it was granted.

    Raises:
        LeaseLostError: the fence was superseded, or a later write of this lease already landed.
    """
    done = connection.execute(
        sa.update(t.units)
        .where(*_held(completion.unit_id, session_id, completion.fence), t.units.c.seq < completion.seq)
        .values(
            state=UnitState.COMPLETED,
            session_id=None,
            seq=completion.seq,
            extent_id=completion.extent_id,
            row_start=completion.row_start,
            row_count=completion.row_count,
            version_step=completion.version_step,
            mean_reward=completion.mean_reward,
            num_tokens=completion.num_tokens,
            last_error=None,
        )
    )
    if done.rowcount == 0:
        raise _lost(connection, completion.unit_id, session_id, completion.fence)
    events.record(connection, "unit.completed", session_id=session_id, unit_id=completion.unit_id)


def fail(
    connection: Connection, session_id: str, unit_id: int, *, fence: int, error: str, max_attempts: int
) -> UnitState:
    """End an attempt with an error: ready again, or failed once the attempts are used up.

    Raises:
        LeaseLostError: the fence was superseded.
    """
    used_up = t.units.c.attempts >= max_attempts
    row = connection.execute(
        sa.update(t.units)
        .where(*_held(unit_id, session_id, fence))
        .values(
            state=sa.case((used_up, UnitState.FAILED.value), else_=UnitState.READY.value),
            session_id=None,
            last_error=error,
        )
        .returning(t.units.c.state)
    ).first()
    if row is None:
        raise _lost(connection, unit_id, session_id, fence)
    state = UnitState(row.state)
    name = "unit.failed" if state is UnitState.FAILED else "unit.attempt_failed"
    events.record(connection, name, session_id=session_id, unit_id=unit_id, error=error)
    return state


def release(connection: Connection, session_id: str, unit_ids: Iterable[int]) -> int:
    """Give unworked leases back: ready again, the attempt refunded; returns how many were still held."""
    done = connection.execute(
        sa.update(t.units)
        .where(
            t.units.c.unit_id.in_(list(unit_ids)),
            t.units.c.session_id == session_id,
            t.units.c.state == UnitState.LEASED,
        )
        .values(state=UnitState.READY, session_id=None, attempts=t.units.c.attempts - 1)
    )
    return int(done.rowcount)


def rescue(connection: Connection, session_id: str, *, reason: str, max_attempts: int) -> list[Unit]:
    """Take every lease of a lost session back; returns the units, ready again or failed.

    Lost among others: the attempt is refunded and a crash counted. Lost alone: the attempt stands, and a unit whose
    attempts are used up is set aside as failed with `reason`.
    """
    held = t.units.c.session_id == session_id
    alone = num_leased(connection, session_id) == 1
    used_up = sa.and_(sa.literal(alone), t.units.c.attempts >= max_attempts)
    rows = connection.execute(
        sa.update(t.units)
        .where(held, t.units.c.state == UnitState.LEASED)
        .values(
            state=sa.case((used_up, UnitState.FAILED.value), else_=UnitState.READY.value),
            session_id=None,
            attempts=t.units.c.attempts - (0 if alone else 1),
            crashes=t.units.c.crashes + (0 if alone else 1),
            last_error=reason,
        )
        .returning(*COLUMNS)
    )
    units = [to_unit(row) for row in rows]
    for unit in units:
        name = "unit.failed" if unit.state is UnitState.FAILED else "unit.rescued"
        events.record(connection, name, session_id=session_id, unit_id=unit.unit_id, error=reason)
    return units


def retry(connection: Connection, unit_id: int) -> None:
    """Offer a failed unit again with fresh attempts.

    Raises:
        NotFoundError: no such unit.
        IllegalTransitionError: the unit is not failed.
    """
    done = connection.execute(
        sa.update(t.units)
        .where(t.units.c.unit_id == unit_id, t.units.c.state == UnitState.FAILED)
        .values(state=UnitState.READY, attempts=0, crashes=0)
    )
    if done.rowcount == 0:
        found = find(connection, unit_id)
        raise IllegalTransitionError(f"unit {unit_id} is {found.state}, only a failed unit can be retried")
    events.record(connection, "unit.retried", unit_id=unit_id)


def requeue(connection: Connection, unit_id: int, *, reason: str) -> None:
    """Send a completed unit back pristine: its stored trajectories are no longer its result.

    Raises:
        IllegalTransitionError: the unit is not completed.
    """
    done = connection.execute(
        sa.update(t.units)
        .where(t.units.c.unit_id == unit_id, t.units.c.state == UnitState.COMPLETED)
        .values(
            state=UnitState.READY,
            extent_id=None,
            row_start=None,
            row_count=None,
            version_step=None,
            mean_reward=None,
            num_tokens=None,
            attempts=0,
        )
    )
    if done.rowcount == 0:
        raise IllegalTransitionError(f"unit {unit_id} is not completed, it cannot be requeued")
    events.record(connection, "unit.requeued", unit_id=unit_id, reason=reason)


def find(connection: Connection, unit_id: int) -> Unit:
    """Return one unit.

    Raises:
        NotFoundError: no such unit.
    """
    row = connection.execute(sa.select(*COLUMNS).where(t.units.c.unit_id == unit_id)).first()
    if row is None:
        raise NotFoundError(f"there is no unit {unit_id}")
    return to_unit(row)


def listed(
    connection: Connection,
    branch_id: str,
    *,
    state: UnitState | None = None,
    purpose: str | None = None,
    newest_first: bool = False,
    limit: int = 100,
) -> list[Unit]:
    """Return units in order of admission, or the newest first."""
    statement = sa.select(*COLUMNS).where(t.units.c.branch_id == branch_id)
    if state is not None:
        statement = statement.where(t.units.c.state == state)
    if purpose is not None:
        statement = statement.where(t.units.c.purpose == purpose)
    return [
        to_unit(row)
        for row in connection.execute(
            statement.order_by(t.units.c.unit_id.desc() if newest_first else t.units.c.unit_id).limit(limit)
        )
    ]


def count_by_state(connection: Connection, branch_id: str) -> dict[tuple[str, str], int]:
    """Return {(purpose, state): number of units}."""
    rows = connection.execute(
        sa.select(t.units.c.purpose, t.units.c.state, sa.func.count())
        .where(t.units.c.branch_id == branch_id)
        .group_by(t.units.c.purpose, t.units.c.state)
    )
    return {(purpose, state): count for purpose, state, count in rows}


def total_tokens(connection: Connection, branch_id: str) -> int:
    """Return the response tokens of all completed units."""
    return int(
        connection.execute(
            sa.select(sa.func.coalesce(sa.func.sum(t.units.c.num_tokens), 0)).where(
                t.units.c.branch_id == branch_id, t.units.c.purpose != "demo"
            )
        ).scalar_one()
    )


def num_unfinished(connection: Connection, branch_id: str, *, purpose: str) -> int:
    """Return how many units of a purpose are ready or leased."""
    return int(
        connection.execute(
            sa.select(sa.func.count()).where(
                t.units.c.branch_id == branch_id,
                t.units.c.purpose == purpose,
                t.units.c.state.in_([UnitState.READY, UnitState.LEASED]),
            )
        ).scalar_one()
    )


def of_profile(connection: Connection, branch_id: str, *, profile: str, epoch: int) -> list[Unit]:
    """Return the units of one profile and epoch, in order of admission."""
    rows = connection.execute(
        sa.select(*COLUMNS)
        .where(t.units.c.branch_id == branch_id, t.units.c.profile == profile, t.units.c.epoch == epoch)
        .order_by(t.units.c.unit_id)
    )
    return [to_unit(row) for row in rows]


def has_epoch(connection: Connection, branch_id: str, *, purpose: str, epoch: int) -> bool:
    """Tell whether any unit of this purpose and epoch was ever admitted."""
    statement = sa.select(t.units.c.unit_id).where(
        t.units.c.branch_id == branch_id, t.units.c.purpose == purpose, t.units.c.epoch == epoch
    )
    return connection.execute(statement.limit(1)).first() is not None


def oldest_required_version(connection: Connection, branch_id: str) -> str | None:
    """Return the weight version that the first unfinished version-bound unit waits for, if its files are there."""
    return connection.execute(
        sa.select(t.units.c.required_version_id)
        .join(t.weight_versions, t.weight_versions.c.version_id == t.units.c.required_version_id)
        .where(
            t.weight_versions.c.files_removed.is_(False),
            t.units.c.branch_id == branch_id,
            t.units.c.state.in_([UnitState.READY, UnitState.LEASED]),
            t.units.c.required_version_id.is_not(None),
        )
        .order_by(t.units.c.epoch, t.units.c.unit_id)
        .limit(1)
    ).scalar()


def _held(unit_id: int, session_id: str, fence: int) -> tuple[sa.ColumnElement[bool], ...]:
    return (
        t.units.c.unit_id == unit_id,
        t.units.c.state == UnitState.LEASED,
        t.units.c.session_id == session_id,
        t.units.c.fence == fence,
    )


def _lost(connection: Connection, unit_id: int, session_id: str, fence: int) -> LeaseLostError:
    found = find(connection, unit_id)
    return LeaseLostError(
        f"the lease of unit {unit_id} was taken over; throw this result away",
        fence=fence,
        found_fence=found.fence,
        found_state=found.state,
        session_id=session_id,
    )
