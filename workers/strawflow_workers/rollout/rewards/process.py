"""One reward process as the pool sees it: started, written to, read from, killed.

1. Nothing here waits for ever: every read has a deadline, and the end of a process ends the reads.
2. A killed process is reaped, and its process group with it (a verifier's own children), before `kill` returns.
3. Which request is to blame, and what happens to the others, is the pool's matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from strawflow.errors import ConfigError, WorkerFailedError
from strawflow_workers.rollout.rewards.calls import Call
from strawflow_workers.rollout.rewards.frames import FrameBuffer, encode_frame
from strawflow_workers.rollout.rewards.spec import RewardSpec

WORKER_MODULE = "strawflow_workers.rollout.rewards.worker"
_EXIT_SECONDS = 1.0
"""A process that closed its wire has this long to end before that itself is its failure."""

Reply = tuple[int, str, Any]


class ProcessEndedError(Exception):
    """The process ended; `how` says with what exit code or signal."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class RewardProcess:
    """A running reward process and the wire to it."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._frames = FrameBuffer()
        self._killed = False
        self.groups: dict[str, bool] = {}
        """The rewards loaded at the start, and whether each takes a whole group."""
        self.warnings: list[str] = []
        """What this host lacks for them."""

    @classmethod
    async def start(cls, spec: RewardSpec, *, limit_s: float, load_timeout_s: float) -> RewardProcess:
        """Start a process and wait until the rewards of the configuration are loaded.

        Raises:
            ConfigError: one of them cannot be loaded.
            WorkerFailedError: the process ended, or was not ready within the time.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", WORKER_MODULE, str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                start_new_session=True,
            )
        self = cls(process, *await asyncio.open_connection(sock=ours))
        try:
            await self._load(spec, limit_s, load_timeout_s)
        except BaseException:
            await self.kill()
            raise
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    async def _load(self, spec: RewardSpec, limit_s: float, load_timeout_s: float) -> None:
        self._writer.write(encode_frame({"spec": asdict(spec), "limit_s": limit_s}))
        deadline = asyncio.get_running_loop().time() + load_timeout_s
        try:
            answers = await self._messages(deadline)
        except ProcessEndedError as ended:
            raise WorkerFailedError(
                f"the process of reward {spec.name!r} {ended.how} while loading"
            ) from ended
        if not answers:
            raise WorkerFailedError(f"reward {spec.name!r} was not loaded within {load_timeout_s:g} s")
        if "refused" in answers[0]:
            raise ConfigError(answers[0]["refused"])
        self.groups, self.warnings = answers[0]["ready"], answers[0]["warnings"]

    def send(self, calls: Iterable[tuple[int, Call]]) -> None:
        """Ask for answers; they come in this order."""
        rows = [[number, *call.as_row()] for number, call in calls]
        self._writer.write(encode_frame({"score": rows}))

    def skip(self, request_ids: list[int]) -> None:
        """Ask not to begin these requests; each is still answered, as skipped or as scored, in its turn."""
        self._writer.write(encode_frame({"skip": request_ids}))

    async def replies(self, deadline: float) -> list[Reply]:
        """Return what has come (see worker.py), or nothing when the deadline (loop time) passes.

        Raises:
            ProcessEndedError: the process ended.
        """
        return [(number, status, value) for number, status, value in await self._messages(deadline)]

    async def _messages(self, deadline: float) -> list[Any]:
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    piece = await self._reader.read(1 << 16)
            except TimeoutError:
                # A child that a verifier forked may hold the wire open after the end of the process.
                if (returncode := self._process.poll()) is not None:
                    raise ProcessEndedError(_describe(returncode)) from None
                return []
            except ConnectionError:
                piece = b""
            if not piece:
                raise ProcessEndedError(await self._how_it_ended())
            self._frames.push(piece)
            if messages := list(self._frames.pop_all()):
                return messages

    async def _how_it_ended(self) -> str:
        try:
            return _describe(await asyncio.to_thread(self._process.wait, _EXIT_SECONDS))
        except subprocess.TimeoutExpired:
            return "closed its connection to the pool"

    async def kill(self) -> None:
        """Kill the process and what it started, and reap it; calls after the first do nothing."""
        if self._killed:
            return
        # Once only: when the whole group is gone its number may come to name another.
        self._killed = True
        with contextlib.suppress(ProcessLookupError):  # it and all of its group have ended already
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)
        self._writer.close()
        with contextlib.suppress(ConnectionError):  # it died with requests unread, as a killed process may
            await self._writer.wait_closed()


def _describe(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    return f"was killed by {signal.Signals(-returncode).name}"
