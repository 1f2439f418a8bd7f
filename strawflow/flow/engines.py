"""Engines as the index knows them: what each one itself reported to serve."""

from __future__ import annotations

from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.index import sessions, weights
from strawflow.index.weights import Engine


def report(session: WorkerSession, *, engine_id: str, url: str, build: str, version_id: str | None) -> None:
    """Store an engine's own word on the weights it serves.

    Raises:
        LeaseLostError: the session was declared lost.
    """
    with session.run.index.begin() as connection:
        sessions.require_live(connection, session.session_id)
        weights.report_engine(
            connection,
            engine_id,
            session_id=session.session_id,
            url=url,
            build=build,
            version_id=version_id,
        )


def listed(run: Run) -> list[Engine]:
    """Return the engines of live workers and what each reported to serve."""
    with run.index.read() as connection:
        return weights.engines_listed(connection)
