"""Tie a process's life to the one that started it, so that a kill of the parent leaves nothing running (Linux).

The kernel's parent-death signal (prctl(2), PR_SET_PDEATHSIG) is sent when the *thread* that forked this process ends. A
parent that is gone before the call is found by its pid, which the caller hands over.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; end at once when it already has.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
