"""Whether an engine still answers: asked now and then beside its work, judged by how long it has not.

1. A check that fails is not yet a dead engine: it may be paused, or its host busy. Only `limit_s` without one that was answered is.
2. While weights are loaded nothing is expected of it (`excuse`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from strawflow.errors import EngineError

EVERY_S = 10.0
"""Between two checks, and how long one is waited for; less where the limit is short."""


@dataclass
class EngineHealth:
    """Checks one engine; `ask` gets the seconds that it may take."""

    limit_s: float
    ask: Callable[[float], Awaitable[bool]]
    _asked_at: float = field(default_factory=time.monotonic)
    _failing_since: float | None = None
    _check: asyncio.Task[bool] | None = None

    @property
    def every_s(self) -> float:
        return min(EVERY_S, self.limit_s / 4)

    def look(self) -> None:
        """Take the answer to the last check, and ask again when it is time; never waits.

        Raises:
            EngineError: no check was answered for `limit_s` seconds.
        """
        now = time.monotonic()
        if self._check is not None and self._check.done():
            is_well, self._check = self._check.result(), None
            self._failing_since = None if is_well else self._failing_since or self._asked_at
        if self._failing_since is not None and now - self._failing_since >= self.limit_s:
            raise EngineError(
                f"the engine answered no health check for {now - self._failing_since:.0f} s (rollout.health_timeout_s); this "
                "worker starts again"
            )
        if self._check is None and now - self._asked_at >= self.every_s:
            self._asked_at = now
            self._check = asyncio.ensure_future(self.ask(self.every_s))

    def excuse(self) -> None:
        """Forget what was asked: it is busy with what it was told to do."""
        self.close()
        self._failing_since, self._asked_at = None, time.monotonic()

    def close(self) -> None:
        if self._check is not None:
            self._check.cancel()
            self._check = None
