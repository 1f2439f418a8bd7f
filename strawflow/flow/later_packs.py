"""Packs of a later index: files with rows that this index has never heard of.

A pack's row is committed before its file exists, and goes after its file. So a pack without a row that holds a whole message
was written under another state of the index: the one that is here is an older copy, put back by hand, a database rolled back
in time or a standby that had not followed. What it does not name was accepted; nothing may be collected.

What `storage reconcile` was told to accept is remembered by the newest file's time: later ones count again.
"""

from __future__ import annotations

from collections.abc import Iterable

from strawflow.errors import CorruptPackError, IncompatibleFormatError
from strawflow.flow.run import Run
from strawflow.index import liveness, meta
from strawflow.index.engine import Connection
from strawflow.packs.places import open_place
from strawflow.packs.scan import list_files, list_packs, open_scan

_ACCEPTED = "later_packs_accepted_ns"
"""Key in meta: modification time, ns since 1970, of the newest pack without a row that was accepted as no loss."""


def later_packs(run: Run) -> list[str]:
    """Return the paths of packs that only a later index can have named."""
    return later_among(run, unnamed(run))


def unnamed(run: Run) -> dict[str, int]:
    """Return the sizes of the pack files that no row names, by path."""
    sizes = list_packs(open_place(run.root))  # before the rows: a row precedes its file
    with run.index.read() as connection:
        known = liveness.known_paths(connection, sizes)
    return {path: size for path, size in sizes.items() if path not in known}


def later_among(run: Run, paths: Iterable[str]) -> list[str]:
    """Return those of the files that no row names which only a later index can have named."""
    place = open_place(run.root)
    with run.index.read() as connection:
        accepted = int(meta.find(connection, _ACCEPTED) or 0)
    found = []
    for path in sorted(paths):
        try:
            if (run.root / path).stat().st_mtime_ns > accepted and any(open_scan(place, path).messages()):
                found.append(path)
        except (CorruptPackError, IncompatibleFormatError, FileNotFoundError):
            continue  # a stranger's file, or gone meanwhile
    return found


def accept(run: Run, connection: Connection) -> None:
    """Remember that the packs without a row that are there now are no loss."""
    sizes = list_files(open_place(run.root))
    known = liveness.known_paths(connection, sizes)
    times = [(run.root / path).stat().st_mtime_ns for path in sizes.keys() - known]
    meta.put(connection, _ACCEPTED, str(max(times, default=0)))


def why(paths: list[str]) -> str:
    """Say what is wrong and what to do."""
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return (
        f"{paths[0]}{more}: rows that this index never named: it is an older copy than the packs; `strawflow index restore` "
        "takes it on to what they tell, `strawflow storage reconcile RUN --yes` accepts their loss"
    )
