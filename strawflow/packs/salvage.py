"""Recovery of a pack whose writer died: the extents that the index names are copied to a new pack and sealed there.

1. The source is only read; nothing on the share is replaced in place.
2. An extent keeps its id, its rows and its version, so its bytes too, and gets a new place; the caller moves the rows of the index in one transaction.
3. A damaged extent is reported and left behind, and does not stop the others.
4. That the writer is dead, and fenced off, is the caller's to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from strawflow.errors import CorruptPackError, InvalidInputError
from strawflow.ids import Extent
from strawflow.packs.places import Place
from strawflow.packs.reader import PackReader
from strawflow.packs.writer import PackWriter
from strawflow.records import as_written


@dataclass(frozen=True)
class CorruptExtent:
    """An extent that could not be copied, and why."""

    extent: Extent
    reason: str


@dataclass(frozen=True)
class Salvaged:
    """Where each extent lies now, by extent id, and which were left behind."""

    moved: dict[int, Extent]
    corrupt: tuple[CorruptExtent, ...]


def salvage(root: str | Path | Place, extents: Sequence[Extent], *, target: PackWriter) -> Salvaged:
    """Copy `extents`, in the given order, to `target` and seal it; durable at the target's level on return.

    Raises:
        InvalidInputError: an extent is of another kind than the target, lies in it, or is named twice.
        StorageError: a source is missing or the target failed; the target is ended, nothing else has changed.
    """
    try:
        _check(extents, target)
        reader = PackReader(root)
        moved: dict[int, Extent] = {}
        corrupt: list[CorruptExtent] = []
        for extent in extents:
            try:
                batch = as_written(reader.read(extent), reader.stored_schema(extent))
            except CorruptPackError as error:
                corrupt.append(CorruptExtent(extent, error.message))
                continue
            moved[extent.extent_id] = replace(target.append(batch), extent_id=extent.extent_id)
        target.seal()
    except BaseException as error:
        target.abandon(f"salvage broke off: {error}")
        raise
    return Salvaged(moved, tuple(corrupt))


def _check(extents: Sequence[Extent], target: PackWriter) -> None:
    if len({extent.extent_id for extent in extents}) != len(extents):
        raise InvalidInputError(f"the extents to salvage into {target.path} name one twice")
    for extent in extents:
        if extent.extent_id == 0:
            raise InvalidInputError(
                f"{extent.place} is not named by the index; only named extents can be salvaged into {target.path}"
            )
        if extent.kind != target.kind or extent.pack_id == target.pack_id:
            raise InvalidInputError(
                f"{extent.place}, of kind {extent.kind!r}, cannot be salvaged into "
                f"{target.path} of kind {target.kind!r}"
            )
