"""Several processes that do rounds of work together and say when each began and ended.

1. Processes are spawned, set up once, and wait between rounds; a round is measured from the first begin to the last end, on
   the monotonic clock that all processes of a Linux host share.
2. What a process raises is raised here. All are gone when the crowd is closed.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import monotonic
from types import TracebackType

Work = Callable[[], int]
"""One round's work; returns how much of it this process did."""


@dataclass(frozen=True)
class Round:
    seconds: float
    done: list[int]


class Crowd:
    """`size` processes, each of which entered `prepare(number, *arguments)` and does its work when told."""

    def __init__(
        self, size: int, prepare: Callable[..., AbstractContextManager[Work]], *arguments: object
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, prepare, number, arguments), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def __enter__(self) -> Crowd:
        for pipe in self._pipes:
            _told(pipe)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()  # the processes end when they read the end of it
        for process in self._processes:
            process.join(timeout=30)
            if process.is_alive():
                process.kill()
                process.join()

    def round(self) -> Round:
        """Let all work at once."""
        for pipe in self._pipes:
            pipe.send("go")
        spans = [_told(pipe) for pipe in self._pipes]
        begin, end = min(s[0] for s in spans), max(s[1] for s in spans)
        return Round(end - begin, [s[2] for s in spans])


def _told(pipe: Connection) -> tuple[float, float, int]:
    answer: tuple[float, float, int] | str = pipe.recv()
    if isinstance(answer, str):
        raise RuntimeError(f"a process of the crowd failed:\n{answer}")
    return answer


def _serve(
    pipe: Connection,
    prepare: Callable[..., AbstractContextManager[Work]],
    number: int,
    arguments: tuple[object, ...],
) -> None:
    try:
        with prepare(number, *arguments) as work:
            pipe.send((0.0, 0.0, 0))
            while True:
                try:
                    pipe.recv()
                except EOFError:
                    return
                begin = monotonic()
                done = work()
                pipe.send((begin, monotonic(), done))
    except Exception:  # whatever it was, the measuring process is to show it
        pipe.send(traceback.format_exc())
