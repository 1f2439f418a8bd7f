"""Beginning an incarnation of the index: the entry that makes the next one higher, whatever becomes of this one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from strawflow.config import RunConfig
from strawflow.flow import journal
from strawflow.flow.journal import Entry, EntryKind
from strawflow.flow.run import MAIN_BRANCH
from strawflow.ids import new_id
from strawflow.index import found_extents
from strawflow.index.engine import Connection
from strawflow.packs.scan import FOLDER
from strawflow.packs.writer import PackWriter


def begin_incarnation(connection: Connection, root: Path, config: RunConfig, incarnation: int) -> None:
    """Write down in the journal that this incarnation was begun, so that the next one is above it whatever became of it.

    The entry is durable before it is named in this transaction; without a folder of packs there is nothing to tell.
    """
    if not (root / FOLDER).is_dir():
        return
    path = f"{FOLDER}/{journal.KIND}/{new_id('incarnation')}.arrow"
    writer = PackWriter(root, pack_id=0, path=path, kind=journal.KIND, durability=config.run.durability)
    entry = Entry(EntryKind.INCARNATION, MAIN_BRANCH, {})
    extent = writer.append(journal.to_rows([entry], incarnation=incarnation))
    writer.seal()
    pack = found_extents.add_pack(
        connection, kind=journal.KIND, path=path, is_sealed=True, num_bytes=writer.length
    )
    found_extents.add_extent(connection, replace(extent, pack_id=pack.pack_id))
