"""The worker of a frozen model's engine (a reward model, a teacher): it is kept alive and gets no weights.

Whoever asks it does so by its address, which the topology fixes. It claims no unit.
"""

from __future__ import annotations

import logging
import time
import urllib.error
import urllib.request

from strawflow.errors import EngineError
from strawflow.flow import engines
from strawflow.flow.session import WorkerSession
from strawflow.ids import new_id
from strawflow.states import EngineState
from strawflow_workers.drain import Drain
from strawflow_workers.rollout.engine_health import EVERY_S
from strawflow_workers.rollout.engine_plan import frozen_process
from strawflow_workers.rollout.engine_process import EngineProcess

log = logging.getLogger(__name__)

LOOK_S = 1.0


def serve_frozen(session: WorkerSession, drain: Drain, *, slot_id: int) -> None:
    """Start the engine and stay until it is drained or removed, the worker is told to end, or the engine dies.

    Raises:
        EngineError: it did not start, died or stopped answering; the supervisor starts it again.
        LeaseLostError: this session was declared lost.
    """
    slot = engines.take(session, slot_id=slot_id, url=None)
    process = frozen_process(session, slot)
    try:
        process.start()
        process.wait_ready()
        engines.report(
            session,
            engine_id=new_id("engine"),
            url=process.url,
            build=f"frozen {slot.model}",
            version_id=None,
        )
        engines.serve(session, slot_id)
        log.info("%s serves at %s", slot.model, process.url)
        _stay(session, drain, slot_id, process)
    finally:
        process.stop()


def _stay(session: WorkerSession, drain: Drain, slot_id: int, process: EngineProcess) -> None:
    limit_s = session.run.config.rollout.health_timeout_s
    answered_at = time.monotonic()
    while not drain.wait(LOOK_S):
        session.require_live()
        session.mark_progress()
        if not process.alive():
            raise EngineError("the engine's process ended; this worker starts again with a new one")
        if _answers(process.url, within_s=min(EVERY_S, limit_s)):
            answered_at = time.monotonic()
        elif time.monotonic() - answered_at >= limit_s:
            raise EngineError(
                f"the engine at {process.url} answered no health check for {limit_s:g} s; it is started again"
            )
        if engines.state_of(session.run, slot_id) in (EngineState.DRAINING, EngineState.GONE):
            return


def _answers(url: str, *, within_s: float) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=within_s) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
