"""The request to drain: SIGTERM or SIGINT asks a worker to finish cleanly; loops look at it and wait on it."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Drain:
    """Set by a signal or by code; waiting on it returns early when it is set."""

    def __init__(self) -> None:
        self._event = threading.Event()

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def request(self) -> None:
        self._event.set()

    def wait(self, seconds: float) -> bool:
        """Wait; True when a drain is requested."""
        return self._event.wait(seconds)

    def on_signals(self) -> None:
        """Take SIGTERM and SIGINT of this process as requests to drain."""

        def handle(_number: int, _frame: FrameType | None) -> None:
            self._event.set()

        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGINT, handle)
