"""Leases: granting units to worker sessions and every guarded write that follows, each for many units at once.

1. A grant raises the fence above any of this and of earlier incarnations; every later write must name the fence it was
   granted, and a `seq` above the last one written under it.
2. What a statement changed it returns; what it did not change is for the caller to read back (`lost`).
3. Claims take parked units before fresh ones, then the highest priority, then the lowest scheduling key (for parked
   units the oldest weights), then first in.
4. Attempts count at grant. A park with progress and a clean release give the attempt back. A unit that was lost
   together with others gets it back too and counts a crash; after `CRASHES_BEFORE_ALONE` of them it is granted only
   alone, so that the culprit alone can exhaust its attempts.
5. The number of statements does not grow with the number of units.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from strawflow.errors import InvalidInputError
from strawflow.index import events, slots
from strawflow.index.prepared import Prepared, Transaction, rows_value
from strawflow.index.units import COLUMN_NAMES, Unit, to_unit
from strawflow.states import UnitState

CRASHES_BEFORE_ALONE = 3

MAX_ERROR_CHARACTERS = 10_000

FENCES_PER_INCARNATION = 1 << 40
"""A fence is the index's incarnation times this, plus a counter: older incarnations' fences are lower for ever."""

Key = tuple[int, int]
"""(unit id, fence)."""


@dataclass(frozen=True)
class Wanted:
    """Which units a session asks for."""

    limit: int
    serving_version_id: str | None = None
    """Units bound to a weight version are granted only to an engine serving it."""
    purposes: tuple[str, ...] | None = None
    """None: any."""


@dataclass(frozen=True)
class Outcome:
    """What a held unit now points at: its trajectories, or the progress saved so far."""

    unit_id: int
    fence: int
    seq: int
    extent_id: int
    row_start: int
    row_count: int
    version_step: int
    mean_reward: float | None
    num_tokens: int

    def row(self) -> tuple[int | float | None, ...]:
        return (
            self.unit_id,
            self.fence,
            self.seq,
            self.extent_id,
            self.row_start,
            self.row_count,
            self.version_step,
            self.mean_reward,
            self.num_tokens,
        )


@dataclass(frozen=True)
class Failure:
    """An attempt that ended with an error."""

    unit_id: int
    fence: int
    error: str
    """Kept as the unit's last error: what no database takes (NUL, halves of surrogate pairs) as escapes, and at most
    MAX_ERROR_CHARACTERS of it."""
    retry_after_s: float = 0.0
    """How long the unit is not offered again; 0: at once."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.retry_after_s):
            raise InvalidInputError(
                f"retry_after_s is {self.retry_after_s}; give a number of seconds", unit_id=self.unit_id
            )
        kept = self.error[:MAX_ERROR_CHARACTERS].replace("\0", r"\x00")
        object.__setattr__(self, "error", kept.encode(errors="backslashreplace").decode())


_RIPEN = Prepared(
    "UPDATE units SET not_before = NULL WHERE unit_id IN (SELECT unit_id FROM units "
    "WHERE branch_id = :branch_id AND not_before IS NOT NULL AND not_before <= {now} "
    "ORDER BY not_before LIMIT 1000 {skip_locked})"
)

_OFFERED = (
    "branch_id = :branch_id AND state = 'ready' AND not_before IS NULL "
    "AND (:purposes = '' OR :purposes LIKE '%,' || purpose || ',%')"
)
_ELIGIBLE = f"{_OFFERED} AND (required_version_id IS NULL OR required_version_id = :serving_version_id)"

_ORDER = "claim_class, precedence, scheduling_key, unit_id"

