"""Datasets: immutable segments of prompts, row identities, and each branch's cursor over them.

1. Row identity is (dataset, content digest, occurrence): enqueuing the same file twice adds nothing.
2. The cursor moves only in the transaction that creates the units it passes over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow import clock
from strawflow.errors import ConflictError, NotFoundError
from strawflow.index import meta
from strawflow.index import tables as t
from strawflow.index.engine import insert_unless_there, lock_rows


@dataclass(frozen=True)
class Segment:
    segment_id: int
    dataset_id: str
    segment_seq: int
    num_rows: int
    source: str
    priority: int = 0
    """Of the groups made of it, unless their admission says otherwise."""


@dataclass(frozen=True)
class Cursor:
    """Where admission stands: the next place is `position` of segment `segment_seq` in `epoch`."""

    dataset_id: str
    version: int
    epoch: int
    segment_seq: int
    position: int
    num_admitted: int


def ensure(connection: Connection, dataset_id: str, *, purpose: str) -> None:
    """Create the dataset unless it exists.

    Raises:
        ConflictError: it exists for another purpose.
    """
    found = purpose_of(connection, dataset_id)
    if found is None:
        connection.execute(
            insert_unless_there(t.datasets, connection).values(
                dataset_id=dataset_id, purpose=purpose, created_at=clock.wall_time()
            )
        )
    elif found != purpose:
        raise ConflictError(f"dataset {dataset_id!r} was created for {found!r}, not {purpose!r}")


def purpose_of(connection: Connection, dataset_id: str) -> str | None:
    """Return what a dataset was created for; None: it was not."""
    return connection.execute(
        sa.select(t.datasets.c.purpose).where(t.datasets.c.dataset_id == dataset_id)
    ).scalar()


def known_occurrences(connection: Connection, dataset_id: str, digests: Sequence[bytes]) -> dict[bytes, int]:
    """Return how many rows of each content digest the dataset already holds."""
    counts: dict[bytes, int] = {}
    for at in range(0, len(digests), 500):
        chunk = list(digests[at : at + 500])
        rows = connection.execute(
            sa.select(t.prompt_rows.c.digest, sa.func.count())
            .where(t.prompt_rows.c.dataset_id == dataset_id, t.prompt_rows.c.digest.in_(chunk))
            .group_by(t.prompt_rows.c.digest)
        )
        counts.update({bytes(digest): count for digest, count in rows})
    return counts


def next_segment_seq(connection: Connection, dataset_id: str) -> int:
    """Return the number that the dataset's next segment will have, unless another comes first."""
    last = connection.execute(
        sa.select(sa.func.max(t.segments.c.segment_seq)).where(t.segments.c.dataset_id == dataset_id)
    ).scalar()
    return 0 if last is None else int(last) + 1


_PRIORITY = "segment_priority:"
"""Begins the key in meta of a segment's priority; the segment's id follows. Most segments have none."""


def add_segment(
    connection: Connection, dataset_id: str, *, num_rows: int, source: str, priority: int = 0
) -> Segment:
    """Append an immutable segment; whoever appends to the same dataset waits."""
    whole = sa.select(t.datasets.c.dataset_id).where(t.datasets.c.dataset_id == dataset_id)
    connection.execute(lock_rows(whole, connection))
    seq = next_segment_seq(connection, dataset_id)
    segment_id = connection.execute(
        sa.insert(t.segments)
        .values(
            dataset_id=dataset_id,
            segment_seq=seq,
            num_rows=num_rows,
            source=source,
            created_at=clock.wall_time(),
        )
        .returning(t.segments.c.segment_id)
    ).scalar_one()
    if priority:
        meta.put(connection, f"{_PRIORITY}{segment_id}", str(priority))
    return Segment(segment_id, dataset_id, seq, num_rows, source, priority)


def add_segment_extents(connection: Connection, segment_id: int, extents: Sequence[tuple[int, int]]) -> None:
    """Record (first row, extent id) pairs."""
    connection.execute(
        sa.insert(t.segment_extents),
        [{"segment_id": segment_id, "first_row": first, "extent_id": e} for first, e in extents],
    )


def add_rows(connection: Connection, dataset_id: str, rows: Sequence[tuple[bytes, int]]) -> None:
    """Record the identities (content digest, occurrence) of new rows.

    Raises:
        ConflictError: another writer recorded one of them meanwhile.
    """
    try:
        connection.execute(
            sa.insert(t.prompt_rows),
            [{"dataset_id": dataset_id, "digest": d, "occurrence": o} for d, o in rows],
        )
    except sa.exc.IntegrityError as error:
        raise ConflictError(
            "the same rows were enqueued by another writer meanwhile; nothing of this file was taken, enqueue it again",
            dataset_id=dataset_id,
        ) from error


