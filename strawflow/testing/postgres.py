"""A private PostgreSQL server, for tests and measurements: started here, gone with the process that started it.

1. Absent binaries are an error, never a skip.
2. It listens on a unix socket in its own folder only, and dies with the process that started it.
3. A server that syncs may be killed and started again: what it acknowledged is still there.

Needs the package psycopg and the programs of a PostgreSQL server.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psycopg

USER = "postgres"
PORT = 5432
_UNSYNCED = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


@dataclass
class PostgresServer:
    """A running server; `new_database` makes an empty database and returns its name."""

    folder: Path
    syncs: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._numbers = count()
        self._as_user = _as_ordinary_user(self.folder)
        self._process: subprocess.Popen[str] | None = None

    def create(self) -> None:
        """Make its data folder."""
        data = str(self.folder / "data")
        program = [str(_binaries() / "initdb"), "-D", data, "-U", USER, "-A", "trust"]
        subprocess.run(
            [*self._as_user, *program, *([] if self.syncs else ["--no-sync"])],
            check=True,
            capture_output=True,
            cwd=self.folder,
        )

    def start(self) -> None:
        """Start it on its data folder and wait until it takes connections."""
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.folder),
            "max_connections": "200",
            **({} if self.syncs else _UNSYNCED),
            **self.settings,
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        program = [str(_binaries() / "postgres"), "-D", str(self.folder / "data")]
        deadline = time.monotonic() + 60
        while True:
            self._process = subprocess.Popen(
                [*self._as_user, *program, *options],
                stdout=subprocess.DEVNULL,  # a backend whose postmaster was killed may write a prompt
                stderr=subprocess.PIPE,
                cwd=self.folder,
                text=True,
            )
            try:
                await_line(self._process, "ready to accept connections", of="PostgreSQL")
                return
            except RuntimeError as error:
                # Backends of a postmaster that was killed end by themselves, a busy one a little later.
                if "is still in use" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def stop(self, how: signal.Signals) -> None:
        """Signal the server (SIGKILL; SIGQUIT: at once; SIGINT: fast, rolling back what runs) and wait for its end."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=60)

    def connect(self, database: str = "postgres") -> psycopg.Connection:
        return psycopg.connect(self.conninfo(database), autocommit=True)

    def new_database(self, name: str = "") -> str:
        name = name or f"made_{next(self._numbers)}"
        with self.connect() as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return name

    def new_url(self) -> str:
        """Make an empty database; returns its address as run.index_url takes it."""
        return self.url(self.new_database())

    def conninfo(self, database: str) -> str:
        """Return a database's address as libpq takes it."""
        return f"host={self.folder} port={PORT} user={USER} dbname={database}"

    def url(self, database: str) -> str:
        """Return a database's address as run.index_url takes it."""
        return f"postgresql+psycopg://{USER}@/{database}?host={self.folder}&port={PORT}"


@contextmanager
def running_server(
    *, syncs: bool = False, settings: Mapping[str, str] | None = None
) -> Iterator[PostgresServer]:
    """Start a server in a temporary folder; it and the folder are gone at the end.

    One that `syncs` has the durability PostgreSQL has by default; another one loses what it holds with the machine.
    """
    # Short: a socket's path has 107 characters, and the server's user must be able to walk to it.
    folder = Path(tempfile.mkdtemp(prefix="strawflow-pg-", dir="/tmp"))
    try:
        server = PostgresServer(folder, syncs, settings or {})
        server.create()
        try:
            server.start()
            yield server
        finally:
            server.stop(signal.SIGQUIT)  # at once: nothing in it is wanted any more
    finally:
        shutil.rmtree(folder)


def await_line(process: subprocess.Popen[str], text: str, *, of: str) -> str:
    """Return the first line with `text` that a server says on its stderr; RuntimeError when it ends without one."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if text in line:
            # Drain what it says later: a full pipe would stop it.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return line
    process.wait()
    raise RuntimeError(f"{of} did not start:\n{''.join(seen)}")


def _binaries() -> Path:
    """Return the folder of the newest PostgreSQL's programs."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    if not found:
        raise RuntimeError(
            "no PostgreSQL in /usr/lib/postgresql: install it (Debian: apt-get install postgresql), or run `make setup`"
        )
    return found[-1]


def _as_ordinary_user(folder: Path) -> list[str]:
    """Return the command prefix that runs a program as a user PostgreSQL accepts, and ties its life to ours."""
    prefix = ["setpriv", "--pdeathsig", "QUIT"]
    if os.geteuid() != 0:
        return prefix
    user = pwd.getpwnam(USER)
    os.chown(folder, user.pw_uid, user.pw_gid)
    return [*prefix, "--reuid", str(user.pw_uid), "--regid", str(user.pw_gid), "--clear-groups"]
