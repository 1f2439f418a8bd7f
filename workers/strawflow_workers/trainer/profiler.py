"""A trace of chosen steps by torch's profiler, as a file that Perfetto and chrome://tracing open.

1. Steps outside the window run without the profiler.
2. A profiler that fails costs the trace, not the run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from strawflow.config_trainer import profile_window

log = logging.getLogger(__name__)


class StepProfiler(AbstractContextManager["StepProfiler"]):
    """Traces the steps FIRST:LAST into one file. A restart inside the window traces what is left of it."""

    def __init__(self, window: str, folder: Path) -> None:
        """`window` is trainer.profile_steps; empty: nothing is ever traced."""
        self._steps = profile_window(window) if window else range(0)
        self._folder = folder
        self._profile: Any = None
        self._first = self._last = 0

    def __exit__(self, *_: object) -> None:
        self._write()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Trace what is done inside, if the step is in the window."""
        if step in self._steps:
            self._begin(step)
        try:
            yield
        finally:
            if step in self._steps:
                self._last = step
                if step == self._steps[-1]:
                    self._write()

    def _begin(self, step: int) -> None:
        if self._profile is not None:
            return
        try:
            from torch import profiler

            # Without a choice it traces everything that this machine has.
            self._profile = profiler.profile()
            self._profile.__enter__()
            self._first = step
        except Exception:  # a trace never stops a run
            self._profile, self._steps = None, range(0)
            log.warning("the profiler does not start", exc_info=True)

    def _write(self) -> None:
        profile, self._profile = self._profile, None
        if profile is None:
            return
        path = self._folder / f"steps-{self._first}-{self._last}.json.gz"
        try:
            profile.__exit__(None, None, None)
            self._folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(path))
            log.info("trace of steps %d to %d: %s", self._first, self._last, path)
        except Exception:  # a trace never stops a run
            log.warning("%s could not be written", path, exc_info=True)
