"""What names stored bytes, and what nothing names any more: the questions behind sweep and compaction.

1. An extent is named by every row of another table that refers to it; a table added later counts without a change here.
   Extents of kinds that no table refers to (journal, history, event, tensor) are named by being there.
2. A pack is quiet when nothing in it can be named any more that is not named yet: it is sealed, and its writer's session
   is not live, or it was sealed longer ago than a live session may hold bytes without naming them.
3. Only quiet packs are looked into. Whoever acts on an answer asks again in the transaction that acts, under the packs'
   locks (index.packs).
4. Ages are index time. On SQLite that is the time since boot: an age that lies in the future is of an earlier boot, and
   whoever held anything then is gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow.errors import ConflictError
from strawflow.ids import Extent
from strawflow.index import tables as t
from strawflow.index.engine import now
from strawflow.index.pins import PinKind, is_pinned
from strawflow.index.prepared import Prepared, rows_value
from strawflow.states import PackState, SessionState

REFERRED_KINDS = ("prompt", "trajectory", "continuation", "progress", "batch", "plan")
"""Kinds whose extents rows of other tables name."""

_REFERRERS = [
    column
    for table in t.metadata.sorted_tables
    for column in table.columns
    if any(key.column is t.extents.c.extent_id for key in column.foreign_keys)
]

_CHUNK = 500


@dataclass(frozen=True)
class PackUse:
    """One pack, and how much of it is named."""

    pack_id: int
    kind: str
    path: str
    state: PackState
    num_bytes: int | None
    """Size of the file; None while it is open."""
    is_quiet: bool
    is_pinned: bool
    num_extents: int
    num_named: int
    named_bytes: int


def _refers() -> sa.ColumnElement[bool]:
    """Return the condition that another table's row names `extents`."""
    return sa.or_(*(sa.exists().where(column == t.extents.c.extent_id) for column in _REFERRERS))


def _is_named() -> sa.ColumnElement[bool]:
    return sa.or_(t.packs.c.kind.not_in(REFERRED_KINDS), _refers())


def _is_old(connection: Connection, at: sa.Column[Any], *, age_s: float) -> sa.ColumnElement[bool]:
    at_s = sa.func.coalesce(at, 0.0)  # not told before revision 0002
    return sa.or_(at_s + age_s < now(connection), at_s > now(connection))


def _is_quiet(connection: Connection, *, age_s: float) -> sa.ColumnElement[bool]:
    live = sa.select(t.sessions.c.session_id).where(t.sessions.c.state == SessionState.LIVE)
    return sa.and_(
        t.packs.c.state == PackState.SEALED,
        sa.or_(t.packs.c.session_id.not_in(live), _is_old(connection, t.packs.c.sealed_at, age_s=age_s)),
    )


def pack_uses(connection: Connection, *, quiet_s: float) -> list[PackUse]:
    """Return every pack, by path; reads every extent's row."""
    one = sa.case((_is_named(), 1), else_=0)
    counted = (
        sa.select(
            t.extents.c.pack_id,
            sa.func.count().label("num_extents"),
            sa.func.sum(one).label("num_named"),
            sa.func.sum(one * t.extents.c.length).label("named_bytes"),
        )
        .join(t.packs, t.packs.c.pack_id == t.extents.c.pack_id)
        .group_by(t.extents.c.pack_id)
        .subquery()
    )
    rows = connection.execute(
        sa.select(
            t.packs.c.pack_id,
            t.packs.c.kind,
            t.packs.c.path,
            t.packs.c.state,
            t.packs.c.num_bytes,
            _is_quiet(connection, age_s=quiet_s).label("is_quiet"),
            is_pinned(PinKind.PACK).label("is_pinned"),
            counted.c.num_extents,
            counted.c.num_named,
            counted.c.named_bytes,
        )
        .outerjoin(counted, counted.c.pack_id == t.packs.c.pack_id)
        .order_by(t.packs.c.path)
    )
    return [
        PackUse(
            pack_id=r.pack_id,
            kind=r.kind,
            path=r.path,
            state=PackState(r.state),
            num_bytes=r.num_bytes,
            is_quiet=bool(r.is_quiet),
            is_pinned=bool(r.is_pinned),
            num_extents=int(r.num_extents or 0),
            num_named=int(r.num_named or 0),
            named_bytes=int(r.named_bytes or 0),
        )
        for r in rows
    ]


