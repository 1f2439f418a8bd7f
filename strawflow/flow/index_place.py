"""The place of a run's index: what stands there, and how another index takes its place whole or not at all.

1. An index that can be read is replaced in one transaction; a lost or damaged SQLite file by one that was made under another
   name and is put in its place last. A kill at any instant leaves the one of before or the new one.
2. Nothing takes its place while a worker lives in it, or a process still has a lost file open.
3. A damaged SQLite file is kept beside the new one, never removed.
4. A rehearsal does all but the last step, and leaves no trace.

What the new index holds is the caller's to say (flow.restore, flow.rebuild).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from strawflow.config import RunConfig
from strawflow.errors import (
    AlreadyExistsError,
    CommitUnknownError,
    ConflictError,
    IncompatibleFormatError,
    StorageError,
    StrawflowError,
)
from strawflow.flow.backup import partial_folder
from strawflow.flow.run import INDEX_FILE, index_url, stored_config
from strawflow.index import dump, leases, meta, sessions, weights
from strawflow.index.engine import REVISION, Connection, Index
from strawflow.packs.sync import sync_path

SWEEP_BLOCKED = "sweep_blocked"
"""Key in meta: why no byte may be collected now."""

_SQLITE_PARTS = ("", "-wal", "-shm")

T = TypeVar("T")
Pour = Callable[[Connection, int], T]
"""Fills the tables in a transaction; told the incarnation of the index that stood there."""


class Found(StrEnum):
    """What stands in the place of the index."""

    ABSENT = "absent"
    """An SQLite file that is gone."""
    DAMAGED = "damaged"
    """An SQLite file that cannot be trusted any more."""
    EMPTY = "empty"
    """A database without strawflow's tables, or with no row in them."""
    FILLED = "filled"


@dataclass(frozen=True)
class Target:
    """The place of the index, looked at."""

    root: Path
    config: RunConfig
    url: str
    shown_url: str
    file: Path | None
    found: Found
    num_rows: int | None
    incarnation: int


def look(root: Path) -> Target:
    """Look at what stands in the place of a run's index.

    Raises:
        NotFoundError: `root` is no run.
        IncompatibleFormatError: the index there is of another revision.
        ConflictError: a worker lives in it, or a process has a lost or damaged file open.
    """
    config = stored_config(root)
    url = index_url(root, config)
    file = dump.sqlite_file(url)
    with opened_index(url, config) as index:
        shown = index.shown_url
        if file is not None and not file.exists():
            found, num_rows, incarnation = Found.ABSENT, None, 0
        elif dump.is_damaged(index):
            found, num_rows, incarnation = Found.DAMAGED, None, 0
        else:
            found, num_rows, incarnation = _look_inside(index, config)
    if file is not None and found in (Found.ABSENT, Found.DAMAGED):
        _refuse_open_file(file)
    return Target(root, config, url, shown, file, found, num_rows, incarnation)


def _look_inside(index: Index, config: RunConfig) -> tuple[Found, int, int]:
    with index.read() as connection:
        revision = dump.revision(connection)
    if revision is None:
        return Found.EMPTY, 0, 0
    if revision != REVISION:
        raise IncompatibleFormatError(
            f"the index there is at revision {revision}, this program needs {REVISION}; run `strawflow index upgrade`",
            url=index.shown_url,
        )
    index.expire_after_reboot()
    with index.read() as connection:
        _refuse_live_sessions(connection, config)
        num_rows = _num_rows(connection)
        return (Found.FILLED if num_rows else Found.EMPTY), num_rows, meta.incarnation(connection)


def _num_rows(connection: Connection) -> int:
    """Return how many rows a restore would replace; those of meta, counters and the boot, hold no work."""
    return sum(count for table, count in dump.count_rows(connection).items() if table != "meta")


def _refuse_live_sessions(connection: Connection, config: RunConfig) -> None:
    gone = {s.session_id for s in sessions.live_but_gone(connection)}
    gone |= set(sessions.expired(connection, grace_s=config.lease.grace_s))
    living = [s for s in sessions.listed(connection, live_only=True) if s.session_id not in gone]
    if living:
        first = living[0]
        raise ConflictError(
            f"{len(living)} worker session(s) still live in the index there, the first is {first.session_id} "
            f"(process {first.pid} of {first.host}); stop the workers first",
        )


