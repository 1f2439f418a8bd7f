"""Room on the disk: what the run takes, what is free, and who has to stop before there is none.

1. While less is free than the reserve nothing new begins: no unit is admitted, none is claimed. What is leased goes on
   and may complete into the reserve.
2. Once half of the reserve is used, appends raise StorageError, before the disk itself refuses: retention and sweep need
   room to work. What they write themselves is not held up.
3. The reserve is storage.min_free_bytes, at most 5 % of the disk; beneath a quota it is 5 % of the quota.
4. A look is taken at most once a second, and at most a twentieth of the time is spent on it; in between the last one is
   good. Free space is one system call; only a quota needs a walk through the run's folder.
5. The index notes a shortage when it begins and when it ends, once for all workers.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from strawflow.errors import CommitUnknownError, StorageError
from strawflow.flow.run import Run
from strawflow.index import dump, events, meta
from strawflow.index.engine import Index

log = logging.getLogger(__name__)

UPKEEP = "storage"
"""Kind of the sessions that make room: they may write while others may not."""

SHORTAGE = "storage_short"
"""Key in meta: why nothing is admitted or claimed now."""

_LOOK_EVERY_S = 1.0
_SHARE_OF_TIME = 20
_SHARE_OF_RESERVE = 20
_FOLDERS = ("packs", "weights", "checkpoints", "backups", "logs")


@dataclass(frozen=True)
class Room:
    """One look: bytes."""

    root: Path
    quota_bytes: int
    """0: no quota."""
    used_bytes: int
    """By the run's folder and its SQLite index; 0 without a quota, it is not counted then."""
    free_bytes: int
    """On the disk of the run or of its SQLite index, whichever has less."""
    reserve_bytes: int

    @property
    def shortage(self) -> str | None:
        """Why nothing may begin now; None while there is room."""
        return self._what_is_short(1.0)

    @property
    def exhaustion(self) -> str | None:
        """Why nothing may be appended now; None while there is room."""
        return self._what_is_short(0.5)

    def _what_is_short(self, share_of_reserve: float) -> str | None:
        kept = self.quota_bytes // _SHARE_OF_RESERVE * share_of_reserve
        if self.quota_bytes and self.used_bytes > self.quota_bytes - kept:
            return f"{self.root} takes {self.used_bytes} of the {self.quota_bytes} bytes of its quota (storage.quota_bytes)"
        if self.free_bytes < self.reserve_bytes * share_of_reserve:
            return (
                f"the disk of {self.root} has {self.free_bytes} bytes free, of {self.reserve_bytes} that are kept in "
                "reserve (storage.min_free_bytes)"
            )
        return None


def measure(run: Run) -> Room:
    """Look at the disk now; what the run takes is counted when it has a quota."""
    storage = run.config.storage
    places = [run.root]
    if (index_file := dump.sqlite_file(run.index.url)) is not None:
        places.append(index_file.parent)
    disks = [os.statvfs(place) for place in places]
    return Room(
        root=run.root,
        quota_bytes=storage.quota_bytes,
        used_bytes=sum(disk_use(run).values()) if storage.quota_bytes else 0,
        free_bytes=min(disk.f_bavail * disk.f_frsize for disk in disks),
        reserve_bytes=min(
            [storage.min_free_bytes, *(d.f_blocks * d.f_frsize // _SHARE_OF_RESERVE for d in disks)]
        ),
    )


def disk_use(run: Run) -> dict[str, int]:
    """Return the bytes of each folder of a run and of its SQLite index, wherever that lies."""
    return {**{folder: tree_bytes(run.root / folder) for folder in _FOLDERS}, "index": index_bytes(run)}


def index_bytes(run: Run) -> int:
    """Return the size of an SQLite index and its log; 0 for a server's."""
    file = dump.sqlite_file(run.index.url)
    return 0 if file is None else sum(_file_bytes(path) for path in file.parent.glob(f"{file.name}*"))


def tree_bytes(folder: Path) -> int:
    """Return the bytes of a folder's files; those that vanish meanwhile count 0."""
    return sum(_file_bytes(Path(parent, name)) for parent, _, names in os.walk(folder) for name in names)


def _file_bytes(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


class Gauge:
    """The last look at a run's disk, renewed when it is old; safe for threads."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._room = measure(run)
        self._good_until = time.monotonic() + _LOOK_EVERY_S
        self._lock = threading.Lock()
        self._noted: bool | None = None

    def room(self) -> Room:
        """Return the last look; opens no transaction, so it may be asked inside of one."""
        if time.monotonic() >= self._good_until and self._lock.acquire(blocking=False):
            try:
                started = time.monotonic()
                self._room = measure(self._run)
                took_s = time.monotonic() - started
                self._good_until = time.monotonic() + max(_LOOK_EVERY_S, took_s * _SHARE_OF_TIME)
            finally:
                self._lock.release()
        return self._room

    def is_short(self) -> bool:
        """Tell whether nothing may begin now."""
        return self.room().shortage is not None

    def watch(self) -> bool:
        """Tell whether nothing may begin now, and note in the index when that changes; not inside a transaction."""
        shortage = self.room().shortage
        if (shortage is not None) != self._noted:
            self._note(shortage)
        return shortage is not None

    def require_room(self) -> None:
        """Raise StorageError when nothing may be appended now."""
        room = self.room()
        if (why := room.exhaustion) is not None:
            raise StorageError(
                f"{why}; nothing more is written before there is room: `strawflow storage retain {room.root}` and "
                f"`strawflow storage sweep {room.root}` say what can go, --yes removes it",
                used_bytes=room.used_bytes,
                quota_bytes=room.quota_bytes,
                free_bytes=room.free_bytes,
            )

    def _note(self, shortage: str | None) -> None:
        try:
            with self._run.index.begin() as connection:
                before = meta.find(connection, SHORTAGE)
                if shortage is not None and before is None:
                    meta.put(connection, SHORTAGE, shortage)
                    events.record(connection, "storage.short", why=shortage)
                elif shortage is None and before is not None:
                    meta.remove(connection, SHORTAGE)
                    events.record(connection, "storage.recovered")
        except (StorageError, CommitUnknownError) as error:  # the index may lie on the disk that is full
            log.warning("the shortage of storage could not be noted: %s", error)
            return
        self._noted = shortage is not None
        if shortage is not None:
            log.error("nothing is admitted or claimed: %s", shortage)


_gauges: WeakKeyDictionary[Index, Gauge] = WeakKeyDictionary()
_gauges_lock = threading.Lock()


def gauge(run: Run) -> Gauge:
    """Return the gauge that all who have this run open share."""
    with _gauges_lock:
        found = _gauges.get(run.index)
        if found is None:
            found = _gauges[run.index] = Gauge(run)
        return found
