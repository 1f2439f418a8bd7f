"""Rescue: take back what lost sessions held, and close the packs they left open.

Recovery of a pack flips nothing it has not copied first: named extents are copied to a new pack under a new name, then
one transaction moves their rows and condemns the old pack; its file is removed last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pyarrow as pa

from strawflow.errors import CommitUnknownError, CorruptPackError, StorageError
from strawflow.flow import journal
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.ids import Extent
from strawflow.index import events, leases, packs, quarantine, sessions, weights
from strawflow.index.engine import Connection
from strawflow.index.packs import Pack
from strawflow.index.units import Unit
from strawflow.packs.posix import file_of, set_aside
from strawflow.packs.salvage import CorruptExtent, salvage
from strawflow.packs.writer import PackWriter

log = logging.getLogger(__name__)


Confirm = Callable[[Connection, Sequence[Unit]], None]
"""Is told in the transaction of the units that come back, in order of their ids; what it raises undoes all of it."""


def declare_lost(
    run: Run,
    session_id: str,
    *,
    reason: str,
    if_expired_for_s: float | None = None,
    confirm: Confirm | None = None,
) -> int:
    """Declare a live session lost and take its units back; returns how many. Idempotent.

    With `if_expired_for_s` only if it is still past its expiry by so much: a heartbeat may have come meanwhile.
    """
    with run.index.begin() as connection:
        if not sessions.lose(connection, session_id, reason=reason, if_expired_for_s=if_expired_for_s):
            return 0
        weights.forget_engines(connection, session_id)
        rescued = leases.rescue(
            connection, session_id, reason=reason, max_attempts=run.config.rollout.max_attempts
        )
        if confirm is not None:
            confirm(connection, sorted(rescued, key=lambda unit: unit.unit_id))
    return len(rescued)


def rescue_expired(run: Run) -> int:
    """Declare every session past its expiry and grace lost; returns how many units came back."""
    with run.index.read() as connection:
        expired = sessions.expired(connection, grace_s=run.config.lease.grace_s)
    return sum(
        declare_lost(run, session_id, reason="its lease expired", if_expired_for_s=run.config.lease.grace_s)
        for session_id in expired
    )


def declare_dead_processes_lost(run: Run) -> int:
    """Declare lost every live session of this machine whose process no longer exists; returns how many units came back."""
    with run.index.read() as connection:
        gone = sessions.live_but_gone(connection)
    return sum(declare_lost(run, s.session_id, reason=f"its process {s.pid} is gone") for s in gone)


def rescue_all(run: Run) -> int:
    """Declare lost every session whose process is gone or whose lease expired; returns how many units came back."""
    return declare_dead_processes_lost(run) + rescue_expired(run)


def give_up(session: WorkerSession, *, reason: str) -> None:
    """Seal the packs of a session of this process whose work failed, and declare it lost now, not at its expiry.

    Lost, not ended: the attempts it held stand. What fails in it is logged; the session expires then, as if killed.
    """
    session.mark_lost()
    try:
        session.checksums.write()
        session.packs.close()
    except Exception as error:  # the work's own error is the one to tell; recovery closes what is left open
        log.warning("packs of session %s stay open: %s", session.session_id, error)
    try:
        declare_lost(session.run, session.session_id, reason=reason)
    except (StorageError, CommitUnknownError) as error:
        log.warning("session %s lives on until it expires: %s", session.session_id, error)


def pids_of_lost_sessions(run: Run) -> set[int]:
    """Return processes of this machine that live on though their session was declared lost."""
    with run.index.read() as connection:
        return sessions.lost_pids(connection)


def recover_packs(session: WorkerSession) -> int:
    """Seal, by copying, every pack whose writer is gone; returns how many were recovered."""
    run = session.run
    with run.index.read() as connection:
        left_open = packs.open_without_writer(connection)
    return sum(_recover(session, pack) for pack in left_open)


def _schema_of(session: WorkerSession, extent: Extent) -> pa.Schema | None:
    """Return the schema of an extent's pack; None where its head is damaged, which the copying will tell."""
    try:
        return session.reader.stored_schema(extent)
    except CorruptPackError:
        return None


def _recover(session: WorkerSession, pack: Pack) -> bool:
    run = session.run
    with run.index.read() as connection:
        named = packs.extents_of_pack(connection, pack.pack_id)
        contained = quarantine.listed(connection)
    extents = [extent for extent in named if extent.extent_id not in contained]
    if named and not extents:
        set_aside(run.root, pack.path)  # programs before this one left it where it was
        return False  # nothing but damage is left in it, for whoever restores the file
    moved = {}
    corrupt: tuple[CorruptExtent, ...] = ()
    target: PackWriter | None = None
    if extents:
        target = session.pack_for_copies(pack.kind, purpose="salvage", schema=_schema_of(session, extents[0]))
        salvaged = salvage(run.root, extents, target=target)
        moved, corrupt = salvaged.moved, salvaged.corrupt
        if corrupt:
            # The damaged pack stays open, for whoever repairs it; reads of its extents raise.
            log.error("%s", CorruptPackError(corrupt[0].reason, pack=pack.path))
    checksums = journal.checksums(run.branch, moved.values())
    with journal.recorded(session, checksums) as record, run.index.begin() as connection:
        sessions.require_live(connection, session.session_id)
        record.name(connection)
        packs.move_extents(connection, moved)
        for damaged in corrupt:
            quarantine.add(connection, damaged.extent.extent_id, reason="damaged when its pack was recovered")
        if target is not None:
            packs.seal(
                connection,
                target.pack_id,
                path=target.path,
                num_bytes=target.length,
                num_rows=target.num_rows,
            )
        # Not while something is left in it, or it is pinned.
        is_condemned = packs.condemn(connection, pack.pack_id)
        events.record(
            connection,
            "pack.recovered",
            session_id=session.session_id,
            path=pack.path,
            num_extents=len(moved),
            num_corrupt=len(extents) - len(moved),
        )
    if is_condemned:
        # crash before: a condemned file, which the sweep removes
        file_of(run.root, pack.path).unlink(missing_ok=True)
    elif corrupt:
        set_aside(run.root, pack.path)  # crash before: the next recovery does it
    return True