def _refuse_open_file(file: Path) -> None:
    """Refuse while a process of this machine still uses an SQLite file that is gone or damaged.

    It would go on with a file that nobody else sees. Only processes that this one may look into are found.
    """
    names = {f"{file.resolve()}{part}{gone}" for part in _SQLITE_PARTS for gone in ("", " (deleted)")}
    for pid in os.listdir("/proc"):
        if not pid.isdigit():
            continue
        try:
            is_open = any(os.readlink(entry.path) in names for entry in os.scandir(f"/proc/{pid}/fd"))
        except OSError:  # ended, or another user's
            continue
        if is_open:
            raise ConflictError(f"process {pid} still has the old {file} open; stop the workers first")


# ---- doing


def fill(
    target: Target, pour: Pour[T], *, may_replace: bool, rehearse: bool = False
) -> tuple[T, Path | None]:
    """Put a new index in its place; returns what `pour` returned, and where a damaged index lies now.

    Raises:
        AlreadyExistsError: the index there was filled meanwhile, and `may_replace` is not set.
        ConflictError: a worker came to life in it meanwhile.
        StorageError: it could not be written; what was there is as it was.
    """
    if target.file is not None and target.found in (Found.ABSENT, Found.DAMAGED):
        return _in_a_new_file(target, target.file, pour, rehearse=rehearse)
    return _in_place(target, pour, may_replace=may_replace, rehearse=rehearse), None


class _RehearsedError(Exception):
    """Everything was done: roll it back."""


def _in_place(target: Target, pour: Pour[T], *, may_replace: bool, rehearse: bool) -> T:
    """Replace all rows in one transaction: those who have the index open see the new state with their next statement."""
    done: list[T] = []
    try:
        with opened_index(target.url, target.config) as index, index.begin() as connection:
            dump.hold_alone(connection)
            here = 0
            if dump.revision(connection) is None:
                dump.build(connection)
            else:
                # Asked again, now that nothing can change any more.
                _refuse_live_sessions(connection, target.config)
                if _num_rows(connection) and not may_replace:
                    raise AlreadyExistsError(f"the index of {target.root} was filled meanwhile; look again")
                here = meta.incarnation(connection)
            dump.clear(connection)  # tables just built hold rows too: counters at their start
            done.append(pour(connection, here))
            if rehearse:
                raise _RehearsedError
    except _RehearsedError:
        pass
    return done[0]


def _in_a_new_file(target: Target, file: Path, pour: Pour[T], *, rehearse: bool) -> tuple[T, Path | None]:
    """Make a new SQLite file and put it in its place last."""
    kept = None
    try:
        with partial_folder(file.parent) as partial:
            made = partial / INDEX_FILE
            with opened_index(f"sqlite:///{made}", target.config) as index, index.begin() as connection:
                dump.hold_alone(connection)
                dump.build(connection)
                dump.clear(connection)
                done = pour(connection, 0)
            # The last connection to close brings everything from the WAL into the file, or leaves the WAL.
            if made.with_name(f"{made.name}-wal").exists():
                raise StorageError(f"the new index could not be written whole beside {file}")
            if not rehearse:
                sync_path(made)
                kept = _put_in_place(made, file, found=target.found)
                sync_path(file.parent)
    except (OSError, CommitUnknownError) as error:
        if isinstance(error, StrawflowError) and not isinstance(error, CommitUnknownError):
            raise
        raise StorageError(f"the new index could not be put in place of {file}: {error}") from error
    return done, kept


def _put_in_place(made: Path, file: Path, *, found: Found) -> Path | None:
    kept = file.with_name(f"{file.name}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    # The WAL goes first: beside another main file it would be taken for that one's.
    for part in ("-wal", "-shm"):
        try:
            file.with_name(file.name + part).rename(kept.with_name(kept.name + part))
        except FileNotFoundError:
            continue
    if found is Found.ABSENT:
        try:
            os.link(made, file)  # unlike a rename it replaces nothing
        except FileExistsError:
            raise AlreadyExistsError(f"{file} appeared meanwhile; nothing was done, look again") from None
        return None
    # crash before: still the damaged index, its WAL beside it under the other name
    os.link(file, kept)
    made.rename(file)
    return kept


def lose_everyone(connection: Connection, *, reason: str) -> tuple[int, int]:
    """Declare every session lost and take its units back; returns how many sessions and units."""
    living = sessions.listed(connection, live_only=True)
    num_units = 0
    for session in living:
        sessions.lose(connection, session.session_id, reason=reason)
        weights.forget_engines(connection, session.session_id)
        # The restore is no unit's fault: none is set aside for it, however many attempts it has behind it.
        num_units += len(leases.rescue(connection, session.session_id, reason=reason, max_attempts=2**31 - 1))
    return len(living), num_units


@contextmanager
def opened_index(url: str, config: RunConfig) -> Iterator[Index]:
    index = Index(url, durability=config.run.durability)
    try:
        yield index
    finally:
        index.close()
