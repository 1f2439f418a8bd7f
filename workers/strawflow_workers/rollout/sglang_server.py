"""Starts, watches and stops one SGLang server as a process tree that never outlives who started it.

1. Every process of the tree dies with its parent (see sglang_cpu/strawflow_deathsig.py): after kill -9 of the starting
   process, of the launcher or of the scheduler nothing of the tree remains.
2. The tree is one process group; `stop` returns only when no process of the group is left.
3. Output is appended to one log file; a start that fails quotes its last lines.
4. Without CUDA the ordinary SGLang runs on stubs of the packages that cannot be had, and a stub that is called raises.
   With CUDA there are no stubs: only the death signal is added.
It does not know what is generated (sglang_client) nor when to restart (the engine pool).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from strawflow.errors import ConfigError, EngineError
from strawflow_workers.rollout.sglang_client import refuse_original_logprobs

_SHIM_FOLDER = Path(__file__).parent / "sglang_cpu"
_QUOTED_LOG_LINES = 25
_POLL_S = 0.1
_ALIVE = frozenset("RSDTtI")
"""States of a process in /proc that can still do something; a zombie is dead, whoever has yet to reap it."""

CPU_ARGS = ("--log-level", "warning", "--skip-server-warmup")
"""Server flags that measured best on a CPU; `extra_args` come later and so win."""


@dataclass(frozen=True, kw_only=True)
class SglangOptions:
    """What one server is started with."""

    model_path: Path
    """Folder of a Hugging Face checkpoint."""
    log_path: Path
    """File that the server's output is appended to."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: a free port is chosen at each start."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: str = "auto"
    """"auto": float32 on a CPU, the checkpoint's on CUDA."""
    max_total_tokens: int | None = None
    """Size of the KV cache in tokens; None: 32768 on a CPU, SGLang's own choice on CUDA."""
    load_tokenizer: bool = False
    """False: token ids in and out only, and SGLang then has no stop strings and no min_new_tokens."""
    weight_version: str | None = None
    """Label of the weights that the server starts with."""
    extra_args: tuple[str, ...] = ()
    """Native flags of sglang.launch_server, passed as they are."""
    threads: int = 1
    """OMP_NUM_THREADS on a CPU."""
    ready_timeout_s: float = 300.0

    def resolved_device(self) -> Literal["cpu", "cuda"]:
        """Return the device; "auto" is "cuda" where the NVIDIA driver is loaded (torch is not asked: it is slow to load)."""
        if self.device != "auto":
            return self.device
        return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


class EngineStartError(EngineError):
    """The server ended, or was not ready in time; the message quotes its log."""

    kind = "engine_start"


