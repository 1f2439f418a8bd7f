"""Reading extents where they lie now: resolve through the index, read, and once more if they were moved meanwhile.

1. An extent keeps its id; salvage and compaction move its place, and the old file goes after a grace. A reader that
   looked it up before and comes too late finds no file (or, on a share, an old view of it): it asks the index again.
2. Only what fails at a place that is still the right one is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import TypeVar

import pyarrow as pa

from strawflow.errors import CorruptPackError, StorageError
from strawflow.flow.run import Run
from strawflow.ids import Extent, RowRange
from strawflow.index import liveness, packs
from strawflow.packs.reader import PackReader

T = TypeVar("T")


def read_extent(run: Run, reader: PackReader, extent: Extent) -> pa.RecordBatch:
    """Return the rows of an extent that was looked up a while ago.

    Raises:
        CorruptPackError, StorageError: the bytes are damaged or missing where the index says now that they lie.
        NotFoundError: the index names no such extent any more.
    """
    return _read_again(run, extent, reader.read)


def read_rows(run: Run, reader: PackReader, rows: RowRange) -> pa.RecordBatch:
    """Return a range of an extent's rows; raises as `read_extent`, and InvalidInputError when the range leaves it."""
    return _read_again(
        run, rows.extent, lambda extent: reader.read_rows(RowRange(extent, rows.start, rows.count))
    )


def read_extents(
    run: Run, reader: PackReader, extent_ids: Iterable[int]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (id, rows) of extents, one at a time, each once; raises as `read_extent`."""
    with run.index.read() as connection:
        placed = packs.find_extents(connection, extent_ids)
    for extent_id, extent in placed.items():
        yield extent_id, read_extent(run, reader, extent)


def moved_rows(run: Run, kind: str, *, newest_first: bool = False) -> Iterator[pa.RecordBatch]:
    """Yield what left the index for packs of a kind, in the order it left; each piece keeps its own order."""
    with run.index.read() as connection:
        ids = liveness.extent_ids_of_kind(connection, kind)
    with closing(PackReader(run.root)) as reader:
        for extent_id in reversed(ids) if newest_first else ids:
            yield from (rows for _, rows in read_extents(run, reader, [extent_id]))


def _read_again(run: Run, extent: Extent, read: Callable[[Extent], T]) -> T:
    try:
        return read(extent)
    except (CorruptPackError, StorageError):
        with run.index.read() as connection:
            placed = packs.find_extents(connection, [extent.extent_id])[extent.extent_id]
        if placed == extent:
            raise  # the reader tried a fresh open already
    return read(placed)
