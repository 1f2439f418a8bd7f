"""The batches of a trainer in order: each is read, checked and laid out while the one before is trained.

1. Order and content are those of reading each when it is wanted: what was read ahead is used for the very batch (id and digest)
   that the index has planned for the step when its turn comes, and read again if that is another.
2. An error of reading ahead is raised when its step is wanted, by reading again: what was mended meanwhile is no error.
3. At most one batch is read ahead, so memory holds two.
4. It knows nothing of sessions, models or steps to come: it is asked for a step at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from strawflow.index.batches import Batch

POLL_S = 0.05
"""Seconds between two looks whether a batch is planned."""

T = TypeVar("T")


@dataclass(frozen=True)
class Served(Generic[T]):
    """A batch as it was handed out."""

    batch: Batch
    content: T
    read_wait_s: float
    """Seconds that its reader waited for its content once it was planned."""
    was_ahead: bool
    """Whether it was read, or being read, before it was asked for."""


class BatchFeed(Generic[T]):
    """Read batches one ahead; use as a context manager, from one thread."""

    def __init__(
        self, planned: Callable[[int], Batch | None], read: Callable[[Batch], T], *, ahead: bool = True
    ) -> None:
        """`planned` returns the batch of a step, None while there is none; `read` its content, checked. Both are called from
        the feed's thread too."""
        self._planned, self._read = planned, read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch-feed") if ahead else None
        self._next: _Ahead[T] | None = None

    def __enter__(self) -> BatchFeed[T]:
        return self

    def __exit__(self, *_: object) -> None:
        if self._next is not None:
            self._next.is_wanted.set()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def content_of(self, batch: Batch) -> Served[T]:
        """Return the content of a planned batch.

        Raises:
            CorruptPackError, StorageError, NotFoundError: it cannot be read.
        """
        started = time.monotonic()
        found = self._found_ahead(batch)
        content = self._read(batch) if found is None else found[0]
        return Served(batch, content, time.monotonic() - started, found is not None)

    def read_ahead(self, step: int) -> None:
        """Begin to read the batch of a step, as soon as it is planned, until it is asked for."""
        if self._thread is None or (self._next is not None and self._next.step == step):
            return
        is_wanted = threading.Event()
        future = self._thread.submit(self._find_and_read, step, is_wanted)
        self._next = _Ahead(step, is_wanted, future)

    def _find_and_read(self, step: int, is_wanted: threading.Event) -> tuple[Batch, T] | None:
        while (batch := self._planned(step)) is None:
            if is_wanted.wait(POLL_S):
                return None
        return batch, self._read(batch)

    def _found_ahead(self, batch: Batch) -> tuple[T] | None:
        if self._next is None or self._next.step != batch.step:
            return None
        ahead, self._next = self._next, None
        ahead.is_wanted.set()
        try:
            found = ahead.future.result()
        except Exception:  # whatever it was: reading again tells, or shows that it is over
            return None
        if found is None or (found[0].batch_id, found[0].digest) != (batch.batch_id, batch.digest):
            return None
        return (found[1],)


@dataclass(frozen=True)
class _Ahead(Generic[T]):
    step: int
    is_wanted: threading.Event
    """Set when nobody will wait for it to be planned any more."""
    future: Future[tuple[Batch, T] | None]
