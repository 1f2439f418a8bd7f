"""A private S3 server for the tests: a process of its own on a free port, spoken to over HTTP.

1. It keeps everything in its memory and dies with the process that started it.
2. An absent package is an error, never a skip.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import fsspec


@dataclass
class S3Server:
    """A running server; `environment` is what a client needs to find it."""

    endpoint: str

    def __post_init__(self) -> None:
        self._numbers = count()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def make_bucket(self, name: str = "") -> str:
        """Make a bucket (under a fresh name) and return its name; the environment must be set."""
        bucket = name or f"bucket-{next(self._numbers)}"
        fsspec.filesystem("s3").mkdir(bucket)
        return bucket


@contextmanager
def running_server() -> Iterator[S3Server]:
    """Start a server; it is gone at the end."""
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield S3Server(_endpoint(process))
    finally:
        process.terminate()
        process.wait(timeout=60)


def _endpoint(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if "Running on http://" in line:
            # Drain what it says later: a full pipe would stop it.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return line.split("Running on ")[1].split()[0]
    process.wait()
    raise RuntimeError(f"the S3 server did not start:\n{''.join(seen)}")
