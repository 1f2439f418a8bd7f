"""Units that came back for another attempt, brought into an index that was lost or restored since.

It changes units that stand as they did before they came back, and of later ones only how often they were sent back. What is
told is believed unless the unit has a fate that contradicts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow.index import continuations
from strawflow.index import tables as t
from strawflow.index.prepared import Prepared, rows_value
from strawflow.states import UnitState

PRISTINE: Mapping[str, None] = dict.fromkeys(
    ("extent_id", "row_start", "row_count", "version_step", "mean_reward", "num_tokens")
)
"""Columns of a unit that has neither result nor progress."""


@dataclass(frozen=True)
class Return:
    """How a unit came back, and how its counts stood after that."""

    is_pristine: bool
    """Whether what it had was given up."""
    fence: int
    """Of the attempt it came back from."""
    seq: int
    attempts: int
    crashes: int
    parks: int
    requeues: int


_STANDING = Prepared(
    "SELECT units.unit_id, units.state, units.fence, units.seq, units.requeues, units.claim_class, "
    "(SELECT count(*) FROM assignments AS a WHERE a.unit_id = units.unit_id), "
    "(SELECT count(*) FROM assignments AS a WHERE a.unit_id = units.unit_id AND a.reason = :given_up) "
    "FROM {each} JOIN units ON units.unit_id = CAST(r.value AS BIGINT)"
)


def bring_back(connection: Connection, returns: Mapping[int, Sequence[Return]], *, given_up: str) -> int:
    """Let units stand as they did after they came back; returns how many were changed.

    `returns` holds those of each unit in order. A fate with the reason `given_up` is of a unit that failed, whatever it had
    before; any other one was given for the result that it has.
    """
    num_changed = 0
    for row in _STANDING.rows(connection, rows=rows_value(sorted(returns)), given_up=given_up):
        unit_id, state, fence, seq, requeues, claim_class, num_fates, num_given_up = row
        values: dict[str, Any] = {}
        for r in returns[unit_id]:
            if (fence, seq) > (r.fence, r.seq):
                requeues = max(requeues, r.requeues)
                values["requeues"] = requeues
            elif r.is_pristine and num_fates == num_given_up:
                values |= {**PRISTINE, **_counts(r), "claim_class": 1}
                values |= {"scheduling_key": 0} if claim_class == 0 else {}
                state = UnitState.READY
            elif not r.is_pristine and not num_fates and state != UnitState.COMPLETED:
                values |= _counts(r)
                state = UnitState.READY
        if values:
            num_changed += 1
            if "extent_id" in values:
                continuations.end(connection, [unit_id])
            connection.execute(
                sa.update(t.units).where(t.units.c.unit_id == unit_id).values(state=state, **values)
            )
    return num_changed


def _counts(r: Return) -> dict[str, int]:
    return {"attempts": r.attempts, "crashes": r.crashes, "parks": r.parks, "requeues": r.requeues}