# The subquery is materialized: PostgreSQL must not run it again while it joins, or it would lock other rows.
_CLAIM = """
WITH picked AS MATERIALIZED (
    SELECT unit_id FROM units WHERE {eligible} AND {how} ORDER BY {order} LIMIT :num_units {{skip_locked}}
)
UPDATE units SET state = 'leased', session_id = :session_id, seq = 0, attempts = attempts + 1,
    fence = CASE WHEN fence < :first_fence THEN :first_fence ELSE fence + 1 END
WHERE unit_id IN (SELECT unit_id FROM picked) RETURNING {columns}, claim_class, precedence, scheduling_key
"""
_CLAIM_MANY = Prepared(
    _CLAIM.format(
        eligible=_ELIGIBLE,
        how=f"crashes < {CRASHES_BEFORE_ALONE} AND NOT {slots.CLOSED}",
        order=_ORDER,
        columns=", ".join(COLUMN_NAMES),
    )
)
_CLAIM_SUSPECT = Prepared(
    _CLAIM.format(
        eligible=_ELIGIBLE,
        how=f"crashes >= {CRASHES_BEFORE_ALONE} AND NOT {slots.CLOSED}",
        order=_ORDER,
        columns=", ".join(COLUMN_NAMES),
    )
)
_ANY_SUSPECT = Prepared(f"SELECT 1 FROM units WHERE {_ELIGIBLE} LIMIT 1")
# Ordered, so that the planner keeps to the index of ready units and never reads the finished ones.
_ANY_READY = Prepared(f"SELECT 1 FROM units WHERE {_OFFERED} ORDER BY {_ORDER} LIMIT 1")
_ANY_RIPE = Prepared(
    "SELECT 1 FROM units WHERE branch_id = :branch_id AND not_before IS NOT NULL AND not_before <= {now} LIMIT 1"
)
_NUM_OUT = Prepared(
    "SELECT count(*) FROM units WHERE session_id IS NOT NULL AND branch_id = :branch_id AND purpose = :purpose"
)
_NUM_LEASED = Prepared("SELECT count(*) FROM units WHERE session_id = :session_id")

# `|| ''` hides the index of sessions: by it SQLite would walk all leases of the session for each row, a square of them.
_HELD = (
    "units.unit_id = CAST(r.value->>0 AS BIGINT) AND units.fence = CAST(r.value->>1 AS BIGINT) "
    "AND units.state = 'leased' AND units.session_id || '' = :session_id"
)
HELD_BEFORE = f"{_HELD} AND units.seq < CAST(r.value->>2 AS BIGINT)"
POINTS = (
    "seq = CAST(r.value->>2 AS BIGINT), extent_id = CAST(r.value->>3 AS BIGINT), "
    "row_start = CAST(r.value->>4 AS INTEGER), row_count = CAST(r.value->>5 AS INTEGER), "
    "version_step = CAST(r.value->>6 AS BIGINT), mean_reward = CAST(r.value->>7 AS DOUBLE PRECISION), "
    "num_tokens = CAST(r.value->>8 AS INTEGER)"
)

