"""Units and batches that had left the index for the history before it was lost: they leave again, and are counted.

Everything runs in the caller's transaction, on both dialects, a chunk of rows at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow.index import continuations, retired
from strawflow.index import tables as t
from strawflow.index.prepared import Prepared, rows_value
from strawflow.index.reconstruction import carried_units
from strawflow.index.retired import Fate, Retired
from strawflow.states import BatchState, UnitState

_CHUNK = 500

_FATES = Prepared(
    "SELECT assignments.unit_id, assignments.consumer, assignments.outcome, assignments.reason, assignments.at_step, "
    "assignments.batch_id FROM {each} JOIN assignments ON assignments.unit_id = CAST(r.value AS BIGINT) "
    "ORDER BY assignments.unit_id, assignments.consumer"
)


def retire_again(connection: Connection, wanted: Mapping[int, int]) -> set[int]:
    """Remove units that had left the index for the history before it was lost, and count them; returns them.

    `wanted` is {unit id: number of its fates}; a unit that has fewer now stays.
    """
    ids = sorted(wanted)
    fates: dict[int, list[Fate]] = {}
    for row in _FATES.rows(connection, rows=rows_value(ids)):
        fates.setdefault(row[0], []).append(Fate(*row[1:]))
    leaving: dict[str, list[Retired]] = {}
    gone: list[int] = []
    units = carried_units(connection, ids)
    for unit_id in ids:
        found = units.get(unit_id)
        mine = tuple(fates.get(unit_id, ()))
        is_settled = found is not None and found.unit.state in (UnitState.COMPLETED, UnitState.FAILED)
        if found is None or not is_settled or len(mine) < wanted[unit_id]:
            continue
        u = found.unit
        leaving.setdefault(u.branch_id, []).append(
            Retired(u.purpose, u.state, found.dataset_id, u.num_tokens, mine)
        )
        gone.append(unit_id)
    batch_ids = {f.batch_id for unit_id in gone for f in fates[unit_id] if f.batch_id is not None}
    _retire_batches(connection, sorted(batch_ids))
    for at in range(0, len(gone), _CHUNK):
        chunk = gone[at : at + _CHUNK]
        connection.execute(sa.delete(t.assignments).where(t.assignments.c.unit_id.in_(chunk)))
        connection.execute(sa.delete(t.offers).where(t.offers.c.unit_id.in_(chunk)))
        continuations.end(connection, chunk)
        connection.execute(sa.delete(t.units).where(t.units.c.unit_id.in_(chunk)))
    for branch_id, units_of in leaving.items():
        retired.add(connection, branch_id, units_of)
    return set(gone)


def _retire_batches(connection: Connection, batch_ids: Sequence[int]) -> None:
    for at in range(0, len(batch_ids), _CHUNK):
        chunk = list(batch_ids[at : at + _CHUNK])
        connection.execute(
            sa.update(t.batches)
            .where(t.batches.c.batch_id.in_(chunk), t.batches.c.state == BatchState.TRAINED)
            .values(state=BatchState.RETIRED)
        )
        retired_ids = sa.select(t.batches.c.batch_id).where(
            t.batches.c.batch_id.in_(chunk), t.batches.c.state == BatchState.RETIRED
        )
        connection.execute(sa.delete(t.batch_extents).where(t.batch_extents.c.batch_id.in_(retired_ids)))


def retire_batch(connection: Connection, batch_id: int) -> None:
    """Say that a trained batch's packed rows are gone."""
    _retire_batches(connection, [batch_id])
