"""An engine of a bench in a process of its own: a script that is started with flags and prints its address."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType
from typing import Self


class EngineProgram:
    """Use as a context manager; `url` is where it answers."""

    def __init__(self, script: str, **flags: float) -> None:
        self._command = [sys.executable, script]
        self._command += [
            part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))
        ]
        self.url = ""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