_COMPLETE = Prepared(
    f"UPDATE units SET state = 'completed', session_id = NULL, last_error = NULL, {POINTS} "
    f"FROM {{each}} WHERE {HELD_BEFORE} RETURNING units.unit_id"
)
_PARK = Prepared(
    "UPDATE units SET state = 'ready', session_id = NULL, claim_class = 0, "
    "scheduling_key = CAST(r.value->>6 AS BIGINT), parks = parks + 1, attempts = attempts - 1, "
    f"{POINTS} FROM {{each}} WHERE {HELD_BEFORE} RETURNING units.unit_id"
)
_FAIL = Prepared(
    "UPDATE units SET state = CASE WHEN attempts >= :max_attempts THEN 'failed' ELSE 'ready' END, session_id = NULL, "
    "not_before = CASE WHEN attempts < :max_attempts AND CAST(r.value->>3 AS DOUBLE PRECISION) > 0 "
    "THEN {now} + CAST(r.value->>3 AS DOUBLE PRECISION) END, "
    f"last_error = r.value->>2 FROM {{each}} WHERE {_HELD} RETURNING units.unit_id, units.state"
)
_RELEASE = Prepared(
    "UPDATE units SET state = 'ready', session_id = NULL, attempts = attempts - 1 "
    f"FROM {{each}} WHERE {_HELD} RETURNING units.unit_id"
)
_RELEASE_ALL = Prepared(
    "UPDATE units SET state = 'ready', session_id = NULL, attempts = attempts - 1 "
    "WHERE session_id = :session_id AND state = 'leased' RETURNING unit_id"
)
_RESCUE = Prepared(
    "UPDATE units SET state = CASE WHEN :alone = 1 AND attempts >= :max_attempts THEN 'failed' ELSE 'ready' END, "
    "session_id = NULL, attempts = attempts - (1 - :alone), crashes = crashes + (1 - :alone), last_error = :reason "
    f"WHERE session_id = :session_id AND state = 'leased' RETURNING {', '.join(COLUMN_NAMES)}"
)
_READ_BACK = Prepared(
    "SELECT units.unit_id, units.state, units.fence, units.seq FROM {each} JOIN units "
    "ON units.unit_id = CAST(r.value AS BIGINT)"
)


def claim(
    transaction: Transaction, branch_id: str, session_id: str, wanted: Wanted, *, incarnation: int
) -> list[Unit]:
    """Lease up to `wanted.limit` ready units to a live session, in the order of claims; empty when there is none.

    A unit with a record of crashes is granted only when the session holds nothing else, and then alone. A session whose
    engine is quarantined, draining or gone is granted nothing.
    """
    values = {**_filter(branch_id, wanted), "session_id": session_id, "num_units": wanted.limit}
    values["first_fence"] = incarnation * FENCES_PER_INCARNATION + 1
    if _ANY_RIPE.rows(transaction, branch_id=branch_id):
        _RIPEN.count(transaction, branch_id=branch_id)
    rows = _CLAIM_MANY.rows(transaction, **values)
    if (
        not rows
        and _ANY_SUSPECT.rows(transaction, **_filter(branch_id, wanted))
        and num_leased(transaction, session_id) == 0
    ):
        rows = _CLAIM_SUSPECT.rows(transaction, **{**values, "num_units": 1})
    num_columns = len(COLUMN_NAMES)
    at_id = COLUMN_NAMES.index("unit_id")
    rows.sort(key=lambda row: (*row[num_columns:], row[at_id]))
    return [to_unit(row[:num_columns]) for row in rows]


def any_ready(transaction: Transaction, branch_id: str, *, purposes: Sequence[str] | None = None) -> bool:
    """Tell whether any unit of these purposes may be claimed now."""
    values = _filter(branch_id, Wanted(1, purposes=None if purposes is None else tuple(purposes)))
    del values["serving_version_id"]
    if _ANY_READY.rows(transaction, **values):
        return True
    return bool(_ANY_RIPE.rows(transaction, branch_id=branch_id))


def num_leased(transaction: Transaction, session_id: str) -> int:
    return int(_NUM_LEASED.rows(transaction, session_id=session_id)[0][0])


def num_out(transaction: Transaction, branch_id: str, *, purpose: str) -> int:
    """Return how many units of a purpose are leased to anyone."""
    return int(_NUM_OUT.rows(transaction, branch_id=branch_id, purpose=purpose)[0][0])


def complete(transaction: Transaction, session_id: str, outcomes: Iterable[Outcome]) -> set[int]:
    """Store the results of held units; returns the units it was done for, the others' leases were lost."""
    rows = rows_value(o.row() for o in outcomes)
    return {row[0] for row in _COMPLETE.rows(transaction, session_id=session_id, rows=rows)}


def park(transaction: Transaction, session_id: str, outcomes: Iterable[Outcome]) -> set[int]:
    """Give held units back with their progress: offered before fresh ones, the attempt refunded; returns which."""
    rows = rows_value(o.row() for o in outcomes)
    return {row[0] for row in _PARK.rows(transaction, session_id=session_id, rows=rows)}


