"""Speaks SGLang's HTTP API: token ids in; token ids, log-probabilities and weight versions out.

1. A `Generation` is complete or it is an error: the log-probabilities and versions are as long as the tokens, finite, and
   those of log-softmax(logits / temperature) before truncation (promise P9). Nothing is filled in.
2. New weights always get a label, and the label is read back before the update counts as done.
3. `EngineResponseError`: the engine answered, and the answer cannot be used. `EngineUnavailableError`: it did not answer.
It does not retry, choose engines or know what a unit is; the caller decides what follows an error.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import aiohttp
import numpy as np
import orjson

from strawflow.config import RolloutSection
from strawflow.errors import ConfigError, EngineError, InvalidInputError
from strawflow.flow.trajectory import MAX_LOGPROB
from strawflow.prompts.images import data_address

ORIGINAL_LOGPROB_VARIABLE = "SGLANG_RETURN_ORIGINAL_LOGPROB"
MASKED_LOGPROB = -9000.0
"""At or below: a placeholder for a value that was never computed, not a probability."""

GENERATE, UPDATE_WEIGHTS = "/generate", "/update_weights_from_disk"
_SETTINGS = {GENERATE: "rollout.answer_timeout_s", UPDATE_WEIGHTS: "rollout.load_timeout_s"}
_LARGE_BYTES = 64 * 1024
_IDLE_S = 2.0
"""An idle connection is closed here first. SGLang's server closes it after 5 s: a request sent at that moment on a
connection kept for longer would be lost, and cost an attempt."""


class EngineResponseError(EngineError):
    """The engine's answer cannot be used; `reason` says what was wrong with it in a few words."""

    kind = "engine_response"

    @property
    def reason(self) -> str:
        return self.message


class GarbageAnswerError(EngineResponseError):
    """The engine answered with what no sound engine answers: log-probabilities or weight versions that cannot be true."""

    kind = "engine_garbage"


class EngineUnavailableError(EngineError):
    """The engine did not answer: refused, broke off, failed inside or took too long."""

    kind = "engine_unavailable"


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One prompt, sampled `sampling_params["n"]` times."""

    input_ids: Sequence[int]
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    """SGLang's own names: n, temperature, top_p, top_k, max_new_tokens, stop_token_ids, ..."""
    images: Sequence[bytes] = ()
    """Image files as they are, in the order of their places in the prompt."""
    rid: str | None = None
    """Name to abort by. SGLang renames the samples of a request with n > 1: only abort() of all ends those."""

    @property
    def num_samples(self) -> int:
        return int(self.sampling_params.get("n", 1))


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One sample. The three lists have equal length."""

    output_ids: list[int]
    logprobs: list[float]
    """Of each token: log-softmax(logits / temperature), before top-p, top-k and min-p."""
    weight_versions: list[str]
    """Of each token: label of the weights that sampled it."""
    finish_reason: str
    """"stop", "length" or "abort"."""
    prompt_tokens: int
    cached_tokens: int
    tells_spans: bool = False
    """Whether the engine told by itself which token which weights sampled: one that only names its last weights cannot
    load others inside a request."""


ROUTING_HEADER = "X-SMG-Routing-Key"
"""By this SGLang's router keeps what belongs together with one engine (policy `manual`); engines themselves ignore it."""


