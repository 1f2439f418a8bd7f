"""Pinning: what must stay while somebody works on it is named in the index, with the reason.

A pin on a pack keeps its file as it is, one on a batch its packed rows, one on a checkpoint or weight version its files.
Nothing else is promised: a pinned batch's trajectories may go.
"""

from __future__ import annotations

from strawflow.errors import NotFoundError
from strawflow.flow.run import Run
from strawflow.index import batches, checkpoints, packs, pins, weights
from strawflow.index.engine import Connection
from strawflow.index.pins import Pin, PinKind


def pin(run: Run, kind: PinKind, subject: str, *, reason: str, session_id: str | None = None) -> Pin:
    """Pin a pack (its id or path), a batch (its step), a checkpoint or weight version (its id or step).

    With `session_id` the pin ends with that worker session. Pinning twice makes two pins.

    Raises:
        NotFoundError: there is no such subject.
        ConflictError: it was given up already.
        LeaseLostError: the session that is to own the pin is not live.
    """
    with run.index.begin() as connection:
        pin_id = pins.pin(
            connection, kind, _id_of(connection, run, kind, subject), reason=reason, session_id=session_id
        )
        return next(p for p in pins.listed(connection) if p.pin_id == pin_id)


def unpin(run: Run, pin_id: int) -> None:
    """Remove a pin.

    Raises:
        NotFoundError: there is no such pin.
    """
    with run.index.begin() as connection:
        pins.unpin(connection, pin_id)


def listed(run: Run) -> list[Pin]:
    """Return every pin, void ones too, the oldest first."""
    with run.index.read() as connection:
        return pins.listed(connection)


def _id_of(connection: Connection, run: Run, kind: PinKind, subject: str) -> str:
    match kind:
        case PinKind.PACK if not subject.isdecimal():
            found = next((p.pack_id for p in packs.listed(connection) if p.path == subject), None)
            if found is None:
                raise NotFoundError(f"the index names no pack {subject!r}; paths are relative to the run")
            return str(found)
        case PinKind.BATCH:
            if not subject.isdecimal():
                raise NotFoundError(f"a batch is named by its step, not {subject!r}")
            return str(batches.require(connection, run.branch, run.consumer, int(subject)).batch_id)
        case PinKind.CHECKPOINT if subject.isdecimal():
            on_line = checkpoints.listed(connection, run.branch, run.consumer)
            of_step = next((c for c in on_line if c.step == int(subject)), None)
            if of_step is None:
                raise NotFoundError(f"there is no checkpoint of step {subject} on branch {run.branch!r}")
            return of_step.checkpoint_id
        case PinKind.WEIGHTS if subject.isdecimal():
            version = weights.of_step(connection, run.branch, int(subject))
            if version is None:
                raise NotFoundError(f"no weights of step {subject} with files are published")
            return version.version_id
    return subject
