"""What can be told about processes of this host."""

from __future__ import annotations

from pathlib import Path


def process_exists(pid: int) -> bool:
    """Tell whether a process runs; a zombie, which can do nothing any more, does not count."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
