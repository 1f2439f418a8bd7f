"""Rebuilding a run's index from its folder alone: config.json, packs, checkpoints and weights.

1. The new index is built whole beside the place of the lost one and put there last; a kill leaves the place empty, as it
   was. A database on a server is filled in one transaction.
2. Without `--yes` all of it is done and thrown away: what is told is what would be.
3. The index is of a new incarnation, above every fence met: whoever held something before is refused.
4. What no pack holds is gone and told: events, receipts, attempts, pins, errors of units, the time that was counted.

What is believed of what is found is flow.reconstruct's part.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from strawflow import faults
from strawflow.errors import AlreadyExistsError
from strawflow.flow.incarnation import begin_incarnation
from strawflow.flow.index_place import SWEEP_BLOCKED, Found, Target, fill, look
from strawflow.flow.reconstruct import Reconstruction, reconstruct
from strawflow.flow.run import RUN_ID, identity_of
from strawflow.index import events, meta, reconstruction
from strawflow.index.engine import Connection

NOT_KEPT = (
    "events (new ones begin with this rebuild)",
    "receipts: a submission repeated now is refused by its lease, not answered again",
    "attempts, crashes and parks of units: counted from 0 again, or from where they stood when the unit was sent back, retried "
    "or released last; units set aside as failed are ready again",
    "pins, quarantine, worker sessions and engines",
    "seconds and restarts counted so far",
)


@dataclass(frozen=True)
class Rebuilding:
    """What a rebuild did, or (when not `done`) would do."""

    done: bool
    index: str
    """Address of the index, without its password."""
    found: Found
    incarnation: int
    units: dict[str, int]
    """"purpose state" to number of units."""
    rebuilt: Reconstruction
    not_kept: tuple[str, ...] = field(default=NOT_KEPT)
    """What no pack holds."""
    kept: Path | None = None
    """Where the damaged index lies now."""


def plan(root: Path, *, lossy: bool = False) -> Rebuilding:
    """Say what `rebuild` would do, having done all of it but the last step; leaves no trace. Raises what it would."""
    return _rebuild(root, lossy=lossy, rehearse=True)


def rebuild(root: Path, *, lossy: bool = False) -> Rebuilding:
    """Build the index of a run anew from its folder; `lossy` goes on where the journal has holes.

    Raises:
        NotFoundError: `root` is no run.
        AlreadyExistsError: the index is there.
        ConflictError: a process still has the lost file open.
        CorruptPackError: the journal has a hole, or there is none.
        StorageError: the index could not be written, or a file not be read.
    """
    return _rebuild(root, lossy=lossy, rehearse=False)


def _rebuild(root: Path, *, lossy: bool, rehearse: bool) -> Rebuilding:
    target = look(root.resolve())
    if target.found is Found.FILLED:
        raise AlreadyExistsError(
            f"the index of {root} is there and can be read; `strawflow index check` says whether it is sound. To build it "
            "anew, move it away first",
            index=target.shown_url,
        )
    done, kept = fill(
        target,
        lambda connection, here: _pour(connection, target, here=here, lossy=lossy, rehearse=rehearse),
        may_replace=False,
        rehearse=rehearse,
    )
    return replace(done, kept=kept)


def _pour(connection: Connection, target: Target, *, here: int, lossy: bool, rehearse: bool) -> Rebuilding:
    rebuilt = reconstruct(connection, target.root, target.config, lossy=lossy)
    incarnation = meta.raise_incarnation(connection, above=max(here, rebuilt.incarnation))
    if not rehearse:
        begin_incarnation(connection, target.root, target.config, incarnation)
    if identity := identity_of(target.root):
        meta.put(connection, RUN_ID, identity)
    meta.put(
        connection,
        SWEEP_BLOCKED,
        "rebuilt from packs and journal: packs were not matched against the index since",
    )
    events.record(connection, "index.rebuilt", incarnation=incarnation, num_losses=len(rebuilt.losses))
    faults.at("rebuild.before_commit")
    return Rebuilding(
        done=not rehearse,
        index=target.shown_url,
        found=target.found,
        incarnation=incarnation,
        units=reconstruction.count_units(connection),
        rebuilt=rebuilt,
    )
