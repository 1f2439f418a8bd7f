"""Questions that have no rows as their answer while the promises hold; what `strawflow index check` asks.

1. Reads only; every question is one statement, so it sees one state of the index.
2. An answer is (subject, what is wrong); at most `LIMIT` rows of each are returned.
3. It knows rows only: whether the bytes they name are good is flow.check's part.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow.index import branches, retired
from strawflow.index import tables as t
from strawflow.states import BatchState, PackState, SessionState, UnitState, WeightState

LIMIT = 100

Answer = list[tuple[str, str]]

_units = t.units.c
_live = sa.select(t.sessions.c.session_id).where(t.sessions.c.state == SessionState.LIVE)


def _fated(branch_id: str, consumer: str) -> sa.Select[tuple[int]]:
    a = t.assignments.c
    return sa.select(a.unit_id).where(a.branch_id == branch_id, a.consumer == consumer)


def _offered(branch_id: str, consumer: str) -> sa.Select[tuple[int]]:
    o = t.offers.c
    return sa.select(o.unit_id).where(o.branch_id == branch_id, o.consumer == consumer)


def _units_where(connection: Connection, branch_id: str, *where: sa.ColumnElement[bool]) -> list[int]:
    rows = connection.execute(
        sa.select(_units.unit_id)
        .where(_units.branch_id == branch_id, _units.purpose != "eval", *where)
        .order_by(_units.unit_id)
        .limit(LIMIT)
    )
    return [row.unit_id for row in rows]


def broken_fates(connection: Connection, branch_id: str, consumer: str) -> Answer:
    """Promise P1: a unit is open (ready, leased, failed, or completed and offered) or has exactly one fate."""
    fated, offered = _fated(branch_id, consumer), _offered(branch_id, consumer)
    a = t.assignments.c
    twice = (
        sa.select(a.unit_id)
        .where(a.branch_id == branch_id, a.consumer == consumer)
        .group_by(a.unit_id)
        .having(sa.func.count() > 1)
    )
    questions: list[tuple[str, tuple[sa.ColumnElement[bool], ...]]] = [
        (
            "is completed, but neither offered nor given a fate: it would never be trained",
            (
                _units.state == UnitState.COMPLETED,
                _units.unit_id.not_in(fated),
                _units.unit_id.not_in(offered),
                # What is in quarantine is not offered to a consumer made since; `check` tells whether anybody needs it.
                ~sa.exists().where(t.quarantine.c.extent_id == _units.extent_id),
            ),
        ),
        (
            "is offered though it has its fate: it would be trained twice",
            (_units.unit_id.in_(fated), _units.unit_id.in_(offered)),
        ),
        ("has more than one fate", (_units.unit_id.in_(twice),)),
        (
            "has its fate and is still to be worked on",
            (_units.unit_id.in_(fated), _units.state.in_([UnitState.READY, UnitState.LEASED])),
        ),
        (
            "is offered and is not completed",
            (_units.unit_id.in_(offered), _units.state != UnitState.COMPLETED),
        ),
    ]
    return [
        (f"unit {unit_id}", wrong)
        for wrong, where in questions
        for unit_id in _units_where(connection, branch_id, *where)
    ]


def broken_cursors(connection: Connection, branch_id: str) -> Answer:
    """Promise P2, first half: a dataset's cursor counts exactly the units that were admitted from it.

    Those it passed that are no rows of this branch (an ancestor's, or retired to packs) are counted in a tally.
    """
    admitted = (
        sa.select(t.segments.c.dataset_id, sa.func.count().label("found"))
        .join(t.segments, t.segments.c.segment_id == _units.segment_id)
        .where(_units.branch_id == branch_id, _units.purpose != "eval")
        .group_by(t.segments.c.dataset_id)
        .subquery()
    )
    passed = (
        sa.select(t.tallies.c.value)
        .where(t.tallies.c.branch_id == branch_id, t.tallies.c.name == "passed/" + t.cursors.c.dataset_id)
        .scalar_subquery()
    )
    found = sa.func.coalesce(admitted.c.found, 0) + sa.func.coalesce(passed, 0)
    rows = connection.execute(
        sa.select(t.cursors.c.dataset_id, t.cursors.c.num_admitted, found.label("found"))
        .outerjoin(admitted, admitted.c.dataset_id == t.cursors.c.dataset_id)
        .where(t.cursors.c.branch_id == branch_id, t.cursors.c.num_admitted != found)
    )
    return [
        (
            f"dataset {r.dataset_id}",
            f"its cursor counts {r.num_admitted} admitted rows, there are {r.found} units",
        )
        for r in rows
    ]


def broken_batches(connection: Connection, branch_id: str, consumer: str) -> Answer:
    """Batches are steps 1 to `planned`, trained up to `position`, and each counts the units assigned to it."""
    b = t.batches.c
    mine = (b.branch_id == branch_id, b.consumer == consumer)
    row = connection.execute(
        sa.select(t.consumers).where(t.consumers.c.branch_id == branch_id, t.consumers.c.consumer == consumer)
    ).one()
    answer: Answer = []
    steps = [r.step for r in connection.execute(sa.select(b.step).where(*mine).order_by(b.step))]
    branch = branches.find(connection, branch_id)
    first = 1 if branch is None else branches.start_of(connection, branch, consumer) + 1
    if steps != list(range(first, row.planned + 1)):
        answer.append(
            (f"consumer {consumer}", f"planned is {row.planned}, the stored batches are not {first} to that")
        )
    wrong_state = sa.or_(
        sa.and_(b.step <= row.position, b.state.not_in([BatchState.TRAINED, BatchState.RETIRED])),
        sa.and_(b.step > row.position, b.state != BatchState.PLANNED),
    )
    answer += [
        (f"batch of step {r.step}", f"is {r.state} while the consumer's position is {row.position}")
        for r in connection.execute(sa.select(b.step, b.state).where(*mine, wrong_state).limit(LIMIT))
    ]
    counted = (
        sa.select(t.assignments.c.batch_id, sa.func.count().label("found"))
        .group_by(t.assignments.c.batch_id)
        .subquery()
    )
    found = sa.func.coalesce(counted.c.found, 0)
    miscounted = (
        sa.select(b.step, b.num_units, found.label("found"))
        .outerjoin(counted, counted.c.batch_id == b.batch_id)
        .where(*mine, b.num_units != found, b.state != BatchState.RETIRED)
        .limit(LIMIT)
    )
    answer += [
        (f"batch of step {r.step}", f"says {r.num_units} units, {r.found} are assigned to it")
        for r in connection.execute(miscounted)
    ]
    in_retired = (
        sa.select(sa.func.coalesce(sa.func.sum(b.num_units), 0), sa.func.coalesce(sa.func.sum(found), 0))
        .outerjoin(counted, counted.c.batch_id == b.batch_id)
        .where(*mine, b.state == BatchState.RETIRED)
    )
    said, left = (int(number) for number in connection.execute(in_retired).one())
    gone = retired.num_in_batches(connection, branch_id, consumer)
    if said != left + gone:
        answer.append(
            (
                f"consumer {consumer}",
                f"its retired batches say {said} units, {left} are here and {gone} retired",
            )
        )
    return answer


def broken_counts(connection: Connection) -> Answer:
    """Rows that the index counts in two places: segments and batches against the extents they are made of."""
    answer: Answer = []
    in_extents = (
        sa.select(t.segment_extents.c.segment_id, sa.func.sum(t.extents.c.num_rows).label("found"))
        .join(t.extents, t.extents.c.extent_id == t.segment_extents.c.extent_id)
        .group_by(t.segment_extents.c.segment_id)
        .subquery()
    )
    rows = connection.execute(
        sa.select(t.segments.c.segment_id, t.segments.c.num_rows, in_extents.c.found)
        .outerjoin(in_extents, in_extents.c.segment_id == t.segments.c.segment_id)
        .where(t.segments.c.num_rows != sa.func.coalesce(in_extents.c.found, 0))
        .limit(LIMIT)
    )
    answer += [
        (f"segment {r.segment_id}", f"says {r.num_rows} rows, its extents hold {r.found}") for r in rows
    ]
    packed = (
        sa.select(t.batch_extents.c.batch_id, sa.func.sum(t.extents.c.num_rows).label("found"))
        .join(t.extents, t.extents.c.extent_id == t.batch_extents.c.extent_id)
        .group_by(t.batch_extents.c.batch_id)
        .subquery()
    )
    found = sa.func.coalesce(packed.c.found, 0)
    rows = connection.execute(
        sa.select(t.batches.c.step, t.batches.c.num_sequences, found.label("found"))
        .outerjoin(packed, packed.c.batch_id == t.batches.c.batch_id)
        .where(
            t.batches.c.num_sequences != found,
            t.batches.c.objective != "reference",
            t.batches.c.state != BatchState.RETIRED,
        )
        .limit(LIMIT)
    )
    answer += [
        (f"batch of step {r.step}", f"says {r.num_sequences} sequences, its extents hold {r.found}")
        for r in rows
    ]
    rows = connection.execute(
        sa.select(_units.unit_id, _units.row_start, _units.row_count, t.extents.c.num_rows)
        .join(t.extents, t.extents.c.extent_id == _units.extent_id)
        .where(_units.row_start + _units.row_count > t.extents.c.num_rows)
        .limit(LIMIT)
    )
    answer += [
        (f"unit {r.unit_id}", f"names rows to {r.row_start + r.row_count}, its extent holds {r.num_rows}")
        for r in rows
    ]
    return answer


def dangling(connection: Connection) -> Answer:
    """Rows that name something that is gone."""
    condemned = (
        sa.select(t.extents.c.extent_id, t.packs.c.path)
        .join(t.packs, t.packs.c.pack_id == t.extents.c.pack_id)
        .where(t.packs.c.state == PackState.CONDEMNED)
        .limit(LIMIT)
    )
    answer = [
        (f"extent {r.extent_id}", f"lies in the condemned pack {r.path}")
        for r in connection.execute(condemned)
    ]
    held = (
        sa.select(_units.unit_id, _units.session_id)
        .where(_units.state == UnitState.LEASED, _units.session_id.not_in(_live))
        .limit(LIMIT)
    )
    answer += [
        (f"unit {r.unit_id}", f"is leased to session {r.session_id}, which is not live")
        for r in connection.execute(held)
    ]
    left_behind = (
        sa.select(t.engines.c.engine_id, t.engines.c.session_id)
        .where(t.engines.c.session_id.not_in(_live))
        .limit(LIMIT)
    )
    answer += [
        (f"engine {r.engine_id}", f"is reported by session {r.session_id}, which is not live")
        for r in connection.execute(left_behind)
    ]
    w = t.weight_versions
    missing = (
        sa.select(_units.unit_id, _units.required_version_id)
        .outerjoin(w, w.c.version_id == _units.required_version_id)
        .where(
            _units.required_version_id.is_not(None),
            _units.state.in_([UnitState.READY, UnitState.LEASED]),
            sa.or_(w.c.version_id.is_(None), w.c.files_removed, w.c.state == WeightState.DEAD),
        )
        .limit(LIMIT)
    )
    answer += [
        (f"unit {r.unit_id}", f"waits for weights {r.required_version_id}, which cannot be served")
        for r in connection.execute(missing)
    ]
    c = t.checkpoints.c
    other_batch = (
        sa.select(c.checkpoint_id)
        .outerjoin(
            t.batches,
            sa.and_(
                t.batches.c.branch_id == c.branch_id,
                t.batches.c.consumer == c.consumer,
                t.batches.c.step == c.step,
            ),
        )
        .where(sa.or_(t.batches.c.digest.is_(None), t.batches.c.digest != c.batch_digest))
        .limit(LIMIT)
    )
    answer += [
        (f"checkpoint {r.checkpoint_id}", "stands for another batch than the one stored for its step")
        for r in connection.execute(other_batch)
    ]
    return answer
