"""Restoring a run's index from a backup; with config.json and the backup's folder even when the index is gone.

1. Nothing is changed before every file of the backup matched its checksum, nor by the backup of another run.
2. A kill at any instant leaves the index of before or the restored one (flow.index_place).
3. What packs, journal and checkpoints tell beyond the backup is replayed in the same transaction: admissions, drops, plans,
   checkpoints, weights and trajectories made after it are there again. Only what packs do not hold is as old as the
   backup: events, receipts, attempts, pins.
4. The restored index is of a new incarnation, no session of it lives, and its units are ready again: whoever held
   something before is refused.
5. The sweep is blocked until a reconcile matched packs against the index.

It does not know how a backup came to be (flow.backup).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from strawflow.errors import AlreadyExistsError, CorruptPackError, InvalidInputError
from strawflow.flow.backup import FOLDER as BACKUPS
from strawflow.flow.backup import Manifest, read_manifest, table_batches, verify
from strawflow.flow.incarnation import begin_incarnation
from strawflow.flow.index_place import SWEEP_BLOCKED, Found, Target, fill, lose_everyone
from strawflow.flow.index_place import look as look_at
from strawflow.flow.reconstruct import Reconstruction, reconstruct
from strawflow.flow.run import identity_of
from strawflow.index import dump, events, meta
from strawflow.index.engine import Connection
from strawflow.packs.places import open_place
from strawflow.packs.scan import list_packs


@dataclass(frozen=True)
class Restoration:
    """What a restore did, or (when not `done`) would do."""

    done: bool
    folder: Path
    manifest: Manifest
    index: str
    """Address of the index, without its password."""
    found: Found
    num_rows_replaced: int | None
    """None: not known, the index there cannot be read."""
    incarnation: int
    """Of the index after the restore."""
    num_sessions_lost: int = 0
    num_units_ready: int = 0
    """Units that were leased in the backup and are offered again."""
    replayed: Reconstruction | None = None
    """What came after the backup and is there again."""
    kept: Path | None = None
    """Where the damaged index lies now."""


def plan(root: Path, folder: Path, *, may_replace: bool, lossy: bool = False) -> Restoration:
    """Say what `restore` would do, having done all of it but the last step; leaves no trace. Raises what it would."""
    return _restore(root, folder, may_replace=may_replace, lossy=lossy, rehearse=True)


def restore(root: Path, folder: Path, *, may_replace: bool = False, lossy: bool = False) -> Restoration:
    """Bring the index back to the backup in `folder` and on to what the run's folder tells.

    `may_replace` lets it take the place of what is there; `lossy` goes on where the journal has holes.

    Raises:
        NotFoundError: `root` is no run, or `folder` no backup.
        InvalidInputError: it is the backup of another run.
        CorruptPackError: a file of the backup is missing or was changed, or the journal has a hole.
        IncompatibleFormatError: the backup or the index there is of another revision.
        AlreadyExistsError: the index there is not empty, and `may_replace` is not set.
        ConflictError: a worker still lives in the index there, or a process has its file open.
        StorageError: the index could not be written; it is as it was.
    """
    return _restore(root, folder, may_replace=may_replace, lossy=lossy, rehearse=False)


def _restore(root: Path, folder: Path, *, may_replace: bool, lossy: bool, rehearse: bool) -> Restoration:
    manifest, target = _looked_at(root, folder, may_replace=may_replace)
    done, kept = fill(
        target,
        lambda connection, here: _pour(
            connection, target, folder, manifest, here=here, lossy=lossy, rehearse=rehearse
        ),
        may_replace=may_replace,
        rehearse=rehearse,
    )
    return replace(done, kept=kept)


def _looked_at(root: Path, folder: Path, *, may_replace: bool) -> tuple[Manifest, Target]:
    manifest = read_manifest(folder)
    target = look_at(root.resolve())
    if target.found not in (Found.ABSENT, Found.EMPTY) and not may_replace:
        raise AlreadyExistsError(
            f"the index of {root} is {target.found}, not empty; --replace puts the backup in its place",
            index=target.shown_url,
        )
    verify(folder, manifest)
    _refuse_another_runs(folder, manifest, target.root)
    return manifest, target


def _refuse_another_runs(folder: Path, manifest: Manifest, root: Path) -> None:
    """Refuse the backup of another run; where one of the two has no identity, by the packs that it names.

    A pack's name is used once, anywhere: a backup of this run names one that lies here, unless all of them are gone.
    """
    mine = identity_of(root)
    if mine and manifest.run_id:
        if mine != manifest.run_id:
            raise InvalidInputError(
                f"{folder} is the backup of another run, {manifest.run!r}: nothing was changed; give one of {root} "
                f"(`ls {root / BACKUPS}`)",
                run_id=mine,
                backup_of=manifest.run_id,
            )
        return
    here = list_packs(open_place(root)).keys()
    named = {path for batch in table_batches(folder, "packs") for path in batch.column("path").to_pylist()}
    if here and named and here.isdisjoint(named):
        raise InvalidInputError(
            f"{folder} names {len(named)} packs, and none of them is among the {len(here)} in {root}: it is the backup of "
            f"another run, {manifest.run!r}, or all packs it needs are gone; nothing was changed, give a backup of this run"
        )


def _pour(
    connection: Connection,
    target: Target,
    folder: Path,
    manifest: Manifest,
    *,
    here: int,
    lossy: bool,
    rehearse: bool,
) -> Restoration:
    """Load the backup, replay what came later, and make it a new incarnation in which nobody holds anything."""
    for stored in manifest.tables:
        num_rows = dump.load(connection, stored.table, table_batches(folder, stored.table))
        if num_rows != stored.num_rows:
            raise CorruptPackError(
                f"{folder} holds {num_rows} rows of table {stored.table}, its manifest says {stored.num_rows}"
            )
    dump.pass_ids(connection)
    lost, ready = lose_everyone(connection, reason="the index was restored from a backup")
    replayed = reconstruct(connection, target.root, target.config, lossy=lossy)
    incarnation = meta.raise_incarnation(connection, above=max(here, replayed.incarnation))
    if not rehearse:
        begin_incarnation(connection, target.root, target.config, incarnation)
    meta.put(
        connection,
        SWEEP_BLOCKED,
        f"restored from {folder.name} of {manifest.created_at}: packs were not matched against the index since",
    )
    events.record(connection, "index.restored", incarnation=incarnation, folder=str(folder))
    return Restoration(
        done=not rehearse,
        folder=folder,
        manifest=manifest,
        index=target.shown_url,
        found=target.found,
        num_rows_replaced=target.num_rows,
        incarnation=incarnation,
        num_sessions_lost=lost,
        num_units_ready=ready,
        replayed=replayed,
    )
