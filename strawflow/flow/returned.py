"""Units that come back to be worked on though no worker gave them back: requeued, opened again, retried, released.

Packs still hold the results that such a unit had, so without the journal a rebuild would offer them again, and count from 0.
An entry tells which attempt the unit came back from (fence and seq) and how its counts stand after that: what is found
of a later attempt counts, what is found of that one or earlier does not.

A unit that got its fate from the very result that an entry sends back was never sent back: its transaction did not commit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from strawflow.flow.journal import Entry, EntryKind, StoredEntry
from strawflow.index.returns import Return
from strawflow.index.units import Unit

PRISTINE = frozenset({EntryKind.REQUEUE, EntryKind.REOPEN})
"""Kinds after which a unit has neither result nor progress."""
KINDS = PRISTINE | {EntryKind.RETRY, EntryKind.RELEASE}


def entries(kind: EntryKind, units: Iterable[Unit], *, fence: int = 0, reason: str = "") -> list[Entry]:
    """Return the entries that tell of units as they stand once they came back, one for each branch; `fence` is that of the
    role under which they do, if any."""
    by_branch: dict[str, list[list[int]]] = defaultdict(list)
    for u in units:
        by_branch[u.branch_id].append([u.unit_id, u.fence, u.seq, u.attempts, u.crashes, u.parks, u.requeues])
    return [
        Entry(kind, branch_id, {"units": rows, "fence": fence, "reason": reason})
        for branch_id, rows in sorted(by_branch.items())
    ]


def told(stored: Iterable[StoredEntry]) -> dict[int, list[Return]]:
    """Return by unit what entries tell, in the order in which it happened."""
    found: dict[int, list[Return]] = defaultdict(list)
    in_order = sorted((e for e in stored if e.kind in KINDS), key=lambda e: (e.incarnation, e.at_ms, e.place))
    for entry in in_order:
        for unit_id, *values in entry.body["units"]:
            found[unit_id].append(Return(entry.kind in PRISTINE, *values))
    return {unit_id: sorted(mine, key=lambda r: (r.fence, r.seq)) for unit_id, mine in found.items()}
