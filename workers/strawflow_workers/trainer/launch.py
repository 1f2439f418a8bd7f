"""Starting the ranks of a trainer on this host, and ending them all when one ends.

1. The process that is asked to train is rank 0; it starts the others, which die with it (the kernel sees to it).
2. A rank that ends before it is told to ends all: rank 0 exits with that rank's code, or 1 when a signal killed it. A
   collective that waits for a dead rank does not delay that.
3. Where a launcher set RANK and WORLD_SIZE (torchrun, an actor of Ray), nothing is started: that launcher minds the ranks.
4. Ranks find each other on the loopback interface, on a port that is bound before anyone is told of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strawflow.config_parallel import ParallelSection
from strawflow.errors import StorageError
from strawflow.plural import counted

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
END_TIMEOUT_S = 30.0
_LOOK_EVERY_S = 0.1
_CAUSE_WITHIN_S = 2.0
"""How long after a collective failed a rank's end is taken for its cause."""


def is_launched() -> bool:
    """Whether somebody else started the ranks."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextlib.contextmanager
def ranks_of(root: Path, parallel: ParallelSection) -> Iterator[int]:
    """Yield the rank that this process is, the others running beside it while the block runs; they run `train` of `root`.

    When the block ends well the others were told to end and are waited for.
    """
    if is_launched() or parallel.world_size == 1:
        yield int(os.environ.get("RANK", "0")) if is_launched() else 0
        return
    others = _start(root, parallel.world_size)
    with others.watched():
        yield 0


@dataclass
class Others:
    """The ranks after the first, as processes of it; `watched` ends the process when one of them ends too early."""

    processes: dict[int, subprocess.Popen[bytes]]
    store: Any
    """torch's store at which ranks find each other; it lives as long as this object."""
    _are_ending: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        watch = threading.Thread(target=self._watch, name="ranks", daemon=True)
        watch.start()
        try:
            yield
            self._wait()
        except (RuntimeError, StorageError) as error:
            # What a collective says of a dead peer may come before the watch looks: the peer's end is the cause.
            if (code := self._code_of_dead(wait_s=_CAUSE_WITHIN_S)) is not None:
                raise SystemExit(code) from error
            raise
        finally:
            self._are_ending.set()
            self._kill()
            watch.join()

    def _watch(self) -> None:
        while not self._are_ending.wait(_LOOK_EVERY_S):
            if (code := self._code_of_dead(wait_s=0.0)) is not None:
                self._kill()
                os._exit(code)

    def _code_of_dead(self, *, wait_s: float) -> int | None:
        """Tell of a rank that ended with an error and return the exit code that makes for all; None: there is none."""
        deadline = time.monotonic() + wait_s
        while True:
            for rank, process in self.processes.items():
                if code := process.poll():
                    how = f"exit code {code}" if code > 0 else f"signal {-code}"
                    log.error("rank %d of the trainer ended with %s: all its ranks end", rank, how)
                    return code if code > 0 else 1
            if time.monotonic() >= deadline:
                return None
            time.sleep(_LOOK_EVERY_S / 10)

    def _wait(self) -> None:
        deadline = time.monotonic() + END_TIMEOUT_S
        for rank, process in self.processes.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("rank %d of the trainer did not end by itself and is killed", rank)

    def _kill(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
        for process in self.processes.values():
            process.wait()


def _start(root: Path, size: int) -> Others:
    listening = socket.create_server((LOOPBACK, 0), backlog=size)
    here = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(listening.getsockname()[1]),
        # Rank 0 serves the store below: torch's own initialisation must not, on any rank.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    log.info("the trainer has %s", counted(size, "rank"))
    processes = {
        rank: subprocess.Popen(
            [
                sys.executable,
                "-m",
                "strawflow_workers.entry",
                "train",
                str(root),
                "--die-with-parent",
                str(os.getpid()),
            ],
            env={**os.environ, **here, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # signals are for rank 0
        )
        for rank in range(1, size)
    }
    os.environ.update(here, RANK="0", LOCAL_RANK="0")
    import torch.distributed as dist  # seconds, while the others start

    store = dist.TCPStore(  # type: ignore[attr-defined]
        LOOPBACK,
        int(here["MASTER_PORT"]),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return Others(processes, store)
