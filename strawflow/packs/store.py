"""The packs one session writes: one open pack per kind, durable appends, adaptive group commit, roll-over.

1. `append` returns once its bytes are durable at the store's level; nothing here names them in an index.
2. While one window of a kind is being written and synced, arrivals gather for the next and share its one sync; a lone
   writer never waits. Kinds do not wait for each other.
   In an object store a window is one object: it waits for `GroupFlush.min_bytes` or `max_delay_s`, then is a sealed pack.
3. `on_create` runs before a pack's file exists, so that no file is ever without its row; it gives the pack its id.
4. After a failure every unfinished append of that window gets the error, and the next append opens a new pack.
5. Callbacks run in the thread of one of the appenders, with no lock held; they must not append to this store.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import pyarrow as pa

from strawflow.errors import InvalidInputError, StorageError
from strawflow.ids import Extent
from strawflow.packs.places import open_place
from strawflow.packs.probe import Durability
from strawflow.packs.writer import PackWriter, check_batch
from strawflow.records import SCHEMAS, schema_of

MAX_PACK_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class GroupFlush:
    """How long appends to an object store gather: until they are this large, or the oldest has waited this long."""

    min_bytes: int = 8 * 1024 * 1024
    """As the rows lie in memory, before compression."""
    max_delay_s: float = 0.2


@dataclass(frozen=True)
class PackCreated:
    """A pack is about to be created: insert its row now and return its id."""

    kind: str
    path: str
    session_id: str


@dataclass(frozen=True)
class PackSealed:
    """A pack has its footer and is durable; `length` is the file's size in bytes."""

    pack_id: int
    kind: str
    path: str
    length: int
    num_extents: int
    num_rows: int


@dataclass(frozen=True)
class PackFailed:
    """A pack was ended by a failure: its synced extents are readable, its footer (or all of the file) is missing."""

    pack_id: int
    kind: str
    path: str
    reason: str


@dataclass(eq=False)
class _Publication:
    """What one caller wants to append, and what became of it."""

    batches: Sequence[pa.RecordBatch]
    num_bytes: int
    came_at_s: float
    extents: list[Extent] = field(default_factory=list)
    error: BaseException | None = None
    is_done: bool = False

    @property
    def is_written(self) -> bool:
        return len(self.extents) == len(self.batches)


