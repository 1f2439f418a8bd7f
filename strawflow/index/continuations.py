"""Progress saved while a unit is worked on: a chain of records, so that each save costs only the tokens since the last.

1. The unit's own extent is the first record, whole; the table holds those after it, in the order of (fence, seq).
2. A save is guarded as every write of a holder is: by the fence, and a `seq` above the last.
3. Completing, parking and starting again end the chain. A record that is left of an earlier one does no harm: each names
   the one it goes on from, and a reader stops where that is not the one before (flow.chain).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from strawflow.index.leases import HELD_BEFORE, POINTS, Outcome
from strawflow.index.prepared import Prepared, Transaction, rows_value


@dataclass(frozen=True)
class SavedRecord:
    """Where one record of a chain lies."""

    unit_id: int
    fence: int
    seq: int
    extent_id: int
    row_start: int
    row_count: int


# A unit whose holder dies is offered as a parked one is: before fresh ones, that with the oldest weights first.
_BEGIN = Prepared(
    f"UPDATE units SET claim_class = 0, scheduling_key = CAST(r.value->>6 AS BIGINT), {POINTS} FROM {{each}} "
    f"WHERE {HELD_BEFORE} RETURNING units.unit_id"
)
_OLDER = "CAST(r.value->>6 AS BIGINT) < coalesce(units.version_step, CAST(r.value->>6 AS BIGINT) + 1)"
_GO_ON = Prepared(
    "UPDATE units SET claim_class = 0, seq = CAST(r.value->>2 AS BIGINT), "
    f"scheduling_key = CASE WHEN {_OLDER} THEN CAST(r.value->>6 AS BIGINT) ELSE units.version_step END, "
    f"version_step = CASE WHEN {_OLDER} THEN CAST(r.value->>6 AS BIGINT) ELSE units.version_step END, "
    "num_tokens = coalesce(units.num_tokens, 0) + CAST(r.value->>8 AS INTEGER) "
    f"FROM {{each}} WHERE {HELD_BEFORE} AND units.extent_id IS NOT NULL RETURNING units.unit_id"
)
_ADD = Prepared(
    "INSERT INTO continuations (unit_id, fence, seq, extent_id, row_start, row_count) "
    "SELECT CAST(r.value->>0 AS BIGINT), CAST(r.value->>1 AS BIGINT), CAST(r.value->>2 AS BIGINT), "
    "CAST(r.value->>3 AS BIGINT), CAST(r.value->>4 AS INTEGER), CAST(r.value->>5 AS INTEGER) FROM {each}"
)
_END = Prepared("DELETE FROM continuations WHERE unit_id IN (SELECT CAST(r.value AS BIGINT) FROM {each})")
_FIND = Prepared(
    "SELECT c.unit_id, c.fence, c.seq, c.extent_id, c.row_start, c.row_count FROM {each} "
    "JOIN continuations AS c ON c.unit_id = CAST(r.value AS BIGINT) ORDER BY c.unit_id, c.fence, c.seq"
)


def begin(transaction: Transaction, session_id: str, outcomes: Iterable[Outcome]) -> set[int]:
    """Save progress of held units that goes on from the prompt, in the place of any there was; returns the units it was
    done for, the others' leases were lost."""
    rows = [o.row() for o in outcomes]
    if not rows:
        return set()
    begun = _BEGIN.rows(transaction, session_id=session_id, rows=rows_value(rows))
    saved = {row[0] for row in begun}
    end(transaction, saved)
    return saved


def go_on(transaction: Transaction, session_id: str, outcomes: Iterable[Outcome]) -> set[int]:
    """Save progress of held units that goes on from what was saved before; returns the units it was done for, as `begin`.

    `Outcome.num_tokens` is what came on top.
    """
    rows = {o.unit_id: o.row() for o in outcomes}
    if not rows:
        return set()
    gone_on = _GO_ON.rows(transaction, session_id=session_id, rows=rows_value(rows.values()))
    saved = {row[0] for row in gone_on}
    if saved:
        _ADD.count(transaction, rows=rows_value(rows[unit_id] for unit_id in sorted(saved)))
    return saved


def end(transaction: Transaction, unit_ids: Iterable[int]) -> None:
    """Remove the records of units on top of the one that each itself names."""
    ids = sorted(unit_ids)
    if ids:
        _END.count(transaction, rows=rows_value(ids))


def find(transaction: Transaction, unit_ids: Iterable[int]) -> dict[int, list[SavedRecord]]:
    """Return the records of units on top of the one that each itself names, in their order; units without are left out."""
    found: dict[int, list[SavedRecord]] = {}
    for row in _FIND.rows(transaction, rows=rows_value(sorted(unit_ids))):
        found.setdefault(row[0], []).append(SavedRecord(*row))
    return found


def put(transaction: Transaction, records: Iterable[SavedRecord]) -> None:
    """Insert records that were found by a rebuild."""
    rows = [(r.unit_id, r.fence, r.seq, r.extent_id, r.row_start, r.row_count) for r in records]
    if rows:
        _ADD.count(transaction, rows=rows_value(rows))