def routing_headers(body: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return headers that keep all requests of a unit, whose name stands before the first dot of `rid`, with one engine."""
    rid = None if body is None else body.get("rid")
    return {ROUTING_HEADER: rid.partition(".")[0]} if rid else None


def refuse_original_logprobs(environment: Mapping[str, str]) -> None:
    """Refuse to work with an engine that would report log-probabilities of the untempered distribution.

    Raises:
        ConfigError: SGLANG_RETURN_ORIGINAL_LOGPROB is set to anything but "", "0" or "false".
    """
    if environment.get(ORIGINAL_LOGPROB_VARIABLE, "").lower() not in ("", "0", "false"):
        raise ConfigError(
            f"{ORIGINAL_LOGPROB_VARIABLE} is set: SGLang would leave the temperature out of the log-probabilities, and they "
            f"would not be those of the policy that sampled; unset it"
        )


def _parsed(raw: bytes) -> Any:
    """Parse JSON as quickly as can be.

    Raises:
        ValueError: it is none.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:  # or an engine says NaN, which is garbage of another kind
        return json.loads(raw)


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How many seconds a client waits for a server; then EngineUnavailableError."""

    generate_s: float = 600.0
    """For the next byte of an answer to /generate: one that is not streamed comes all at its end."""
    load_s: float = 600.0
    """For weights to be loaded."""
    control_s: float = 120.0
    """For the answer to anything else."""

    @classmethod
    def of(cls, rollout: RolloutSection) -> Patience:
        return cls(
            generate_s=rollout.answer_timeout_s,
            load_s=rollout.load_timeout_s,
            control_s=rollout.health_timeout_s,
        )


class SglangClient:
    """A client of one server; use as an async context manager, or call `close`.

    max_connections: most requests in flight at once; further calls wait their turn.
    """

    def __init__(self, url: str, *, max_connections: int = 256, patience: Patience | None = None) -> None:
        self.url = url.rstrip("/")
        self._max_connections = max_connections
        patience = patience or Patience()
        self._timeout = aiohttp.ClientTimeout(total=patience.control_s)
        self._timeout_of = {
            # No bound for the whole: a long response may take hours.
            GENERATE: aiohttp.ClientTimeout(total=None, sock_read=patience.generate_s),
            UPDATE_WEIGHTS: aiohttp.ClientTimeout(total=patience.load_s),
        }
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> SglangClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self, request: GenerateRequest, *, on_progress: OnProgress | None = None
    ) -> list[Generation]:
        """Sample one prompt; returns `request.num_samples` generations.

        All samples of a prompt go in one request: SGLang computes the prompt once and draws them independently.
        With `on_progress` the answer is streamed: it is called with a sample's number and all that came of it so far, its
        finish reason "abort" until it has ended.

        Raises:
            InvalidInputError: several samples with one seed, which would be the same sample.
            EngineResponseError: the request was refused, or an answer is not complete.
            EngineUnavailableError: no answer.
        """
        if request.num_samples > 1 and request.sampling_params.get("sampling_seed") is not None:
            raise InvalidInputError(
                "sampling_seed with n > 1 draws one sample n times; send n requests with n seeds"
            )
        body = {**request_body(request), "stream": on_progress is not None}
        if on_progress is not None:
            return await self._generate_streaming(body, request.num_samples, on_progress)

        def parse(raw: bytes) -> list[Generation]:
            answer = _parsed(raw)
            samples = answer if isinstance(answer, list) else [answer]
            if len(samples) != request.num_samples:
                raise GarbageAnswerError(
                    f"{len(samples)} samples instead of {request.num_samples}", engine=self.url
                )
            return [parse_generation(sample, engine=self.url) for sample in samples]

        found: list[Generation] | str = await self._call("POST", GENERATE, body, parse)
        if isinstance(found, str):
            raise EngineResponseError(f"{GENERATE} answered {found!r:.200}, not JSON", engine=self.url)
        return found

    async def _generate_streaming(
        self, body: Mapping[str, Any], num_samples: int, on_progress: OnProgress
    ) -> list[Generation]:
        samples = [StreamedSample(engine=self.url) for _ in range(num_samples)]
        try:
            async with self._open().post(
                f"{self.url}{GENERATE}",
                json=body,
                headers=routing_headers(body),
                timeout=self._timeout_of[GENERATE],
            ) as answer:
                if answer.status >= 400:
                    self._refuse(GENERATE, answer.status, await answer.text())
                async for chunk in _chunks(answer.content):
                    if "error" in chunk:
                        problem = chunk["error"]
                        status = int(problem.get("code") or 500) if isinstance(problem, dict) else 500
                        self._refuse(GENERATE, status, str(problem))
                    place = int(chunk.get("index") or 0)
                    if not 0 <= place < num_samples:
                        raise GarbageAnswerError(
                            f"a chunk of sample {place}, asked for {num_samples}", engine=self.url
                        )
                    on_progress(place, samples[place].add(chunk))
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = _reason(error, GENERATE)
            raise EngineUnavailableError(f"{GENERATE} broke off: {reason}", engine=self.url) from error
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise EngineResponseError(
                f"{GENERATE} streamed what is no chunk: {error}", engine=self.url
            ) from error
        if not all(sample.has_ended for sample in samples):
            raise EngineUnavailableError(f"{GENERATE} broke off before its end", engine=self.url)
        return [sample.so_far() for sample in samples]

    async def update_weights_from_disk(self, path: str | Path, version: str) -> None:
        """Load a Hugging Face checkpoint into the engine under a new label; the KV cache is flushed.

        Raises:
            EngineResponseError: refused (the old weights stay), or the engine reports another label afterwards.
            EngineUnavailableError: no answer; which weights it holds is then unknown.
        """
        if not version:
            raise InvalidInputError(
                "weights need a version label: without one the engine keeps the old label on the new weights"
            )
        body = {"model_path": str(path), "weight_version": version, "flush_cache": True}
        answer = await self._call("POST", UPDATE_WEIGHTS, body)
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise EngineResponseError(
                f"weights were not loaded from {path}: {answer}", engine=self.url, version=version
            )
        found = await self.weight_version()
        if found != version:
            raise EngineResponseError(
                f"the engine reports weight version {found!r} after loading {version!r}", engine=self.url
            )

    async def weight_version(self) -> str:
        """Return the label of the weights that the engine reports."""
        version = (await self._call_for_object("GET", "/model_info")).get("weight_version")
        if not isinstance(version, str):
            raise EngineResponseError(
                f"/model_info gives no weight version, but {version!r}", engine=self.url
            )
        return version

    async def health(self, *, timeout_s: float = 10.0) -> bool:
        """Say whether the engine answers its health check; it does not while it starts, is paused or hangs."""
        try:
            async with asyncio.timeout(timeout_s):
                async with self._open().get(f"{self.url}/health") as answer:
                    return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def abort(self, rid: str | None = None) -> None:
        """End one request (started with this `rid` and one sample), or all; they answer with what they have."""
        await self._call("POST", "/abort_request", {"rid": rid} if rid is not None else {"abort_all": True})

    async def pause(self) -> None:
        """Stop generating with everything kept: running requests wait and are computed afresh from their tokens.

        Mode `retract`: `in_place` leaves the token of a batch under way to be counted to the weights loaded meanwhile.

        Raises:
            EngineResponseError: the engine cannot pause.
        """
        await self._call("POST", "/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._call("POST", "/continue_generation", {})

    async def flush_cache(self) -> None:
        """Empty the KV cache.

        Raises:
            EngineResponseError: requests are running.
        """
        await self._call("POST", "/flush_cache", {})

    async def server_info(self) -> dict[str, Any]:
        """Return the engine's own description: version, arguments, limits."""
        return await self._call_for_object("GET", "/server_info")

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=_IDLE_S)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        return self._session

    async def _call_for_object(self, method: str, route: str) -> dict[str, Any]:
        answer = await self._call(method, route, None)
        if not isinstance(answer, dict):
            raise EngineResponseError(
                f"{route} answered {answer!r:.200} instead of an object", engine=self.url
            )
        return answer

    async def _call(
        self,
        method: str,
        route: str,
        body: Mapping[str, Any] | None,
        parse: Callable[[bytes], Any] = _parsed,
    ) -> Any:
        """Return what `parse` makes of the JSON in an answer, or its text if it holds none."""
        try:
            async with self._open().request(
                method,
                f"{self.url}{route}",
                json=body,
                headers=routing_headers(body),
                timeout=self._timeout_of.get(route, self._timeout),
            ) as answer:
                status, content_type, raw = answer.status, answer.content_type, await answer.read()
            is_json = status < 400 and bool(raw) and _holds_json(content_type, raw)
            if not is_json:
                content = raw.decode(errors="replace")
            elif len(raw) < _LARGE_BYTES:
                content = parse(raw)
            else:  # groups that were begun together end together: the next should not wait until all are parsed
                content = await asyncio.to_thread(parse, raw)
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = _reason(error, route)
            raise EngineUnavailableError(f"{route} got no answer: {reason}", engine=self.url) from error
        except ValueError as error:
            raise EngineResponseError(
                f"{route} answered what is not JSON: {error}", engine=self.url
            ) from error
        if status >= 400:
            self._refuse(route, status, content)
        return content

    def _refuse(self, route: str, status: int, text: str) -> NoReturn:
        if status >= 500:
            raise EngineUnavailableError(f"{route} failed with HTTP {status}: {text:.500}", engine=self.url)
        raise EngineResponseError(f"{route} was refused with HTTP {status}: {text:.500}", engine=self.url)


