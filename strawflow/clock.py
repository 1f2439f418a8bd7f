"""Time on one host.

1. Leases in an SQLite index are judged by (boot id, seconds since boot): no wall-clock step can move them, and a
   reboot is seen as a new boot id that expires them all.
2. A worker trusts its lease by the monotonic clock only; wall time is for display.
3. Who waits for what another process will commit looks again and again (`look_until_found`): nothing would wake it.

It knows no index: what is looked for is the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")

BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")

_LOOK_EVERY_S = 0.05


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    return BOOT_ID_PATH.read_text(encoding="ascii").strip()


def uptime_s() -> float:
    """Return seconds since boot, suspend included; the same for every process of the host."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def wall_time() -> str:
    """Return UTC wall time for display, ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def wall_ms() -> int:
    """Return UTC wall time for display, milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def shown(at_ms: int) -> str:
    """Return milliseconds since 1970 as `wall_time` writes them."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")


def look_until_found(look: Callable[[], _T], *, wait_s: float) -> _T:
    """Look at least once, and again for up to `wait_s` seconds while nothing (false) is found; returns the last finding."""
    deadline = time.monotonic() + wait_s
    while not (found := look()) and (left_s := deadline - time.monotonic()) > 0:
        time.sleep(min(_LOOK_EVERY_S, left_s))
    return found


@dataclass(frozen=True)
class TrustedUntil:
    """How long a worker may trust a lease it asked for: request start + ttl - margin.

    Counted in seconds since boot, which go on while the machine is suspended, as the expiry in the index does.
    """

    deadline: float

    @classmethod
    def from_request(cls, requested_at: float, *, ttl_s: float, margin_s: float) -> TrustedUntil:
        return cls(requested_at + ttl_s - margin_s)

    def holds(self) -> bool:
        return uptime_s() < self.deadline
