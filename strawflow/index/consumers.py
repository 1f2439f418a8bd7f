"""Consumers, the roles that act for them, and what became of each unit in their eyes.

1. A role (`consume:<name>`, `assemble:<name>`) has one holder; taking it raises its fence.
2. Every assignment is made once: primary key (branch, consumer, epoch, unit).
3. `position` is the last step a checkpoint (or an advance) covers, `planned` the last with a stored batch;
   position <= planned.
4. A completed unit is put before every consumer of its branch that wants its purpose; consumers do not see each other.
5. Offers are locked in the order of their key, whoever takes them: two consumers over the same units wait for each other,
   and never in a circle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow.errors import ConflictError, LeaseLostError, NotFoundError
from strawflow.index import events, meta, retired, sessions, tallies
from strawflow.index import tables as t
from strawflow.index.engine import insert_unless_there, lock_rows
from strawflow.index.leases import FENCES_PER_INCARNATION
from strawflow.index.prepared import Prepared, Transaction, rows_value
from strawflow.index.units import COLUMN_NAMES, COLUMNS, OFFER_SELECTED, WHO_WANT_IT, Unit, to_unit
from strawflow.states import SessionState


@dataclass(frozen=True)
class Consumer:
    branch_id: str
    consumer: str
    position: int
    planned: int
    purposes: tuple[str, ...]


TRAINABLE = ("demo", "train")
"""Purposes of units that a trainer learns from."""


@dataclass(frozen=True)
class Role:
    """A held role: the fence every write under it must name."""

    branch_id: str
    role: str
    fence: int
    session_id: str


@dataclass(frozen=True)
class Assignment:
    epoch: int
    unit_id: int
    outcome: str
    reason: str | None = None


def ensure(
    connection: Connection,
    branch_id: str,
    consumer: str,
    *,
    purposes: Collection[str] = TRAINABLE,
    position: int = 0,
) -> bool:
    """Create a consumer unless it exists; it is offered every completed unit of its purposes. True if it was created.

    Units whose trajectories are in quarantine are left out: it could not read them (`offer_after_all`).
    With a `position` it goes on after that step, as a branch does; then nothing is offered yet.
    """
    made = connection.execute(
        insert_unless_there(t.consumers, connection)
        .values(
            branch_id=branch_id,
            consumer=consumer,
            position=position,
            planned=position,
            purposes=",".join(sorted(purposes)),
        )
        .returning(t.consumers.c.consumer)
    ).first()
    if made is not None and position == 0:
        _OFFER_ALL.count(connection, branch_id=branch_id, consumer=consumer)
    return made is not None


def listed(connection: Connection, branch_id: str) -> list[Consumer]:
    rows = connection.execute(
        sa.select(t.consumers).where(t.consumers.c.branch_id == branch_id).order_by(t.consumers.c.consumer)
    )
    return [_consumer(row) for row in rows]


def _consumer(row: sa.Row[Any]) -> Consumer:
    return Consumer(row.branch_id, row.consumer, row.position, row.planned, tuple(row.purposes.split(",")))


def find(connection: Connection, branch_id: str, consumer: str) -> Consumer:
    """Return a consumer's standing.

    Raises:
        NotFoundError: no such consumer on this branch.
    """
    row = connection.execute(
        sa.select(t.consumers).where(t.consumers.c.branch_id == branch_id, t.consumers.c.consumer == consumer)
    ).first()
    if row is None:
        raise NotFoundError(f"there is no consumer {consumer!r} on branch {branch_id!r}")
    return _consumer(row)


def take_role(connection: Connection, branch_id: str, role: str, session_id: str) -> Role | None:
    """Take a role that is free or whose holder's session is not live; None while another live session holds it."""
    sessions.require_live(connection, session_id)
    connection.execute(
        insert_unless_there(t.roles, connection).values(branch_id=branch_id, role=role, fence=0)
    )
    live = sa.select(t.sessions.c.session_id).where(t.sessions.c.state == SessionState.LIVE)
    first_fence = meta.incarnation(connection) * FENCES_PER_INCARNATION + 1
    row = connection.execute(
        sa.update(t.roles)
        .where(
            t.roles.c.branch_id == branch_id,
            t.roles.c.role == role,
            sa.or_(t.roles.c.session_id.is_(None), t.roles.c.session_id.not_in(live)),
        )
        .values(
            # Above every fence of earlier incarnations: folders are named by it, also those of a future that was lost.
            fence=sa.case((t.roles.c.fence < first_fence, first_fence), else_=t.roles.c.fence + 1),
            session_id=session_id,
        )
        .returning(t.roles.c.fence)
    ).first()
    if row is None:
        return None
    events.record(connection, "role.taken", session_id=session_id, role=role, fence=row.fence)
    return Role(branch_id, role, row.fence, session_id)


