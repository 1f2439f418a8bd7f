"""Quarantine: extents whose bytes are damaged, what each of them held, and what can be done about it.

1. An extent is quarantined, never a pack: its neighbours are good. Whoever looks a quarantined extent up is refused at once
   (index.packs).
2. Units that a consumer gave a fate are told, never opened again; others are ready again, their offers withdrawn.
3. Batches are taken back from the last on, with the fates they gave; their steps can then be planned again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow import clock
from strawflow.index import continuations, events, meta
from strawflow.index import tables as t
from strawflow.index.batches import LAST_VOID_ID
from strawflow.index.engine import insert_unless_there, lock_rows
from strawflow.index.pins import PinKind
from strawflow.index.prepared import Prepared, rows_value
from strawflow.index.units import COLUMNS, Unit, to_unit
from strawflow.states import BatchState, UnitState

EVAL = "eval"
"""Purpose of units that no consumer is given."""

_CHUNK = 500


def add(connection: Connection, extent_id: int, *, reason: str) -> bool:
    """Quarantine an extent; False if it was."""
    done = connection.execute(
        insert_unless_there(t.quarantine, connection).values(
            extent_id=extent_id, reason=reason, at=clock.wall_time()
        )
    )
    return bool(done.rowcount)


def lift(connection: Connection, extent_ids: Iterable[int]) -> int:
    """Take extents out of quarantine; returns how many were in it."""
    done = 0
    for chunk in _chunks(extent_ids):
        done += int(
            connection.execute(sa.delete(t.quarantine).where(t.quarantine.c.extent_id.in_(chunk))).rowcount
        )
    return done


def listed(connection: Connection) -> dict[int, str]:
    """Return {extent id: reason} of what is in quarantine."""
    q = t.quarantine.c
    return {r.extent_id: r.reason for r in connection.execute(sa.select(q.extent_id, q.reason))}


def paths_of(connection: Connection, extent_ids: Iterable[int]) -> set[str]:
    """Return the paths of the packs that extents lie in."""
    path, extent_id = t.packs.c.path, t.extents.c.extent_id
    found = set[str]()
    for chunk in _chunks(extent_ids):
        joined = sa.select(path).join(t.extents, t.extents.c.pack_id == t.packs.c.pack_id)
        found.update(connection.execute(joined.where(extent_id.in_(chunk))).scalars())
    return found


def _chunks(ids: Iterable[int]) -> Iterator[list[int]]:
    wanted = sorted(set(ids))
    for at in range(0, len(wanted), _CHUNK):
        yield wanted[at : at + _CHUNK]


# ---- what extents held


@dataclass(frozen=True)
class HeldPrompts:
    """Prompts of a segment that lie in an extent."""

    extent_id: int
    dataset_id: str
    segment_seq: int
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class HeldUnit:
    """A unit whose trajectories, or saved progress, lie in an extent."""

    extent_id: int
    unit_id: int
    branch_id: str
    purpose: str
    epoch: int
    state: UnitState
    fates: tuple[str, ...]
    """consumer: outcome, of each consumer that gave it one."""
    offered_to: tuple[str, ...]
    """Consumers it waits for."""
    can_be_served: bool
    """Whether the weights it is bound to, if any, can serve it again."""

    @property
    def is_open(self) -> bool:
        """Whether somebody still has to read what lies there: a consumer it waits for, or whoever goes on with it."""
        if self.state is UnitState.COMPLETED:
            return bool(self.offered_to) or (not self.fates and self.purpose != EVAL)
        return self.state in (UnitState.READY, UnitState.LEASED)


@dataclass(frozen=True)
class HeldBatch:
    """A batch of which a part lies in an extent."""

    extent_id: int
    batch_id: int
    branch_id: str
    consumer: str
    step: int
    state: BatchState


def held_prompts(connection: Connection, extent_ids: Iterable[int]) -> list[HeldPrompts]:
    found: list[HeldPrompts] = []
    s, e = t.segment_extents.c, t.extents.c
    for chunk in _chunks(extent_ids):
        rows = connection.execute(
            sa.select(s.extent_id, t.segments.c.dataset_id, t.segments.c.segment_seq, s.first_row, e.num_rows)
            .join(t.segments, t.segments.c.segment_id == s.segment_id)
            .join(t.extents, e.extent_id == s.extent_id)
            .where(s.extent_id.in_(chunk))
            .order_by(s.segment_id, s.first_row)
        )
        found += [HeldPrompts(*row) for row in rows]
    return found


def held_units(connection: Connection, extent_ids: Iterable[int]) -> list[HeldUnit]:
    found: list[HeldUnit] = []
    u, w, c = t.units.c, t.weight_versions.c, t.continuations.c
    held = sa.union_all(  # by what the unit names, and by progress saved on top of it
        sa.select(u.unit_id, u.extent_id).where(u.extent_id.is_not(None)),
        sa.select(c.unit_id, c.extent_id),
    ).subquery()
    for chunk in _chunks(extent_ids):
        rows = connection.execute(
            sa.select(
                held.c.extent_id,
                u.unit_id,
                u.branch_id,
                u.purpose,
                u.epoch,
                u.state,
                sa.or_(
                    u.required_version_id.is_(None),
                    sa.and_(w.files_removed.is_(False), w.state != "dead"),
                ).label("can_be_served"),
            )
            .join(held, held.c.unit_id == u.unit_id)
            .outerjoin(t.weight_versions, w.version_id == u.required_version_id)
            .where(held.c.extent_id.in_(chunk))
            .order_by(u.unit_id)
        ).all()
        ids = [row.unit_id for row in rows]
        fates, offers = _fates_of(connection, ids), _offers_of(connection, ids)
        found += [
            HeldUnit(
                extent_id=r.extent_id,
                unit_id=r.unit_id,
                branch_id=r.branch_id,
                purpose=r.purpose,
                epoch=r.epoch,
                state=UnitState(r.state),
                fates=tuple(fates.get(r.unit_id, ())),
                offered_to=tuple(offers.get(r.unit_id, ())),
                can_be_served=bool(r.can_be_served),
            )
            for r in rows
        ]
    return found


_FATES = Prepared(
    "SELECT assignments.unit_id, assignments.consumer, assignments.outcome FROM {each} JOIN assignments "
    "ON assignments.unit_id = CAST(r.value AS BIGINT) ORDER BY assignments.unit_id, assignments.consumer"
)
_OFFERS = Prepared(
    "SELECT offers.unit_id, offers.consumer FROM {each} JOIN offers "
    "ON offers.unit_id = CAST(r.value AS BIGINT) ORDER BY offers.unit_id, offers.consumer"
)


def _fates_of(connection: Connection, unit_ids: Sequence[int]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for unit_id, consumer, outcome in _FATES.rows(connection, rows=rows_value(unit_ids)):
        found.setdefault(unit_id, []).append(f"{consumer}: {outcome}")
    return found


def _offers_of(connection: Connection, unit_ids: Sequence[int]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for unit_id, consumer in _OFFERS.rows(connection, rows=rows_value(unit_ids)):
        found.setdefault(unit_id, []).append(consumer)
    return found


def held_batches(connection: Connection, extent_ids: Iterable[int]) -> list[HeldBatch]:
    """Return the batches of which packed rows, the plan, or (held by reference) trajectories lie in the extents."""
    found: set[HeldBatch] = set()
    b, a, u = t.batches.c, t.assignments.c, t.units.c
    columns = (b.batch_id, b.branch_id, b.consumer, b.step, b.state)
    packs_rows = sa.exists().where(t.batch_extents.c.batch_id == b.batch_id)
    for chunk in _chunks(extent_ids):
        p = t.batch_extents.c
        asked = [
            sa.select(p.extent_id, *columns)
            .join(t.batches, b.batch_id == p.batch_id)
            .where(p.extent_id.in_(chunk)),
            sa.select(b.plan_extent_id, *columns).where(b.plan_extent_id.in_(chunk)),
            sa.select(u.extent_id, *columns)
            .select_from(t.units)
            .join(t.assignments, sa.and_(a.unit_id == u.unit_id, a.outcome == "trained"))
            .join(t.batches, b.batch_id == a.batch_id)
            .where(u.extent_id.in_(chunk), b.num_sequences > 0, b.state != BatchState.RETIRED, ~packs_rows),
        ]
        for statement in asked:
            found |= {HeldBatch(*row[:5], BatchState(row[5])) for row in connection.execute(statement)}
    return sorted(found, key=lambda held: (held.branch_id, held.consumer, held.step, held.extent_id))


def was_applied(connection: Connection, branch_id: str, consumer: str, *, step: int) -> bool:
    """Tell whether a trainer has applied this step or a later one, so that what it published came of it."""
    s = t.steps.c
    recorded = sa.select(s.step).where(s.branch_id == branch_id, s.consumer == consumer, s.step >= step)
    if connection.execute(recorded.limit(1)).first() is not None:
        return True
    # Weights are the trainer's: of another consumer they say nothing.
    w = t.weight_versions.c
    published = sa.select(w.version_id).where(w.branch_id == branch_id, w.step >= step)
    is_trainer = sa.select(s.step).where(s.branch_id == branch_id, s.consumer == consumer)
    return (
        connection.execute(is_trainer.limit(1)).first() is not None
        and connection.execute(published.limit(1)).first() is not None
    )


def needed_among(connection: Connection, extent_ids: Sequence[int]) -> set[int]:
    """Return those of the extents that something still has to read: prompts, open units, batches not trained."""
    needed = {held.extent_id for held in held_prompts(connection, extent_ids)}
    needed |= {held.extent_id for held in held_units(connection, extent_ids) if held.is_open}
    needed |= {
        held.extent_id for held in held_batches(connection, extent_ids) if held.state is BatchState.PLANNED
    }
    return needed


# ---- what is done


def openable(connection: Connection, unit_ids: Collection[int]) -> list[Unit]:
    """Return those of the units that `reopen` changes, by id, and keep others from changing them."""
    u = t.units.c
    is_fated = sa.exists().where(t.assignments.c.unit_id == u.unit_id)
    has_progress = sa.and_(u.state.in_([UnitState.READY, UnitState.LEASED]), u.extent_id.is_not(None))
    found: list[Unit] = []
    for chunk in _chunks(unit_ids):
        wanted = sa.select(*COLUMNS).where(
            u.unit_id.in_(chunk),
            sa.or_(sa.and_(u.state == UnitState.COMPLETED, ~is_fated), has_progress),
        )
        held = lock_rows(wanted.order_by(u.unit_id), connection, of=t.units, refers=True)
        found += [to_unit(row) for row in connection.execute(held)]
    return found


def reopen(connection: Connection, unit_ids: Collection[int], *, reason: str) -> list[int]:
    """Let completed units without a fate be generated again, and parked ones start pristine; returns which.

    Whoever assembles must be kept from it by the caller, who holds the role.
    """
    ids = rows_value(sorted(unit_ids))
    reopened = [row[0] for row in _REOPEN.rows(connection, rows=ids)]
    _WITHDRAW.count(connection, rows=rows_value(reopened))
    restarted = [row[0] for row in _RESTART.rows(connection, rows=ids)]
    done = sorted({*reopened, *restarted})
    continuations.end(connection, done)
    events.record_many(
        connection,
        [events.Event("unit.reopened", unit_id=unit_id, facts={"reason": reason}) for unit_id in done],
    )
    return done


_PRISTINE = "extent_id = NULL, row_start = NULL, row_count = NULL, version_step = NULL, mean_reward = NULL, num_tokens = NULL"
_REOPEN = Prepared(
    f"UPDATE units SET state = 'ready', claim_class = 1, scheduling_key = 0, attempts = 0, crashes = 0, {_PRISTINE} "
    "FROM {each} WHERE units.unit_id = CAST(r.value AS BIGINT) AND units.state = 'completed' "
    "AND NOT EXISTS (SELECT 1 FROM assignments WHERE assignments.unit_id = units.unit_id) RETURNING units.unit_id"
)
_RESTART = Prepared(
    f"UPDATE units SET claim_class = 1, scheduling_key = 0, {_PRISTINE} "
    "FROM {each} WHERE units.unit_id = CAST(r.value AS BIGINT) AND units.state IN ('ready', 'leased') "
    "AND units.extent_id IS NOT NULL RETURNING units.unit_id"
)
_WITHDRAW = Prepared("DELETE FROM offers WHERE unit_id IN (SELECT CAST(r.value AS BIGINT) FROM {each})")


@dataclass(frozen=True)
class Voided:
    """A planned batch that was taken back."""

    batch_id: int
    step: int
    digest: str
    unit_ids: tuple[int, ...]


def batches_from(connection: Connection, branch_id: str, consumer: str, *, step: int) -> list[Voided]:
    """Return a line's own batches from a step on, the last first."""
    b, a = t.batches.c, t.assignments.c
    rows = connection.execute(
        sa.select(b.batch_id, b.step, b.digest)
        .where(b.branch_id == branch_id, b.consumer == consumer, b.step >= step)
        .order_by(b.step.desc())
    ).all()
    return [
        Voided(
            r.batch_id,
            r.step,
            r.digest,
            tuple(
                connection.execute(
                    sa.select(a.unit_id).where(a.batch_id == r.batch_id).order_by(a.unit_id)
                ).scalars()
            ),
        )
        for r in rows
    ]


