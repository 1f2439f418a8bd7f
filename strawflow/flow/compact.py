"""Compaction: the named extents of half-empty and of small packs are copied together into new ones.

    copies durable under a new name ▸ transaction(extents moved, old packs condemned) ▸ grace ▸ swept

1. An extent keeps its id and its bytes, so every digest over it stays what it was. One whose rows this program would write
   in other bytes (another release of Arrow, say) stays where it is, and so does its pack.
2. Only quiet packs (index.liveness) that are not pinned are taken; that is asked again under their locks, and only an
   extent that still lies where it was read is moved.
3. Readers of an old pack go on: its file stays for the grace, and who comes later asks the index again (flow.placed).
4. A kill before the transaction leaves a pack that names nothing, which recovery condemns; after it, the sweep finishes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pyarrow as pa

from strawflow import faults
from strawflow.errors import CorruptPackError, InvalidInputError, StorageError
from strawflow.flow import journal, quota
from strawflow.flow.index_place import SWEEP_BLOCKED
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.flow.sweep import Collected, Item, drop_unnamed_rows, quiet_s, refuse_if_blocked
from strawflow.ids import Extent
from strawflow.index import events, liveness, meta, packs, sessions
from strawflow.index.liveness import PackUse
from strawflow.packs.reader import PackReader
from strawflow.packs.store import MAX_PACK_BYTES
from strawflow.packs.writer import PackWriter
from strawflow.plural import counted
from strawflow.records import schema_of

SMALL_BYTES = 16 * 1024 * 1024
"""A pack below this is small: packs of one kind are merged once there are MERGED_FROM of them."""

MERGED_FROM = 4

_FOOTER_ENTRY_BYTES = 32

MIN_LIVE = 0.5


@dataclass(frozen=True)
class Group:
    """Packs of one kind whose named extents fit into one new pack."""

    kind: str
    sources: tuple[PackUse, ...]

    @property
    def named_bytes(self) -> int:
        return sum(use.named_bytes for use in self.sources)


def plan_compaction(run: Run, *, min_live: float = MIN_LIVE) -> Collected:
    """Say what `compact` would do; changes nothing. Raises what it would."""
    return Collected(False, [_item(use) for group in _groups(run, min_live) for use in group.sources])


def compact(session: WorkerSession, *, min_live: float = MIN_LIVE) -> Collected:
    """Rewrite packs whose named share of bytes is below `min_live`, and merge small ones; their files go with a sweep.

    Raises:
        InvalidInputError: `min_live` is not a share.
        ConflictError: sweeping is blocked until packs were matched against the index.
        LeaseLostError: the session was declared lost; what was done is done.
        StorageError: there is no room for the copies, or the disk or the index did not answer.
    """
    done = Collected(True)
    drop_unnamed_rows(session)
    for group in _groups(session.run, min_live):
        _require_room(session.run, group)
        done.items += _compact(session, group)
    return done


def bring_out(session: WorkerSession, paths: Sequence[str]) -> None:
    """Copy what is whole in these packs into new ones, each for itself; what is damaged stays, and so does its pack.

    Nothing is copied of packs that are pinned or not quiet, and none while sweeping is blocked or the disk is full.
    """
    with session.run.index.read() as connection:
        if not paths or meta.find(connection, SWEEP_BLOCKED) is not None:
            return
        uses = liveness.pack_uses(connection, quiet_s=quiet_s(session.run))
    for use in uses:
        if use.path in paths and use.is_quiet and not use.is_pinned:
            group = Group(use.kind, (use,))
            if quota.measure(session.run).free_bytes >= group.named_bytes:
                _compact(session, group)


def _groups(run: Run, min_live: float) -> list[Group]:
    if not 0.0 <= min_live <= 1.0:
        raise InvalidInputError(f"--min-live is {min_live}; it is a share, from 0 to 1")
    with run.index.read() as connection:
        refuse_if_blocked(connection)
        uses = liveness.pack_uses(connection, quiet_s=quiet_s(run))
    # What nothing names is for the sweep alone.
    uses = [use for use in uses if use.is_quiet and not use.is_pinned and use.num_named]
    groups = []
    for kind in sorted({use.kind for use in uses}):
        of_kind = [use for use in uses if use.kind == kind]
        small = [use for use in of_kind if (use.num_bytes or 0) < SMALL_BYTES]
        merged = {use.pack_id for use in small} if len(small) >= MERGED_FROM else set()
        groups += _packed([u for u in of_kind if u.pack_id in merged or live_share(u) < min_live])
    return groups


def _packed(uses: Iterable[PackUse]) -> list[Group]:
    """Put packs together, in the order of their names, until a new one is full."""
    groups: list[list[PackUse]] = []
    for use in uses:
        if not groups or sum(u.named_bytes for u in groups[-1]) + use.named_bytes > MAX_PACK_BYTES:
            groups.append([])
        groups[-1].append(use)
    return [Group(group[0].kind, tuple(group)) for group in groups]


def _require_room(run: Run, group: Group) -> None:
    room = quota.measure(run)
    if room.free_bytes < group.named_bytes:
        raise StorageError(
            f"compaction needs {group.named_bytes} bytes for copies and {run.root} has {room.free_bytes} free; sweep first",
        )


def _compact(session: WorkerSession, group: Group) -> list[Item]:
    run = session.run
    reader = PackReader(run.root)
    sources = [use for use in group.sources if _keeps_bytes(run, reader, use)]
    if not sources:
        return []
    target = session.pack_for_copies(group.kind, purpose="compact")
    try:
        moved = _copy(session, reader, sources, target)
        target.seal()
    except BaseException as error:
        target.abandon(f"compaction broke off: {error}")
        raise
    finally:
        reader.close()
    faults.at("compact.before_commit")  # crash here: a pack that names nothing, its writer gone
    condemned = _commit(session, sources, target, moved)
    faults.at("compact.after_commit")  # crash here: condemned packs whose files the sweep removes
    return [_item(use) for use in sources if use.pack_id in condemned]


def _copy(
    session: WorkerSession, reader: PackReader, sources: Sequence[PackUse], target: PackWriter
) -> list[tuple[Extent, Extent]]:
    """Append the sources' extents to the target; returns (old place, new place) of those with equal bytes."""
    moved = []
    for use in sources:
        with session.run.index.read() as connection:
            extents = packs.extents_of_pack(connection, use.pack_id)
        for extent in extents:
            session.mark_progress()
            try:
                copy = target.append(reader.read(extent))
            except CorruptPackError:
                continue  # it stays, for whoever repairs it
            if _is_same(extent, copy):
                moved.append((extent, copy))
    return moved


