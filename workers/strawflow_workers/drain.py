"""The request to drain: SIGTERM or SIGINT asks a worker to finish cleanly; loops look at it and wait on it.

The signal handler only sets a flag and writes a byte to a socket: taking a lock there could wait for the very code that the
signal interrupted.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
from types import FrameType


class Drain:
    """Set by a signal or by code, from any thread; waiting on it returns early when it is set."""

    def __init__(self) -> None:
        self._requested = False
        self._wakes, self._wake = socket.socketpair()
        self._wake.setblocking(False)

    @property
    def requested(self) -> bool:
        return self._requested

    def request(self) -> None:
        self._requested = True
        with contextlib.suppress(BlockingIOError):  # it is full of earlier requests
            self._wake.send(b".")

    def wait(self, seconds: float) -> bool:
        """Wait; True when a drain is requested."""
        if not self._requested:
            select.select([self._wakes], [], [], seconds)
        return self._requested

    def on_signals(self) -> None:
        """Take SIGTERM and SIGINT of this process as requests to drain."""

        def handle(_number: int, _frame: FrameType | None) -> None:
            self.request()

        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGINT, handle)