def require_role(connection: Connection, role: Role) -> None:
    """Raise LeaseLostError unless the role is still held under this fence by a live session."""
    sessions.require_live(connection, role.session_id)
    statement = sa.select(t.roles.c.fence, t.roles.c.session_id).where(
        t.roles.c.branch_id == role.branch_id, t.roles.c.role == role.role
    )
    row = connection.execute(lock_rows(statement, connection)).one()
    if (row.fence, row.session_id) != (role.fence, role.session_id):
        raise LeaseLostError(
            f"another session took over as {role.role}; stop the work",
            fence=role.fence,
            found_fence=row.fence,
        )


_OFFER = Prepared(
    f"{OFFER_SELECTED} FROM {{each}} JOIN units ON units.unit_id = CAST(r.value AS BIGINT) {WHO_WANT_IT}"
)
_OFFER_ALL = Prepared(
    f"{OFFER_SELECTED} FROM units {WHO_WANT_IT} "
    "WHERE units.branch_id = :branch_id AND consumers.consumer = :consumer AND units.state = 'completed' "
    "AND NOT EXISTS (SELECT 1 FROM quarantine WHERE quarantine.extent_id = units.extent_id)"
)
_OFFER_AFTER_ALL = Prepared(
    f"{OFFER_SELECTED} FROM {{each}} JOIN units ON units.extent_id = CAST(r.value AS BIGINT) {WHO_WANT_IT} "
    "WHERE units.state = 'completed' "
    "AND NOT EXISTS (SELECT 1 FROM offers AS o WHERE o.unit_id = units.unit_id AND o.consumer = consumers.consumer) "
    "AND NOT EXISTS (SELECT 1 FROM assignments AS a WHERE a.unit_id = units.unit_id "
    "AND a.consumer = consumers.consumer)"
)
_WAITING = Prepared(
    "SELECT count(*) FROM (SELECT 1 AS one FROM offers WHERE branch_id = :branch_id AND consumer = :consumer "
    "AND purpose = :purpose LIMIT :num_rows) AS waiting"
)


_HOLD = Prepared(
    "SELECT position FROM consumers WHERE branch_id = :branch_id AND consumer = :consumer {lock}"
)


def hold(transaction: Transaction, branch_id: str, consumer: str) -> None:
    """Keep others from holding this consumer's row until the transaction ends."""
    _HOLD.hold(transaction, branch_id=branch_id, consumer=consumer)


def offer(transaction: Transaction, unit_ids: Iterable[int]) -> None:
    """Put completed units before every consumer of their branch that wants their purpose."""
    _OFFER.count(transaction, rows=rows_value(unit_ids))


def offer_after_all(transaction: Transaction, extent_ids: Iterable[int]) -> int:
    """Put completed units of extents that left quarantine before the consumers that were made meanwhile; returns how many."""
    return _OFFER_AFTER_ALL.count(transaction, rows=rows_value(extent_ids))


def num_waiting(
    transaction: Transaction, branch_id: str, consumer: str, *, purpose: str, at_most: int
) -> int:
    """Count the units that wait for a consumer, up to `at_most`: the cost is bounded by that, not by the backlog."""
    rows = _WAITING.rows(
        transaction, branch_id=branch_id, consumer=consumer, purpose=purpose, num_rows=at_most
    )
    return int(rows[0][0])


_HOLD_OFFERS = Prepared(
    "SELECT 1 FROM {each} JOIN offers ON offers.unit_id = CAST(r.value AS BIGINT) "
    "WHERE offers.branch_id = :branch_id AND offers.consumer = :consumer "
    "ORDER BY offers.purpose, offers.version_step, offers.unit_id {lock}"
)
_WITHDRAW = Prepared(
    "DELETE FROM offers WHERE branch_id = :branch_id AND consumer = :consumer "
    "AND unit_id IN (SELECT CAST(r.value AS BIGINT) FROM {each})"
)
_OFFERED_UNITS = Prepared(
    f"SELECT {', '.join(f'units.{name}' for name in COLUMN_NAMES)} FROM offers JOIN units ON units.unit_id = offers.unit_id "
    "WHERE offers.branch_id = :branch_id AND offers.consumer = :consumer AND offers.purpose = :purpose "
    "ORDER BY offers.version_step, offers.unit_id LIMIT :num_units"
)