class _Lane:
    """One kind: its open pack, and the queue that gathers while a window is in flight."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.turn = threading.Condition()
        self.queue: list[_Publication] = []
        self.is_busy = False
        self.created: tuple[int, str] | None = None  # pack id and path, from its row until its end
        self.writer: PackWriter | None = None
        self.num_packs = self.num_messages = self.num_syncs = 0


class PackStore:
    """Append record batches of any kind from any thread; use as a context manager, or `close` it."""

    def __init__(
        self,
        root: str | Path,
        session_id: str,
        *,
        durability: Durability,
        on_create: Callable[[PackCreated], int],
        on_seal: Callable[[PackSealed], None],
        on_fail: Callable[[PackFailed], None] | None = None,
        before_append: Callable[[], None] | None = None,
        max_pack_bytes: int = MAX_PACK_BYTES,
        flush: GroupFlush = GroupFlush(),
    ) -> None:
        """Prepare to write under `root`, a folder or an address; no file is made before the first append.

        `session_id` becomes part of file names and must never be used again. A pack is rolled over by the first
        append that finds it at `max_pack_bytes` or more, so one may be larger by one message. `before_append` may refuse
        an append by raising.

        Raises:
            ConfigError: the back end of an address is unknown or not installed.
            InvalidInputError: `session_id` cannot be part of a file name, or a bound is below 1 byte or 0 s.
        """
        if not session_id or "/" in session_id or session_id.startswith("."):
            raise InvalidInputError(f"session id {session_id!r} cannot be part of a file name")
        if max_pack_bytes < 1:
            raise InvalidInputError(f"max_pack_bytes is {max_pack_bytes}; it must be at least 1")
        if flush.min_bytes < 1 or flush.max_delay_s < 0:
            raise InvalidInputError(f"{flush} must have at least 1 byte and 0 s")
        self._place, self._session_id, self._durability = open_place(root), session_id, durability
        self._flush = flush
        self._on_create, self._on_seal, self._on_fail = on_create, on_seal, on_fail
        self._before_append = before_append
        self._max_pack_bytes = max_pack_bytes
        self._pid = os.getpid()
        self._is_closed = False
        self._lanes = {kind: _Lane(kind) for kind in SCHEMAS}

    @property
    def num_messages(self) -> int:
        """Messages made durable so far, all kinds."""
        return sum(lane.num_messages for lane in self._lanes.values())

    @property
    def num_syncs(self) -> int:
        """Syncs and seals that made them durable: one per window, not one per append."""
        return sum(lane.num_syncs for lane in self._lanes.values())

    @property
    def num_packs(self) -> int:
        """Names of packs used so far, failed ones included."""
        return sum(lane.num_packs for lane in self._lanes.values())

    def append(self, kind: str, batch: pa.RecordBatch) -> Extent:
        """Append one record batch; see `append_many`."""
        return self.append_many(kind, [batch])[0]

    def append_many(self, kind: str, batches: Sequence[pa.RecordBatch]) -> list[Extent]:
        """Append record batches, one extent each, in order; durable on return.

        They are not atomic together: after an error some may lie in a pack, unnamed, to be swept.

        Raises:
            InvalidInputError: unknown kind, or a batch that is not of it; nothing was written.
            StorageError: the write or sync failed, the store is closed, or this process forked; append again.
            Exception: whatever `before_append`, `on_create` or `on_seal` raised, unchanged.
        """
        schema_of(kind)
        for batch in batches:
            check_batch(batch, kind)
        self.require_own_process()
        if self._before_append is not None and batches:
            self._before_append()
        publication = self._publication(batches)
        lane = self._lanes[kind]
        window = self._await_turn(lane, publication) if batches else []
        if window:
            self._lead(lane, window)
        if publication.error is not None:
            raise publication.error
        return publication.extents

    def seal(self, kind: str) -> None:
        """Seal the open pack of `kind`, if there is one, after the window in flight; the next append opens another.

        Raises:
            StorageError: the footer could not be made durable, or this process forked.
            Exception: whatever `on_seal` raised, unchanged; the file is sealed all the same.
        """
        schema_of(kind)
        self.require_own_process()
        lane = self._lanes[kind]
        with lane.turn:
            # Closing lets the queue run dry first; else its members, which nobody has answered yet, use the next pack.
            while lane.is_busy or (self._is_closed and lane.queue):
                lane.turn.wait()
            lane.is_busy = True
        try:
            self._seal_open_pack(lane, [])
        except BaseException as error:
            self._drop_pack(lane, error)
            raise
        finally:
            self._end_turn(lane)

    def close(self) -> None:
        """Seal every open pack and refuse further appends; closing twice is fine.

        Raises:
            Exception: the first failure, after every kind was tried; the others are noted on it.
        """
        self.require_own_process()
        self._is_closed = True
        for lane in self._lanes.values():
            with lane.turn:
                lane.turn.notify_all()  # what gathers for a larger object waits no longer
        failures: list[Exception] = []
        for kind in self._lanes:
            try:
                self.seal(kind)
            except Exception as error:  # every kind gets its try; the first failure is raised below
                failures.append(error)
        if failures:
            for other in failures[1:]:
                failures[0].add_note(f"closing also failed: {other}")
            raise failures[0]

    def __enter__(self) -> PackStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def require_own_process(self) -> None:
        # Before any lock: one that another thread held at the fork would never be released here.
        if os.getpid() != self._pid:
            raise StorageError(
                f"the pack store of session {self._session_id} belongs to process {self._pid}; "
                "a forked process must open its own store with its own session"
            )

    def _await_turn(self, lane: _Lane, publication: _Publication) -> list[_Publication]:
        """Queue up; return the window to write, or nothing when another thread has settled the publication."""
        with lane.turn:
            if self._is_closed:
                raise StorageError(f"the pack store of session {self._session_id} is closed")
            lane.queue.append(publication)
            try:
                while (lane.is_busy or self._gathers(lane) > 0) and not publication.is_done:
                    lane.turn.wait(None if lane.is_busy else self._gathers(lane))
            except BaseException:
                # An interrupted waiter takes its work back if nobody has begun on it.
                if publication in lane.queue:
                    lane.queue.remove(publication)
                    lane.turn.notify_all()
                raise
            if publication.is_done:
                return []
            lane.is_busy = True
            window, lane.queue = lane.queue, []
            return window

    def _publication(self, batches: Sequence[pa.RecordBatch]) -> _Publication:
        if self._place.appends:
            return _Publication(batches, 0, 0.0)
        return _Publication(batches, sum(batch.nbytes for batch in batches), time.monotonic())

    def _gathers(self, lane: _Lane) -> float:
        """Return for how many seconds the queue still waits for company before it is flushed."""
        if self._place.appends or self._is_closed or not lane.queue:
            return 0.0
        if sum(publication.num_bytes for publication in lane.queue) >= self._flush.min_bytes:
            return 0.0
        return lane.queue[0].came_at_s + self._flush.max_delay_s - time.monotonic()

    def _end_turn(self, lane: _Lane) -> None:
        with lane.turn:
            lane.is_busy = False
            lane.turn.notify_all()

    def _lead(self, lane: _Lane, window: list[_Publication]) -> None:
        try:
            self._write(lane, window)
        except BaseException as error:
            _settle_failed(window, error)
            self._drop_pack(lane, error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._end_turn(lane)

    def _write(self, lane: _Lane, window: list[_Publication]) -> None:
        for publication in window:
            for batch in publication.batches:
                publication.extents.append(self._pack_with_room(lane, window).append(batch, is_checked=True))
        assert lane.writer is not None
        if self._place.appends:
            lane.writer.sync()
            self._settle_durable(lane, window)
        else:
            self._seal_open_pack(lane, window)

    def _pack_with_room(self, lane: _Lane, window: list[_Publication]) -> PackWriter:
        if lane.writer is not None and lane.writer.length >= self._max_pack_bytes:
            self._seal_open_pack(lane, window)
        if lane.writer is None:
            lane.writer = self._create_pack(lane)
        return lane.writer

    def _create_pack(self, lane: _Lane) -> PackWriter:
        path = f"packs/{lane.kind}/{self._session_id}-{lane.num_packs:06d}.arrow"
        # Counted first: whatever happens from here on, this name is spent.
        lane.num_packs += 1
        pack_id = self._on_create(PackCreated(lane.kind, path, self._session_id))
        lane.created = pack_id, path
        # crash here: a row whose file does not exist, which recovery finds to hold no extents
        return PackWriter(
            self._place, pack_id=pack_id, path=path, kind=lane.kind, durability=self._durability
        )

    def _seal_open_pack(self, lane: _Lane, window: list[_Publication]) -> None:
        writer = lane.writer
        if writer is None:
            return
        writer.seal()
        lane.created = lane.writer = None
        self._settle_durable(lane, window)
        # crash here: a sealed file whose row says open, which readers and recovery treat as an open one
        self._on_seal(
            PackSealed(
                pack_id=writer.pack_id,
                kind=writer.kind,
                path=writer.path,
                length=writer.length,
                num_extents=writer.num_extents,
                num_rows=writer.num_rows,
            )
        )

    def _settle_durable(self, lane: _Lane, window: list[_Publication]) -> None:
        lane.num_syncs += 1
        for publication in window:
            if publication.is_written and not publication.is_done:
                publication.is_done = True
                lane.num_messages += len(publication.extents)

    def _drop_pack(self, lane: _Lane, error: BaseException) -> None:
        created, writer = lane.created, lane.writer
        lane.created = lane.writer = None
        if writer is not None:
            writer.abandon(f"{type(error).__name__}: {error}")
        if created is not None and self._on_fail is not None:
            pack_id, path = created
            self._on_fail(PackFailed(pack_id, lane.kind, path, str(error)))


def _settle_failed(window: list[_Publication], error: BaseException) -> None:
    """Give the error to all that are not durable; an interrupt of the leading thread is not the others' interrupt."""
    told: BaseException = error
    if not isinstance(error, Exception):
        told = StorageError(
            f"the append was broken off by {type(error).__name__} in another thread; append again"
        )
    for publication in window:
        if not publication.is_done:
            publication.error = told
            publication.is_done = True