def fail(
    transaction: Transaction, session_id: str, failures: Sequence[Failure], *, max_attempts: int
) -> dict[int, UnitState]:
    """End attempts with their errors: ready again, or failed once the attempts are used up; returns the new states."""
    if not failures:
        return {}
    changed = _FAIL.rows(
        transaction,
        session_id=session_id,
        max_attempts=max_attempts,
        rows=rows_value((f.unit_id, f.fence, f.error, f.retry_after_s) for f in failures),
    )
    states = {row[0]: UnitState(row[1]) for row in changed}
    errors = {f.unit_id: f.error for f in failures}
    events.record_many(
        transaction,
        [
            events.Event(
                "unit.failed" if state is UnitState.FAILED else "unit.attempt_failed",
                session_id=session_id,
                unit_id=unit_id,
                facts={"error": errors[unit_id]},
            )
            for unit_id, state in states.items()
        ],
    )
    return states


def release(transaction: Transaction, session_id: str, keys: Sequence[Key]) -> set[int]:
    """Give unworked leases back: ready again, the attempt refunded; returns which were still held."""
    if not keys:
        return set()
    return {row[0] for row in _RELEASE.rows(transaction, session_id=session_id, rows=rows_value(keys))}


def release_all(transaction: Transaction, session_id: str) -> list[int]:
    """Give back whatever a session still holds, the attempts refunded; returns the units. For a session that ends."""
    released = sorted(row[0] for row in _RELEASE_ALL.rows(transaction, session_id=session_id))
    if released:
        events.record(transaction, "units.released", session_id=session_id, units=released)
    return released


def rescue(transaction: Transaction, session_id: str, *, reason: str, max_attempts: int) -> list[Unit]:
    """Take every lease of a lost session back; returns the units, ready again or failed.

    Lost among others: the attempt is refunded and a crash counted. Lost alone: the attempt stands, and a unit whose
    attempts are used up is set aside as failed with `reason`.
    """
    alone = int(num_leased(transaction, session_id) == 1)
    rows = _RESCUE.rows(
        transaction, session_id=session_id, reason=reason, max_attempts=max_attempts, alone=alone
    )
    units = [to_unit(row) for row in rows]
    events.record_many(
        transaction,
        [
            events.Event(
                "unit.failed" if unit.state is UnitState.FAILED else "unit.rescued",
                session_id=session_id,
                unit_id=unit.unit_id,
                facts={"error": reason},
            )
            for unit in units
        ],
    )
    return units


def rescued(held: Sequence[Unit], *, max_attempts: int) -> list[Unit]:
    """Return how the units that a session holds will stand once `rescue` took them back."""
    if len(held) != 1:
        return [
            replace(u, state=UnitState.READY, session_id=None, attempts=u.attempts - 1, crashes=u.crashes + 1)
            for u in held
        ]
    (alone,) = held
    state = UnitState.FAILED if alone.attempts >= max_attempts else UnitState.READY
    return [replace(alone, state=state, session_id=None)]


@dataclass(frozen=True)
class Found:
    """How a unit was found when a guarded write did not match it."""

    unit_id: int
    state: UnitState
    fence: int
    seq: int


def read_back(transaction: Transaction, unit_ids: Iterable[int]) -> dict[int, Found]:
    """Return how these units stand now."""
    rows = _READ_BACK.rows(transaction, rows=rows_value(unit_ids))
    return {row[0]: Found(row[0], UnitState(row[1]), row[2], row[3]) for row in rows}


def _filter(branch_id: str, wanted: Wanted) -> dict[str, str | int | None]:
    return {
        "branch_id": branch_id,
        "serving_version_id": wanted.serving_version_id,
        "purposes": "" if wanted.purposes is None else f",{','.join(wanted.purposes)},",
    }
