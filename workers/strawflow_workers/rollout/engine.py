"""The engine of one rollout worker: its process, its client, and which weights it really serves.

1. A version counts as served only after the engine itself reported it.
2. Weights are loaded with nothing in flight, or while the engine is paused (policy `continue`); the engine then tells which
   token which weights sampled, and one that does not tell is never loaded so.
3. A reload that was refused, an engine that reports other weights, or garbage in its answers to several units in a row
   puts it in quarantine; it serves again after it answered `NUM_PROBES` probes soundly.
4. A reload without an answer within `rollout.load_timeout_s` ends the engine; a new one is started and asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from typing import Any, NoReturn

from strawflow.errors import EngineError, EngineQuarantinedError
from strawflow.flow import engines
from strawflow.flow.session import WorkerSession
from strawflow.ids import new_id
from strawflow.index.slots import Slot
from strawflow.index.weights import WeightVersion
from strawflow.states import EngineState
from strawflow.weights.verify import verify_weights
from strawflow_workers.rollout.engine_health import EngineHealth
from strawflow_workers.rollout.engine_plan import make_client, policy_process
from strawflow_workers.rollout.engine_process import AttachedEngine, EngineProcess
from strawflow_workers.rollout.engine_trust import EngineTrust
from strawflow_workers.rollout.sglang_client import (
    EngineResponseError,
    EngineUnavailableError,
    GarbageAnswerError,
    GenerateRequest,
    Generation,
    OnProgress,
    Patience,
    SglangClient,
)

log = logging.getLogger(__name__)

TELLS_ONLY_NEW = "incremental_streaming_output"
"""Of a server's description: whether each part of a streamed answer tells only what is new."""
NUM_PROBES = 4
"""Answers that an engine which was quarantined must give soundly before it serves again."""
PROBE_TOKENS = 8
MARK_S = 10.0
"""How often a wait for weights says that it is no hang."""
NOTE_S = 5.0
"""How often what was seen of an engine is stored."""


