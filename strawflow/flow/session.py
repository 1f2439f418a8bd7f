"""A worker's session: its row, its heartbeat and the packs it may write.

1. The heartbeat runs in its own thread and renews only while the work loop's progress mark is younger than `stall_s`:
   a hung loop loses its leases as a dead one does.
2. A lost session is told by `require_live`; every guarded write would be refused anyway.
"""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType

import pyarrow as pa

from strawflow import clock
from strawflow.clock import TrustedUntil
from strawflow.errors import CommitUnknownError, LeaseLostError, StorageError
from strawflow.flow import quota
from strawflow.flow.exchange import Exchange
from strawflow.flow.journal import ChecksumLog
from strawflow.flow.run import Run
from strawflow.ids import new_id
from strawflow.index import leases, packs, sessions, weights
from strawflow.packs.reader import PackReader
from strawflow.packs.store import PackCreated, PackSealed, PackStore
from strawflow.packs.writer import PackWriter

log = logging.getLogger(__name__)

STALL_S = 600.0
"""Default age of the progress mark at which a work loop counts as hung; longer than any one guarded step here."""


class WorkerSession:
    """One life of one worker process; use as a context manager."""

    def __init__(self, run: Run, kind: str, *, stall_s: float = STALL_S) -> None:
        self.run = run
        self.session_id = new_id(kind)
        self.reader = PackReader(run.root)
        self._stall_s = stall_s
        self._progressed_at = time.monotonic()
        self._stop = threading.Event()
        self._lost = threading.Event()
        requested_at = clock.uptime_s()
        with run.index.begin() as connection:
            self.incarnation = sessions.start(
                connection, self.session_id, kind=kind, ttl_s=run.config.lease.ttl_s
            )
        self._trusted = self._trust_from(requested_at)
        self.packs = PackStore(
            run.root,
            self.session_id,
            durability=run.config.run.durability,
            on_create=self._name_pack,
            on_seal=self._seal_pack,
            before_append=None if kind == quota.UPKEEP else quota.gauge(run).require_room,
        )
        self.exchange = Exchange(self)
        self.checksums = ChecksumLog(self)
        self._heartbeat = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._heartbeat.start()

    def mark_progress(self) -> None:
        """Tell the heartbeat that the work loop is alive."""
        self._progressed_at = time.monotonic()

    def require_live(self) -> None:
        """Raise LeaseLostError when this session was lost or can no longer be trusted to be live."""
        if self._lost.is_set() or not self._trusted.holds():
            raise LeaseLostError(
                "this worker's session was lost (late heartbeat, or taken back); it must start again",
                session_id=self.session_id,
            )

    def mark_lost(self) -> None:
        """Refuse all further work under this session, which its owner gave up."""
        self._lost.set()

    def require_not_lost(self) -> None:
        """Raise LeaseLostError when this session is known to be lost; one only late may still write, under its fence."""
        if self._lost.is_set():
            raise LeaseLostError("this session was lost; it must start again", session_id=self.session_id)

    def pack_for_copies(self, kind: str, *, purpose: str, schema: pa.Schema | None = None) -> PackWriter:
        """Create a pack of its own for extents of other packs; the caller seals it and names what lies in it.

        `schema` is the earlier version that they are of; None: the present one.

        Raises:
            LeaseLostError: the session was declared lost. StorageError: the file cannot be created.
        """
        path = f"packs/{kind}/{self.session_id}-{purpose}-{new_id('pack')}.arrow"
        pack_id = self._name_pack(PackCreated(kind, path, self.session_id))
        durability = self.run.config.run.durability
        return PackWriter(
            self.run.root, pack_id=pack_id, path=path, kind=kind, durability=durability, schema=schema
        )

    def end(self) -> None:
        """Seal the packs and end the session: a clean drain."""
        self._stop.set()
        self._heartbeat.join()
        self.checksums.write()
        self.packs.close()
        with self.run.index.begin() as connection:
            if sessions.end(connection, self.session_id):
                leases.release_all(connection, self.session_id)
            weights.forget_engines(connection, self.session_id)

    def __enter__(self) -> WorkerSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if error is None:
            self.end()
        # Otherwise the session expires, or its supervisor or its owner (rescue.give_up) declares it lost: what it holds
        # is taken back whole, its attempts counted, which a clean end would refund.

    def _trust_from(self, requested_at: float) -> TrustedUntil:
        lease = self.run.config.lease
        return TrustedUntil.from_request(requested_at, ttl_s=lease.ttl_s, margin_s=lease.margin_s)

    def _beat(self) -> None:
        while not self._stop.wait(self.run.config.lease.heartbeat_s):
            if time.monotonic() - self._progressed_at > self._stall_s:
                log.error("the work loop made no progress for %.0f s: heartbeat withheld", self._stall_s)
                continue
            requested_at = clock.uptime_s()
            try:
                with self.run.index.begin() as connection:
                    sessions.renew(connection, self.session_id, ttl_s=self.run.config.lease.ttl_s)
            except LeaseLostError:
                log.error("session %s was declared lost", self.session_id)
                self._lost.set()
                return
            except (
                StorageError,
                CommitUnknownError,
            ) as error:  # the next beat tries again; trust runs out meanwhile
                log.warning("heartbeat failed: %s", error)
                continue
            self._trusted = self._trust_from(requested_at)
            self.checksums.write()

    def _name_pack(self, created: PackCreated) -> int:
        with self.run.index.begin() as connection:
            sessions.require_live(connection, self.session_id)
            return packs.create(connection, kind=created.kind, path=created.path, session_id=self.session_id)

    def _seal_pack(self, sealed: PackSealed) -> None:
        with self.run.index.begin() as connection:
            packs.seal(
                connection,
                sealed.pack_id,
                path=sealed.path,
                num_bytes=sealed.length,
                num_rows=sealed.num_rows,
            )
