"""A private PostgreSQL server with the durability PostgreSQL has by default, for as long as a bench needs it.

1. It listens on a unix socket in its own folder only and dies with the process that started it.
2. fsync, synchronous_commit and full_page_writes are left as they come (on); so is everything else but the number of
   connections and pg_stat_statements, by which pages are counted.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psycopg

USER = "postgres"
_START_S = 60


@dataclass
class Server:
    """A running server."""

    folder: Path

    def __post_init__(self) -> None:
        self._numbers = count()

    def connect(self, database: str = "postgres") -> psycopg.Connection:
        return psycopg.connect(host=str(self.folder), user=USER, dbname=database, autocommit=True)

    def new_database(self, name: str = "") -> str:
        """Make an empty database that counts its statements' pages; returns its name."""
        name = name or f"bench_{next(self._numbers)}"
        with self.connect() as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        with self.connect(name) as connection:
            connection.execute("CREATE EXTENSION pg_stat_statements")
        return name

    def url(self, database: str) -> str:
        """Return the address as strawflow's configuration takes it."""
        return f"postgresql+psycopg://{USER}@/{database}?host={self.folder}"

    def conninfo(self, database: str) -> str:
        """Return the address as libpq takes it."""
        return f"host={self.folder} user={USER} dbname={database}"

    def version(self) -> str:
        with self.connect() as connection:
            return f"PostgreSQL {connection.info.server_version // 10000}"


@contextmanager
def running_server() -> Iterator[Server]:
    """Start a server in a temporary folder; it and the folder are gone at the end."""
    # A socket's path has 107 characters, and the server's user must be able to walk to it.
    folder = Path(tempfile.mkdtemp(prefix="sf-bench-pg-", dir="/tmp"))
    process: subprocess.Popen[bytes] | None = None
    try:
        prefix = _as_ordinary_user(folder)
        initdb = [*prefix, str(_binaries() / "initdb"), "-D", str(folder / "data"), "-U", USER, "-A", "trust"]
        subprocess.run(initdb, check=True, capture_output=True, cwd=folder)
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(folder),
            "max_connections": "200",
            "shared_preload_libraries": "pg_stat_statements",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*prefix, str(_binaries() / "postgres"), "-D", str(folder / "data"), *options],
                stderr=log,
                cwd=folder,
            )
        server = Server(folder)
        _await(server, process)
        yield server
    finally:
        try:
            if process is not None:
                process.send_signal(signal.SIGQUIT)  # at once: nothing in it is wanted any more
                process.wait(timeout=60)
        finally:
            shutil.rmtree(folder)


def _await(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            server.connect().close()
            return
        except psycopg.OperationalError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                log = (server.folder / "log").read_text(errors="replace")
                raise RuntimeError(f"PostgreSQL did not start:\n{log}") from error
            time.sleep(0.05)


def _binaries() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    if not found:
        raise RuntimeError("no PostgreSQL in /usr/lib/postgresql: run `make setup`")
    return found[-1]


def _as_ordinary_user(folder: Path) -> list[str]:
    """Return the command prefix that runs a program as a user PostgreSQL accepts, and ties its life to ours."""
    prefix = ["setpriv", "--pdeathsig", "QUIT"]
    if os.geteuid() != 0:
        return prefix
    user = pwd.getpwnam(USER)
    os.chown(folder, user.pw_uid, user.pw_gid)
    return [*prefix, "--reuid", str(user.pw_uid), "--regid", str(user.pw_gid), "--clear-groups"]
