"""What the machine itself can do with the same bytes: the floor that every figure is set against."""

from __future__ import annotations

import mmap
import os
import sqlite3
import time
from pathlib import Path

import numpy as np


def append_and_sync(path: Path, pieces: list[bytes]) -> float:
    """Append the pieces one by one, each with its own fdatasync; returns the seconds it took."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        started = time.perf_counter()
        for piece in pieces:
            view = memoryview(piece)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fdatasync(descriptor)
        return time.perf_counter() - started
    finally:
        os.close(descriptor)


def write(path: Path, piece: bytes) -> float:
    """Append a piece, no sync; returns the seconds it took: what the page cache takes."""
    with path.open("ab", buffering=0) as file:
        started = time.perf_counter()
        view = memoryview(piece)
        while view:
            view = view[file.write(view) :]
        return time.perf_counter() - started


class TwoSyncs:
    """What a durable cycle cannot do without: bytes appended and synced, then a row for each in an SQLite log, synced too."""

    def __init__(self, place: Path) -> None:
        """Work in two new files beside `place`, of its name."""
        self._file = place.with_suffix(".raw")
        self._database = sqlite3.connect(place.with_suffix(".sqlite"), isolation_level=None)
        for statement in (
            "PRAGMA journal_mode=WAL",
            "PRAGMA synchronous=FULL",
            "CREATE TABLE names (place INTEGER PRIMARY KEY, digests BLOB)",
        ):
            self._database.execute(statement)

    def cycles(self, pieces: list[bytes], *, window: int) -> float:
        """Append the pieces, `window` of them to a sync and a transaction; returns cycles per second."""
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            started = time.perf_counter()
            for start in range(0, len(pieces), window):
                together = pieces[start : start + window]
                os.writev(descriptor, together)
                os.fdatasync(descriptor)
                self._database.execute("BEGIN IMMEDIATE")
                self._database.executemany(
                    "INSERT INTO names (digests) VALUES (?)", [(piece[:16],) for piece in together]
                )
                self._database.execute("COMMIT")
            return len(pieces) / (time.perf_counter() - started)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        self._database.close()


class MappedFile:
    """A file that is there, mapped once, whose bytes can be summed."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as source:
            self._map = mmap.mmap(source.fileno(), 0, prot=mmap.PROT_READ)

    def sum(self, piece: int) -> float:
        """Sum all 64-bit words, `piece` bytes at a time; returns bytes per second."""
        words = np.frombuffer(self._map, np.uint64, count=len(self._map) // 8)
        step = piece // 8
        total = np.uint64(0)
        started = time.perf_counter()
        with np.errstate(over="ignore"):
            for start in range(0, len(words), step):
                total += words[start : start + step].sum()
        return words.nbytes / (time.perf_counter() - started)
