"""Pins: a pack, batch, checkpoint or weight version that nothing may remove while the pin stands, and why.

1. A pin is made under a shared lock of its subject's row, which must not be given up yet; whoever gives it up locks that
   row exclusively and looks for pins afterwards. So of a pin and a removal that race one wins, never both.
2. A pin that a worker session owns is void once the session is no longer live; one without stands until it is removed.
3. It knows rows only: what a pin is good for is told by those who remove.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow import clock
from strawflow.errors import ConflictError, NotFoundError
from strawflow.index import events, sessions
from strawflow.index import tables as t
from strawflow.index.engine import share_rows
from strawflow.states import BatchState, PackState, SessionState


class PinKind(StrEnum):
    """What can be pinned."""

    PACK = "pack"
    BATCH = "batch"
    CHECKPOINT = "checkpoint"
    WEIGHTS = "weights"


@dataclass(frozen=True)
class Pin:
    pin_id: int
    subject_kind: PinKind
    subject: str
    """Id of the pack, batch, checkpoint or weight version."""
    reason: str
    session_id: str | None
    """The worker session it ends with; None: it stands until it is removed."""
    at: str
    is_void: bool


# Of each kind: the column that holds its id, and the condition that it is not given up yet.
_SUBJECTS: dict[PinKind, tuple[sa.Column[Any], sa.ColumnElement[bool]]] = {
    PinKind.PACK: (t.packs.c.pack_id, t.packs.c.state != PackState.CONDEMNED),
    PinKind.BATCH: (t.batches.c.batch_id, t.batches.c.state != BatchState.RETIRED),
    PinKind.CHECKPOINT: (t.checkpoints.c.checkpoint_id, t.checkpoints.c.files_removed.is_(False)),
    PinKind.WEIGHTS: (t.weight_versions.c.version_id, t.weight_versions.c.files_removed.is_(False)),
}

_live = sa.select(t.sessions.c.session_id).where(t.sessions.c.state == SessionState.LIVE)
_STANDS = sa.or_(t.pins.c.session_id.is_(None), t.pins.c.session_id.in_(_live))


def is_pinned(kind: PinKind) -> sa.ColumnElement[bool]:
    """Return the condition that a row of the kind's table is pinned.

    To be asked in a statement of its own, after the row was locked exclusively.
    """
    column, _ = _SUBJECTS[kind]
    return sa.exists().where(
        t.pins.c.subject_kind == kind, t.pins.c.subject == sa.cast(column, sa.String), _STANDS
    )


def pin(
    connection: Connection, kind: PinKind, subject: str, *, reason: str, session_id: str | None = None
) -> int:
    """Pin a subject; returns the pin's id.

    Raises:
        NotFoundError: there is no such subject.
        ConflictError: it was given up already, its bytes may be gone at any moment.
        LeaseLostError: the session that is to own the pin is not live.
    """
    if session_id is not None:
        sessions.require_live(connection, session_id)
    _hold(connection, kind, subject)
    pin_id: int = connection.execute(
        sa.insert(t.pins)
        .values(
            subject_kind=kind, subject=subject, reason=reason, session_id=session_id, at=clock.wall_time()
        )
        .returning(t.pins.c.pin_id)
    ).scalar_one()
    events.record(
        connection, "pin.made", session_id=session_id, pin_id=pin_id, subject=f"{kind} {subject}", why=reason
    )
    return pin_id


def _hold(connection: Connection, kind: PinKind, subject: str) -> None:
    """Share the subject's row, so that it cannot be given up before this transaction ends."""
    column, is_kept = _SUBJECTS[kind]
    value = int(subject) if isinstance(column.type, sa.Integer) and subject.isdecimal() else subject
    if isinstance(column.type, sa.Integer) and isinstance(value, str):
        raise NotFoundError(f"there is no {kind} {subject!r}: its id is a number")
    # After a wait for whoever changes the row, PostgreSQL asks the condition again of what the row has become.
    held = share_rows(sa.select(column).where(column == value, is_kept), connection)
    if connection.execute(held).first() is not None:
        return
    if connection.execute(sa.select(column).where(column == value)).first() is None:
        raise NotFoundError(f"there is no {kind} {subject!r}")
    raise ConflictError(
        f"{kind} {subject!r} was given up already, its bytes may be gone; it cannot be pinned"
    )


def unpin(connection: Connection, pin_id: int) -> None:
    """Remove a pin.

    Raises:
        NotFoundError: there is no such pin.
    """
    row = connection.execute(
        sa.delete(t.pins).where(t.pins.c.pin_id == pin_id).returning(t.pins.c.subject_kind, t.pins.c.subject)
    ).first()
    if row is None:
        raise NotFoundError(f"there is no pin {pin_id}; see `strawflow storage pins`")
    events.record(connection, "pin.removed", pin_id=pin_id, subject=f"{row.subject_kind} {row.subject}")


def listed(connection: Connection) -> list[Pin]:
    """Return every pin, void ones too, the oldest first."""
    rows = connection.execute(sa.select(t.pins, _STANDS.label("stands")).order_by(t.pins.c.pin_id))
    return [
        Pin(r.pin_id, PinKind(r.subject_kind), r.subject, r.reason, r.session_id, r.at, not r.stands)
        for r in rows
    ]


def drop_void(connection: Connection) -> int:
    """Remove the pins of sessions that are no longer live; returns how many."""
    return int(connection.execute(sa.delete(t.pins).where(~_STANDS)).rowcount)