def unnamed_extents(
    connection: Connection, *, after: int, limit: int, quiet_s: float
) -> list[tuple[int, str]]:
    """Return (id beyond `after`, path of its pack) of extents in quiet packs that nothing names, in their order."""
    rows = connection.execute(
        sa.select(t.extents.c.extent_id, t.packs.c.path)
        .join(t.packs, t.packs.c.pack_id == t.extents.c.pack_id)
        .where(t.extents.c.extent_id > after, _is_quiet(connection, age_s=quiet_s), ~_is_named())
        .order_by(t.extents.c.extent_id)
        .limit(limit)
    )
    return [(row.extent_id, row.path) for row in rows]


def drop_unnamed(connection: Connection, extent_ids: Sequence[int]) -> int:
    """Remove those of the extents' rows that nothing names; returns how many.

    Raises:
        ConflictError: one was named in this very moment, which the foreign key tells; nothing changed.
    """
    removed = 0
    try:
        for at in range(0, len(extent_ids), _CHUNK):
            chunk = list(extent_ids[at : at + _CHUNK])
            done = connection.execute(
                sa.delete(t.extents).where(t.extents.c.extent_id.in_(chunk), ~_refers())
            )
            removed += int(done.rowcount)
    except sa.exc.IntegrityError as error:
        raise ConflictError("an extent was named while it was being swept; sweep again") from error
    return removed


def empty_packs(connection: Connection, *, quiet_s: float) -> list[tuple[int, str, int]]:
    """Return (id, path, bytes) of quiet packs without an extent and without a pin."""
    rows = connection.execute(
        sa.select(t.packs.c.pack_id, t.packs.c.path, t.packs.c.num_bytes)
        .where(
            _is_quiet(connection, age_s=quiet_s),
            ~sa.exists().where(t.extents.c.pack_id == t.packs.c.pack_id),
            ~is_pinned(PinKind.PACK),
        )
        .order_by(t.packs.c.path)
    )
    return [(r.pack_id, r.path, r.num_bytes or 0) for r in rows]


def due_packs(connection: Connection, *, grace_s: float) -> list[tuple[int, str, int]]:
    """Return (id, path, bytes) of packs condemned longer ago than the grace."""
    rows = connection.execute(
        sa.select(t.packs.c.pack_id, t.packs.c.path, t.packs.c.num_bytes)
        .where(
            t.packs.c.state == PackState.CONDEMNED,
            _is_old(connection, t.packs.c.condemned_at, age_s=grace_s),
            ~sa.exists().where(t.extents.c.pack_id == t.packs.c.pack_id),
        )
        .order_by(t.packs.c.path)
    )
    return [(r.pack_id, r.path, r.num_bytes or 0) for r in rows]


@dataclass(frozen=True)
class Waiting:
    """Condemned packs whose files stay until their grace is over."""

    num_packs: int
    num_bytes: int
    first_in_s: float
    """Seconds until the first of them may go; 0 or less: a sweep removes it now."""
    last_in_s: float


def waiting_packs(connection: Connection, *, grace_s: float) -> Waiting | None:
    """Tell of the condemned packs that are not due yet; None when there are none."""
    at = t.packs.c.condemned_at
    left = sa.func.coalesce(at, 0.0) + grace_s - now(connection)
    row = connection.execute(
        sa.select(
            sa.func.count(), sa.func.sum(t.packs.c.num_bytes), sa.func.min(left), sa.func.max(left)
        ).where(t.packs.c.state == PackState.CONDEMNED, ~_is_old(connection, at, age_s=grace_s))
    ).one()
    # PostgreSQL sums 64-bit integers to a Decimal
    return Waiting(row[0], int(row[1] or 0), float(row[2]), float(row[3])) if row[0] else None


def forget_pack(connection: Connection, pack_id: int) -> None:
    """Remove the row of a condemned pack whose file is gone."""
    connection.execute(
        sa.delete(t.packs).where(t.packs.c.pack_id == pack_id, t.packs.c.state == PackState.CONDEMNED)
    )


