"""Reward requests that wait for a process, shared by the lanes of a pool.

1. A request is here, or owed by a process, or both while one is stuck with it; its answer is settled once.
2. What a process gives back goes to the front: it has waited longest.
3. Batches are as large as the usual cost of a request allows; a batch of slow requests is a single one.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from strawflow_workers.rollout.rewards.calls import Answer, Call

_MAX_BATCH = 64
_BATCH_SECONDS = 0.02
_MIN_STALL_SECONDS = 0.25
_STALL_FACTOR = 10.0
_MEMORY = 0.9
"""Weight of the past in the running mean of seconds a request."""


@dataclass(eq=False, slots=True)
class Ticket:
    """A call and the place where its answer is awaited."""

    number: int
    call: Call
    answer: asyncio.Future[Answer]

    def settle(self, answer: Answer) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class Backlog:
    """The queue of tickets, and what is known of how long they take."""

    def __init__(self, *, when_short: Callable[[], None]) -> None:
        self._waiting: deque[Ticket] = deque()
        self._arrived = asyncio.Event()
        self._when_short = when_short
        self._usual_s: float | None = None
        self.num_stuck = 0
        """Processes that are held by one request for unusually long."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, ticket: Ticket) -> None:
        self._waiting.append(ticket)
        self._announce()

    def put_back(self, tickets: Iterable[Ticket]) -> None:
        """Put tickets before all others, in their order, leaving out those that are settled."""
        self._waiting.extendleft(reversed([ticket for ticket in tickets if not ticket.answer.done()]))
        self._announce()

    def _announce(self) -> None:
        if self._waiting:
            self._arrived.set()
            self._when_short()

    async def arrival(self, *, timeout_s: float) -> None:
        """Wait until there is something to take, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            return

    def take(self, *, num_takers: int) -> list[Ticket]:
        """Take the next batch, leaving their share to other takers; empty when nothing waits."""
        limit = min(self._batch_limit(), math.ceil(len(self._waiting) / num_takers))
        batch: list[Ticket] = []
        while self._waiting and len(batch) < limit:
            ticket = self._waiting.popleft()
            if not ticket.answer.done():
                batch.append(ticket)
        if not self._waiting:
            self._arrived.clear()
        return batch

    def _batch_limit(self) -> int:
        if self._usual_s is None:
            return 1
        return max(1, min(_MAX_BATCH, int(_BATCH_SECONDS / max(self._usual_s, 1e-9))))

    @property
    def stall_s(self) -> float:
        """After how many seconds with one request a process counts as stuck."""
        return max(_MIN_STALL_SECONDS, _STALL_FACTOR * (self._usual_s or 0.0))

    def note_seconds(self, seconds: float) -> None:
        """Take the seconds of one answered request into the running mean."""
        self._usual_s = (
            seconds if self._usual_s is None else _MEMORY * self._usual_s + (1 - _MEMORY) * seconds
        )

    @contextmanager
    def one_stuck(self) -> Iterator[None]:
        """Count one process as stuck."""
        self.num_stuck += 1
        if self._waiting:
            self._when_short()
        try:
            yield
        finally:
            self.num_stuck -= 1