def withdraw(transaction: Transaction, branch_id: str, consumer: str, unit_ids: Iterable[int]) -> int:
    """Take offers back; returns how many there were.

    They are locked in the order of their key first, as `hold_unfated` does: a DELETE alone meets them in an order of its own.
    """
    values = {"branch_id": branch_id, "consumer": consumer, "rows": rows_value(unit_ids)}
    _HOLD_OFFERS.hold(transaction, **values)
    return _WITHDRAW.count(transaction, **values)


def offered(
    transaction: Transaction, branch_id: str, consumer: str, *, purpose: str, limit: int
) -> list[Unit]:
    """Return completed units before this consumer: oldest weight version first, then first in."""
    rows = _OFFERED_UNITS.rows(
        transaction, branch_id=branch_id, consumer=consumer, purpose=purpose, num_units=limit
    )
    return [to_unit(row) for row in rows]


def first_offered_epoch(connection: Connection, branch_id: str, consumer: str, *, purpose: str) -> int | None:
    """Return the lowest epoch of the units before this consumer; of evaluation, the step of the oldest weights."""
    o = t.offers.c
    statement = sa.select(sa.func.min(t.units.c.epoch)).join(t.offers, o.unit_id == t.units.c.unit_id)
    return connection.execute(
        statement.where(o.branch_id == branch_id, o.consumer == consumer, o.purpose == purpose)
    ).scalar()


def offered_of_epoch(connection: Connection, branch_id: str, consumer: str, *, epoch: int) -> list[Unit]:
    """Return the units of an epoch before this consumer, first in first."""
    o = t.offers.c
    rows = connection.execute(
        sa.select(*COLUMNS)
        .join(t.offers, o.unit_id == t.units.c.unit_id)
        .where(o.branch_id == branch_id, o.consumer == consumer, t.units.c.epoch == epoch)
        .order_by(t.units.c.unit_id)
    )
    return [to_unit(row) for row in rows]


def assign(
    connection: Connection,
    branch_id: str,
    consumer: str,
    assignments: Sequence[Assignment],
    *,
    batch_id: int | None,
    at_step: int,
) -> None:
    """Record what becomes of units while `at_step` is planned; the primary key refuses a second fate.

    Raises:
        ConflictError: a unit was assigned before.
    """
    if not assignments:
        return
    try:
        connection.execute(
            sa.insert(t.assignments),
            [
                {
                    "branch_id": branch_id,
                    "consumer": consumer,
                    "epoch": a.epoch,
                    "unit_id": a.unit_id,
                    "batch_id": batch_id,
                    "outcome": a.outcome,
                    "reason": a.reason,
                    "at_step": at_step,
                }
                for a in assignments
            ],
        )
    except sa.exc.IntegrityError as error:
        raise ConflictError(
            f"a unit of this batch was already given to consumer {consumer!r}", detail=str(error.orig)
        ) from error
    if batch_id is None:
        _count_dropped(connection, branch_id, consumer, [a.unit_id for a in assignments])


def _count_dropped(connection: Connection, branch_id: str, consumer: str, unit_ids: Sequence[int]) -> None:
    by_purpose = connection.execute(
        sa.select(t.units.c.purpose, sa.func.count())
        .where(t.units.c.unit_id.in_(unit_ids))
        .group_by(t.units.c.purpose)
    )
    for purpose, count in by_purpose.all():
        tallies.add(connection, branch_id, f"dropped/{consumer}/{purpose}", count)


def assignments_of(connection: Connection, branch_id: str, consumer: str) -> list[Assignment]:
    """Return every assignment of a consumer, by unit."""
    rows = connection.execute(
        sa.select(t.assignments)
        .where(t.assignments.c.branch_id == branch_id, t.assignments.c.consumer == consumer)
        .order_by(t.assignments.c.unit_id, t.assignments.c.epoch)
    )
    return [Assignment(r.epoch, r.unit_id, r.outcome, r.reason) for r in rows]


