"""What a piece of work costs in a process of its own: time, memory and bytes read beyond its imports.

    python bench/apart.py slice FOLDER PLACES START STOP     read rows of a stored array
    python bench/apart.py open FOLDER                        open a run and claim one group
    python bench/apart.py straw FOLDER                       recover a straw queue and acquire one task

Each prints one JSON object. Memory is the resident set's high-water mark, reset after the imports, less what was resident
then; bytes read are what the process asked the kernel for (rchar) and what it mapped of files and touched.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def run(what: str, *arguments: str) -> dict[str, float]:
    """Do one of the works above in a fresh process and return what it printed."""
    done = subprocess.run(
        [sys.executable, __file__, what, *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measured(work: Callable[[], object]) -> dict[str, float]:
    """Do the work and return seconds, and bytes of memory and of reading."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before, read_before = _status("VmRSS"), _read_bytes()
    mapped_before = _status("RssFile")
    started = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - started
    result = {
        "seconds": seconds,
        "memory": _status("VmHWM") - before,
        "read": _read_bytes() - read_before,
        "mapped": _status("RssFile") - mapped_before,
    }
    del kept
    return result


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def _read_bytes() -> int:
    (line,) = [x for x in Path("/proc/self/io").read_text().splitlines() if x.startswith("rchar:")]
    return int(line.split()[1])


def read_slice(folder: str, places: str, start: str, stop: str) -> dict[str, float]:
    from packs import StoredArray

    stored = StoredArray.known(Path(folder), Path(places))

    def work() -> object:
        rows = stored.read(int(start), int(stop))
        rows.sum()  # every byte is touched
        return rows

    stored.read(0, 0)  # what is loaded at first use, and the head of the pack
    return measured(work)


def open_run(folder: str) -> dict[str, float]:
    import strawflow
    from strawflow import store, worker  # noqa: F401 - loaded at first use otherwise

    def work() -> object:
        opened = strawflow.open(folder)
        session = opened.worker("bench")
        (grant,) = session.claim(1)
        return opened, session, grant

    return measured(work)


def open_straw(folder: str) -> dict[str, float]:
    from peers.straw import recover

    return measured(lambda: recover(Path(folder)))


if __name__ == "__main__":
    works: dict[str, Callable[..., dict[str, float]]] = {
        "slice": read_slice,
        "open": open_run,
        "straw": open_straw,
    }
    print(json.dumps(works[sys.argv[1]](*sys.argv[2:])))
    sys.stdout.flush()
    import os

    os._exit(0)  # a claimed group is left to its lease: ending well is not what is measured
