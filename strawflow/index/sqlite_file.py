"""What the file system lets one do with an SQLite file: whether it can only be read, and what stands in the way.

1. SQLite in WAL mode makes two files beside the index even to read it. Where nobody can write, it is read without them; that is
   sound only there: a file that others may write is never opened so.
2. Nothing is changed here.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from urllib.parse import quote

_LOG = "-wal"


def is_read_only(file: Path) -> bool:
    """Tell whether the file lies on a file system that takes no writes from anybody here."""
    try:
        return bool(os.statvfs(file).f_flag & os.ST_RDONLY)
    except OSError:
        return False  # it is not there, or cannot be asked: opening it tells


def connect_frozen(file: Path, *, timeout_s: float) -> sqlite3.Connection:
    """Open a file of a read-only file system, as it was left, with the log of whoever was killed at it."""
    log = file.with_name(file.name + _LOG)
    has_log = log.exists() and log.stat().st_size > 0
    mode = "mode=ro" if has_log else "immutable=1"
    return sqlite3.connect(
        f"file:{quote(str(file.absolute()))}?{mode}", uri=True, timeout=timeout_s, check_same_thread=False
    )


def obstacle(file: Path) -> str:
    """Say what stands in the way of writing the file, and what to do; empty where the file system tells of nothing."""
    if not file.parent.is_dir():
        return f"{file.parent} does not exist"
    if is_read_only(file):
        return "it lies on a read-only file system: it can be looked at; mount it writable to go on"
    beside = [file, *(file.with_name(file.name + end) for end in (_LOG, "-shm"))]
    for path in [file.parent, *(path for path in beside if path.exists())]:
        if not os.access(path, os.R_OK | os.W_OK):
            return f"this user may not read and write {path}: give it back its permissions"
    return ""
