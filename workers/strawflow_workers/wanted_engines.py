"""Which engines of a run are to have a worker now: what a supervisor asks of the index, and what it makes of the answer.

1. The rows decide (flow.engines); they are looked at again once a second and after each death.
2. Frozen models serve before any rollout worker starts: rewards may ask them.
It starts and ends no process.
"""

from __future__ import annotations

import logging
from enum import Enum, auto

from strawflow.errors import WorkerFailedError
from strawflow.flow import engines
from strawflow.flow.run import Run
from strawflow.index.slots import Slot
from strawflow.states import EngineState
from strawflow.topology import POLICY

log = logging.getLogger(__name__)

MAX_STRIKES = 5
"""Quarantines in a row of every engine of our own after which the run ends."""


class Due(Enum):
    """What is to be done about an engine that no worker has."""

    START = auto()
    WAIT = auto()
    """Not now: a supervisor that waits for nothing else may end."""
    FORGET = auto()


class WantedEngines:
    """The engines that a run wants, as last looked up."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.slots: dict[int, Slot] = {}

    def look(self) -> None:
        self.slots = {slot.slot_id: slot for slot in engines.wanted(self._run)}

    def kind(self, slot_id: int) -> str:
        """Return which worker serves an engine."""
        return "rollout" if self.slots[slot_id].model == POLICY else "engine"

    def due(self, slot_id: int) -> Due:
        """Return what is to be done about an engine without a worker."""
        slot = self.slots.get(slot_id)
        if slot is None or (slot.state is EngineState.DRAINING and engines.leave(self._run, slot_id)):
            return Due.FORGET
        rests = slot.state is EngineState.QUARANTINED and (slot.url is not None or slot.retry_in_s > 0)
        if rests or slot.session_id is not None:
            return Due.WAIT
        is_early = slot.model == POLICY and any(
            other.model != POLICY and other.state is EngineState.STARTING for other in self.slots.values()
        )
        return Due.WAIT if is_early else Due.START

    def left(self, slot_id: int) -> bool:
        """Tell whether a worker ended because its engine is gone, draining or in quarantine.

        Raises:
            WorkerFailedError: every engine is in quarantine, again and again.
        """
        self.look()
        slot = self.slots.get(slot_id)
        if slot is None or slot.state is EngineState.DRAINING:
            log.info("the worker of engine %d ended: it leaves", slot_id)
            return True
        if slot.state is not EngineState.QUARANTINED:
            return False
        of_policy = [s for s in self.slots.values() if s.model == POLICY]
        hopeless = [
            s
            for s in of_policy
            if s.state is EngineState.QUARANTINED and not s.url and s.strikes > MAX_STRIKES
        ]
        if len(hopeless) == len(of_policy):
            raise WorkerFailedError(
                "every engine is in quarantine, however often it is started: "
                + "; ".join(f"{s.name}: {s.reason}" for s in hopeless)
            )
        what = (
            "waits for `strawflow engine release`"
            if slot.url
            else f"is tried again in {slot.retry_in_s:.0f} s"
            if slot.retry_in_s > 0
            else "is being tried again"
        )
        log.warning("%s is quarantined and %s: %s", slot.name, what, slot.reason)
        return True

    def others_serve(self, slot_id: int | None) -> bool:
        """Tell whether a run goes on without this engine."""
        slot = None if slot_id is None else self.slots.get(slot_id)
        return slot is not None and any(
            other.state is EngineState.SERVING and other.model == slot.model and other.slot_id != slot_id
            for other in self.slots.values()
        )
