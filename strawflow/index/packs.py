"""Packs and extents: which files exist and where each stored message lies.

1. A pack's row exists before its file.
2. Naming an extent requires its pack to be open and the writer's session live, checked in the same transaction.
3. An extent keeps its id for ever; salvage and compaction move its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow import clock
from strawflow.errors import CorruptPackError, LeaseLostError, NotFoundError
from strawflow.ids import Extent
from strawflow.index import tables as t
from strawflow.index.engine import lock_rows, now, share_rows
from strawflow.index.pins import PinKind, is_pinned
from strawflow.index.prepared import Prepared, Transaction, rows_value
from strawflow.states import PackState, SessionState


@dataclass(frozen=True)
class Pack:
    pack_id: int
    kind: str
    path: str
    state: PackState
    session_id: str
    num_bytes: int | None
    num_rows: int | None


def create(connection: Connection, *, kind: str, path: str, session_id: str) -> int:
    """Insert the row of a pack whose file is about to be made; returns its id."""
    return int(
        connection.execute(
            sa.insert(t.packs)
            .values(
                kind=kind,
                path=path,
                state=PackState.OPEN,
                session_id=session_id,
                created_at=clock.wall_time(),
            )
            .returning(t.packs.c.pack_id)
        ).scalar_one()
    )


def seal(connection: Connection, pack_id: int, *, path: str, num_bytes: int, num_rows: int) -> bool:
    """Move an open pack to sealed; False if it was not open.

    By its path as well: a path is used once for ever, while an id may be another pack's since a restore or rebuild that
    the writer slept through.
    """
    done = connection.execute(
        sa.update(t.packs)
        .where(t.packs.c.pack_id == pack_id, t.packs.c.path == path, t.packs.c.state == PackState.OPEN)
        .values(state=PackState.SEALED, num_bytes=num_bytes, num_rows=num_rows, sealed_at=now(connection))
    )
    return bool(done.rowcount)


def condemn(connection: Connection, pack_id: int) -> bool:
    """Give up a pack that no extent and no pin names; False if one does, or it was condemned before.

    Whoever names or pins it shares its row: the lock comes first, and what it kept from view is seen by the next
    statement.
    """
    lock_packs(connection, [pack_id])
    named = sa.exists().where(t.extents.c.pack_id == t.packs.c.pack_id)
    done = connection.execute(
        sa.update(t.packs)
        .where(
            t.packs.c.pack_id == pack_id,
            t.packs.c.state != PackState.CONDEMNED,
            ~named,
            ~is_pinned(PinKind.PACK),
        )
        .values(state=PackState.CONDEMNED, condemned_at=now(connection))
    )
    return bool(done.rowcount)


def lock_packs(connection: Connection, pack_ids: Iterable[int]) -> None:
    """Wait until nobody names, pins or moves anything in these packs, and keep it so until the transaction ends."""
    wanted = sa.select(t.packs.c.pack_id).where(t.packs.c.pack_id.in_(sorted(pack_ids)))
    connection.execute(lock_rows(wanted.order_by(t.packs.c.pack_id), connection)).all()


# A pack may roll over, and so be sealed by its own writer, before its last extents are named. The check and the insert
# are one statement: it runs in every completion.
_NAME = Prepared(
    'INSERT INTO extents (pack_id, "offset", length, num_rows, digests) '
    "SELECT packs.pack_id, :at_byte, :length, :num_rows, :digests FROM packs "
    "JOIN sessions ON sessions.session_id = packs.session_id "
    "WHERE packs.pack_id = :pack_id AND packs.session_id = :session_id AND packs.state IN ('open', 'sealed') "
    "AND sessions.state = 'live' {share_both} RETURNING extent_id"
)


def name_extents(transaction: Transaction, extents: Sequence[Extent], *, session_id: str) -> list[Extent]:
    """Insert rows for extents just made durable in this session's packs; returns them with their ids.

    Raises:
        LeaseLostError: a pack is not open, or its writer session is not live (it was declared lost meanwhile).
    """
    return [replace(extent, extent_id=_name(transaction, extent, session_id)) for extent in extents]


def _name(transaction: Transaction, extent: Extent, session_id: str) -> int:
    rows = _NAME.rows(
        transaction,
        pack_id=extent.pack_id,
        session_id=session_id,
        at_byte=extent.offset,
        length=extent.length,
        num_rows=extent.num_rows,
        digests=extent.digests,
    )
    if not rows:
        raise LeaseLostError(
            "the pack's writer session was declared lost; its bytes are not taken",
            session_id=session_id,
            path=extent.path,
        )
    return int(rows[0][0])


def move_extents(connection: Connection, moved: Mapping[int, Extent]) -> None:
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


_FIND_EXTENTS = Prepared(
    "SELECT extents.extent_id, extents.pack_id, packs.kind, packs.path, "
    'extents."offset", extents.length, extents.num_rows, extents.digests, quarantine.reason '
    "FROM {each} JOIN extents ON extents.extent_id = CAST(r.value AS BIGINT) "
    "JOIN packs ON packs.pack_id = extents.pack_id "
    "LEFT JOIN quarantine ON quarantine.extent_id = extents.extent_id"
)


def find_extents(transaction: Transaction, extent_ids: Iterable[int]) -> dict[int, Extent]:
    """Return where each extent lies now.

    Raises:
        NotFoundError: an id is unknown.
        CorruptPackError: one is quarantined: its bytes are known to be damaged.
    """
    wanted = sorted(set(extent_ids))
    found: dict[int, Extent] = {}
    for extent_id, pack_id, kind, path, offset, length, num_rows, digests, reason in _FIND_EXTENTS.rows(
        transaction, rows=rows_value(wanted)
    ):
        extent = Extent(extent_id, pack_id, kind, path, offset, length, num_rows, bytes(digests))
        if reason is not None:
            raise _quarantined(extent, reason)
        found[extent_id] = extent
    missing = [e for e in wanted if e not in found]
    if missing:
        raise NotFoundError("the index names no such extent", extent_id=missing[0])
    return found


def whole_extents(transaction: Transaction, extent_ids: Iterable[int]) -> dict[int, Extent]:
    """Return where each extent lies now; those that are quarantined or unknown are left out."""
    rows = _FIND_EXTENTS.rows(transaction, rows=rows_value(sorted(set(extent_ids))))
    return {
        extent_id: Extent(extent_id, pack_id, kind, path, offset, length, num_rows, bytes(digests))
        for extent_id, pack_id, kind, path, offset, length, num_rows, digests, reason in rows
        if reason is None
    }


def with_digests(connection: Connection, kind: str, digests: Iterable[bytes]) -> dict[bytes, Extent]:
    """Return the extents of a kind that have these digests, those in quarantine left out; reads every extent's row."""
    wanted = set(digests)
    statement = _PLACED.where(
        t.packs.c.kind == kind,
        t.packs.c.state != PackState.CONDEMNED,
        ~sa.exists().where(t.quarantine.c.extent_id == t.extents.c.extent_id),
    )
    rows = connection.execute(statement.order_by(t.extents.c.extent_id))
    return {bytes(row.digests): _extent(row) for row in rows if bytes(row.digests) in wanted}


