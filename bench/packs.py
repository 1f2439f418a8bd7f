"""strawflow's packs without an index: opaque records of one size, and one big array, appended and read back."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from strawflow.ids import Extent
from strawflow.packs.probe import Durability
from strawflow.packs.reader import PackReader
from strawflow.packs.store import PackStore
from strawflow.packs.tensors import read_tensor_rows, to_tensor_batches

AT_ONCE = 64
"""Extents that `read_many` is given in one call."""


class PackRecords:
    """Records of `num_bytes` random bytes in packs of kind `tensor`, each an extent of its own."""

    def __init__(self, folder: Path, *, num_bytes: int, durability: Durability = "host") -> None:
        self.num_bytes = num_bytes
        self._folder = folder
        payloads = [os.urandom(num_bytes) for _ in range(max(1, min(64, 2**25 // num_bytes)))]
        self._batches = [
            batch
            for payload in payloads
            for batch in to_tensor_batches("record", np.frombuffer(payload, np.uint8))
        ]
        self._extents: list[Extent] = []
        self._store = _store(folder, durability)
        self._reader = PackReader(folder)

    def close(self) -> None:
        self._reader.close()
        self._store.close()

    def append(self, count: int) -> float:
        """Append records one by one, each durable before the next; returns bytes per second."""
        started = time.perf_counter()
        for number in range(count):
            self._store.append("tensor", self._batches[number % len(self._batches)])
        return count * self.num_bytes / (time.perf_counter() - started)

    def fill(self, count: int) -> Path:
        """Write and seal what `read` will read; returns the pack's place. Not measured."""
        batches = [self._batches[number % len(self._batches)] for number in range(count)]
        self._extents = self._store.append_many("tensor", batches)
        self._store.seal("tensor")
        return self._folder / self._extents[0].path

    def read(self) -> float:
        """Read every record of the sealed pack, checked, one by one; returns bytes per second."""
        started = time.perf_counter()
        for extent in self._extents:
            self._reader.read(extent, sealed=True)
        return len(self._extents) * self.num_bytes / (time.perf_counter() - started)

    def read_many(self) -> float:
        """Read the same, `AT_ONCE` records a call; returns bytes per second."""
        started = time.perf_counter()
        for first in range(0, len(self._extents), AT_ONCE):
            self._reader.read_many(self._extents[first : first + AT_ONCE], sealed=True)
        return len(self._extents) * self.num_bytes / (time.perf_counter() - started)


class StoredArray:
    """One array in a pack, cut where data-parallel slices begin."""

    def __init__(self, folder: Path, extents: list[Extent]) -> None:
        self._reader = PackReader(folder)
        self._extents = extents

    @classmethod
    def write(cls, folder: Path, places: Path, array: npt.NDArray[np.float32], *, slices: int) -> None:
        """Store the array; `places` is where `known` finds it again."""
        step = len(array) // slices
        batches = to_tensor_batches("batch", array, cuts=list(range(0, len(array), step)))
        with _store(folder, "process") as store:
            extents = store.append_many("tensor", batches)
        fields = [{**vars(extent), "digests": extent.digests.hex()} for extent in extents]
        places.write_text(json.dumps(fields), encoding="utf-8")

    @classmethod
    def known(cls, folder: Path, places: Path) -> StoredArray:
        fields = json.loads(places.read_text(encoding="utf-8"))
        return cls(folder, [Extent(**{**each, "digests": bytes.fromhex(each["digests"])}) for each in fields])

    def read(self, start: int, stop: int) -> npt.NDArray[np.generic]:
        """Read rows, checked; those of one extent are a view of the mapped file."""
        return read_tensor_rows(self._reader, self._extents, start, stop, sealed=True)


def _store(folder: Path, durability: Durability) -> PackStore:
    ids = itertools.count(1)
    return PackStore(
        folder,
        "bench",
        durability=durability,
        on_create=lambda created: next(ids),
        on_seal=lambda sealed: None,
        max_pack_bytes=2**40,
    )