class SglangServer:
    """One SGLang server. `start`, `wait_ready`, `stop` may be called from any thread, one at a time; `start` again restarts.

    As a context manager it is ready on entry and stopped on exit.
    """

    def __init__(self, options: SglangOptions) -> None:
        self.options = options
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def url(self) -> str:
        """`http://host:port` of the running or last server."""
        return f"http://{self.options.host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id of the launcher, which is also the id of the process group; None before the first start."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the server without waiting for it.

        The launcher is forked from a thread of its own that lives until the launcher ends, because the kernel sends the
        parent-death signal when the forking thread ends, not when the process does.

        Raises:
            ConfigError: log-probabilities would not be those of the sampled distribution, or it runs already.
        """
        if self.alive():
            raise ConfigError(f"the SGLang server at {self.url} runs already; stop it first")
        refuse_original_logprobs(os.environ)
        self._port = self.options.port or free_port(self.options.host)
        started: list[subprocess.Popen[bytes] | OSError] = []
        ready = threading.Event()
        threading.Thread(target=self._run, args=(started, ready), name="sglang-parent", daemon=True).start()
        ready.wait()
        if isinstance(started[0], OSError):
            raise started[0]
        self._process = started[0]

    def _run(self, started: list[subprocess.Popen[bytes] | OSError], ready: threading.Event) -> None:
        try:
            process = self._spawn()
        except OSError as error:
            started.append(error)
            return
        else:
            started.append(process)
        finally:
            ready.set()
        process.wait()

    def _spawn(self) -> subprocess.Popen[bytes]:
        self.options.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.options.log_path, "ab") as log:
            self._log_start = log.tell()
            command = launch_command(self.options, self._port)
            log.write(f"# {' '.join(command)}\n".encode())
            log.flush()
            return subprocess.Popen(
                command,
                env=launch_environment(self.options, os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Return when the server answers its health check.

        Raises:
            EngineStartError: it ended, or `ready_timeout_s` passed (it is stopped then); quotes the log's last lines.
        """
        deadline = time.monotonic() + self.options.ready_timeout_s
        while not self._healthy():
            if not self.alive():
                self.stop()
                raise EngineStartError(
                    f"SGLang ended while it started; the end of its log:\n{self._log_tail()}"
                )
            if time.monotonic() > deadline:
                self.stop()
                raise EngineStartError(
                    f"SGLang was not ready within {self.options.ready_timeout_s:g} s; the end of its log:\n{self._log_tail()}"
                )
            time.sleep(_POLL_S)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def alive(self) -> bool:
        """Say whether the launcher runs; it ends within seconds when its scheduler or detokenizer does."""
        if self._process is None or self._process.returncode is not None:
            return False
        # not poll(): it says "running" as long as the thread that waits has not reaped the launcher
        return _process_state(self._process.pid) in _ALIVE

    def stop(self, grace_s: float = 3.0) -> None:
        """End the server: SIGINT to the launcher, after `grace_s` SIGKILL to the group; return when nothing of it is left.

        SIGINT because SGLang looks for SIGTERM only every 5 s; the engine holds nothing durable, so its requests are not
        waited for.

        Raises:
            EngineError: processes survived SIGKILL for 10 s (stuck in the kernel); names them.
        """
        if self._process is None:
            return
        group = self._process.pid
        if self.alive():
            self._process.send_signal(signal.SIGINT)
        _wait_until_gone(group, grace_s)
        if _group_members(group):
            _kill_group(group)
        if remaining := _wait_until_gone(group, 10.0):
            raise EngineError(f"processes of the SGLang server survived SIGKILL: {remaining}")
        self._process.wait()

    def _log_tail(self) -> str:
        with open(self.options.log_path, "rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join([*lines[-_QUOTED_LOG_LINES:], f"(whole log: {self.options.log_path})"])

    def __enter__(self) -> SglangServer:
        self.start()
        self.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def launch_command(options: SglangOptions, port: int) -> list[str]:
    """Return the command line of the server."""
    cpu = options.resolved_device() == "cpu"
    dtype = "float32" if cpu and options.dtype == "auto" else options.dtype
    max_total_tokens = options.max_total_tokens or (32768 if cpu else None)
    return [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(options.model_path), "--host", options.host, "--port", str(port)),
        *("--device", options.resolved_device(), "--dtype", dtype),
        *(("--max-total-tokens", str(max_total_tokens)) if max_total_tokens else ()),
        *(("--weight-version", options.weight_version) if options.weight_version else ()),
        *(() if options.load_tokenizer else ("--skip-tokenizer-init",)),
        *(CPU_ARGS if cpu else ()),
        *options.extra_args,
    ]


def launch_environment(
    options: SglangOptions, inherited: os._Environ[str] | dict[str, str]
) -> dict[str, str]:
    """Return the environment of the server: the inherited one, the death signal, and on a CPU the stubs."""
    path = os.pathsep.join(filter(None, (str(_SHIM_FOLDER), inherited.get("PYTHONPATH", ""))))
    environment = {
        **inherited,
        "PYTHONPATH": path,
        "STRAWFLOW_GUARDIAN_PID": str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
    }
    if options.model_path.is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    if options.resolved_device() == "cpu":
        environment |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "STRAWFLOW_SGLANG_CPU": "1",
            "OMP_NUM_THREADS": str(options.threads),
        }
    return environment


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _wait_until_gone(group: int, patience_s: float) -> list[int]:
    """Wait until the group has no live process; return those left when the patience ended."""
    deadline = time.monotonic() + patience_s
    while (members := _group_members(group)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return members


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return  # the last of it ended meanwhile


def _group_members(group: int) -> list[int]:
    """Return the live processes of a group."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if _process_group(pid) == group and _process_state(pid) in _ALIVE]


def _process_group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _process_state(pid: int) -> str | None:
    """Return the kernel's letter for the state of a process; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(b")")[2].split()[0].decode()
