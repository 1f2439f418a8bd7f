"""Engines that a run wants to have, one row each: desired state, the worker that has it, and why it is not trusted.

1. A slot's number outlives processes: its worker ends, another takes it.
2. Nothing is granted to a session whose slot is quarantined, draining or gone: the statement that grants looks (`CLOSED`).
3. What a session held is free again when it ends, however it ends (`vacate`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow import clock
from strawflow.index import events
from strawflow.index import tables as t
from strawflow.index.engine import lock_rows, now
from strawflow.states import EngineState

CLOSED = (
    "EXISTS (SELECT 1 FROM engine_slots WHERE engine_slots.session_id = :session_id "
    "AND engine_slots.state IN ('quarantined', 'draining', 'gone'))"
)
"""Condition of statements that grant: the engine of this session is to get nothing."""


@dataclass(frozen=True)
class Slot:
    slot_id: int
    model: str
    """`policy`, or the name of a frozen one."""
    placement: int | None
    """Which of the topology's; None: one server, by the run's own flags."""
    url: str | None
    """Address of an engine that others started; None: started by the run."""
    state: EngineState
    is_by_hand: bool
    """Its worker was started by hand: no supervisor starts one."""
    session_id: str | None
    reason: str | None
    """Why it is quarantined."""
    last_error: str | None
    num_garbage: int
    strikes: int
    """How often it was quarantined since it last served well."""
    tokens_per_s: float | None
    updated_at: str
    retry_in_s: float
    """Seconds until one of our own that is quarantined may be started again."""

    @property
    def name(self) -> str:
        return f"engine {self.slot_id}" + (f" at {self.url}" if self.url else "")


_s = t.engine_slots.c


def add(
    connection: Connection,
    *,
    model: str,
    placement: int | None = None,
    url: str | None = None,
    is_by_hand: bool = False,
) -> int:
    """Want one engine more; returns its number."""
    slot_id = connection.execute(
        sa.insert(t.engine_slots)
        .values(
            model=model,
            placement=placement,
            url=url,
            state=EngineState.STARTING,
            is_by_hand=is_by_hand,
            num_garbage=0,
            strikes=0,
            updated_at=clock.wall_time(),
        )
        .returning(_s.slot_id)
    ).scalar_one()
    events.record(connection, "engine.added", slot_id=slot_id, url=url, model=model)
    return int(slot_id)


def listed(connection: Connection, *, with_gone: bool = False) -> list[Slot]:
    """Return the slots in the order of their numbers."""
    condition = sa.true() if with_gone else _s.state != EngineState.GONE
    return _found(connection, condition)


def any_ever(connection: Connection) -> bool:
    """Tell whether the run was ever given slots by its configuration or an operator, gone ones included."""
    return (
        connection.execute(sa.select(_s.slot_id).where(_s.is_by_hand.is_(False)).limit(1)).first() is not None
    )


def find(connection: Connection, slot_id: int) -> Slot | None:
    return next(iter(_found(connection, _s.slot_id == slot_id)), None)


def attached(connection: Connection, url: str) -> Slot | None:
    """Return the slot of an engine that others started, unless it is gone."""
    return next(iter(_found(connection, _s.url == url, _s.state != EngineState.GONE)), None)


def hold(connection: Connection, slot_id: int) -> None:
    """Make others that change a slot wait until the transaction ends."""
    connection.execute(lock_rows(sa.select(_s.state).where(_s.slot_id == slot_id), connection)).all()


def take(connection: Connection, slot_id: int, *, session_id: str) -> None:
    """Note which worker has a slot from now on."""
    _update(connection, slot_id, session_id=session_id)


def move(
    connection: Connection,
    slot_id: int,
    to: EngineState,
    *,
    of: Collection[EngineState],
    reason: str | None = None,
) -> bool:
    """Change a slot's state if it is one `of` these; False if it is not."""
    return bool(_update(connection, slot_id, _s.state.in_(sorted(of)), state=to, reason=reason))


def quarantine(connection: Connection, slot_id: int, *, reason: str, retry_after_s: float) -> bool:
    """Trust an engine no longer; False if it is draining or gone."""
    done = _update(
        connection,
        slot_id,
        _s.state.in_(sorted((EngineState.STARTING, EngineState.SERVING, EngineState.QUARANTINED))),
        state=EngineState.QUARANTINED,
        reason=reason,
        last_error=reason,
        strikes=_s.strikes + 1,
        retry_at=now(connection) + retry_after_s,
    )
    return bool(done)


def note(
    connection: Connection,
    slot_id: int,
    *,
    num_garbage: int,
    tokens_per_s: float | None,
    last_error: str | None,
    serves_well: bool,
) -> None:
    """Store what its worker saw of an engine: garbage since the last note, speed, the last error if there was one."""
    error = {} if last_error is None else {"last_error": last_error}
    well = {"strikes": 0} if serves_well else {}
    _update(
        connection,
        slot_id,
        num_garbage=_s.num_garbage + num_garbage,
        tokens_per_s=tokens_per_s,
        **error,
        **well,
    )


def vacate(connection: Connection, session_id: str) -> None:
    """Take a session that ended or was lost from the slot it had: to be started again, or gone if it was draining."""
    is_kept = sa.and_(_s.url.is_not(None), _s.state == EngineState.QUARANTINED)
    leaves = sa.or_(_s.state == EngineState.DRAINING, sa.and_(_s.is_by_hand.is_(True), ~is_kept))
    became = sa.case(
        (leaves, EngineState.GONE.value),
        (_s.state == EngineState.SERVING, EngineState.STARTING.value),
        else_=_s.state,
    )
    connection.execute(
        sa.update(t.engine_slots)
        .where(_s.session_id == session_id)
        .values(
            state=became,
            reason=sa.case((leaves, None), else_=_s.reason),
            session_id=None,
            tokens_per_s=None,
            updated_at=clock.wall_time(),
        )
    )


def _update(
    connection: Connection, slot_id: int, *conditions: sa.ColumnElement[bool], **values: object
) -> int:
    done = connection.execute(
        sa.update(t.engine_slots)
        .where(_s.slot_id == slot_id, *conditions)
        .values(**values, updated_at=clock.wall_time())
    )
    return int(done.rowcount)


def _found(connection: Connection, *conditions: sa.ColumnElement[bool]) -> list[Slot]:
    columns = [c for c in t.engine_slots.columns if c.name != "retry_at"]
    retry_in_s = sa.func.coalesce(_s.retry_at - now(connection), 0.0).label("retry_in_s")
    rows = connection.execute(sa.select(*columns, retry_in_s).where(*conditions).order_by(_s.slot_id))
    return [Slot(**{**row._mapping, "state": EngineState(row.state)}) for row in rows]
