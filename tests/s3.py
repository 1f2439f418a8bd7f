"""A private S3 server for the tests: a process of its own on a free port, spoken to over HTTP.

1. It keeps everything in its memory and dies with the process that started it.
2. An absent package is an error, never a skip.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import fsspec

from strawflow.testing.postgres import await_line


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
        line = await_line(process, "Running on http://", of="the S3 server")
        yield S3Server(line.split("Running on ")[1].split()[0])
    finally:
        process.terminate()
        process.wait(timeout=60)