def segments_of(connection: Connection, dataset_id: str) -> list[Segment]:
    key = sa.literal(_PRIORITY) + sa.cast(t.segments.c.segment_id, sa.String)
    rows = connection.execute(
        sa.select(t.segments, t.meta.c.value.label("priority"))
        .outerjoin(t.meta, t.meta.c.key == key)
        .where(t.segments.c.dataset_id == dataset_id)
        .order_by(t.segments.c.segment_seq)
    )
    return [
        Segment(r.segment_id, r.dataset_id, r.segment_seq, r.num_rows, r.source, int(r.priority or 0))
        for r in rows
    ]


def segment_extent_ids(connection: Connection, segment_id: int) -> list[tuple[int, int]]:
    """Return the segment's (first row, extent id) pairs in row order."""
    rows = connection.execute(
        sa.select(t.segment_extents.c.first_row, t.segment_extents.c.extent_id)
        .where(t.segment_extents.c.segment_id == segment_id)
        .order_by(t.segment_extents.c.first_row)
    )
    return [(r.first_row, r.extent_id) for r in rows]


def first_digest(connection: Connection, segment_id: int) -> bytes:
    """Return the checksum of the first 4 MiB of a segment's rows: it tells one segment from another."""
    digests = connection.execute(
        sa.select(t.extents.c.digests)
        .join(t.segment_extents, t.segment_extents.c.extent_id == t.extents.c.extent_id)
        .where(t.segment_extents.c.segment_id == segment_id, t.segment_extents.c.first_row == 0)
    ).scalar_one()
    return bytes(digests)[:16]


def cursor_for_update(connection: Connection, branch_id: str, dataset_id: str) -> Cursor:
    """Return the cursor, its row held until the transaction ends; made at the start of the data if absent."""
    connection.execute(
        insert_unless_there(t.cursors, connection).values(
            branch_id=branch_id,
            dataset_id=dataset_id,
            version=0,
            epoch=0,
            segment_seq=0,
            position=0,
            num_admitted=0,
        )
    )
    statement = sa.select(t.cursors).where(
        t.cursors.c.branch_id == branch_id, t.cursors.c.dataset_id == dataset_id
    )
    r = connection.execute(lock_rows(statement, connection)).one()
    return Cursor(r.dataset_id, r.version, r.epoch, r.segment_seq, r.position, r.num_admitted)


def cursor(connection: Connection, branch_id: str, dataset_id: str) -> Cursor:
    """Return the cursor as it stands, unlocked; at the start of the data if there is none."""
    r = connection.execute(
        sa.select(t.cursors).where(t.cursors.c.branch_id == branch_id, t.cursors.c.dataset_id == dataset_id)
    ).first()
    if r is None:
        return Cursor(dataset_id, 0, 0, 0, 0, 0)
    return Cursor(r.dataset_id, r.version, r.epoch, r.segment_seq, r.position, r.num_admitted)


def num_admitted(connection: Connection, branch_id: str, dataset_id: str) -> int:
    """Return how many rows the branch's cursor has passed, over all epochs."""
    return (
        connection.execute(
            sa.select(t.cursors.c.num_admitted).where(
                t.cursors.c.branch_id == branch_id, t.cursors.c.dataset_id == dataset_id
            )
        ).scalar()
        or 0
    )


def move_cursor(connection: Connection, branch_id: str, cursor: Cursor, *, expected_version: int) -> None:
    """Store a cursor whose version is `expected_version` + 1.

    Raises:
        ConflictError: someone else moved it.
    """
    done = connection.execute(
        sa.update(t.cursors)
        .where(
            t.cursors.c.branch_id == branch_id,
            t.cursors.c.dataset_id == cursor.dataset_id,
            t.cursors.c.version == expected_version,
        )
        .values(
            version=cursor.version,
            epoch=cursor.epoch,
            segment_seq=cursor.segment_seq,
            position=cursor.position,
            num_admitted=cursor.num_admitted,
        )
    )
    if done.rowcount != 1:
        raise ConflictError("the dataset cursor was moved by another writer", dataset_id=cursor.dataset_id)


def insert_cursor(connection: Connection, branch_id: str, cursor: Cursor) -> None:
    """Give a branch that has none its cursor over a dataset."""
    connection.execute(sa.insert(t.cursors).values(branch_id=branch_id, **cursor.__dict__))


MIXTURE = "mixture/"
"""Begins the key in meta of what draws by weight go on from; the branch follows (index.mixtures)."""
_SOURCE_STATE = "source_state"


def _state_key(branch_id: Any, dataset_id: Any) -> Any:
    """Key in meta of what the source of a dataset's prompts goes on from, of values or of columns."""
    return f"{_SOURCE_STATE}/" + branch_id + "/" + dataset_id


def source_state(connection: Connection, branch_id: str, dataset_id: str) -> str | None:
    """Return the state (JSON) that came with the last prompts which a source of its own state had admitted."""
    return meta.find(connection, _state_key(branch_id, dataset_id))


