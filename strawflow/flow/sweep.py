"""Sweeping: removing what nothing names, safely beside live workers and other sweeps.

    condemn (row, under its lock) ▸ grace ▸ [G] unlink ▸ [H] row removed

1. A pack's row precedes its file and outlives it. A file without a row was therefore swept before, or never named.
2. A pack is condemned only while it is quiet (index.liveness) and no extent and no pin names it; that is asked in the
   statement, after its row was locked. A condemned pack can never be named or pinned again.
3. Its file goes after the grace. References are younger than that: a writer names what it appended within its window
   (a live session is quiet after REFERENCE_AGE_S), a reader that looked an extent up reads it in seconds and asks the
   index again when the file is gone (flow.placed); descriptors and mappings outlive the name.
4. A checkpoint or weights folder is only removed when its row says so, or when it has none, nothing wrote to it for the
   grace, and the trainer's fence in its name is not that of a role some live session holds: only its holder could
   still commit it.
   A checkpoint that was finished before the index was restored or rebuilt and has no row in it now is kept and told: the
   index may have lost it, and who removes it by hand knows better.
5. Nothing is swept while the index was restored or rebuilt and its packs were not matched against it since.
6. A kill between any two steps leaves what the next sweep finishes.

What a live row should no longer name is flow.retain's decision, half-empty packs are flow.compact's.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from strawflow import faults
from strawflow.errors import ConflictError, StorageError
from strawflow.flow.found_manifests import read_manifests
from strawflow.flow.index_place import SWEEP_BLOCKED
from strawflow.flow.later_packs import later_packs, why
from strawflow.flow.quota import tree_bytes
from strawflow.flow.run import Run
from strawflow.flow.session import STALL_S, WorkerSession
from strawflow.index import events, liveness, meta, packs, pins, sessions
from strawflow.index.engine import Connection
from strawflow.index.liveness import Waiting
from strawflow.index.reconstruction import incarnation_of
from strawflow.packs.places import open_place
from strawflow.packs.posix import file_of
from strawflow.packs.scan import list_files
from strawflow.plural import counted

REFERENCE_AGE_S = 1.5 * STALL_S
"""How long a live session may hold bytes that it has not named: its loop would count as hung before."""

KEPT = "kept"
"""What an item is called that nothing names and that a sweep leaves where it is."""

_WHY_KEPT = (
    "a finished checkpoint of {size} bytes from before the index was restored or rebuilt, which has no row now; it stays, "
    "remove the folder by hand if it is not wanted"
)
_CHUNK = 2000
_FOLDERS = ("checkpoints", "weights")
# A version's digest may look like a fence: it is the last part of the name and belongs to weights only.
_OF_TRAINER = re.compile(r"\.?(?:c\d+-.+-f(?P<c>\d+)|v\d+-.+-f(?P<v>\d+)-[0-9a-f]+)(?:\.partial-[0-9a-f]+)?")


@dataclass(frozen=True)
class Item:
    """One thing that is removed, or would be."""

    what: str
    """`pack`, `file`, `extents`, `folder`, `pins`, `kept`; retention has further ones."""
    subject: str
    why: str
    num_bytes: int
    """Bytes on disk that go with it now; 0 where only rows go, or the file later."""
    later_bytes: int = 0
    """Bytes that are free once a later sweep has removed its file."""


@dataclass
class Collected:
    """What a sweep, retention or compaction did, or (when not `done`) would do."""

    done: bool
    items: list[Item] = field(default_factory=list)
    waiting: Waiting | None = None
    """Told by a sweep: what the next ones have to remove."""

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)

    @property
    def later_bytes(self) -> int:
        return sum(item.later_bytes for item in self.items)


def plan_sweep(run: Run) -> Collected:
    """Say what `sweep` would do; changes nothing. Raises what it would."""
    _refuse_an_older_index(run)
    grace_s = run.config.storage.sweep_grace_s
    with run.index.read() as connection:
        refuse_if_blocked(connection)
        uses = liveness.pack_uses(connection, quiet_s=quiet_s(run))
        due = liveness.due_packs(connection, grace_s=grace_s)
        waiting = liveness.waiting_packs(connection, grace_s=grace_s)
        num_void = sum(pin.is_void for pin in pins.listed(connection))
    items = [Item("pins", str(num_void), "their worker sessions are gone", 0)] if num_void else []
    quiet = [use for use in uses if use.is_quiet]
    items += [
        _rows_item(use.path, use.num_extents - use.num_named)
        for use in quiet
        if use.num_extents > use.num_named
    ]
    items += [
        _condemned_item(use.path, use.num_bytes or 0, grace_s)
        for use in quiet
        if use.num_named == 0 and not use.is_pinned
    ]
    items += [_due_item(path, num_bytes) for _, path, num_bytes in due]
    items += list(_orphans(run)) + list(folders_without_a_row(run))
    return Collected(False, items, waiting)


def sweep(session: WorkerSession) -> Collected:
    """Remove what nothing names. Idempotent; several may run at once.

    Raises:
        ConflictError: the sweep is blocked until packs were matched against the index.
        LeaseLostError: the session was declared lost; what was done is done.
        StorageError: a file could not be removed, or the index did not answer.
    """
    run, grace_s = session.run, session.run.config.storage.sweep_grace_s
    done = Collected(True)
    _refuse_an_older_index(run)
    with run.index.begin() as connection:
        refuse_if_blocked(connection)
        if num_void := pins.drop_void(connection):
            done.items.append(Item("pins", str(num_void), "their worker sessions are gone", 0))
    done.items += drop_unnamed_rows(session)
    done.items += _condemn(session, grace_s)
    done.items += _unlink_due(session, grace_s)
    done.items += _remove_files(session, list(_orphans(run)))
    done.items += _remove_files(session, list(folders_without_a_row(run)))
    with run.index.read() as connection:
        done.waiting = liveness.waiting_packs(connection, grace_s=grace_s)
    if any(item.what != KEPT for item in done.items):
        with run.index.begin() as connection:
            events.record(
                connection,
                "storage.swept",
                session_id=session.session_id,
                num_items=len(done.items),
                num_bytes=done.num_bytes,
            )
    return done


def quiet_s(run: Run) -> float:
    """Return how long ago a live session must have sealed a pack to be done with it."""
    return max(run.config.storage.sweep_grace_s, REFERENCE_AGE_S)


def _refuse_an_older_index(run: Run) -> None:
    """Raise ConflictError when the packs tell of a later index: what this one does not name was accepted."""
    if later := later_packs(run):
        raise ConflictError(f"no byte may be collected: {why(later)}")


def refuse_if_blocked(connection: Connection) -> None:
    """Raise ConflictError while the index was restored or rebuilt and not matched against the packs since."""
    note = meta.find(connection, SWEEP_BLOCKED)
    if note is not None:
        raise ConflictError(
            f"no byte may be collected now ({note}); `strawflow storage reconcile RUN` matches them and allows it again"
        )


# ---- rows and packs


def drop_unnamed_rows(session: WorkerSession) -> list[Item]:
    """Remove the rows of extents that nothing names any more, some thousand in a transaction."""
    run, after = session.run, 0
    dropped: Counter[str] = Counter()
    while True:
        session.mark_progress()
        with run.index.read() as connection:
            found = liveness.unnamed_extents(connection, after=after, limit=_CHUNK, quiet_s=quiet_s(run))
        if not found:
            return [_rows_item(path, number) for path, number in sorted(dropped.items())]
        after = found[-1][0]
        with _writing(session) as connection:
            liveness.drop_unnamed(connection, [extent_id for extent_id, _ in found])
        dropped.update(path for _, path in found)


def _condemn(session: WorkerSession, grace_s: float) -> list[Item]:
    run, items = session.run, []
    with run.index.read() as connection:
        empty = liveness.empty_packs(connection, quiet_s=quiet_s(run))
    for pack_id, path, num_bytes in empty:
        session.mark_progress()
        with _writing(session) as connection:
            if packs.condemn(connection, pack_id):
                items.append(_condemned_item(path, num_bytes, grace_s))
    return items


def _unlink_due(session: WorkerSession, grace_s: float) -> list[Item]:
    run = session.run
    place = open_place(run.root)
    with run.index.read() as connection:
        due = liveness.due_packs(connection, grace_s=grace_s)
    items = []
    for pack_id, path, num_bytes in due:
        session.mark_progress()
        session.require_live()
        faults.at(
            "sweep.before_unlink"
        )  # [G] crash here: a condemned pack that nothing names, its file still there
        try:
            place.remove(path)
        except OSError as error:
            raise StorageError(f"the condemned pack {path} cannot be removed: {error}") from error
        faults.at("sweep.after_unlink")  # [H] crash here: the row of a file that is gone
        with _writing(session) as connection:
            liveness.forget_pack(connection, pack_id)
        items.append(_due_item(path, num_bytes))
    return items


def _rows_item(path: str, number: int) -> Item:
    return Item(
        "extents", path, f"{counted(number, 'extent of it is', 'extents of it are')} named by nothing", 0
    )


def _condemned_item(path: str, num_bytes: int, grace_s: float) -> Item:
    why = f"nothing names it; its file goes with a sweep {grace_s:.0f} s after it is condemned"
    return Item("pack", path, why, 0, later_bytes=num_bytes)


def _due_item(path: str, num_bytes: int) -> Item:
    return Item("file", path, "its pack is condemned, references have aged out", num_bytes)


@contextmanager
def _writing(session: WorkerSession) -> Iterator[Connection]:
    """Open a transaction of a live session, refused while sweeping is blocked."""
    with session.run.index.begin() as connection:
        sessions.require_live(connection, session.session_id)
        refuse_if_blocked(connection)
        yield connection


# ---- files that no row names


def _orphans(run: Run) -> Iterator[Item]:
    """Yield pack files without a row. The files are listed first: a row precedes its file."""
    sizes = list_files(open_place(run.root))
    with run.index.read() as connection:
        known = liveness.known_paths(connection, sizes)
    for path in sorted(sizes.keys() - known):
        if _is_old(file_of(run.root, path), run.config.storage.sweep_grace_s):
            yield Item("file", path, "no row of the index names it", sizes[path])


def folders_without_a_row(run: Run) -> Iterator[Item]:
    """Yield folders of checkpoints and weights that no row names, or whose row says that they are removed."""
    found = [path for name in _FOLDERS for path in sorted((run.root / name).glob("*")) if path.is_dir()]
    with run.index.read() as connection:
        told = liveness.folders(connection)
        incarnation = meta.incarnation(connection)
    finished_before = {m.path for m in read_manifests(run.root) if incarnation_of(m.fence) < incarnation}
    for path in found:
        name = str(path.relative_to(run.root))
        matched = _OF_TRAINER.fullmatch(path.name)
        may_be_named = matched is None or int(matched["c"] or matched["v"]) in told.trainer_fences
        if name in told.kept or (may_be_named and name not in told.removed):
            continue
        if name in finished_before and name not in told.removed:
            yield Item(KEPT, name, _WHY_KEPT.format(size=tree_bytes(path)), 0)
        elif _is_old(path, run.config.storage.sweep_grace_s):
            why = (
                "its row says that it is removed" if name in told.removed else "no row of the index names it"
            )
            yield Item("folder", name, why, tree_bytes(path))


def _remove_files(session: WorkerSession, items: list[Item]) -> list[Item]:
    for item in items:
        session.mark_progress()
        session.require_live()
        if item.what == KEPT:
            continue
        path = file_of(session.run.root, item.subject)
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except FileNotFoundError:
            continue  # another sweep was there first
        except OSError as error:
            raise StorageError(f"{path} cannot be removed: {error}") from error
    return items


def _is_old(path: Path, grace_s: float) -> bool:
    """Tell whether nothing was written to a file, or into a folder, for so long; False when it is gone."""
    newest = 0.0
    try:
        newest = path.stat().st_mtime
        for parent, _, names in os.walk(path):
            newest = max(newest, *(Path(parent, name).stat().st_mtime for name in (*names, ".")))
    except FileNotFoundError:
        return False
    return time.time() - newest >= grace_s