def failed_unassigned(connection: Connection, branch_id: str, consumer: str, *, purpose: str) -> list[Unit]:
    """Return failed units this consumer has not recorded as dropped yet; a retry of them waits for this transaction."""
    a = t.assignments.c
    known = sa.exists().where(
        a.branch_id == branch_id,
        a.consumer == consumer,
        a.epoch == t.units.c.epoch,
        a.unit_id == t.units.c.unit_id,
    )
    statement = sa.select(*COLUMNS).where(
        t.units.c.branch_id == branch_id,
        sa.text("units.state = 'failed'"),  # spelled out, so that the partial index of failed units serves
        t.units.c.purpose == purpose,
        ~known,
    )
    in_order = statement.order_by(t.units.c.unit_id)  # two consumers lock the same units
    return [to_unit(row) for row in connection.execute(lock_rows(in_order, connection, of=t.units))]


def count_outcomes(
    connection: Connection, branch_id: str, consumer: str
) -> dict[tuple[str, str | None], int]:
    """Return {(outcome, reason): number of units}, retired ones included."""
    rows = connection.execute(
        sa.select(t.assignments.c.outcome, t.assignments.c.reason, sa.func.count())
        .where(t.assignments.c.branch_id == branch_id, t.assignments.c.consumer == consumer)
        .group_by(t.assignments.c.outcome, t.assignments.c.reason)
    )
    counts = Counter({(outcome, reason): count for outcome, reason, count in rows})
    for (_, outcome, reason), count in retired.fates(connection, branch_id, consumer).items():
        counts[outcome, reason] += count
    return dict(counts)


def advance_planned(connection: Connection, branch_id: str, consumer: str, *, step: int) -> None:
    """Move the last planned step from `step` - 1 to `step`.

    Raises:
        ConflictError: another batch was planned meanwhile.
    """
    _advance(connection, branch_id, consumer, "planned", expected=step - 1, new=step)


def advance_position(
    connection: Connection, branch_id: str, consumer: str, *, expected: int, new: int
) -> None:
    """Move the committed position.

    Raises:
        ConflictError: the position is not `expected`.
    """
    _advance(connection, branch_id, consumer, "position", expected=expected, new=new)


def _advance(
    connection: Connection, branch_id: str, consumer: str, column: str, *, expected: int, new: int
) -> None:
    done = connection.execute(
        sa.update(t.consumers)
        .where(
            t.consumers.c.branch_id == branch_id,
            t.consumers.c.consumer == consumer,
            t.consumers.c[column] == expected,
        )
        .values({column: new})
    )
    if done.rowcount != 1:
        found = find(connection, branch_id, consumer)
        raise ConflictError(
            f"consumer {consumer!r} has {column} {getattr(found, column)}, not {expected}", new=new
        )


_PUBLISHED = "published/"


def note_publisher(connection: Connection, branch_id: str, consumer: str) -> None:
    """Write down that a consumer publishes the branch's weights."""
    if not tallies.value(connection, branch_id, _PUBLISHED + consumer):
        tallies.add(connection, branch_id, _PUBLISHED + consumer, 1)


def publishers(connection: Connection, branch_id: str) -> set[str]:
    """Return the consumers that published weights on this very branch, as far as programs wrote it down."""
    found = tallies.starting_with(connection, branch_id, _PUBLISHED)
    return {name.removeprefix(_PUBLISHED) for name in found}


def num_offered(connection: Connection, branch_id: str, consumer: str) -> dict[str, int]:
    """Return {purpose: completed units waiting for this consumer}."""
    rows = connection.execute(
        sa.select(t.offers.c.purpose, sa.func.count())
        .where(t.offers.c.branch_id == branch_id, t.offers.c.consumer == consumer)
        .group_by(t.offers.c.purpose)
    )
    return {row[0]: row[1] for row in rows}


def roles_listed(connection: Connection, branch_id: str) -> list[tuple[str, int, str | None]]:
    """Return (role, fence, session that holds or held it)."""
    r = t.roles.c
    rows = connection.execute(
        sa.select(r.role, r.fence, r.session_id).where(r.branch_id == branch_id).order_by(r.role)
    )
    return [(row.role, row.fence, row.session_id) for row in rows]


def count_outcomes_by_purpose(
    connection: Connection, branch_id: str, consumer: str
) -> dict[tuple[str, str, str | None], int]:
    """Return {(purpose, outcome, reason): number of units}, retired ones included."""
    a, u = t.assignments.c, t.units.c
    rows = connection.execute(
        sa.select(u.purpose, a.outcome, a.reason, sa.func.count())
        .select_from(t.assignments.join(t.units, u.unit_id == a.unit_id))
        .where(a.branch_id == branch_id, a.consumer == consumer)
        .group_by(u.purpose, a.outcome, a.reason)
    )
    counts = Counter({(purpose, outcome, reason): count for purpose, outcome, reason, count in rows})
    counts.update(retired.fates(connection, branch_id, consumer))
    return dict(counts)


