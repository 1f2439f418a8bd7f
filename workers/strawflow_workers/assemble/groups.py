"""Closed groups as the assembler holds them: a unit, its members' rows, and whether enough of them finished.

1. A row is one segment of a member; the rows of a member lie together, segment after segment.
2. Nothing is decided here but whether a group can be used; advantages are made in `scoring`, batches in `packing`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from strawflow.config import RunConfig
from strawflow.flow.payload import arrays_of
from strawflow.index.units import Unit
from strawflow_workers.rollout.hooks.converted import Shaped

Row = dict[str, Any]
"""A stored trajectory: one segment of a member; its `tensors` are arrays by name, or None."""


def rows_of(stored: pa.RecordBatch) -> list[Row]:
    """Return the stored trajectories of one unit as rows."""
    tensors = arrays_of(stored.column("tensors"))
    rows = stored.drop_columns(["tensors"]).to_pylist()
    return [{**row, "tensors": of_row} for row, of_row in zip(rows, tensors, strict=True)]


@dataclass
class Group:
    """A closed group: its unit and its members' rows, member after member, segment after segment."""

    unit: Unit
    rows: list[Row]
    advantages: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """Of each member."""
    shaped: Shaped | None = None
    """What the user's hooks made of it; None: they had no part in it. Its rows are `rows`."""

    @property
    def left_out(self) -> frozenset[tuple[int, int]]:
        """(member, segment) of rows that are not trained."""
        return frozenset() if self.shaped is None else self.shaped.left_out

    def advantage_of(self, row: Row, of_member: float) -> float | npt.NDArray[np.float32]:
        """Return what the tokens of a row are weighted by."""
        own = None if self.shaped is None else self.shaped.row_advantages.get((row["member"], row["segment"]))
        return of_member if own is None else own

    @property
    def members(self) -> list[list[Row]]:
        """The rows of each member."""
        return [list(rows) for _, rows in groupby(self.rows, key=itemgetter("member"))]

    @property
    def valid(self) -> npt.NDArray[np.bool_]:
        """Whether each member finished."""
        return np.array([first["status"] != "failed" for first, *_ in self.members], dtype=np.bool_)


def min_group_size(num_members: int) -> int:
    """Return how many members must remain for a group to be trained: max(2, half of them), 1 for a group of one."""
    return 1 if num_members == 1 else max(2, math.ceil(num_members / 2))


def is_usable(group: Group, config: RunConfig) -> bool:
    """Tell whether enough members of a group finished."""
    valid = group.valid
    num_valid = int(valid.sum())
    if config.assemble.failed_member == "drop-group" and num_valid < len(valid):
        return False
    return num_valid >= min_group_size(len(valid))