def _reason(error: Exception, route: str) -> str:
    if isinstance(error, TimeoutError):
        return f"waited longer than {_SETTINGS.get(route, 'rollout.health_timeout_s')}"
    return str(error) or type(error).__name__


def _holds_json(content_type: str, raw: bytes) -> bool:
    """Tell whether an answer is JSON, also one that a router put together from two servers: it calls that plain bytes."""
    if content_type == "application/octet-stream":
        return raw.startswith((b"{", b"[", b'"'))
    return content_type == "application/json"


OnProgress = Callable[[int, Generation], None]
"""Called with a sample's number and what came of it so far."""


async def _chunks(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events, each however long.

    Raises:
        ValueError: one is no JSON object.
    """
    rest = bytearray()
    async for piece in content.iter_any():
        rest += piece
        while (end := rest.find(b"\n\n")) >= 0:
            event = bytes(rest[:end])
            del rest[: end + 2]
            data = event.removeprefix(b"data:").strip()
            if data and data != b"[DONE]":
                chunk = _parsed(data)
                if not isinstance(chunk, dict):
                    raise ValueError(f"{chunk!r:.200} is no object")
                yield chunk


class StreamedSample:
    """One sample of a streamed answer, put together from its chunks.

    A chunk tells all tokens so far or those since the last chunk, as the server was started; the count of tokens in it says
    which. Until the end SGLang names only its present weights, and in the last chunk which sampled which token: that counts.
    """

    def __init__(self, *, engine: str = "") -> None:
        self._engine = engine
        self._output_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[str] = []
        self._meta: Mapping[str, Any] = {}
        self.has_ended = False

    def add(self, chunk: Mapping[str, Any]) -> Generation:
        """Take a chunk; returns the sample as far as it has come.

        Raises:
            GarbageAnswerError: tokens are missing between it and the last one, or it is unsound in itself.
        """
        with _malformed_is_garbage(self._engine):
            self._add(chunk)
            return self.so_far()

    def _add(self, chunk: Mapping[str, Any]) -> None:
        had = len(self._output_ids)
        meta = chunk["meta_info"]
        told = [int(token) for token in chunk["output_ids"]]
        total = int(meta["completion_tokens"])
        finish_reason = meta["finish_reason"]
        entries = meta.get("output_token_logprobs")
        if len(told) == total and told[:had] == self._output_ids:  # all so far
            told = told[had:]
            entries = entries and entries[had:]
        elif had + len(told) != total:
            raise GarbageAnswerError(
                f"a chunk of {len(told)} tokens after {had} makes {total}", engine=self._engine
            )
        self._logprobs += _logprobs({**meta, "output_token_logprobs": entries}, told, self._engine)
        self._output_ids += told
        if meta.get("weight_versions"):
            self._versions = _weight_versions(meta, total, self._engine)
        else:
            self._versions += _weight_versions(meta, len(told), self._engine)
        self._meta = meta
        self.has_ended = finish_reason is not None

    def so_far(self) -> Generation:
        """Return the sample as far as it has come; its lists grow with the next chunk."""
        meta = self._meta
        return Generation(
            output_ids=self._output_ids,
            logprobs=self._logprobs,
            weight_versions=self._versions,
            finish_reason=str(meta["finish_reason"]["type"]) if self.has_ended else "abort",
            prompt_tokens=int(meta.get("prompt_tokens", 0)),
            cached_tokens=int(meta.get("cached_tokens", 0)),
            tells_spans=bool(meta.get("weight_versions")),
        )


def request_body(request: GenerateRequest) -> dict[str, Any]:
    """Return what SGLang's /generate is sent."""
    return {
        "input_ids": list(request.input_ids),
        "sampling_params": dict(request.sampling_params),
        "return_logprob": True,
        "stream": False,
        **_image_data(request),
        **({"rid": request.rid} if request.rid is not None else {}),
    }


def _image_data(request: GenerateRequest) -> dict[str, Any]:
    """Return the images as SGLang takes them: a list; for several samples a list of it, else it counts images as prompts."""
    if not request.images:
        return {}
    images = [data_address(image) for image in request.images]
    return {"image_data": [images] if request.num_samples > 1 else images}


def parse_generation(sample: Any, *, engine: str = "") -> Generation:
    """Turn one element of a /generate answer into a Generation.

    Raises:
        GarbageAnswerError: anything is missing, of unequal length or not a number that can be a log-probability.
    """
    with _malformed_is_garbage(engine):
        meta = sample["meta_info"]
        output_ids = [int(token) for token in sample["output_ids"]]
        return Generation(
            output_ids=output_ids,
            logprobs=_logprobs(meta, output_ids, engine),
            weight_versions=_weight_versions(meta, len(output_ids), engine),
            finish_reason=str(meta["finish_reason"]["type"]),
            prompt_tokens=int(meta["prompt_tokens"]),
            cached_tokens=int(meta.get("cached_tokens", 0)),
            tells_spans=bool(meta.get("weight_versions")),
        )


@contextmanager
def _malformed_is_garbage(engine: str) -> Iterator[None]:
    """Tell what Python makes of an answer with other types, names or magnitudes than an engine's as GarbageAnswerError."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise GarbageAnswerError(f"the answer is malformed: {error!r}", engine=engine) from error


def _logprobs(meta: Mapping[str, Any], output_ids: list[int], engine: str) -> list[float]:
    entries = meta.get("output_token_logprobs")
    if entries is None and output_ids:
        raise GarbageAnswerError("the log-probabilities are missing", engine=engine)
    entries = entries or []
    if len(entries) != len(output_ids):
        raise GarbageAnswerError(
            f"{len(entries)} log-probabilities for {len(output_ids)} tokens", engine=engine
        )
    if (sound := _all_sound(entries, output_ids)) is not None:
        return sound
    logprobs = []
    for place, (entry, token) in enumerate(zip(entries, output_ids, strict=True)):
        if not isinstance(entry, (list, tuple)) or len(entry) < 2:
            raise GarbageAnswerError(
                f"log-probability {place} is {entry!r} instead of [value, token, ...]", engine=engine
            )
        value, of_token = entry[0], entry[1]
        if of_token != token:
            raise GarbageAnswerError(
                f"log-probability {place} is of token {of_token}, not {token}", engine=engine
            )
        if (
            not isinstance(value, (int, float))
            or not math.isfinite(value)
            or not MASKED_LOGPROB < value <= MAX_LOGPROB
        ):
            raise GarbageAnswerError(f"log-probability {place} is {value!r}", engine=engine)
        logprobs.append(float(value))
    return logprobs


def _all_sound(entries: list[Any], output_ids: list[int]) -> list[float] | None:
    """Return the log-probabilities when nothing is wrong with any: all at once, as a response has thousands. None otherwise."""
    try:
        values = [entry[0] for entry in entries]
        if [entry[1] for entry in entries] != output_ids:
            return None
    except (TypeError, IndexError, KeyError):
        return None
    found = np.array(values)
    if found.dtype != np.float64 or not ((found > MASKED_LOGPROB) & (found <= MAX_LOGPROB)).all():
        return None  # NaN compares as false
    return values


def _weight_versions(meta: Mapping[str, Any], num_tokens: int, engine: str) -> list[str]:
    spans = meta.get("weight_versions")
    if not spans:
        version = meta.get("weight_version")
        if not isinstance(version, str):
            raise GarbageAnswerError(f"no weight version, but {version!r}", engine=engine)
        return [version] * num_tokens
    versions: list[str] = []
    for span in spans:
        if (
            not isinstance(span, dict)
            or span.get("start") != len(versions)
            or not isinstance(span.get("version"), str)
        ):
            raise GarbageAnswerError(
                f"the weight version spans do not follow one another: {spans!r:.200}", engine=engine
            )
        versions += [span["version"]] * (int(span["end"]) - len(versions))
    if len(versions) != num_tokens:
        raise GarbageAnswerError(
            f"weight version spans of {len(versions)} tokens for {num_tokens}", engine=engine
        )
    return versions
