"""First process inside the sandbox: `python -I -S sandbox_init.py REQUEST`. It shuts itself in, then runs the program.

REQUEST is JSON: {"probe": true}, or {isolate, uid, folder, limits, program_fd, result_fd, parent} as `sandbox.run_program` makes
it. It needs the standard library alone, so that it starts in milliseconds and takes nothing of strawflow inside.

1. All limits and walls stand before the first byte of the program is compiled; then `started` goes to `result_fd`. When one
   cannot be put up, the program does not run, and the line there is `refused: ...`.
2. With a process namespace this process's child is its init: when that ends, the kernel kills whatever else is inside.
3. A test is read only after the program has run, and it is confirmed at its end: a program that ends early has not passed. One
   that searches this interpreter for a way to pass finds it; only tests of input and output are judged from outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from types import ModuleType

NAMESPACES = {
    "user": 0x10000000,
    "mount": 0x00020000,
    "net": 0x40000000,
    "ipc": 0x08000000,
    "pid": 0x20000000,
}
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
_MS_NOSUID, _MS_NODEV = 2, 4
_MOUNT_FLAGS = {
    "nosuid": 2,
    "nodev": 4,
    "noexec": 8,
    "noatime": 1024,
    "nodiratime": 2048,
    "relatime": 1 << 21,
}
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CAPABILITY_VERSION_3 = 0x20080522
_COVERED = ("/run", "/dev/shm")
"""Folders of sockets and memory that other programs share; a read-only mount would not keep anyone from a socket."""
_REFUSED = 120
"""Exit code of a sandbox that could not be put up."""

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    request = json.loads(sys.argv[1])
    if request.get("probe"):
        print(json.dumps(_probe(request["folder"])))
        return
    try:
        _die_with_parent(request["parent"])
        _enter(request)
        if "pid" in request["isolate"]:
            _become_init(proc="proc" in request["isolate"])
        _limit_and_drop(request)
    except OSError as error:
        os.write(request["result_fd"], f"refused: {error}\n".encode())
        os._exit(_REFUSED)
    os.write(request["result_fd"], b"started\n")
    _run(request["program_fd"], request["result_fd"])


# ---- walls


def _probe(folder: str) -> list[str]:
    """Return which walls this kernel lets this user put up, each tried in a process of its own."""
    base = [] if os.getuid() == 0 else ["user"]
    works = [*base] if all(_tried([name], folder) for name in base) else []
    if base and not works:
        return []
    works += [name for name in ("net", "ipc", "pid", "mount") if _tried([*base, name], folder)]
    if {"pid", "mount"} <= set(works) and _tried([*base, "mount", "pid", "proc"], folder):
        works.append("proc")
    return works


def _tried(isolate: list[str], folder: str) -> bool:
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(OSError):
            _enter(
                {
                    "isolate": isolate,
                    "folder": folder,
                    "uid": None,
                    "hidden": None,
                    "limits": {"folder_bytes": 1 << 20},
                }
            )
            if "pid" in isolate:
                _become_init(proc="proc" in isolate)
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _enter(request: dict) -> None:  # type: ignore[type-arg]
    isolate = request["isolate"]
    uid, gid = os.getuid(), os.getgid()
    flags = sum(NAMESPACES[name] for name in isolate if name in NAMESPACES)
    if flags:
        _checked(_libc.unshare(flags), "unshare")
    if "user" in isolate:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    if "mount" in isolate:
        _mount("none", "/", None, _MS_REC | _MS_PRIVATE, None)
        _read_only()
        for folder in _COVERED:
            if os.path.isdir(folder):
                _mount("tmpfs", folder, "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, "mode=755,size=4k")
        if request["hidden"] is not None:
            _show_python(request["hidden"])
        if request["uid"] is not None:
            uid = gid = request["uid"]
        options = f"size={request['limits']['folder_bytes']},mode=700,uid={uid},gid={gid},nr_inodes=1024"
        _mount("tmpfs", request["folder"], "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def _read_only() -> None:
    """Make every mount of this namespace read-only."""
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        lines = [line.split() for line in file]
    for fields in lines:
        target = fields[4].encode().decode("unicode_escape").encode("latin-1").decode()
        kept = sum(_MOUNT_FLAGS.get(option, 0) for option in fields[5].split(","))
        try:
            _mount(None, target, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | kept, None)
        except OSError:
            # Beneath another mount, or out of this user's reach: then it is out of the program's reach too.
            if os.access(target, os.W_OK) and not os.statvfs(target).f_flag & os.ST_RDONLY:
                raise


def _show_python(hidden: str) -> None:
    """Let a user without rights read Python's library, of which the parent folder `hidden` keeps others out.

    The folder is covered with an empty one that holds the installation alone, at its own place.
    """
    prefix = os.open(sys.base_prefix, os.O_PATH)
    _mount("tmpfs", hidden, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=1m")
    os.makedirs(sys.base_prefix, exist_ok=True)
    _mount(f"/proc/self/fd/{prefix}", sys.base_prefix, None, _MS_BIND, None)
    _mount(None, hidden, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV, None)
    os.close(prefix)


def _become_init(*, proc: bool) -> None:
    """Go on in the namespace's second process; this one and its init wait for it and end as it does."""
    for role in ("outside", "init"):
        child = os.fork()
        if child:
            _end_as(child)
        _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
        if role == "outside" and proc:
            _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV, None)


def _end_as(child: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def _die_with_parent(parent: int) -> None:
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != parent:
        os._exit(_REFUSED)


def _limit_and_drop(request: dict) -> None:  # type: ignore[type-arg]
    limits = request["limits"]
    os.chdir(request["folder"])
    for kind, amount in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["num_files"]),
        (resource.RLIMIT_NPROC, limits["num_processes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (amount, amount))
    if request["uid"] is not None:
        os.setgroups([])
        os.setresgid(*[request["uid"]] * 3)
        os.setresuid(*[request["uid"]] * 3)
    _drop_capabilities()
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _checked(
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl"
    )  # a change of user had cleared it


def _drop_capabilities() -> None:
    """Give up what a user namespace had given: without an exec the kernel does not take it away."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _checked(_libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


# ---- the program


def _run(program_fd: int, result_fd: int) -> None:
    program = _next_part(program_fd)
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    run, compiled = exec, compile  # the program may put others in their place
    run(compiled(program, "program.py", "exec"), module.__dict__)
    if test := _next_part(program_fd):
        run(compiled(test, "test.py", "exec"), module.__dict__)
        sys.stdout.flush()
        os.write(result_fd, _next_part(program_fd))
        os._exit(0)


def _next_part(program_fd: int) -> bytes:
    """Read the next part, which stands behind its length in eight bytes."""
    length = int.from_bytes(os.read(program_fd, 8), "little")
    part = b""
    while len(part) < length:
        part += os.read(program_fd, length - len(part))
    return part


if __name__ == "__main__":
    main()