def void(connection: Connection, branch_id: str, consumer: str, voided: Sequence[Voided]) -> None:
    """Take back the last planned batches of a line: their units are offered again, their steps can be planned again."""
    ids = [batch.batch_id for batch in voided]
    c = t.consumers.c
    # Ids of batches are used once, also where the database would count on from the largest that is left.
    meta.put(connection, LAST_VOID_ID, str(max([*ids, int(meta.counter(connection, LAST_VOID_ID))])))
    connection.execute(sa.delete(t.assignments).where(t.assignments.c.batch_id.in_(ids)))
    connection.execute(sa.delete(t.batch_extents).where(t.batch_extents.c.batch_id.in_(ids)))
    connection.execute(
        sa.delete(t.pins).where(
            t.pins.c.subject_kind == PinKind.BATCH, t.pins.c.subject.in_([str(i) for i in ids])
        )
    )
    connection.execute(sa.delete(t.batches).where(t.batches.c.batch_id.in_(ids)))
    connection.execute(
        sa.update(t.consumers)
        .where(c.branch_id == branch_id, c.consumer == consumer)
        .values(planned=min(batch.step for batch in voided) - 1)
    )
    _OFFER_BACK.count(
        connection,
        branch_id=branch_id,
        consumer=consumer,
        rows=rows_value([unit_id for batch in voided for unit_id in batch.unit_ids]),
    )
    events.record_many(
        connection,
        [
            events.Event(
                "batch.voided",
                facts={
                    "branch": branch_id,
                    "consumer": consumer,
                    "step": batch.step,
                    "batch_id": batch.batch_id,
                    "digest": batch.digest,
                    "units": list(batch.unit_ids),
                },
            )
            for batch in voided
        ],
    )


_OFFER_BACK = Prepared(
    "INSERT INTO offers (branch_id, consumer, purpose, version_step, unit_id) "
    "SELECT units.branch_id, :consumer, units.purpose, units.version_step, units.unit_id "
    "FROM {each} JOIN units ON units.unit_id = CAST(r.value AS BIGINT) "
    "WHERE units.branch_id = :branch_id AND units.state = 'completed'"
)
