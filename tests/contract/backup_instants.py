"""A process that runs the program's commands in forked children and kills each one at a chosen instant.

An instant lies before every line that flow.backup, flow.index_place, flow.restore and index.dump execute: whatever they do to files and
databases lies between two of them. The parent imports everything once and opens nothing, so that a child costs a fork;
`Instants` is what tests use, the rest runs in that process.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
UNCOUNTED = "_refuse_open_file"
"""It looks at all processes of the machine: how many calls that takes is never the same."""


TraceFunction = Callable[[FrameType, str, Any], Any]


class Instants:
    """Runs commands in children; use as a context manager."""

    def __enter__(self) -> Instants:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=60)

    def passed(self, *words: object) -> list[str]:
        """Run a command to its end; returns the line after every instant it passed."""
        answer = self._ask(words, 0)
        assert answer["code"] == 0, answer
        instants: list[str] = answer["instants"]
        return instants

    def kill(self, *words: object, at: int) -> None:
        """Run a command and kill it at its instant number `at`, from 1."""
        answer = self._ask(words, at)
        assert answer["code"] == -signal.SIGKILL, answer

    def _ask(self, words: Sequence[object], at: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"words": [str(w) for w in words], "at": at}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def chosen(instants: Sequence[str], *, spread: int) -> list[int]:
    """Return instants to kill at: after every change of a name, before and after the commit, and `spread` others."""
    lines = list(enumerate(instants, 1))
    after = {at + 1 for at, line in lines if re.search(r"\b(rename|link|rmtree)\(", line)}
    commit = [at for at, line in lines if "index.begin()" in line][-1]
    step = max(1, len(instants) // spread)
    wanted = {commit, commit + 1, *after, *range(step // 2, len(instants), step)}
    return sorted(wanted & set(range(1, len(instants) + 1)))


# ---- in the process


def main() -> None:
    # Everything that a command loads on its way is loaded here, once.
    import psycopg  # noqa: F401

    from strawflow.flow import backup, index_place, restore
    from strawflow.index import dump, migrate  # noqa: F401

    watched = {module.__file__ for module in (backup, index_place, restore, dump)}
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(in_a_child(asked["words"], asked["at"], watched)), flush=True)


def in_a_child(words: list[str], at: int, watched: set[str | None]) -> dict[str, Any]:
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        os._exit(run(words, at, watched, theirs))
    os.close(theirs)
    with os.fdopen(ours) as answered:
        instants = answered.read().splitlines()
    _, status = os.waitpid(pid, 0)
    return {"code": os.waitstatus_to_exitcode(status), "instants": instants}


def run(words: list[str], at: int, watched: set[str | None], answer: int) -> int:
    """Run a command in this process, which ends here: killed, or with the instants written down."""
    from strawflow.cli.main import main as program

    seen: list[str] = []

    def on_line(frame: FrameType, event: str, _: Any) -> TraceFunction | None:
        if event == "line":
            seen.append(linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip())
            if len(seen) == at:
                os.kill(os.getpid(), signal.SIGKILL)
        return on_line

    def on_call(frame: FrameType, _: str, __: Any) -> TraceFunction | None:
        code = frame.f_code
        is_ours = code.co_filename in watched and not code.co_qualname.startswith(UNCOUNTED)
        return on_line if is_ours else None

    os.dup2(2, 1)  # what the command prints is no answer
    sys.settrace(on_call)
    try:
        program(words)
    except SystemExit as ended:
        code = ended.code
    sys.settrace(None)
    os.write(answer, "\n".join(seen).encode())
    return code if isinstance(code, int) else 1


if __name__ == "__main__":
    main()
