"""Units: the leasable prompt groups, how they come to be, and what can be asked of them.

1. Unit ids come from a counter in meta, so that bytes written before the transaction can name them.
2. The transitions of a worker's lease are index.leases'; here are those of admission and of an operator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow.errors import ConflictError, IllegalTransitionError, InvalidInputError, NotFoundError
from strawflow.index import branches, events, meta, retired
from strawflow.index import tables as t
from strawflow.index.engine import lock_rows
from strawflow.index.prepared import Prepared, Transaction, rows_value
from strawflow.states import UnitState


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
    parks: int
    requeues: int
    session_id: str | None
    last_error: str | None
    extent_id: int | None
    row_start: int | None
    row_count: int | None
    version_step: int | None
    mean_reward: float | None
    num_tokens: int | None


COLUMN_NAMES = tuple(Unit.__dataclass_fields__)
COLUMNS = [t.units.c[name] for name in COLUMN_NAMES]
_STATE_AT = COLUMN_NAMES.index("state")
_STATES = {state.value: state for state in UnitState}


def to_unit(row: Sequence[Any]) -> Unit:
    """Return the unit of a row of `COLUMNS`."""
    values = list(row)
    values[_STATE_AT] = _STATES[values[_STATE_AT]]
    return Unit(*values)


@dataclass(frozen=True)
class NewUnit:
    purpose: str
    profile: str
    segment_id: int
    epoch: int
    position: int
    required_version_id: str | None = None
    priority: int = 0
    """Higher goes first."""
    scheduling_key: int = 0
    """Inside a priority, lower goes first."""
    delay_s: float = 0.0
    """Not offered before so many seconds have passed."""


def require_priority(priority: int) -> None:
    """Raise InvalidInputError for a priority that the index cannot hold: 32 bits."""
    if abs(priority) >= 1 << 31:
        raise InvalidInputError(
            f"priority {priority} is out of range: give one between -2147483647 and 2147483647"
        )


LAST_UNIT_ID = "last_unit_id"
"""Key of the counter in meta that unit ids come from."""


def take_ids(connection: Connection, count: int) -> int:
    """Take `count` unit ids that nobody else will get; returns the first. Ids that stay unused leave a gap."""
    return int(meta.add(connection, LAST_UNIT_ID, count)) - count + 1


def require_unused(connection: Connection, first_id: int) -> None:
    """Refuse unit ids taken before others that were admitted meanwhile: ids grow in the order of admission.

    Others admitting wait until the transaction ends.

    Raises:
        ConflictError: a later unit was admitted already; take ids again.
    """
    meta.hold(connection, LAST_UNIT_ID)
    last = connection.execute(sa.select(sa.func.max(t.units.c.unit_id))).scalar()
    if last is not None and last >= first_id:
        raise ConflictError("units were admitted by another worker meanwhile; admit again", unit_id=last)


def hold_all(connection: Connection) -> None:
    """Let nobody admit, lease, settle, offer or assign a unit until the transaction ends; whoever is at it is waited for.

    Taken after locks on sessions and packs and before any other, as all who write units do.
    """
    meta.hold(connection, LAST_UNIT_ID)
    if connection.dialect.name == "postgresql":  # SQLite has one writer
        connection.execute(sa.text("LOCK TABLE units IN EXCLUSIVE MODE"))


_ADMIT = Prepared(
    "INSERT INTO units (unit_id, branch_id, purpose, profile, segment_id, epoch, position, state, "
    "required_version_id, claim_class, precedence, scheduling_key, not_before, fence, seq, attempts, crashes, parks, "
    "requeues) SELECT CAST(r.value->>0 AS BIGINT), :branch_id, r.value->>1, r.value->>2, CAST(r.value->>3 AS BIGINT), "
    "CAST(r.value->>4 AS INTEGER), CAST(r.value->>5 AS BIGINT), 'ready', r.value->>6, 1, "
    "CAST(r.value->>7 AS INTEGER), CAST(r.value->>8 AS BIGINT), "
    "CASE WHEN CAST(r.value->>9 AS DOUBLE PRECISION) > 0 THEN {now} + CAST(r.value->>9 AS DOUBLE PRECISION) END, "
    "0, 0, 0, 0, 0, 0 FROM {each}"
)


def admit(connection: Connection, branch_id: str, units: Sequence[NewUnit], *, ids: Sequence[int]) -> None:
    """Insert ready units under these ids; the unique key (branch, profile, segment, epoch, position) forbids a second
    admission."""
    for at in range(0, len(units), 5000):
        rows = [
            (
                unit_id,
                u.purpose,
                u.profile,
                u.segment_id,
                u.epoch,
                u.position,
                u.required_version_id,
                -u.priority,
                u.scheduling_key,
                u.delay_s,
            )
            for unit_id, u in zip(ids[at : at + 5000], units[at : at + 5000], strict=True)
        ]
        _ADMIT.count(connection, branch_id=branch_id, rows=rows_value(rows))


OFFER_SELECTED = (
    "INSERT INTO offers (branch_id, consumer, purpose, version_step, unit_id) "
    "SELECT units.branch_id, consumers.consumer, units.purpose, units.version_step, units.unit_id "
)
"""How a statement begins that puts units before consumers; its FROM joins both."""
WHO_WANT_IT = (
    "JOIN consumers ON consumers.branch_id = units.branch_id "
    "AND ',' || consumers.purposes || ',' LIKE '%,' || units.purpose || ',%' "
)


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
            # As fresh as one that was never parked.
            claim_class=1,
            scheduling_key=sa.case((t.units.c.claim_class == 0, 0), else_=t.units.c.scheduling_key),
            attempts=0,
            requeues=t.units.c.requeues + 1,
        )
    )
    if done.rowcount == 0:
        raise IllegalTransitionError(f"unit {unit_id} is not completed, it cannot be requeued")
    events.record(connection, "unit.requeued", unit_id=unit_id, reason=reason)


def hold(connection: Connection, unit_ids: Sequence[int]) -> None:
    """Keep others from changing units or giving them a fate until the transaction ends."""
    held = sa.select(t.units.c.unit_id).where(t.units.c.unit_id.in_(unit_ids)).order_by(t.units.c.unit_id)
    connection.execute(lock_rows(held, connection)).all()


def is_there(connection: Connection, unit_id: int) -> bool:
    """Tell whether the index holds a unit: it was admitted and is not retired."""
    return (
        connection.execute(sa.select(t.units.c.unit_id).where(t.units.c.unit_id == unit_id)).first()
        is not None
    )


def find(connection: Connection, unit_id: int) -> Unit:
    """Return one unit.

    Raises:
        NotFoundError: no such unit.
    """
    row = connection.execute(sa.select(*COLUMNS).where(t.units.c.unit_id == unit_id)).first()
    if row is None:
        raise NotFoundError(f"there is no unit {unit_id}")
    return to_unit(row)


_STILL_HELD = Prepared(
    f"SELECT {', '.join(f'units.{name}' for name in COLUMN_NAMES)} FROM {{each}} JOIN units "
    "ON units.unit_id = CAST(r.value->>0 AS BIGINT) AND units.fence = CAST(r.value->>1 AS BIGINT) "
    "AND units.state = 'leased' AND units.session_id = :session_id"
)


def held(transaction: Transaction, session_id: str, keys: Sequence[tuple[int, int]]) -> list[Unit]:
    """Return those of (unit id, fence) that the session still holds."""
    if not keys:
        return []
    rows = _STILL_HELD.rows(transaction, session_id=session_id, rows=rows_value(keys))
    return [to_unit(row) for row in rows]


def leased_to(connection: Connection, session_id: str) -> list[Unit]:
    """Return the units that a session holds, by id."""
    rows = connection.execute(
        sa.select(*COLUMNS).where(t.units.c.session_id == session_id).order_by(t.units.c.unit_id)
    )
    return [to_unit(row) for row in rows]


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
    """Return {(purpose, state): number of units}, retired ones included."""
    rows = connection.execute(
        sa.select(t.units.c.purpose, t.units.c.state, sa.func.count())
        .where(t.units.c.branch_id == branch_id)
        .group_by(t.units.c.purpose, t.units.c.state)
    )
    counts = Counter({(purpose, state): count for purpose, state, count in rows})
    counts.update(retired.units(connection, branch_id))
    return dict(counts)


def total_tokens(connection: Connection, branch_id: str) -> int:
    """Return the response tokens of all completed units, retired ones included."""
    gone = retired.num_tokens(connection, branch_id, without="demo")
    return gone + int(
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


def of_batch(connection: Connection, batch_id: int) -> list[Unit]:
    """Return the units that a batch trained."""
    rows = connection.execute(
        sa.select(*COLUMNS)
        .join(t.assignments, t.assignments.c.unit_id == t.units.c.unit_id)
        .where(t.assignments.c.batch_id == batch_id, t.assignments.c.outcome == "trained")
        .order_by(t.units.c.unit_id)
    )
    return [to_unit(row) for row in rows]


def rewards_of_batch(connection: Connection, batch_id: int) -> dict[str, float]:
    """Return the mean reward of the groups that a batch planned, those it dropped among them, by the dataset of their prompt."""
    rows = connection.execute(
        sa.select(t.segments.c.dataset_id, sa.func.avg(t.units.c.mean_reward))
        .select_from(t.assignments)
        .join(t.units, t.units.c.unit_id == t.assignments.c.unit_id)
        .join(t.segments, t.segments.c.segment_id == t.units.c.segment_id)
        .where(t.assignments.c.batch_id == batch_id, t.units.c.mean_reward.is_not(None))
        .group_by(t.segments.c.dataset_id)
        .order_by(t.segments.c.dataset_id)
    )
    return {dataset_id: float(mean) for dataset_id, mean in rows}


def of_profile(connection: Connection, branch_id: str, *, profile: str, epoch: int) -> list[Unit]:
    """Return the units of one profile and epoch on the branch's line, in order of admission.

    For evaluation, where the epoch is the step of the weights under test.
    """
    holder = next(
        s.branch_id
        for s in reversed(branches.lineage(connection, branch_id))
        if s.up_to_step is None or epoch <= s.up_to_step
    )
    rows = connection.execute(
        sa.select(*COLUMNS)
        .where(t.units.c.branch_id == holder, t.units.c.profile == profile, t.units.c.epoch == epoch)
        .order_by(t.units.c.unit_id)
    )
    return [to_unit(row) for row in rows]


def has_epoch(connection: Connection, branch_id: str, *, purpose: str, epoch: int) -> bool:
    """Tell whether any unit of this purpose and epoch was ever admitted."""
    statement = sa.select(t.units.c.unit_id).where(
        t.units.c.branch_id == branch_id, t.units.c.purpose == purpose, t.units.c.epoch == epoch
    )
    return connection.execute(statement.limit(1)).first() is not None


def is_epoch_open(connection: Connection, branch_id: str, *, epoch: int) -> bool:
    """Tell whether version-bound units of an epoch are ready or leased."""
    u = t.units.c
    statement = sa.select(u.unit_id).where(
        u.branch_id == branch_id,
        u.epoch == epoch,
        u.required_version_id.is_not(None),
        u.state.in_([UnitState.READY, UnitState.LEASED]),
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
