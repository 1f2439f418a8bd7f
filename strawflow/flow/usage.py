"""Where the bytes of a run lie: by kind of pack, how much of them is named, and what is free; read-only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from strawflow.flow import quota
from strawflow.flow.quota import Room
from strawflow.flow.run import Run
from strawflow.flow.sweep import quiet_s
from strawflow.index import liveness
from strawflow.packs.places import open_place
from strawflow.packs.scan import list_files
from strawflow.states import PackState


@dataclass(frozen=True)
class KindUse:
    """Packs of one kind."""

    kind: str
    num_files: int
    num_bytes: int
    """As they lie on disk, condemned ones included."""
    named_bytes: int
    """Of extents that something names."""

    @property
    def live_share(self) -> float | None:
        return self.named_bytes / self.num_bytes if self.num_bytes else None


@dataclass(frozen=True)
class Usage:
    kinds: tuple[KindUse, ...]
    unknown_files: int
    """Files among the packs that no row names."""
    unknown_bytes: int
    condemned_bytes: int
    """Of packs whose files go once the grace is over."""
    disk_bytes: dict[str, int]
    """Of each folder, and of an SQLite index with its log."""
    room: Room
    shortage: str | None


def usage_of(run: Run) -> Usage:
    """Measure a run now; reads every extent's row and the size of every file."""
    sizes = list_files(open_place(run.root))
    with run.index.read() as connection:
        uses = liveness.pack_uses(connection, quiet_s=quiet_s(run))
    kinds = []
    for kind in sorted({use.kind for use in uses}):
        of_kind = [use for use in uses if use.kind == kind]
        there = [use for use in of_kind if use.path in sizes]
        kinds.append(
            KindUse(
                kind=kind,
                num_files=len(there),
                num_bytes=sum(sizes[use.path] for use in there),
                named_bytes=sum(use.named_bytes for use in of_kind),
            )
        )
    unknown = sizes.keys() - {use.path for use in uses}
    disk_bytes = quota.disk_use(run)
    room = replace(quota.measure(run), used_bytes=sum(disk_bytes.values()))
    return Usage(
        kinds=tuple(kinds),
        unknown_files=len(unknown),
        unknown_bytes=sum(sizes[path] for path in unknown),
        condemned_bytes=sum(sizes.get(u.path, 0) for u in uses if u.state is PackState.CONDEMNED),
        disk_bytes=disk_bytes,
        room=room,
        shortage=room.shortage,
    )