def known_paths(connection: Connection, paths: Collection[str]) -> set[str]:
    """Return those of the paths that a pack's row names."""
    wanted, known = sorted(paths), set[str]()
    for at in range(0, len(wanted), _CHUNK):
        rows = connection.execute(
            sa.select(t.packs.c.path).where(t.packs.c.path.in_(wanted[at : at + _CHUNK]))
        )
        known.update(row.path for row in rows)
    return known


@dataclass(frozen=True)
class PackEnd:
    """Up to where a pack's named extents reach."""

    path: str
    num_extents: int
    end: int

    def what_is_missing(self, size: int) -> str | None:
        """Return what a file of `size` bytes (0: there is none) lacks of them; None when it holds all."""
        if size >= self.end:
            return None
        return f"{self.num_extents} named extents reach to byte {self.end}, the file to {size}"


def pack_ends(connection: Connection) -> list[PackEnd]:
    """Return for each pack that is not condemned up to which byte its extents reach, those in quarantine apart."""
    e = t.extents.c
    rows = connection.execute(
        sa.select(t.packs.c.path, sa.func.count(), sa.func.max(e.offset + e.length))
        .join(t.packs, t.packs.c.pack_id == e.pack_id)
        .where(
            t.packs.c.state != PackState.CONDEMNED,
            ~sa.exists().where(t.quarantine.c.extent_id == e.extent_id),
        )
        .group_by(t.packs.c.path)
        .order_by(t.packs.c.path)
    )
    return [PackEnd(path, int(count), int(end)) for path, count, end in rows]


@dataclass(frozen=True)
class Folders:
    """What the index says of the folders of checkpoints and weights."""

    kept: frozenset[str]
    """Paths whose row has its files."""
    removed: frozenset[str]
    """Paths whose row says that the files are removed."""
    trainer_fences: frozenset[int]
    """Fences under which a live trainer may still commit a folder."""


def folders(connection: Connection) -> Folders:
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for table in (t.checkpoints, t.weight_versions):
        for row in connection.execute(sa.select(table.c.path, table.c.files_removed)):
            found[bool(row.files_removed)].add(row.path)
    held = sa.select(t.roles.c.fence).join(t.sessions, t.sessions.c.session_id == t.roles.c.session_id)
    of_trainers = held.where(t.sessions.c.state == SessionState.LIVE, t.roles.c.role.startswith("consume:"))
    fences = frozenset(row.fence for row in connection.execute(of_trainers))
    return Folders(frozenset(found[False]), frozenset(found[True] - found[False]), fences)


_MOVE = Prepared(
    'UPDATE extents SET pack_id = :pack_id, "offset" = CAST(r.value->>3 AS BIGINT) FROM {each} '
    "WHERE extents.extent_id = CAST(r.value->>0 AS BIGINT) AND extents.pack_id = CAST(r.value->>1 AS BIGINT) "
    'AND extents."offset" = CAST(r.value->>2 AS BIGINT)'
)


def extent_ids_of_kind(connection: Connection, kind: str) -> list[int]:
    """Return the ids of all extents of a kind, in the order they were named."""
    rows = connection.execute(
        sa.select(t.extents.c.extent_id)
        .join(t.packs, t.packs.c.pack_id == t.extents.c.pack_id)
        .where(t.packs.c.kind == kind)
        .order_by(t.extents.c.extent_id)
    )
    return [row.extent_id for row in rows]


def move_extents(connection: Connection, pack_id: int, moved: Iterable[tuple[Extent, Extent]]) -> int:
    """Point extents (old place, new place) at the copies of their bytes in a pack; returns how many still lay at the old.

    The packs of both are to be locked before.
    """
    rows = rows_value((old.extent_id, old.pack_id, old.offset, new.offset) for old, new in moved)
    return _MOVE.count(connection, pack_id=pack_id, rows=rows)


def still_compactable(connection: Connection, pack_ids: Iterable[int], *, quiet_s: float) -> set[int]:
    """Return those of the (locked) packs that are quiet and not pinned."""
    rows = connection.execute(
        sa.select(t.packs.c.pack_id).where(
            t.packs.c.pack_id.in_(list(pack_ids)),
            _is_quiet(connection, age_s=quiet_s),
            ~is_pinned(PinKind.PACK),
        )
    )
    return {row.pack_id for row in rows}
