"""One batch of reward requests in one process: who is answered, who is to blame, who moves on.

1. Answers come in order, so the first unanswered request is the one that runs. Only it is ever blamed.
2. Its clock starts when the request before it was answered, or when the batch was sent.
3. When it is stuck the others move to the backlog and the process is asked to skip them; the first answer counts.
4. While a process loads a reward that a row names, the limit is that of loading.
5. At the limit the process is killed before the failure is told: whoever hears of it can rely on the process being gone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from strawflow.errors import WorkerFailedError
from strawflow_workers.rollout.rewards.backlog import Backlog, Ticket
from strawflow_workers.rollout.rewards.calls import Answer
from strawflow_workers.rollout.rewards.process import ProcessEndedError, Reply, RewardProcess

_GRACE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds that one call may take, and that loading a reward may."""

    call_s: float
    load_s: float


class BatchRun:
    """Runs a batch in a process that owes nothing else."""

    def __init__(
        self,
        process: RewardProcess,
        batch: list[Ticket],
        *,
        backlog: Backlog,
        limits: TimeLimits,
        warn: Callable[[Iterable[str]], None],
    ) -> None:
        self._process = process
        self._owed = deque(batch)
        self._backlog = backlog
        self._limits = limits
        self._warn = warn
        self._loading = False
        self._moved = False

    async def run(self) -> bool:
        """Settle the batch; return whether the process can go on (else it has been killed)."""
        self._process.send((ticket.number, ticket.call) for ticket in self._owed)
        try:
            while self._owed:
                if failure := await self._next():
                    await self._process.kill()
                    self._owed.popleft().settle(Answer(None, failure))
                    return False
            return True
        finally:
            if not self._moved:
                self._backlog.put_back(self._owed)

    async def _next(self) -> str | None:
        """Settle the next answers; return what is wrong with the request that runs when none comes."""
        began = asyncio.get_running_loop().time()
        try:
            replies = await self._replies(began)
        except ProcessEndedError as ended:
            return f"the reward's process {ended.how}"
        if not replies and self._loading:
            return f"reward {self._owed[0].call.function!r} was not loaded within {self._limits.load_s:g} s"
        if not replies:
            return f"timed out after {self._limits.call_s:g} s"
        if answers := sum(status not in ("loading", "loaded") for _, status, _ in replies):
            self._backlog.note_seconds((asyncio.get_running_loop().time() - began) / answers)
        for reply in replies:
            self._settle(reply)
        return None

    async def _replies(self, began: float) -> list[Reply]:
        stall_s = min(self._backlog.stall_s, self._limits.call_s / 2)
        if replies := await self._process.replies(began + stall_s):
            return replies
        with self._backlog.one_stuck():
            self._move_the_others()
            limit_s = self._limits.load_s if self._loading else self._limits.call_s
            if replies := await self._process.replies(began + limit_s):
                return replies
            # This loop may have been held up itself: look once more for an answer that is there already.
            return await self._process.replies(asyncio.get_running_loop().time() + _GRACE_SECONDS)

    def _move_the_others(self) -> None:
        if self._moved or len(self._owed) < 2:
            return
        others = list(self._owed)[1:]
        self._process.skip([ticket.number for ticket in others])
        self._moved = True
        self._backlog.put_back(others)

    def _settle(self, reply: Reply) -> None:
        number, status, value = reply
        if self._owed[0].number != number:
            raise WorkerFailedError(
                f"a reward process answered request {number} when {self._owed[0].number} was due"
            )
        self._loading = status == "loading"
        if status == "loaded":
            self._warn(value)
        if status in ("loading", "loaded"):
            return
        ticket = self._owed.popleft()
        if status == "scored":
            ticket.settle(Answer(tuple(value)))
        elif status == "failed":
            ticket.settle(Answer(None, value))
