"""Rows of packs and extents that are met in the folder of a run whose index does not know them, or knows them elsewhere.

Everything runs in the caller's transaction, on both dialects; flow.found_packs decides what is believed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow import clock
from strawflow.ids import Extent
from strawflow.index import tables as t
from strawflow.index.engine import insert_unless_there
from strawflow.states import PackState, SessionState

FOUND_SESSION = "found"
"""The session that packs met without a row belong to; never live, so that open ones are salvaged."""


@dataclass(frozen=True)
class KnownPack:
    pack_id: int
    state: PackState


def ensure_session(connection: Connection) -> None:
    connection.execute(
        insert_unless_there(t.sessions, connection).values(
            session_id=FOUND_SESSION,
            kind="rebuild",
            host="",
            machine="",
            pid=0,
            process_started=0,
            state=SessionState.LOST,
            expires_at=0.0,
            started_at=clock.wall_time(),
            incarnation=0,
        )
    )


def packs_by_path(connection: Connection) -> dict[str, KnownPack]:
    rows = connection.execute(sa.select(t.packs.c.path, t.packs.c.pack_id, t.packs.c.state))
    return {r.path: KnownPack(r.pack_id, PackState(r.state)) for r in rows}


def add_pack(connection: Connection, *, kind: str, path: str, is_sealed: bool, num_bytes: int) -> KnownPack:
    """Insert the row of a pack that is there without one."""
    state = PackState.SEALED if is_sealed else PackState.OPEN
    pack_id: int = connection.execute(
        sa.insert(t.packs)
        .values(
            kind=kind,
            path=path,
            state=state,
            session_id=FOUND_SESSION,
            num_bytes=num_bytes if is_sealed else None,
            created_at=clock.wall_time(),
        )
        .returning(t.packs.c.pack_id)
    ).scalar_one()
    return KnownPack(pack_id, state)


def extents_at(connection: Connection, pack_id: int) -> dict[int, tuple[int, bytes]]:
    """Return {offset: (extent id, digests)} of a pack."""
    e = t.extents.c
    rows = connection.execute(sa.select(e.offset, e.extent_id, e.digests).where(e.pack_id == pack_id))
    return {r.offset: (r.extent_id, bytes(r.digests)) for r in rows}


def add_extent(connection: Connection, extent: Extent) -> int:
    """Insert the row of an extent that lies in a known pack; returns its id."""
    return int(
        connection.execute(
            sa.insert(t.extents)
            .values(
                pack_id=extent.pack_id,
                offset=extent.offset,
                length=extent.length,
                num_rows=extent.num_rows,
                digests=extent.digests,
            )
            .returning(t.extents.c.extent_id)
        ).scalar_one()
    )


def extents_of_lost_packs(
    connection: Connection, present: Iterable[str]
) -> list[tuple[int, str, str, bytes, int]]:
    """Return (extent id, kind, path, digests, rows) of the extents whose pack's file is not among those present."""
    there = set(present)
    rows = connection.execute(
        sa.select(
            t.extents.c.extent_id, t.packs.c.kind, t.packs.c.path, t.extents.c.digests, t.extents.c.num_rows
        )
        .join(t.packs, t.packs.c.pack_id == t.extents.c.pack_id)
        .where(t.packs.c.state != PackState.CONDEMNED)
        .order_by(t.extents.c.extent_id)
    )
    return [(r.extent_id, r.kind, r.path, bytes(r.digests), r.num_rows) for r in rows if r.path not in there]


def move_extent(connection: Connection, extent_id: int, place: Extent) -> None:
    connection.execute(
        sa.update(t.extents)
        .where(t.extents.c.extent_id == extent_id)
        .values(pack_id=place.pack_id, offset=place.offset, length=place.length)
    )


def last_extent_id(connection: Connection) -> int:
    return int(
        connection.execute(sa.select(sa.func.coalesce(sa.func.max(t.extents.c.extent_id), 0))).scalar_one()
    )


def drop_unreferred_results(connection: Connection, *, after: int) -> None:
    """Remove extents beyond the id `after` whose results another one took the place of."""
    kinds = sa.select(t.packs.c.pack_id).where(t.packs.c.kind.in_(["trajectory", "continuation", "progress"]))
    named = sa.union(
        sa.select(t.units.c.extent_id).where(t.units.c.extent_id.is_not(None)),
        sa.select(t.continuations.c.extent_id),
    )
    connection.execute(
        sa.delete(t.extents).where(
            t.extents.c.extent_id > after,
            t.extents.c.pack_id.in_(kinds),
            t.extents.c.extent_id.not_in(named),
        )
    )
