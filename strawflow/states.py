"""Every state machine of strawflow in one place.

1. A member's comment says who enters it, who leaves it, and what a crash there means.
2. `TRANSITIONS` is the single table of allowed moves: the SQL CHECKs, the diagram in schemas/states.md and the property
   tests are made from it.
"""

from __future__ import annotations

from enum import StrEnum


class UnitState(StrEnum):
    READY = "ready"
    """Entered by admit, park, release, rescue, fail (attempts left), retry, requeue, reopen; left by claim. A crash here means
    nothing."""
    LEASED = "leased"
    """Entered by claim; left by complete, park, fail, release or, once the session expired, rescue. A crash: rescued
    later."""
    COMPLETED = "completed"
    """Entered by complete, with its trajectories named in the same transaction; left by requeue (a sample whose weights no
    longer belong to the branch) and reopen (damaged, and trained by nobody). What consumers did with it lies in `assignments`."""
    FAILED = "failed"
    """Entered by fail or rescue after max_attempts, with the last error; left by retry (an operator)."""


class PackState(StrEnum):
    OPEN = "open"
    """Entered before the file is created; left by seal, or by salvage once its session is gone."""
    SEALED = "sealed"
    """An ordinary Arrow IPC file with a footer; left by condemn."""
    CONDEMNED = "condemned"
    """No row and no pin names it any more, and none ever will again; its file goes once references have aged out."""


class SessionState(StrEnum):
    LIVE = "live"
    """Entered at a worker's start; a live session past its expiry may be declared lost by anyone."""
    ENDED = "ended"
    """The worker drained and said so."""
    LOST = "lost"
    """Expired, or seen dead by its supervisor: its units and roles were taken back."""


class BatchState(StrEnum):
    PLANNED = "planned"
    """Entered by assemble; replayed from here after any crash until a checkpoint covers it."""
    TRAINED = "trained"
    """Entered in the transaction that commits the checkpoint covering its step; left by retire."""
    RETIRED = "retired"
    """Its packed rows were given up by retention; plan, counts and digest stay."""


class WeightState(StrEnum):
    PUBLISHED = "published"
    """Files durable, row committed: engines may serve it."""
    DEAD = "dead"
    """Published after the checkpoint a resume went back to: no engine may load it. Left by supersede."""
    SUPERSEDED = "superseded"
    """The replay published equal weights (same step, same digest) under a new id: samples of it stay good."""


class EngineState(StrEnum):
    """Of an engine that a run wants to have; its number outlives its processes."""

    STARTING = "starting"
    """Entered by add, release, and restart (its worker ended, for whatever reason); left by serve, quarantine, drain and
    remove. A crash here: started again."""
    SERVING = "serving"
    """Entered by serve, once it reported the weights it was given and, after a quarantine, answered its probes; left by
    restart, quarantine, drain and remove."""
    DRAINING = "draining"
    """Entered by drain: nothing is granted to it any more, its worker parks what it holds; left by leave, when no worker
    has it. A crash here: what it held is rescued, and it is gone."""
    QUARANTINED = "quarantined"
    """Entered by quarantine: it served wrong weights or garbage. Nothing is granted to it. One of our own is started again
    after a back-off and serves once it answered its probes; an attached one waits for release."""
    GONE = "gone"
    """Entered by remove and leave; its number is not used again."""


TRANSITIONS: frozenset[tuple[str, StrEnum, StrEnum]] = frozenset(
    {
        ("claim", UnitState.READY, UnitState.LEASED),
        ("complete", UnitState.LEASED, UnitState.COMPLETED),
        ("park", UnitState.LEASED, UnitState.READY),
        ("release", UnitState.LEASED, UnitState.READY),
        ("rescue", UnitState.LEASED, UnitState.READY),
        ("rescue", UnitState.LEASED, UnitState.FAILED),
        ("fail", UnitState.LEASED, UnitState.READY),
        ("fail", UnitState.LEASED, UnitState.FAILED),
        ("retry", UnitState.FAILED, UnitState.READY),
        ("requeue", UnitState.COMPLETED, UnitState.READY),
        ("reopen", UnitState.COMPLETED, UnitState.READY),
        ("seal", PackState.OPEN, PackState.SEALED),
        ("condemn", PackState.OPEN, PackState.CONDEMNED),
        ("condemn", PackState.SEALED, PackState.CONDEMNED),
        ("end", SessionState.LIVE, SessionState.ENDED),
        ("lose", SessionState.LIVE, SessionState.LOST),
        ("checkpoint", BatchState.PLANNED, BatchState.TRAINED),
        ("retire", BatchState.TRAINED, BatchState.RETIRED),
        ("resume", WeightState.PUBLISHED, WeightState.DEAD),
        ("supersede", WeightState.DEAD, WeightState.SUPERSEDED),
        ("serve", EngineState.STARTING, EngineState.SERVING),
        ("serve", EngineState.QUARANTINED, EngineState.SERVING),
        ("restart", EngineState.SERVING, EngineState.STARTING),
        ("quarantine", EngineState.STARTING, EngineState.QUARANTINED),
        ("quarantine", EngineState.SERVING, EngineState.QUARANTINED),
        ("release", EngineState.QUARANTINED, EngineState.STARTING),
        ("drain", EngineState.STARTING, EngineState.DRAINING),
        ("drain", EngineState.SERVING, EngineState.DRAINING),
        ("drain", EngineState.QUARANTINED, EngineState.DRAINING),
        ("leave", EngineState.DRAINING, EngineState.GONE),
        ("remove", EngineState.STARTING, EngineState.GONE),
        ("remove", EngineState.SERVING, EngineState.GONE),
        ("remove", EngineState.QUARANTINED, EngineState.GONE),
        ("remove", EngineState.DRAINING, EngineState.GONE),
    }
)
