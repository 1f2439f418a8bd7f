"""Reconciling: packs and index are matched, so that sweeping is allowed again after a restore or a rebuild.

1. What the index names must be there: every extent's pack has its file, long enough to hold it. Extents in quarantine are
   known to be lost and do not count.
2. What is there and has no row is listed: nothing of it would be missed by this index, and the next sweep removes it; a
   finished checkpoint without a row it keeps.
3. Only sizes are compared; whether the bytes are good is flow.check's part.
"""

from __future__ import annotations

from strawflow.flow import later_packs
from strawflow.flow.index_place import SWEEP_BLOCKED
from strawflow.flow.run import Run
from strawflow.flow.sweep import Collected, Item, folders_without_a_row
from strawflow.index import events, liveness, meta
from strawflow.packs.places import open_place
from strawflow.packs.scan import list_files

MISSING = "missing"
"""What an item is called that stands for bytes which the index names and the disk lacks."""


def reconcile(run: Run, *, accepts: bool = False, accepts_missing: bool = False) -> Collected:
    """Match packs against the index; with `accepts` sweeping is allowed again, unless named bytes are missing.

    With `accepts_missing` even then: reads of what is missing go on to fail. `done` tells whether it is allowed now.
    """
    sizes = list_files(open_place(run.root))  # before the rows: a row precedes its file
    with run.index.read() as connection:
        ends = liveness.pack_ends(connection)
        known = liveness.known_paths(connection, sizes)
    items = [
        Item(MISSING, end.path, what, 0)
        for end in ends
        if (what := end.what_is_missing(sizes.get(end.path, 0)))
    ]
    num_missing = len(items)
    items += [
        Item("file", path, "no row names it; a sweep will remove it", sizes[path])
        for path in sorted(sizes.keys() - known)
    ]
    items += folders_without_a_row(run)
    may = accepts and (num_missing == 0 or accepts_missing)
    if may:
        with run.index.begin() as connection:
            later_packs.accept(run, connection)
            if meta.find(connection, SWEEP_BLOCKED) is not None:
                meta.remove(connection, SWEEP_BLOCKED)
                events.record(connection, "storage.reconciled", num_missing=num_missing, num_packs=len(ends))
    return Collected(may, items)
