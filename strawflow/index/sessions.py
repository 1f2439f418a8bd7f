"""Worker sessions: one row per worker process life; its expiry is the expiry of all it leases.

1. One heartbeat extends everything the session holds.
2. A session is lost when it expired or its supervisor saw it die; lost sessions never come back.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow import clock, processes
from strawflow.errors import LeaseLostError
from strawflow.index import events, meta
from strawflow.index import tables as t
from strawflow.index.engine import now
from strawflow.index.prepared import Prepared, Transaction
from strawflow.states import SessionState


@dataclass(frozen=True)
class Session:
    session_id: str
    kind: str
    host: str
    machine: str
    pid: int
    process_started: int
    state: SessionState
    expires_in_s: float


def start(connection: Connection, session_id: str, *, kind: str, ttl_s: float) -> int:
    """Register a live session that expires `ttl_s` seconds from now; returns the incarnation it belongs to."""
    incarnation = meta.incarnation(connection)
    connection.execute(
        sa.insert(t.sessions).values(
            session_id=session_id,
            kind=kind,
            host=socket.gethostname(),
            machine=processes.machine_id(),
            pid=os.getpid(),
            process_started=processes.started_at(os.getpid()) or 0,
            state=SessionState.LIVE,
            expires_at=now(connection) + ttl_s,
            started_at=clock.wall_time(),
            incarnation=incarnation,
        )
    )
    events.record(connection, "session.started", session_id=session_id, kind=kind)
    return incarnation


def renew(connection: Connection, session_id: str, *, ttl_s: float) -> None:
    """Extend a live session.

    Raises:
        LeaseLostError: the session was ended or declared lost.
    """
    done = connection.execute(
        sa.update(t.sessions)
        .where(t.sessions.c.session_id == session_id, t.sessions.c.state == SessionState.LIVE)
        .values(expires_at=now(connection) + ttl_s)
    )
    if done.rowcount == 0:
        raise LeaseLostError("the session is no longer live; stop the work", session_id=session_id)


_STATE = Prepared("SELECT state FROM sessions WHERE session_id = :session_id {share}")


_HOLD = Prepared("SELECT state FROM sessions WHERE session_id = :session_id {lock}")


def hold(transaction: Transaction, session_id: str) -> None:
    """Wait until no other transaction holds or shares the session's row, and keep it so until this one ends."""
    _HOLD.hold(transaction, session_id=session_id)


def require_live(transaction: Transaction, session_id: str) -> None:
    """Raise LeaseLostError unless the session is live; holds its row so that it cannot be lost meanwhile."""
    rows = _STATE.rows(transaction, session_id=session_id)
    state = rows[0][0] if rows else None
    if state != SessionState.LIVE:
        raise LeaseLostError(
            "the session is no longer live; stop the work", session_id=session_id, state=state
        )


def end(connection: Connection, session_id: str) -> bool:
    """Mark a session as drained; False if it was not live."""
    return _close(connection, session_id, SessionState.ENDED, "session.ended")


def lose(
    connection: Connection, session_id: str, *, reason: str, if_expired_for_s: float | None = None
) -> bool:
    """Declare a session lost; False if it was not live any more, or (when asked) was renewed meanwhile."""
    expired = (
        [] if if_expired_for_s is None else [t.sessions.c.expires_at + if_expired_for_s < now(connection)]
    )
    return _close(connection, session_id, SessionState.LOST, "session.lost", *expired, reason=reason)


def _close(
    connection: Connection,
    session_id: str,
    state: SessionState,
    event: str,
    *conditions: sa.ColumnElement[bool],
    **facts: Any,
) -> bool:
    done = connection.execute(
        sa.update(t.sessions)
        .where(t.sessions.c.session_id == session_id, t.sessions.c.state == SessionState.LIVE, *conditions)
        .values(state=state, ended_at=clock.wall_time())
    )
    if done.rowcount:
        events.record(connection, event, session_id=session_id, **facts)
    return bool(done.rowcount)


def expired(connection: Connection, *, grace_s: float) -> list[str]:
    """Return live sessions whose expiry passed more than `grace_s` seconds ago."""
    rows = connection.execute(
        sa.select(t.sessions.c.session_id).where(
            t.sessions.c.state == SessionState.LIVE, t.sessions.c.expires_at + grace_s < now(connection)
        )
    )
    return [row.session_id for row in rows]


def listed(connection: Connection, *, live_only: bool = False) -> list[Session]:
    statement = sa.select(
        t.sessions.c.session_id,
        t.sessions.c.kind,
        t.sessions.c.host,
        t.sessions.c.machine,
        t.sessions.c.pid,
        t.sessions.c.process_started,
        t.sessions.c.state,
        (t.sessions.c.expires_at - now(connection)).label("expires_in_s"),
    ).order_by(t.sessions.c.started_at)
    if live_only:
        statement = statement.where(t.sessions.c.state == SessionState.LIVE)
    return [
        Session(**{**row._mapping, "state": SessionState(row.state), "expires_in_s": float(row.expires_in_s)})
        for row in connection.execute(statement)
    ]


def live_but_gone(connection: Connection) -> list[Session]:
    """Return live sessions whose process is known to be gone: of this boot and pid namespace, and not running."""
    here = processes.machine_id()
    return [
        s
        for s in listed(connection, live_only=True)
        if s.machine == here and processes.started_at(s.pid) != s.process_started
    ]


def lost_pids(connection: Connection) -> set[int]:
    """Return the pids of this machine's processes whose session was declared lost while they live."""
    rows = connection.execute(
        sa.select(t.sessions.c.pid, t.sessions.c.process_started).where(
            t.sessions.c.state == SessionState.LOST, t.sessions.c.machine == processes.machine_id()
        )
    )
    return {row.pid for row in rows if processes.started_at(row.pid) == row.process_started}
