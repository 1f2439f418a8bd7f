"""Saved progress as it lies in packs, put together to chains again: what a rebuild goes on with of units without a result.

A chain counts from the record that goes on from the prompt. One that lacks a record in between counts up to that gap, so a
group loses at most what was sampled after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from strawflow.flow.found_results import FoundGroup
from strawflow.ids import Extent
from strawflow.index.leases import Key


@dataclass
class FoundProgress:
    """Records of many units, in whatever order they are found."""

    _records: dict[int, dict[Key, tuple[Extent, FoundGroup]]] = field(default_factory=dict)

    def add(self, extent: Extent, group: FoundGroup) -> None:
        """Take a record: a group of a message of kind continuation (whole) or progress."""
        self._records.setdefault(group.unit_id, {})[group.fence, group.seq] = (extent, group)

    def chains(self) -> Iterator[list[tuple[Extent, FoundGroup]]]:
        """Yield of each unit that has one the chain that ends newest: its records in order, the whole one first."""
        for records in self._records.values():
            for key in sorted(records, reverse=True):
                if chain := _back_from(records, key):
                    yield chain
                    break


def _back_from(
    records: dict[Key, tuple[Extent, FoundGroup]], key: Key
) -> list[tuple[Extent, FoundGroup]] | None:
    """Return the records up to `key`, from the whole one on; None when one is missing."""
    chain = []
    at: Key | None = key
    while at is not None:
        if at not in records:
            return None
        chain.append(records[at])
        before = records[at][1].after
        if before is not None and before >= at:  # would lead in a circle
            return None
        at = before
    return chain[::-1]
