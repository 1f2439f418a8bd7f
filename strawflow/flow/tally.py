"""What is counted about a run as a whole: seconds under supervision and restarts of workers, across every resume."""

from __future__ import annotations

import time

from strawflow.flow.run import Run
from strawflow.index import events, meta

SECONDS = "supervised_seconds"
RESTARTS = "worker_restarts"
RESUMES = "resumes"


class SecondsTally:
    """Adds the time since its last update to the run's seconds, at most every `every_s`: a kill loses that much."""

    def __init__(self, run: Run, *, every_s: float = 2.0) -> None:
        self._run, self._every_s = run, every_s
        self._at = time.monotonic()

    def update(self, *, force: bool = False) -> None:
        passed = time.monotonic() - self._at
        if passed < self._every_s and not force:
            return
        with self._run.index.begin() as connection:
            meta.add(connection, SECONDS, passed)
        self._at += passed


def count_restart(run: Run, *, kind: str, exit_code: int) -> None:
    with run.index.begin() as connection:
        meta.add(connection, RESTARTS, 1)
        events.record(connection, "worker.restarted", kind=kind, exit_code=exit_code)


def count_resume(run: Run, *, prepared_s: float) -> None:
    """Count a start of the supervisor and the seconds that preparation took before it."""
    with run.index.begin() as connection:
        meta.add(connection, RESUMES, 1)
        meta.add(connection, SECONDS, prepared_s)


def read(run: Run) -> dict[str, float]:
    """Return {seconds, restarts, resumes} so far; the first start counts as a resume of nothing."""
    with run.index.read() as connection:
        return {
            "seconds": meta.counter(connection, SECONDS),
            "restarts": meta.counter(connection, RESTARTS),
            "resumes": max(0.0, meta.counter(connection, RESUMES) - 1),
        }
