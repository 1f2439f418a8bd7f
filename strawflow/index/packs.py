"""Packs and extents: which files exist and where each stored message lies.

1. A pack's row exists before its file.
2. Naming an extent requires its pack to be open and the writer's session live, checked in the same transaction.
3. An extent keeps its id for ever; salvage and compaction move its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow import clock
from strawflow.errors import LeaseLostError, NotFoundError
from strawflow.ids import Extent
from strawflow.index import tables as t
from strawflow.index.engine import share_rows
from strawflow.states import PackState, SessionState


@dataclass(frozen=True)
class Pack:
    pack_id: str
    kind: str
    path: str
    state: PackState
    session_id: str
    num_bytes: int | None
    num_rows: int | None


def create(connection: Connection, *, pack_id: str, kind: str, path: str, session_id: str) -> None:
    connection.execute(
        sa.insert(t.packs).values(
            pack_id=pack_id,
            kind=kind,
            path=path,
            state=PackState.OPEN,
            session_id=session_id,
            created_at=clock.wall_time(),
        )
    )


def seal(connection: Connection, pack_id: str, *, num_bytes: int, num_rows: int) -> bool:
    """Move an open pack to sealed; False if it was not open."""
    done = connection.execute(
        sa.update(t.packs)
        .where(t.packs.c.pack_id == pack_id, t.packs.c.state == PackState.OPEN)
        .values(state=PackState.SEALED, num_bytes=num_bytes, num_rows=num_rows)
    )
    return bool(done.rowcount)


def condemn(connection: Connection, pack_id: str) -> None:
    connection.execute(
        sa.update(t.packs).where(t.packs.c.pack_id == pack_id).values(state=PackState.CONDEMNED)
    )


def name_extents(connection: Connection, extents: Iterable[Extent], *, session_id: str) -> None:
    """Insert rows for extents just made durable in this session's open packs.

    Raises:
        LeaseLostError: a pack is not open, or its writer session is not live (it was declared lost meanwhile).
    """
    extents = list(extents)
    pack_ids = {e.pack_id for e in extents}
    statement = (
        sa.select(t.packs.c.pack_id)
        .join(t.sessions, t.sessions.c.session_id == t.packs.c.session_id)
        .where(
            t.packs.c.pack_id.in_(pack_ids),
            t.packs.c.session_id == session_id,
            # a pack may roll over, and so be sealed by its own writer, before its last extents are named
            t.packs.c.state.in_([PackState.OPEN, PackState.SEALED]),
            t.sessions.c.state == SessionState.LIVE,
        )
    )
    live = {row.pack_id for row in connection.execute(share_rows(statement, connection))}
    if live != pack_ids:
        raise LeaseLostError(
            "the pack's writer session was declared lost; its bytes are not taken",
            session_id=session_id,
            packs=sorted(pack_ids - live),
        )
    connection.execute(
        sa.insert(t.extents),
        [
            {
                "extent_id": e.extent_id,
                "pack_id": e.pack_id,
                "offset": e.offset,
                "length": e.length,
                "num_rows": e.num_rows,
                "digests": e.digests,
            }
            for e in extents
        ],
    )


def move_extents(connection: Connection, moved: Mapping[str, Extent]) -> None:
    """Point extents (by id) at their new place."""
    for extent_id, place in moved.items():
        connection.execute(
            sa.update(t.extents)
            .where(t.extents.c.extent_id == extent_id)
            .values(
                pack_id=place.pack_id,
                offset=place.offset,
                length=place.length,
                num_rows=place.num_rows,
                digests=place.digests,
            )
        )


_PLACED = sa.select(
    t.extents.c.extent_id,
    t.extents.c.pack_id,
    t.packs.c.kind,
    t.packs.c.path,
    t.packs.c.state,
    t.extents.c.offset,
    t.extents.c.length,
    t.extents.c.num_rows,
    t.extents.c.digests,
).join(t.packs, t.packs.c.pack_id == t.extents.c.pack_id)


def _extent(row: sa.Row[*tuple[Any, ...]]) -> Extent:
    return Extent(
        extent_id=row.extent_id,
        pack_id=row.pack_id,
        kind=row.kind,
        path=row.path,
        offset=row.offset,
        length=row.length,
        num_rows=row.num_rows,
        digests=row.digests,
    )


def find_extents(connection: Connection, extent_ids: Iterable[str]) -> dict[str, Extent]:
    """Return where each extent lies now.

    Raises:
        NotFoundError: an id is unknown.
    """
    wanted = sorted(set(extent_ids))
    found: dict[str, Extent] = {}
    for at in range(0, len(wanted), 500):  # stays under SQLite's limit of bound values
        chunk = wanted[at : at + 500]
        for row in connection.execute(_PLACED.where(t.extents.c.extent_id.in_(chunk))):
            found[row.extent_id] = _extent(row)
    missing = [e for e in wanted if e not in found]
    if missing:
        raise NotFoundError("the index names no such extent", extent_id=missing[0])
    return found


def extents_of_pack(connection: Connection, pack_id: str) -> list[Extent]:
    rows = connection.execute(_PLACED.where(t.extents.c.pack_id == pack_id).order_by(t.extents.c.offset))
    return [_extent(row) for row in rows]


def listed(connection: Connection, *, state: PackState | None = None) -> list[Pack]:
    statement = sa.select(t.packs).order_by(t.packs.c.path)
    if state is not None:
        statement = statement.where(t.packs.c.state == state)
    return [
        Pack(r.pack_id, r.kind, r.path, PackState(r.state), r.session_id, r.num_bytes, r.num_rows)
        for r in connection.execute(statement)
    ]


def open_without_writer(connection: Connection) -> list[Pack]:
    """Return open packs whose writer session is no longer live."""
    statement = (
        sa.select(t.packs)
        .join(t.sessions, t.sessions.c.session_id == t.packs.c.session_id)
        .where(t.packs.c.state == PackState.OPEN, t.sessions.c.state != SessionState.LIVE)
    )
    return [
        Pack(r.pack_id, r.kind, r.path, PackState(r.state), r.session_id, r.num_bytes, r.num_rows)
        for r in connection.execute(statement)
    ]