class ServedEngine:
    """An engine process with its client; `serving` is what it last reported itself."""

    def __init__(
        self,
        session: WorkerSession,
        *,
        num_connections: int,
        url: str | None = None,
        slot_id: int | None = None,
    ) -> None:
        """`slot_id` is the number of the engine that the run wants; without it this worker's own is noted, at `url` if given."""
        self._session = session
        self._url, self._slot_id = url, slot_id
        self._slot: Slot | None = None
        self._trust = EngineTrust(session.run.config.rollout.quarantine_after)
        self._health = EngineHealth(session.run.config.rollout.health_timeout_s, self._answers)
        self._quarantined: EngineQuarantinedError | None = None
        self._noted_at = time.monotonic()
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
        self._streams = True
        self.can_continue = False
        """Whether weights may be loaded inside its requests."""

    @property
    def stream_interval(self) -> int:
        """Tokens after which it tells how far a response has come; 0: responses are not saved while they are generated."""
        config = self._session.run.config.rollout
        return config.stream_interval if config.saves_progress and self._streams else 0

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
            EngineQuarantinedError: it is quarantined, now or before.
            ConflictError: it serves another worker.
        """
        folder = self._session.run.root / version.path
        self._slot = await asyncio.to_thread(
            engines.take, self._session, slot_id=self._slot_id, url=self._url
        )
        self._url = self._slot.url
        await self._tell(version.version_id, url="", build="starting")  # keeps its files from being removed
        await self._verify(version)
        if self._url is None:
            self._process = policy_process(self._session, self._slot, folder, version_id=version.version_id)
        else:
            self._process = AttachedEngine(self._url)
            await self._end_pause(self._url)
        self._process.start()
        await asyncio.to_thread(self._process.wait_ready)
        self._client = make_client(
            self._process,
            max_connections=self._num_connections,
            patience=Patience.of(self._session.run.config.rollout),
        )
        info = await self._client.server_info()
        self._streams = self._url is None or bool(info.get(TELLS_ONLY_NEW))
        if self._session.run.config.rollout.saves_progress and not self._streams:
            log.warning(
                "the engine at %s would repeat a whole response for each of its tokens: responses are not saved while it makes "
                "them; start it with --incremental-streaming-output --stream-interval 32",
                self._url,
            )
        self.build = f"{self._session.run.config.rollout.engine} {info.get('version', '')}".strip()
        reported = await self._client.weight_version()
        if self._url is not None and reported != version.version_id:
            await self._client.abort()  # whatever an engine of others served until now, and whoever asked it
            await self.reload(version)
        else:
            await self._report(reported, version)
        if self._slot.strikes:
            await self._probe_sound()
        await asyncio.to_thread(engines.serve, self._session, self._slot.slot_id)
        if self._session.run.config.rollout.on_new_weights == "continue":
            self.can_continue = await self._probe_continue()
            if not self.can_continue:
                log.warning(
                    "the engine cannot pause, or does not tell which weights sampled which token: groups are parked instead"
                )

    async def _end_pause(self, url: str) -> None:
        """Let an engine go on whose worker was killed while it was paused for a load: paused it answers no health check."""
        async with SglangClient(url, patience=Patience(control_s=MARK_S)) as client:
            with contextlib.suppress(EngineError):  # it cannot pause, or does not answer yet
                await client.resume()

    async def sample(
        self, request: GenerateRequest, *, on_progress: OnProgress | None = None
    ) -> list[Generation]:
        """Return the engine's answers to a request, all of weights that it served meanwhile.

        With `on_progress` they are streamed, and it is told what came so far as long as it is sure which weights sampled
        it: until the end an engine may name only those it has now, so nothing is told after a reload inside the request.

        Raises:
            EngineResponseError: other weights sampled one, it was aborted by others, or cannot be used.
            EngineUnavailableError: no answer.
            EngineQuarantinedError: such answers came to be too many; nothing more is asked of it.
        """
        self.require_trusted()
        try:
            found = await self._answered(request, on_progress)
        except GarbageAnswerError as error:
            reason = self._trust.garbage(request.rid, error.reason)
            if reason is not None:
                await self._quarantine(reason)
            raise
        except EngineUnavailableError as error:
            self._trust.error(error.message)
            raise
        self._trust.sound(num_tokens=sum(len(generation.output_ids) for generation in found))
        return found

    async def _answered(
        self, request: GenerateRequest, on_progress: OnProgress | None = None
    ) -> list[Generation]:
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
            raise GarbageAnswerError(f"sampled from {sorted(sampled)}, asked of {self.serving}")

    def require_trusted(self) -> None:
        """Raise EngineQuarantinedError when this engine was put in quarantine."""
        if self._quarantined is not None:
            raise self._quarantined

    async def look_after(self) -> EngineState | None:
        """Store now and then how the engine does; returns its state, in which an operator's decision shows. None: not started.

        Raises:
            EngineError: it has not answered a health check for too long.
        """
        if self._slot is None:
            return None
        self.require_healthy()
        slot_id = self._slot.slot_id
        if time.monotonic() - self._noted_at >= NOTE_S:
            self._noted_at, seen = time.monotonic(), self._trust.seen()
            await asyncio.to_thread(
                engines.note,
                self._session,
                slot_id,
                num_garbage=seen.num_garbage,
                tokens_per_s=seen.tokens_per_s,
                last_error=seen.last_error,
                serves_well=seen.serves_well,
            )
        return await asyncio.to_thread(engines.state_of, self._session.run, slot_id)

    def require_healthy(self) -> None:
        """Ask for its health now and then; never waits.

        Raises:
            EngineError: it has not answered a health check for too long.
        """
        if self.serving is None:  # starting
            self._health.excuse()
        else:
            self._health.look()

    async def _answers(self, within_s: float) -> bool:
        return await self.client.health(timeout_s=within_s)

    async def _quarantine(self, reason: str) -> NoReturn:
        """Put this engine in quarantine, once, and raise that it is."""
        if self._quarantined is None and self._slot is not None:
            self._quarantined = EngineQuarantinedError(f"{self._slot.name} is quarantined: {reason}")
            log.error("%s", self._quarantined)
            await asyncio.to_thread(engines.quarantine, self._session, self._slot.slot_id, reason=reason)
        assert self._quarantined is not None
        raise self._quarantined

    async def _probe_sound(self) -> None:
        """Ask for some tokens before anything is granted: an engine that gave garbage must show that it gives none now."""
        params = {"max_new_tokens": PROBE_TOKENS, "temperature": 1.0}
        for _ in range(NUM_PROBES):
            try:
                await self._answered(GenerateRequest(input_ids=[0], sampling_params=params))
            except EngineResponseError as error:
                await self._quarantine(f"its answer to a probe: {error.reason}")

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
        self._health.excuse()  # nobody looks while it loads: what failed before would seem to have failed all the time
        await self._tell(version.version_id)
        await self._verify(version)

    async def _verify(self, version: WeightVersion) -> None:
        folder = self._session.run.root / version.path
        limit_s = self._session.run.config.rollout.load_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._patiently(asyncio.to_thread(verify_weights, folder, version.digest))
        except TimeoutError as error:
            raise EngineError(
                f"{folder} was not read and checked within {limit_s:g} s (rollout.load_timeout_s)"
            ) from error

    async def _load(self, version: WeightVersion) -> None:
        folder = self._session.run.root / version.path
        try:
            await self._patiently(self.client.update_weights_from_disk(folder, version.version_id))
        except EngineResponseError as error:
            await self._quarantine(error.reason)
        await self._report(await self.client.weight_version(), version)

    async def _patiently(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for what may take longer than a work loop may be silent, and has a limit of its own."""
        task = asyncio.create_task(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=MARK_S)
                self._session.mark_progress()
            task.result()
        finally:
            task.cancel()

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

    async def stop(self) -> None:
        self._health.close()
        if self._client is not None:
            if self._url is not None:  # it lives on: nobody waits for these answers any more
                with contextlib.suppress(EngineError):
                    await self._client.abort()
            await self._client.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)

    async def _report(self, reported: str, expected: WeightVersion) -> None:
        if reported != expected.version_id:
            await self._quarantine(
                f"it reports weights {reported!r} after it was given {expected.version_id!r}"
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
