"""Tie a process's life to its parent's with Linux's parent-death signal (see prctl(2), PR_SET_PDEATHSIG).

1. After `arm()` the kernel sends SIGKILL to this process when the *thread* that forked it ends: whoever starts a
   process that arms itself does so from a thread that lives as long as the process should.
2. The parent may already be gone when `arm()` runs; so the pid it left in STRAWFLOW_GUARDIAN_PID must still be an
   ancestor, else this process kills itself. Each armed process leaves its own pid there for its children.
3. The signal is cleared by fork, so a fork hook arms the child again.
4. Python's resource tracker is left alone: it ends by itself when the last writer of its pipe is gone, after it has
   removed leaked shared memory, and any short-lived thread may be the one that started it.

Standard library only: this runs in interpreters that are not ours. Without prctl (not Linux) it does nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

GUARDIAN_VARIABLE = "STRAWFLOW_GUARDIAN_PID"
_PR_SET_PDEATHSIG = 1


def arm(guardian: int | None = None) -> None:
    """Die with the parent from now on; `guardian` (default: the pid in the environment) must still be an ancestor."""
    if not sys.platform.startswith("linux"):
        return
    if any("multiprocessing.resource_tracker" in word for word in sys.orig_argv):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    expected = guardian if guardian is not None else int(os.environ.get(GUARDIAN_VARIABLE) or 0)
    _set_death_signal(libc)
    if expected and not _is_ancestor(expected):
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ[GUARDIAN_VARIABLE] = str(os.getpid())
    os.register_at_fork(after_in_child=lambda: _rearm_after_fork(libc))


def _rearm_after_fork(libc: ctypes.CDLL) -> None:
    _set_death_signal(libc)
    if os.getppid() != int(os.environ[GUARDIAN_VARIABLE]):  # the parent died between fork and prctl
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ[GUARDIAN_VARIABLE] = str(os.getpid())


def _set_death_signal(libc: ctypes.CDLL) -> None:
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def _is_ancestor(pid: int) -> bool:
    current = os.getppid()
    while current > 1 and current != pid:
        try:
            with open(f"/proc/{current}/stat", "rb") as stat:
                current = int(stat.read().rpartition(b")")[2].split()[1])
        except FileNotFoundError:
            return False
    return current == pid