def num_dropped(connection: Connection, branch_id: str, consumer: str, *, purpose: str) -> int:
    """Return how many units of a purpose were dropped outside any batch: each is owed a replacement."""
    return tallies.value(connection, branch_id, f"dropped/{consumer}/{purpose}")


def num_dropped_after(
    connection: Connection, branch_id: str, consumer: str, *, purpose: str, step: int
) -> int:
    """Return how many units of a purpose were dropped outside any batch while a step after `step` was planned."""
    a = t.assignments.c
    gone = retired.dropped_after(connection, branch_id, consumer, purpose=purpose, step=step)
    return gone + int(
        connection.execute(
            sa.select(sa.func.count())
            .select_from(t.assignments.join(t.units, t.units.c.unit_id == a.unit_id))
            .where(
                a.branch_id == branch_id,
                a.consumer == consumer,
                a.batch_id.is_(None),
                a.at_step > step,
                t.units.c.purpose == purpose,
            )
        ).scalar_one()
    )


def drops_while_planning(
    connection: Connection, branch_id: str, consumer: str, *, step: int
) -> dict[str, int]:
    """Return {reason: number of units} of those dropped outside any batch while `step` was being planned."""
    a = t.assignments.c
    rows = connection.execute(
        sa.select(a.reason, sa.func.count())
        .where(a.branch_id == branch_id, a.consumer == consumer, a.at_step == step, a.batch_id.is_(None))
        .group_by(a.reason)
    )
    return {str(reason): int(count) for reason, count in rows}


def hold_unfated(connection: Connection, branch_id: str, unit_ids: Collection[int]) -> dict[int, int | None]:
    """Return {unit: its epoch if any consumer has given it a fate, else None}, and keep the others without one.

    Whoever gives a unit a fate first takes its offer away, so the offers of all consumers are held until the transaction
    ends; they are looked at before the fates, in statements of their own. The units themselves are held before, from being
    changed and from being offered to a consumer that is made just now; others may refer to them.
    """
    o, wanted = t.offers.c, sorted(unit_ids)
    held = sa.select(t.units.c.unit_id).where(t.units.c.unit_id.in_(wanted)).order_by(t.units.c.unit_id)
    connection.execute(lock_rows(held, connection, refers=True)).all()
    offers = sa.select(o.unit_id).where(o.branch_id == branch_id, o.unit_id.in_(wanted))
    in_order = offers.order_by(o.consumer, o.purpose, o.version_step, o.unit_id)
    connection.execute(lock_rows(in_order, connection)).all()
    found = fated_among(connection, branch_id, wanted)
    return {unit_id: found.get(unit_id) for unit_id in wanted}


def fated_among(connection: Connection, branch_id: str, unit_ids: Collection[int]) -> dict[int, int]:
    """Return {unit: its epoch} of the units that any consumer has given a fate."""
    a = t.assignments.c
    fates = sa.select(a.unit_id, a.epoch).where(a.branch_id == branch_id, a.unit_id.in_(sorted(unit_ids)))
    return {row.unit_id: row.epoch for row in connection.execute(fates)}


def withdraw_from_all(connection: Connection, branch_id: str, unit_ids: Collection[int]) -> None:
    """Take units that `hold_unfated` holds back from every consumer that they are offered to."""
    o = t.offers.c
    connection.execute(sa.delete(t.offers).where(o.branch_id == branch_id, o.unit_id.in_(sorted(unit_ids))))


def fates_of(
    connection: Connection, branch_id: str, unit_id: int
) -> list[tuple[str, Assignment, int | None]]:
    """Return (consumer, assignment, batch id) of a unit."""
    a = t.assignments.c
    rows = connection.execute(
        sa.select(a.consumer, a.epoch, a.unit_id, a.outcome, a.reason, a.batch_id)
        .where(a.branch_id == branch_id, a.unit_id == unit_id)
        .order_by(a.consumer, a.epoch)
    )
    return [(r.consumer, Assignment(r.epoch, r.unit_id, r.outcome, r.reason), r.batch_id) for r in rows]
