"""Making a path durable: the one place that opens a file or folder only to sync it.

A new name is durable once its folder was synced too.
"""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Bring a file's bytes, or a folder's names, to the disk.

    Raises:
        OSError: it cannot be opened or synced.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
