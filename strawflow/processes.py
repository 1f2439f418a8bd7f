"""What can be told about processes of this machine, so that a dead worker's session need not wait for its expiry.

A pid alone names nothing for ever: it counts together with the boot, the pid namespace and the process's start time.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from strawflow import clock

_START_TIME_FIELD = 19  # field 22 of /proc/PID/stat, counted after the name in brackets; see proc(5)


@cache
def machine_id() -> str:
    """Return the boot id and the pid namespace of this process."""
    return f"{clock.boot_id()}/{Path('/proc/self/ns/pid').readlink()}"


def started_at(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None when it is gone or a zombie, which can do nothing."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[_START_TIME_FIELD])
