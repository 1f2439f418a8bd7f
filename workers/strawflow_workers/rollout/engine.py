"""The engine of one rollout worker: its process, its client, and which weights it really serves.

1. A version counts as served only after the engine itself reported it.
2. Weights are loaded with nothing in flight, or while the engine is paused (policy `continue`); the engine then tells which
   token which weights sampled, and one that does not tell is never loaded so.
3. A reload that failed, or an engine that reports other weights, ends the engine; a new one is started and asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Protocol

from strawflow.config import RolloutSection
from strawflow.errors import ConfigError, ConflictError, EngineError
from strawflow.flow import engines
from strawflow.flow.session import WorkerSession
from strawflow.ids import new_id
from strawflow.index.weights import WeightVersion
from strawflow.weights.verify import verify_weights
from strawflow_workers.rollout.sglang_client import (
    EngineResponseError,
    GenerateRequest,
    Generation,
    OnProgress,
    SglangClient,
)
from strawflow_workers.rollout.sglang_server import SglangOptions, SglangServer

log = logging.getLogger(__name__)


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

    def __init__(self, model_path: Path, log_path: Path, *, version_id: str, options: dict[str, str]) -> None:
        self._model_path, self._log_path = model_path, log_path
        self._options = {"weight-version": version_id, **options}
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> None:
        config = json.loads((self._model_path / "config.json").read_text(encoding="utf-8"))
        command = [sys.executable, "-m", "strawflow.testing.fake_engine", "--port", "0"]
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


def saves_progress(config: RolloutSection) -> bool:
    """Tell whether responses are saved while they are generated."""
    return config.partial_rollout and bool(config.save_every_s or config.save_every_tokens)


def make_process(session: WorkerSession, *, model_path: Path, version_id: str) -> EngineProcess:
    """Return the (not yet started) engine the configuration asks for, its log in the run's folder."""
    config = session.run.config.rollout
    log_path = session.run.root / "logs" / f"engine-{session.session_id}.log"
    log_path.parent.mkdir(exist_ok=True)
    # Weights are stored without a tokenizer; only an engine that looks for texts or counts tokens up needs one.
    needs_text = bool(config.stop or config.min_response_tokens)
    streaming = ("--incremental-streaming-output", "--stream-interval", str(config.stream_interval))
    of_tokenizer = ("--tokenizer-path", str(session.run.model_path)) if needs_text else ()
    match config.engine:
        case "sglang":
            return SglangServer(
                SglangOptions(
                    model_path=model_path,
                    log_path=log_path,
                    weight_version=version_id,
                    load_tokenizer=needs_text,
                    extra_args=(
                        *of_tokenizer,
                        *(streaming if saves_progress(config) else ()),
                        *config.engine_args,
                    ),
                )
            )
        case "fake":
            return FakeEngineProcess(
                model_path,
                log_path,
                version_id=version_id,
                options={"stream-interval": str(config.stream_interval), **config.engine_options},
            )
        case other:
            raise ConfigError(f"rollout.engine {other!r} is not known")