def name_again(connection: Connection, extents: Iterable[Extent]) -> dict[bytes, Extent]:
    """Insert rows for extents of sealed packs whose rows were swept, where the pack is still there; returns them by digests."""
    found: dict[bytes, Extent] = {}
    for extent in extents:
        pack = share_rows(
            sa.select(t.packs.c.pack_id).where(
                t.packs.c.path == extent.path, t.packs.c.state == PackState.SEALED
            ),
            connection,
        )
        pack_id = connection.execute(pack).scalar()
        at_its_place = sa.select(t.extents.c.extent_id).where(
            t.extents.c.pack_id == pack_id, t.extents.c.offset == extent.offset
        )
        if pack_id is None or connection.execute(at_its_place).first() is not None:
            continue  # what has a row and was not found by it is in quarantine
        values = {
            "pack_id": pack_id,
            "offset": extent.offset,
            "length": extent.length,
            "num_rows": extent.num_rows,
            "digests": extent.digests,
        }
        statement = sa.insert(t.extents).values(**values).returning(t.extents.c.extent_id)
        extent_id = connection.execute(statement).scalar_one()
        found[extent.digests] = replace(extent, pack_id=pack_id, extent_id=extent_id)
    return found


def are_there(connection: Connection, extent_ids: Iterable[int]) -> bool:
    """Tell whether all of these extents have their rows, and keep them from being swept until the transaction ends."""
    wanted = sorted(set(extent_ids))
    held = sa.select(t.extents.c.extent_id).where(t.extents.c.extent_id.in_(wanted))
    rows = connection.execute(share_rows(held.order_by(t.extents.c.extent_id), connection)).all()
    return len(rows) == len(wanted)


def _quarantined(extent: Extent, reason: str) -> CorruptPackError:
    # A batch is what a trainer replays: without it there is no way on from the checkpoint before.
    branch = (
        " or branch from a checkpoint (`strawflow branch create`, or `strawflow resume --from ... --branch ...`)"
        * (extent.kind in ("batch", "plan"))
    )
    return CorruptPackError(
        f"{extent.path}: the extent at byte {extent.offset} is in quarantine: {reason}; restore the file from a copy and run "
        f"`strawflow index quarantine RUN --yes`{branch}",
        extent_id=extent.extent_id,
    )


def extents_of_pack(connection: Connection, pack_id: int) -> list[Extent]:
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
