"""Runs one program of unknown intent: limited, walled in where the kernel allows it, and gone when this returns.

1. Always: no more than the limits of CPU time, memory, processes, open files, bytes a file and bytes printed; a folder of its
   own; no privileges to gain; killed as a group at the time limit, and with the process that asked.
2. Where the kernel grants namespaces: no network, no other process to be seen, a file system that is read-only but for a small
   temporary folder in memory, and no process that outlives the program. As root, a user without rights as well.
3. What this host does not grant is said in words (`missing_walls`), for whoever starts the run to read.
It does not know what is right or wrong about a program.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO

_INIT = Path(__file__).with_name("sandbox_init.py")
_COMMAND = (sys.executable, "-I", "-S", str(_INIT))
_SCRATCH = "/tmp"
"""Where the temporary folder in memory is mounted, inside."""
_STARTED = b"started\n"
_START_SECONDS = 20.0
_EXIT_SECONDS = 0.2
_UIDS = range(60_000, 65_000)
"""Users without a name or rights; one each process, so that each counts its own processes."""

_MISSING = {
    "net": "it can reach the network",
    "mount": "it can write wherever its user may, and fill the disk",
    "pid": "what it starts in a session of its own outlives the time limit",
    "proc": "it sees the processes of this host",
    "ipc": "it sees the shared memory of other processes",
}


class SandboxError(RuntimeError):
    """The sandbox could not be put up; the program did not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one run may use."""

    seconds: float = 2.0
    memory_bytes: int = 1 << 30
    """Address space of each process."""
    folder_bytes: int = 64 << 20
    file_bytes: int = 16 << 20
    output_bytes: int = 1 << 20
    num_processes: int = 32
    num_files: int = 64


@dataclass(frozen=True, slots=True)
class Ran:
    """How a run ended."""

    exit_code: int | None
    """None: it was killed, at the time limit or for printing too much."""
    output: bytes
    """What it printed to standard output, up to the limit."""
    confirmed: bool
    """The test behind the program ran to its end."""


@cache
def _hidden_parent() -> str | None:
    """Return the highest folder above Python's installation that users without rights cannot enter."""
    prefix = Path(sys.base_prefix)
    above = [path for path in reversed([prefix, *prefix.parents]) if not path.stat().st_mode & 0o001]
    return str(above[0]) if above else None


@cache
def _uid() -> int | None:
    """Return the user that programs run as, where this process may choose one and that one can read Python's library."""
    if os.getuid() != 0 or (_hidden_parent() is not None and "mount" not in walls()):
        return None
    return _UIDS[os.getpid() % len(_UIDS)]


@cache
def walls() -> frozenset[str]:
    """Return the walls that this host grants; asked once a process."""
    asked = json.dumps({"probe": True, "folder": _SCRATCH})
    done = subprocess.run([*_COMMAND, asked], capture_output=True, text=True, timeout=60, check=False)
    return frozenset(json.loads(done.stdout)) if done.returncode == 0 else frozenset()


def missing_walls() -> list[str]:
    """Say what a program under test can do here that it should not."""
    missing = [text for name, text in _MISSING.items() if name not in walls()]
    return [*missing, "it runs as root"] if os.getuid() == 0 and _uid() is None else missing


def run_program(program: str, *, stdin: str = "", test: str = "", limits: Limits | None = None) -> Ran:
    """Run Python source with the standard library alone, then `test` in the same module.

    Blocks for at most `limits.seconds` after the sandbox is up. Nothing of the program is left when it returns (see 2).

    Raises:
        SandboxError: the sandbox could not be put up.
    """
    limits = limits or Limits()
    confirmation = secrets.token_hex(16).encode()
    with contextlib.ExitStack() as stack:
        texts = (program.encode(), test.encode(), confirmation)
        parts = stack.enter_context(_in_memory(*(len(t).to_bytes(8, "little") + t for t in texts)))
        given = stack.enter_context(_in_memory(stdin.encode()))
        folder = _SCRATCH if "mount" in walls() else stack.enter_context(tempfile.TemporaryDirectory())
        result_out, result_in = os.pipe()
        stack.callback(os.close, result_out)
        try:
            process = _start(folder, limits, stdin=given, parts=parts, result_fd=result_in)
        finally:
            os.close(result_in)
        stack.callback(_end, process)
        _await_start(result_out)
        deadline = time.monotonic() + limits.seconds
        output, in_time = _printed(process, deadline, limits.output_bytes)
        exit_code = _exit_code(process, deadline) if in_time and len(output) <= limits.output_bytes else None
        confirmed = _result(result_out, 4096, timeout_s=0.0) == confirmation
    return Ran(exit_code, output[: limits.output_bytes], confirmed)


def _await_start(result_fd: int) -> None:
    said = _result(result_fd, len(_STARTED), timeout_s=_START_SECONDS)
    if said != _STARTED:
        why = (said + _result(result_fd, 4096, timeout_s=0.0)).decode(errors="replace").strip()
        why = why.removeprefix("refused: ") or f"it was not up within {_START_SECONDS:g} s"
        raise SandboxError(f"the sandbox could not be put up: {why}")


def _result(result_fd: int, max_bytes: int, *, timeout_s: float) -> bytes:
    """Return what was said on the result descriptor; nothing when nothing comes."""
    if not select.select([result_fd], [], [], timeout_s)[0]:
        return b""
    return os.read(result_fd, max_bytes)


def _start(
    folder: str, limits: Limits, *, stdin: IO[bytes], parts: IO[bytes], result_fd: int
) -> subprocess.Popen[bytes]:
    uid = _uid()
    if uid is not None and folder != _SCRATCH:
        os.chown(folder, uid, uid)
    request = {
        "isolate": sorted(walls()),
        "uid": uid,
        "hidden": None if uid is None else _hidden_parent(),
        "folder": folder,
        "limits": {**asdict(limits), "cpu_seconds": math.ceil(limits.seconds) + 1},
        "program_fd": parts.fileno(),
        "result_fd": result_fd,
        "parent": os.getpid(),
    }
    return subprocess.Popen(
        [*_COMMAND, json.dumps(request)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=(parts.fileno(), result_fd),
        start_new_session=True,
        env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
    )


def _printed(process: subprocess.Popen[bytes], deadline: float, max_bytes: int) -> tuple[bytes, bool]:
    """Return what the program prints until it closes its output, at most one byte above the limit, and whether in time."""
    assert process.stdout is not None
    output = bytearray()
    while len(output) <= max_bytes:
        if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return bytes(output), False
        piece = os.read(process.stdout.fileno(), min(1 << 16, max_bytes + 1 - len(output)))
        if not piece:
            break
        output += piece
    return bytes(output), True


def _exit_code(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    try:
        # Its output is closed, so that it has all but ended; or it goes on without.
        return process.wait(max(_EXIT_SECONDS, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@contextlib.contextmanager
def _in_memory(*contents: bytes) -> Iterator[IO[bytes]]:
    """Yield a file that has no name and no place on a disk, at its beginning."""
    with os.fdopen(os.memfd_create("strawflow"), "w+b") as file:
        file.writelines(contents)
        file.flush()
        file.seek(0)
        yield file