def _commit(
    session: WorkerSession,
    sources: Sequence[PackUse],
    target: PackWriter,
    moved: Sequence[tuple[Extent, Extent]],
) -> set[int]:
    """Move the extents and condemn the packs that are then empty; returns these."""
    run = session.run
    checksums = journal.checksums(run.branch, (new for _, new in moved))
    with journal.recorded(session, checksums) as record, run.index.begin() as connection:
        sessions.require_live(connection, session.session_id)
        refuse_if_blocked(connection)
        record.name(connection)
        packs.lock_packs(connection, [target.pack_id, *(use.pack_id for use in sources)])
        kept = liveness.still_compactable(connection, [use.pack_id for use in sources], quiet_s=quiet_s(run))
        num_moved = liveness.move_extents(
            connection, target.pack_id, [(old, new) for old, new in moved if old.pack_id in kept]
        )
        packs.seal(
            connection, target.pack_id, path=target.path, num_bytes=target.length, num_rows=target.num_rows
        )
        condemned = {pack_id for pack_id in sorted(kept) if packs.condemn(connection, pack_id)}
        events.record(
            connection,
            "packs.compacted",
            session_id=session.session_id,
            path=target.path,
            num_packs=len(condemned),
            num_extents=num_moved,
            num_bytes=target.length,
        )
    return condemned


def _keeps_bytes(run: Run, reader: PackReader, use: PackUse) -> bool:
    """Tell whether the first readable extent of a pack is written in the same bytes again; else copying is in vain."""
    with run.index.read() as connection:
        extents = packs.extents_of_pack(connection, use.pack_id)
    scratch = PackWriter(_Nowhere(), pack_id=0, path="", kind=use.kind, durability="process")
    for extent in extents:
        try:
            return _is_same(extent, scratch.append(reader.read(extent)))
        except CorruptPackError:
            continue
    return False


def _is_same(old: Extent, new: Extent) -> bool:
    return (old.length, old.num_rows, old.digests) == (new.length, new.num_rows, new.digests)


class _Nowhere:
    """A place whose files are not kept: what was written is only measured."""

    appends = True

    def create(self, path: str, head: bytes, *, durability: Any) -> _Nowhere:
        return self

    def write(self, pieces: Sequence[Any]) -> None:
        pass

    def sync(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass

    def open(self, path: str) -> Any:
        raise FileNotFoundError(path)

    def sizes(self, folder: str) -> dict[str, int]:
        return {}

    def remove(self, path: str) -> None:
        pass


@cache
def _frame_bytes(kind: str) -> int:
    """Return what magic, schema and footer of a pack take."""
    sink = pa.BufferOutputStream()
    pa.ipc.new_file(sink, schema_of(kind)).close()
    return int(sink.getvalue().size)


def live_share(use: PackUse) -> float:
    """Return the share of a pack's messages that is named; 1 where the size is not known."""
    messages = (use.num_bytes or 0) - _frame_bytes(use.kind) - _FOOTER_ENTRY_BYTES * use.num_extents
    return use.named_bytes / messages if messages > use.named_bytes else 1.0


def _item(use: PackUse) -> Item:
    moved = counted(use.num_named, "named extent moves", "named extents move")
    why = f"{moved} to another pack, {live_share(use):.0%} of its messages"
    return Item("pack", use.path, why, 0, later_bytes=max(0, (use.num_bytes or 0) - use.named_bytes))
