"""Several engines behind SGLang's router, served by one rollout worker as if they were one.

1. What is generated goes through the router; what changes an engine (weights, pause, abort) goes to every one of them, and
   counts as done when all did it. They serve a version when all report it.
2. The router keeps all requests of a unit, and so all turns of a sample, with the engine that holds their prefix.
3. They start and end together: one that dies ends the others.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from strawflow.errors import EngineError
from strawflow_workers.rollout.engine_process import EngineProcess
from strawflow_workers.rollout.sglang_client import EngineResponseError, Patience, SglangClient
from strawflow_workers.rollout.sglang_server import free_port

AFFINITY = ("--policy", "manual", "--assignment-mode", "min_load")
"""What belongs together stays with the engine that got it first, the one with the least to do; later flags win."""
READY_S = 120.0

T = TypeVar("T")


@dataclass(frozen=True)
class Member:
    """One engine behind the router."""

    process: EngineProcess
    worker_type: str
    bootstrap_port: int
    """Where a prefill server is met by those that decode; 0: nowhere."""


class RoutedEngines:
    """The engines and their router as one process."""

    def __init__(self, members: Sequence[Member], *, arguments: Sequence[str], log_path: Path) -> None:
        self._members = list(members)
        self._arguments = tuple(arguments)
        self._log_path = log_path
        self._router: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def member_urls(self) -> list[str]:
        return [member.process.url for member in self._members]

    def start(self) -> None:
        for member in self._members:
            member.process.start()

    def wait_ready(self) -> None:
        """Return when all engines and the router answer.

        Raises:
            EngineError: one ended while it started, or the router is not ready in time.
        """
        for member in self._members:
            member.process.wait_ready()
        self._port = free_port("127.0.0.1")
        with self._log_path.open("ab") as sink:
            self._router = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
            )
        deadline = time.monotonic() + READY_S
        while not self._answers():
            if self._router.poll() is not None or time.monotonic() > deadline:
                raise EngineError(f"the router did not start; see {self._log_path}")
            time.sleep(0.1)

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "strawflow_workers.rollout.router_program", str(os.getpid())]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--log-level", "warn"]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port("127.0.0.1"))]
        command += ["--disable-retries"]  # a unit's attempts are counted here
        if any(member.worker_type == "prefill" for member in self._members):
            command += ["--pd-disaggregation"]
            for member in self._members:
                if member.worker_type == "prefill":
                    command += ["--prefill", member.process.url, str(member.bootstrap_port)]
                else:
                    command += ["--decode", member.process.url]
        else:
            command += [*AFFINITY, "--worker-urls", *self.member_urls]
        return [*command, *self._arguments]

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/readiness", timeout=5) as answer:
                return int(json.loads(answer.read())["healthy_workers"]) == len(self._members)
        except (urllib.error.URLError, OSError):  # not there yet, or 503: no engine is known to it
            return False

    def alive(self) -> bool:
        return (
            self._router is not None
            and self._router.poll() is None
            and all(member.process.alive() for member in self._members)
        )

    def stop(self) -> None:
        if self._router is not None:
            self._router.kill()  # told to end, it would wait for its requests; nobody waits for their answers
            self._router.wait()
        for member in self._members:
            member.process.stop()


class RoutedClient(SglangClient):
    """A client that generates through the router and changes every engine."""

    def __init__(
        self, url: str, member_urls: Sequence[str], *, max_connections: int, patience: Patience
    ) -> None:
        super().__init__(url, max_connections=max_connections, patience=patience)
        self._members = [
            SglangClient(u, max_connections=max_connections, patience=patience) for u in member_urls
        ]

    async def close(self) -> None:
        """See `SglangClient`; so are those below."""
        await super().close()
        await self._each(lambda member: member.close())

    async def update_weights_from_disk(self, path: str | Path, version: str) -> None:
        await self._each(lambda member: member.update_weights_from_disk(path, version))

    async def weight_version(self) -> str:
        found = await self._each(lambda member: member.weight_version())
        if len(set(found)) > 1:
            raise EngineResponseError(f"the engines behind the router report weights {sorted(set(found))}")
        return found[0]

    async def health(self, *, timeout_s: float = 10.0) -> bool:
        found = await self._each(lambda member: member.health(timeout_s=timeout_s))
        return all(found) and await super().health(timeout_s=timeout_s)

    async def abort(self, rid: str | None = None) -> None:
        await self._each(lambda member: member.abort(rid))

    async def pause(self) -> None:
        await self._each(lambda member: member.pause())

    async def resume(self) -> None:
        await self._each(lambda member: member.resume())

    async def flush_cache(self) -> None:
        await self._each(lambda member: member.flush_cache())

    async def server_info(self) -> dict[str, Any]:
        return (await self._each(lambda member: member.server_info()))[0]

    async def _each(self, call: Callable[[SglangClient], Awaitable[T]]) -> list[T]:
        """Call every engine and wait for all of them, whatever one of them answers."""
        found = await asyncio.gather(*(call(member) for member in self._members), return_exceptions=True)
        for answer in found:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in found if not isinstance(answer, BaseException)]