def put_source_state(connection: Connection, branch_id: str, dataset_id: str, state: str) -> None:
    """Store a source's state; belongs into the transaction that moves the cursor."""
    meta.put(connection, _state_key(branch_id, dataset_id), state)


def num_unadmitted(connection: Connection, branch_id: str, dataset_id: str) -> int:
    """Return how many rows of the dataset the branch has not admitted once; 0 when there is no such dataset."""
    return max(0, num_rows_if_any(connection, dataset_id) - num_admitted(connection, branch_id, dataset_id))


def standing(connection: Connection, branch_id: str) -> tuple[str, int]:
    """Return the branch's cursors as a JSON list of objects with the fields of `Cursor`, and `source_state` where a source
    has one, and the last unit admitted. An object with the one field `mixture` tells what draws by weight go on from.

    One statement, so that no admission comes between them.
    """
    last = sa.select(sa.func.coalesce(sa.func.max(t.units.c.unit_id), 0)).scalar_subquery()
    drawn = sa.select(t.meta.c.value).where(t.meta.c.key == MIXTURE + branch_id).scalar_subquery()
    one = sa.select(last.label("last_unit_id"), drawn.label("mixture")).subquery()
    c, m = t.cursors.c, t.meta.c
    rows = connection.execute(
        sa.select(one.c.last_unit_id, one.c.mixture, t.cursors, m.value.label(_SOURCE_STATE))
        .select_from(
            one.outerjoin(t.cursors, c.branch_id == branch_id).outerjoin(
                t.meta, m.key == _state_key(c.branch_id, c.dataset_id)
            )
        )
        .order_by(c.dataset_id)
    ).all()
    fields = tuple(Cursor.__dataclass_fields__)
    found: list[dict[str, Any]] = [
        {name: getattr(row, name) for name in fields} for row in rows if row.dataset_id is not None
    ]
    for fields_of, row in zip(found, rows, strict=False):
        if row.source_state is not None:
            fields_of[_SOURCE_STATE] = row.source_state
    if rows[0].mixture is not None:
        found.append({"mixture": rows[0].mixture})
    return json.dumps(found, separators=(",", ":")), int(rows[0].last_unit_id)


def of_segments(connection: Connection, segment_ids: Iterable[int]) -> dict[int, str]:
    """Return the dataset of each segment."""
    wanted = sorted(set(segment_ids))
    found: dict[int, str] = {}
    for at in range(0, len(wanted), 500):
        rows = connection.execute(
            sa.select(t.segments.c.segment_id, t.segments.c.dataset_id).where(
                t.segments.c.segment_id.in_(wanted[at : at + 500])
            )
        )
        found.update((row.segment_id, row.dataset_id) for row in rows)
    return found


def num_rows_if_any(connection: Connection, dataset_id: str) -> int:
    """Return the dataset's size, 0 where there is none."""
    return int(
        connection.execute(
            sa.select(sa.func.coalesce(sa.func.sum(t.segments.c.num_rows), 0)).where(
                t.segments.c.dataset_id == dataset_id
            )
        ).scalar_one()
    )


def num_rows(connection: Connection, dataset_id: str) -> int:
    """Return the dataset's size.

    Raises:
        NotFoundError: no such dataset.
    """
    if connection.execute(sa.select(t.datasets).where(t.datasets.c.dataset_id == dataset_id)).first() is None:
        raise NotFoundError(f"there is no dataset {dataset_id!r}; enqueue prompts first")
    return num_rows_if_any(connection, dataset_id)


@dataclass(frozen=True)
class DatasetSize:
    dataset_id: str
    purpose: str
    num_segments: int
    num_rows: int
    num_admitted: int


def listed(connection: Connection, branch_id: str) -> list[DatasetSize]:
    """Return every dataset with its size and how many of its rows the branch admitted, epochs counted again."""
    sizes = (
        sa.select(
            t.segments.c.dataset_id,
            sa.func.count().label("num_segments"),
            sa.func.sum(t.segments.c.num_rows).label("num_rows"),
        )
        .group_by(t.segments.c.dataset_id)
        .subquery()
    )
    rows = connection.execute(
        sa.select(
            t.datasets.c.dataset_id,
            t.datasets.c.purpose,
            sa.func.coalesce(sizes.c.num_segments, 0).label("num_segments"),
            sa.func.coalesce(sizes.c.num_rows, 0).label("num_rows"),
            sa.func.coalesce(t.cursors.c.num_admitted, 0).label("num_admitted"),
        )
        .outerjoin(sizes, sizes.c.dataset_id == t.datasets.c.dataset_id)
        .outerjoin(
            t.cursors,
            sa.and_(t.cursors.c.dataset_id == t.datasets.c.dataset_id, t.cursors.c.branch_id == branch_id),
        )
        .order_by(t.datasets.c.dataset_id)
    )
    # PostgreSQL sums 64-bit integers to a Decimal
    return [
        DatasetSize(r.dataset_id, r.purpose, r.num_segments, int(r.num_rows), r.num_admitted) for r in rows
    ]
