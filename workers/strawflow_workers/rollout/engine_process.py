"""The process of an engine, as the worker that serves it sees it: started, waited for, watched, stopped.

SGLang's own is in sglang_server, several behind a router in routed_engines; which one it is to be says engine_plan.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Protocol

from strawflow.errors import EngineError


class EngineProcess(Protocol):
    """A server process speaking SGLang's HTTP API."""

    @property
    def url(self) -> str: ...

    def start(self) -> None: ...

    def wait_ready(self) -> None: ...

    def alive(self) -> bool: ...

    def stop(self) -> None: ...


class FakeEngineProcess:
    """strawflow.testing's engine as a child process; for fault tests only."""

    def __init__(
        self, model_path: Path, log_path: Path, *, version_id: str, options: dict[str, str], port: int = 0
    ) -> None:
        self._model_path, self._log_path, self._port = model_path, log_path, port
        self._options = {"weight-version": version_id, **options}
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> None:
        config = json.loads((self._model_path / "config.json").read_text(encoding="utf-8"))
        command = [sys.executable, "-m", "strawflow.testing.fake_engine", "--port", str(self._port)]
        command += ["--vocab-size", str(config["vocab_size"]), "--eos", str(config["eos_token_id"])]
        command += ["--model-path", str(self._model_path), "--die-with-parent", str(os.getpid())]
        for name, value in self._options.items():
            command += [f"--{name}", value]
        with self._log_path.open("ab") as sink:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sink)

    def wait_ready(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"the fake engine ended while it started; see {self._log_path}")
        self.url = json.loads(line)["url"]

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class AttachedEngine:
    """An engine that someone else started and ends; it must be there within `patience_s` seconds."""

    def __init__(self, url: str, *, patience_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._patience_s = patience_s
        self._is_given_up = threading.Event()

    def start(self) -> None:
        return

    def wait_ready(self) -> None:
        deadline = time.monotonic() + self._patience_s
        while (reason := self._ails()) is not None:
            if self._is_given_up.wait(0.5) or time.monotonic() > deadline:
                raise EngineError(f"the engine at {self.url} does not answer: {reason}")

    def _ails(self) -> str | None:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
                return None if answer.status == 200 else f"HTTP {answer.status}"
        except (OSError, ValueError) as error:  # URLError is an OSError; ValueError: no address
            return str(error)

    def alive(self) -> bool:
        return True  # its process is not ours to see; requests and health checks tell

    def stop(self) -> None:
        """Wait for it no longer; it lives on."""
        self._is_given_up.set()