class ServedEngine:
    """An engine process with its client; `serving` is what it last reported itself."""

    def __init__(self, session: WorkerSession, *, num_connections: int, url: str | None = None) -> None:
        self._session = session
        self._url = url
        self._num_connections = num_connections
        self._process: EngineProcess | None = None
        self._client: SglangClient | None = None
        self.engine_id = new_id("engine")
        self.build = ""
        self.serving: str | None = None
        self.serving_step = -1
        self.served: list[str] = []
        """Every version it has served, in order; the last is the present one."""
        self.is_interrupted = False
        """Nothing new is asked of it: what is in flight is being broken off."""
        self.can_continue = False
        """Whether weights may be loaded inside its requests."""

    @property
    def stream_interval(self) -> int:
        """Tokens after which it tells how far a response has come; 0: responses are not saved while they are generated."""
        config = self._session.run.config.rollout
        return config.stream_interval if saves_progress(config) else 0

    @property
    def client(self) -> SglangClient:
        if self._client is None:
            raise EngineError("the engine is not started")
        return self._client

    @property
    def label(self) -> str:
        """Engine id and build, as stored with every row."""
        return f"{self.engine_id} {self.build}"

    def alive(self) -> bool:
        return self._process is not None and self._process.alive()

    async def start(self, version: WeightVersion) -> None:
        """Start the engine on the files of a version and wait until it serves it.

        Raises:
            EngineError: it did not start, or serves something else.
        """
        folder = self._session.run.root / version.path
        if self._url is not None:
            await asyncio.to_thread(self._require_free, self._url)
        await self._tell(version.version_id, url="", build="starting")  # keeps its files from being removed
        await asyncio.to_thread(verify_weights, folder, version.digest)
        if self._url is None:
            self._process = make_process(self._session, model_path=folder, version_id=version.version_id)
        else:
            self._process = AttachedEngine(self._url)
        self._process.start()
        await asyncio.to_thread(self._process.wait_ready)
        self._client = SglangClient(self._process.url, max_connections=self._num_connections)
        info = await self._client.server_info()
        self.build = f"{self._session.run.config.rollout.engine} {info.get('version', '')}".strip()
        reported = await self._client.weight_version()
        if self._url is not None and reported != version.version_id:
            await self._client.abort()  # whatever an engine of others served until now, and whoever asked it
            await self.reload(version)
        else:
            await self._report(reported, version)
        if self._session.run.config.rollout.on_new_weights == "continue":
            self.can_continue = await self._probe_continue()
            if not self.can_continue:
                log.warning(
                    "the engine cannot pause, or does not tell which weights sampled which token: groups are parked instead"
                )

    async def sample(
        self, request: GenerateRequest, *, on_progress: OnProgress | None = None
    ) -> list[Generation]:
        """Return the engine's answers to a request, all of weights that it served meanwhile.

        With `on_progress` they are streamed, and it is told what came so far as long as it is sure which weights sampled
        it: until the end an engine may name only those it has now, so nothing is told after a reload inside the request.

        Raises:
            EngineResponseError: other weights sampled one, it was aborted by others, or cannot be used.
            EngineUnavailableError: no answer.
        """
        served_from = len(self.served)

        def tell(place: int, generation: Generation) -> None:
            assert on_progress is not None
            if generation.tells_spans or len(self.served) == served_from:
                self._require_served(generation, served_from)
                on_progress(place, generation)

        found = await self.client.generate(request, on_progress=None if on_progress is None else tell)
        for generation in found:
            self._require_served(generation, served_from)
            if generation.finish_reason == "abort" and not self.is_interrupted:
                raise EngineResponseError("the request was aborted")
        return found

    def _require_served(self, generation: Generation, served_from: int) -> None:
        """Refuse what other weights sampled than those served since a request began (`served` was so long then)."""
        allowed = self.served[max(0, served_from - 1) :]
        if sampled := set(generation.weight_versions).difference(allowed):
            raise EngineResponseError(f"sampled from {sorted(sampled)}, asked of {self.serving}")

    async def reload(self, version: WeightVersion) -> None:
        """Load another version and check that the engine reports it.

        Raises:
            EngineError: the engine refused, died, or reports other weights.
        """
        await self._prepare(version)
        await self._load(version)

    async def reload_inside(self, version: WeightVersion) -> None:
        """Load another version while requests are in flight: they wait, and go on with the new weights.

        Raises:
            EngineError: as `reload`; what is in flight ends with the engine.
        """
        await self._prepare(version)  # before the pause: no request should wait for it
        await self.client.pause()
        self.served.append(version.version_id)  # from now on requests may be answered by it
        await self._load(version)
        await self.client.resume()

    async def _prepare(self, version: WeightVersion) -> None:
        """Keep the files of a version from being removed, and read them once to see that they are what was published."""
        self.serving = None
        await self._tell(version.version_id)
        folder = self._session.run.root / version.path
        await asyncio.to_thread(verify_weights, folder, version.digest)

    async def _load(self, version: WeightVersion) -> None:
        folder = self._session.run.root / version.path
        await self.client.update_weights_from_disk(folder, version.version_id)
        await self._report(await self.client.weight_version(), version)

    async def _probe_continue(self) -> bool:
        """Ask for one token, and for a pause: what an engine can do is seen, not believed."""
        probe = GenerateRequest(input_ids=[0], sampling_params={"max_new_tokens": 1, "temperature": 0.0})
        try:
            (answer,) = await self.client.generate(probe)
            await self.client.pause()
            await self.client.resume()
        except EngineResponseError as error:
            log.info("the engine cannot be loaded inside requests: %s", error.message)
            return False
        return answer.tells_spans

    def _require_free(self, url: str) -> None:
        holders = [e.session_id for e in engines.listed(self._session.run) if e.url == url.rstrip("/")]
        if set(holders) - {self._session.session_id}:
            raise ConflictError(
                f"the engine at {url} serves another worker already; an engine has one, which loads its weights",
                session_id=holders[0],
            )

    async def stop(self) -> None:
        if self._client is not None:
            if self._url is not None:  # it lives on: nobody waits for these answers any more
                with contextlib.suppress(EngineError):
                    await self._client.abort()
            await self._client.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)

    async def _report(self, reported: str, expected: WeightVersion) -> None:
        if reported != expected.version_id:
            raise EngineError(
                f"the engine reports weights {reported!r} after it was given {expected.version_id!r}; "
                "it is stopped and started again",
                engine_id=self.engine_id,
            )
        await self._tell(reported)
        if self.served[-1:] != [reported]:
            self.served.append(reported)
        self.serving, self.serving_step = reported, expected.step
        log.info("the engine serves %s", reported)

    async def _tell(self, version_id: str, *, url: str | None = None, build: str | None = None) -> None:
        """Store in the index what the engine serves or is about to load."""
        await asyncio.to_thread(
            engines.report,
            self._session,
            engine_id=self.engine_id,
            url=self._process.url if url is None and self._process is not None else url or "",
            build=self.build if build is None else build,
            version_id=version_id,
        )
