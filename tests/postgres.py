"""A private PostgreSQL server for the tests: one per test session, a fresh database per test.

1. Absent binaries are an error, never a skip.
2. It listens on a unix socket in its own folder only, syncs nothing unless asked to, and dies with the process that started
   it.
3. A server that syncs may be killed and started again: what it acknowledged is still there.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psycopg

USER = "postgres"


@dataclass
class PostgresServer:
    """A running server; `new_database` makes an empty database and returns its SQLAlchemy address."""

    folder: Path
    port: int = 5432
    syncs: bool = False

    def __post_init__(self) -> None:
        self._numbers = count()
        self.as_user = _as_ordinary_user(self.folder)
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it on its data folder and wait until it takes connections."""
        self._process = _start(self.folder, self.as_user, syncs=self.syncs)

    def stop(self, how: signal.Signals) -> None:
        """Signal the server (SIGKILL; SIGQUIT: at once; SIGINT: fast, rolling back what runs) and wait for its end."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=60)

    def connect(self, database: str = "postgres") -> psycopg.Connection:
        return psycopg.connect(
            host=str(self.folder), port=self.port, user=USER, dbname=database, autocommit=True
        )

    def new_database(self) -> str:
        name = f"test_{next(self._numbers)}"
        with self.connect() as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return f"postgresql+psycopg://{USER}@/{name}?host={self.folder}&port={self.port}"


def binaries() -> Path:
    """Return the folder of the newest PostgreSQL's programs."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    if not found:
        raise RuntimeError(
            "no PostgreSQL in /usr/lib/postgresql: install it (Debian: apt-get install postgresql), or run `make setup`"
        )
    return found[-1]


@contextmanager
def running_server(*, syncs: bool = False) -> Iterator[PostgresServer]:
    """Start a server in a temporary folder; it and the folder are gone at the end."""
    folder = Path(
        tempfile.mkdtemp(prefix="strawflow-pg-", dir="/tmp")
    )  # short: a socket path has 107 characters
    server = PostgresServer(folder, syncs=syncs)
    try:
        subprocess.run(
            [
                *server.as_user,
                str(binaries() / "initdb"),
                "-D",
                str(folder / "data"),
                "-U",
                USER,
                "-A",
                "trust",
                "--no-sync",
            ],
            check=True,
            capture_output=True,
            cwd=folder,
        )
        server.start()
        yield server
    finally:
        try:
            server.stop(signal.SIGQUIT)  # at once: nothing in it is wanted any more
        finally:
            shutil.rmtree(folder)


def _start(folder: Path, as_user: list[str], *, syncs: bool) -> subprocess.Popen[str]:
    settings = {
        "listen_addresses": "",
        "unix_socket_directories": str(folder),
        "shared_buffers": "16MB",
        "max_connections": "200",
        **({} if syncs else {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}),
    }
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    process = subprocess.Popen(
        [*as_user, str(binaries() / "postgres"), "-D", str(folder / "data"), *options],
        stdout=subprocess.DEVNULL,  # a backend whose postmaster was killed may write a prompt
        stderr=subprocess.PIPE,
        cwd=folder,
        text=True,
    )
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if "ready to accept connections" in line:
            # Drain what it says later: a full pipe would stop it.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process
    process.wait()
    raise RuntimeError(f"PostgreSQL did not start:\n{''.join(seen)}")


def _as_ordinary_user(folder: Path) -> list[str]:
    """Return the command prefix that runs a program as a user PostgreSQL accepts, and ties its life to ours."""
    prefix = ["setpriv", "--pdeathsig", "QUIT"]
    if os.geteuid() != 0:
        return prefix
    user = pwd.getpwnam(USER)
    os.chown(folder, user.pw_uid, user.pw_gid)
    return [*prefix, "--reuid", str(user.pw_uid), "--regid", str(user.pw_gid), "--clear-groups"]
