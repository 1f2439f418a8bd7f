"""A generation engine that speaks SGLang's HTTP routes and computes nothing: for tests of everything around an engine.

1. What it answers is a pure function of (prompt ids, sample index, sampling seed, weight version): `expected_generation`
   gives the same answer without a server. Request ids, timing and earlier requests do not matter.
   A response that is broken off and asked for again with its tokens in the prompt goes on as it would have (`Chain`).
2. Faults are switched on by `Faults` at the start, by command-line flags, or later by POST /faults; counted faults
   ("every nth") count requests from the last change.
3. With --die-with-parent it dies with the thread that started it: start it from one that lives as long as the engine should.
It knows no tokenizer and no model; a model path is only a name here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from strawflow.parentage import die_with_parent

DEATH_EXIT_CODE = 70
_DEFAULT_MAX_NEW_TOKENS = 128
_KEPT_REQUESTS = 1024
"""Bodies of the newest /generate that GET /requests shows."""
_MEAN_TOKENS = 8
"""Tokens after which a response ends, on average, when its length does not run out."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Which faults are on; zero or False is off."""

    error_rate_every_nth: int = 0
    """Every nth /generate is answered with HTTP 500."""
    delay_s: float = 0.0
    """Each /generate waits so long first; an abort ends the wait."""
    short_logprobs: int = 0
    """Every nth /generate lacks the last log-probability of its first sample."""
    nan_logprobs: int = 0
    """Every nth /generate has NaN as the first log-probability of its first sample."""
    masked_logprobs: int = 0
    """Every nth /generate has -9999, SGLang's word for one that was never computed, as the first log-probability."""
    positive_logprobs: int = 0
    """Every nth /generate has a log-probability above 0."""
    odd_version: int = 0
    """Every nth /generate names weights that were never loaded."""
    wrong_version: bool = False
    """Weight updates succeed, and the old label stays."""
    die_on_update: int = 0
    """The process ends without an answer at its nth weight update."""
    update_s: float = 0.0
    """Seconds that each weight update takes."""
    hang: bool = False
    """/generate is never answered, until it is aborted."""
    stuck: bool = False
    """As SGLang whose scheduler hangs: /generate is never answered, an abort is acknowledged and ends nothing, /health fails."""
    token_s: float = 0.0
    """Seconds that each token takes; an abort ends the request with the tokens so far."""
    cut_stream_after: int = 0
    """A streamed answer breaks off, its connection closed, once its first sample has so many tokens."""
    no_pause: bool = False
    """The engine cannot pause: the routes for it are not there."""


@dataclass(frozen=True, kw_only=True)
class FakeEngineOptions:
    """What a fake engine is started with."""

    vocab_size: int = 320
    eos: int = 257
    model_path: str = "fake/default"
    weight_version: str | None = None
    """First label; None: the last component of model_path."""
    host: str = "127.0.0.1"
    port: int = 0
    mean_tokens: int = _MEAN_TOKENS
    """A response ends once in so many tokens."""
    tells_only_new: bool = True
    """Whether it says of itself that a chunk of a streamed answer tells only what is new (so it does in any case)."""
    stream_interval: int = 1
    """Tokens between two chunks of a streamed answer; each chunk tells only what is new."""
    faults: Faults = field(default_factory=Faults)

    def first_label(self) -> str:
        return self.weight_version if self.weight_version is not None else Path(self.model_path).name


@dataclass(frozen=True)
class Sample:
    """One answer: tokens, their log-probabilities, and "stop" or "length"."""

    output_ids: list[int]
    logprobs: list[float]
    finish_reason: str


class Chain:
    """Draws one sample token by token, each a pure function of the tokens before it, the weights and the sample's name.

    So a response that was broken off and goes on later, its first part now in the prompt, is the one that would have been:
    as with a real engine that samples greedily. Only the first sample of a request goes on like that; others have a number.
    """

    def __init__(self, input_ids: Sequence[int], *, sample: int, sampling_seed: int | None = None) -> None:
        self._state = hashlib.blake2b(repr((sample, sampling_seed)).encode(), digest_size=16)
        for token in input_ids:
            self._add(token)

    def next(self, *, weight_version: str, vocab_size: int, eos: int, mean_tokens: int) -> tuple[int, float]:
        """Return the next token and its log-probability; `eos` once in `mean_tokens`."""
        drawn = self._state.copy()
        drawn.update(weight_version.encode())
        number = int.from_bytes(drawn.digest(), "little")
        number, is_end = divmod(number, mean_tokens)
        number, token = divmod(number, vocab_size)
        if is_end == 0:
            token = eos
        elif token == eos:
            token = (token + 1) % vocab_size
        self._add(token)
        return token, -round(0.01 + (number % 5_990_000) / 1e6, 6)

    def _add(self, token: int) -> None:
        self._state.update(token.to_bytes(4, "little"))


def expected_generation(
    input_ids: Sequence[int],
    *,
    sample: int,
    weight_version: str,
    vocab_size: int,
    eos: int,
    max_new_tokens: int = _DEFAULT_MAX_NEW_TOKENS,
    sampling_seed: int | None = None,
    mean_tokens: int = _MEAN_TOKENS,
) -> Sample:
    """Return what a fake engine answers when nothing interrupts it: 1 to max_new_tokens tokens, the last one `eos` unless
    the length ran out."""
    chain = Chain(input_ids, sample=sample, sampling_seed=sampling_seed)
    output_ids: list[int] = []
    logprobs: list[float] = []
    while len(output_ids) < max_new_tokens and (not output_ids or output_ids[-1] != eos):
        token, logprob = chain.next(
            weight_version=weight_version, vocab_size=vocab_size, eos=eos, mean_tokens=mean_tokens
        )
        output_ids.append(token)
        logprobs.append(logprob)
    finished = bool(output_ids) and output_ids[-1] == eos
    return Sample(output_ids, logprobs, "stop" if finished else "length")


@dataclass(eq=False)
class _Running:
    """A request being answered. Its number is no name for it: counts begin anew with each set of faults."""

    rid: str
    aborted: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Draft:
    """One sample of a running request, as far as it has come."""

    chain: Chain
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = ""

    def take(self, token: int, logprob: float, version: str) -> None:
        at = len(self.output_ids)
        if not self.spans or self.spans[-1]["version"] != version:
            self.spans.append({"version": version, "start": at, "end": at})
        self.spans[-1]["end"] = at + 1
        self.output_ids.append(token)
        self.logprobs.append(logprob)


class FakeEngine:
    """A fake engine in threads of this process; `python -m strawflow.testing.fake_engine` runs one as a process."""

    def __init__(self, options: FakeEngineOptions | None = None) -> None:
        self.options = options or FakeEngineOptions()
        self._lock = threading.Lock()
        self._faults = self.options.faults
        self._model_path = self.options.model_path
        self._weight_version = self.options.first_label()
        self._counts = {"generate": 0, "update": 0}
        self._requests: deque[Any] = deque(maxlen=_KEPT_REQUESTS)
        self._in_flight: set[_Running] = set()
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._server = _Server((self.options.host, self.options.port), _handler_of(self))

    @property
    def url(self) -> str:
        return f"http://{self.options.host}:{self._server.server_address[1]}"

    @property
    def weight_version(self) -> str:
        return self._weight_version

    @property
    def num_generated(self) -> int:
        """Times that /generate was asked since faults were last changed."""
        return self._counts["generate"]

    @property
    def num_updates(self) -> int:
        """Weight updates asked for since faults were last changed."""
        return self._counts["update"]

    def set_faults(self, **changes: Any) -> Faults:
        """Change fault switches and begin counting anew.

        Raises:
            TypeError: no such switch.
        """
        with self._lock:
            self._faults = replace(self._faults, **changes)
            self._counts = {"generate": 0, "update": 0}
            return self._faults

    def serve(self) -> None:
        """Answer requests until `close`."""
        self._server.serve_forever(poll_interval=0.05)

    def close(self) -> None:
        """Stop serving; whatever waits is aborted."""
        self._goes_on.set()
        self._abort("")
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> FakeEngine:
        threading.Thread(target=self.serve, name="fake-engine", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(self, method: str, route: str, body: Any) -> tuple[int, Any]:
        """Return (HTTP status, JSON content) of one request."""
        actions: dict[tuple[str, str], Callable[[Any], tuple[int, Any]]] = {
            ("GET", "/health"): lambda _: (200 if self._is_well() else 503, None),
            ("GET", "/model_info"): lambda _: (200, self._model_info()),
            ("GET", "/server_info"): lambda _: (200, self._server_info()),
            ("GET", "/faults"): lambda _: (200, {**asdict(self._faults), "counts": self._counts}),
            ("POST", "/faults"): self._change_faults,
            ("GET", "/requests"): lambda _: (200, list(self._requests)),
            ("POST", "/generate"): self._generate,
            ("POST", "/abort_request"): self._abort_request,
            ("POST", "/pause_generation"): self._pause,
            ("POST", "/continue_generation"): self._continue,
            ("POST", "/update_weights_from_disk"): self._update_weights,
            ("POST", "/flush_cache"): lambda _: (200, "Cache flushed.\n"),
        }
        action = actions.get((method, route))
        return action(body) if action else (404, {"detail": "Not Found"})

    def _is_well(self) -> bool:
        return self._goes_on.is_set() and not self._faults.stuck

    def _model_info(self) -> dict[str, Any]:
        return {
            "model_path": self._model_path,
            "weight_version": self._weight_version,
            "is_generation": True,
        }

    def _server_info(self) -> dict[str, Any]:
        return {
            "version": "fake",
            "model_path": self._model_path,
            "weight_version": self._weight_version,
            "incremental_streaming_output": self.options.tells_only_new,
        }

    def _change_faults(self, body: Any) -> tuple[int, Any]:
        try:
            return 200, asdict(self.set_faults(**body))
        except TypeError as error:
            return 400, {"error": str(error)}

    def _count(self, verb: str) -> tuple[int, Faults]:
        with self._lock:
            self._counts[verb] += 1
            return self._counts[verb], self._faults

    def _generate(self, body: Any) -> tuple[int, Any]:
        number, faults = self._count("generate")
        self._requests.append(body)
        input_ids = body.get("input_ids")
        if not isinstance(input_ids, list) or not all(isinstance(token, int) for token in input_ids):
            return 400, {"error": {"message": "input_ids must be one list of token ids"}}
        if any(not 0 <= token < self.options.vocab_size for token in input_ids):
            return 400, {"error": {"message": "input_ids holds a token outside the vocabulary"}}
        if _due(faults.error_rate_every_nth, number):
            return 500, {"error": {"message": f"injected failure of request {number}"}}
        if body.get("stream"):
            return 200, self._stream(body, number, faults)
        *_, drafts = self._rounds(body, faults)
        answers = [self._told(body, place, draft) for place, draft in enumerate(drafts)]
        if body.get("return_logprob"):
            _spoil(answers[0]["meta_info"], faults, number)
        return 200, answers if len(answers) > 1 else answers[0]

    def _stream(self, body: Any, number: int, faults: Faults) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a streamed answer, as SGLang does with --incremental-streaming-output."""
        sent: dict[int, int] = {}
        for drafts in self._rounds(body, faults):
            for place, draft in enumerate(drafts):
                had = sent.get(place, 0)
                is_due = len(draft.output_ids) - had >= self.options.stream_interval
                if had >= 0 and (is_due or draft.finish_reason):
                    chunk = _only_new(self._told(body, place, draft), place, had=had)
                    if body.get("return_logprob") and not place and draft.finish_reason:
                        _spoil(chunk["meta_info"], faults, number)
                    sent[place] = -1 if draft.finish_reason else len(draft.output_ids)
                    yield chunk
            if 0 < faults.cut_stream_after <= len(drafts[0].output_ids):
                raise ConnectionAbortedError

    def _rounds(self, body: Any, faults: Faults) -> Iterator[list[_Draft]]:
        """Yield a request's samples after each round of tokens, and once more when all have ended."""
        running = _Running(str(body.get("rid") or ""))
        with self._lock:
            self._in_flight.add(running)
        try:
            yield from self._drawn(body, running, faults)
        finally:
            with self._lock:
                self._in_flight.remove(running)

    def _drawn(self, body: Any, running: _Running, faults: Faults) -> Iterator[list[_Draft]]:
        """Draw all samples of a request side by side, until they end or it is aborted."""
        params = body.get("sampling_params") or {}
        limit = int(params.get("max_new_tokens", _DEFAULT_MAX_NEW_TOKENS))
        seed = params.get("sampling_seed")
        drafts = [
            _Draft(Chain(body["input_ids"], sample=place, sampling_seed=seed))
            for place in range(int(params.get("n", 1)))
        ]
        is_aborted = running.aborted.wait(None if faults.hang or faults.stuck else faults.delay_s)
        while not is_aborted and (open_drafts := [d for d in drafts if not d.finish_reason]):
            if faults.token_s:
                is_aborted = running.aborted.wait(faults.token_s)
            while not is_aborted and not self._goes_on.wait(0.01):
                is_aborted = running.aborted.is_set()
            if not is_aborted:
                for draft in open_drafts:
                    self._draw(draft, limit)
                yield drafts
        for draft in drafts:
            draft.finish_reason = draft.finish_reason or "abort"
        yield drafts

    def _draw(self, draft: _Draft, limit: int) -> None:
        version, options = self._weight_version, self.options
        if len(draft.output_ids) < limit:
            token, logprob = draft.chain.next(
                weight_version=version,
                vocab_size=options.vocab_size,
                eos=options.eos,
                mean_tokens=options.mean_tokens,
            )
            draft.take(token, logprob, version)
        if draft.output_ids and draft.output_ids[-1] == options.eos:
            draft.finish_reason = "stop"
        elif len(draft.output_ids) >= limit:
            draft.finish_reason = "length"

    def _told(self, body: Any, place: int, draft: _Draft) -> dict[str, Any]:
        version = draft.spans[-1]["version"] if draft.spans else self._weight_version
        meta: dict[str, Any] = {
            "id": f"{body.get('rid') or 'request'}-{place}",
            "finish_reason": {"type": draft.finish_reason},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(draft.output_ids),
            "cached_tokens": 0,
            "weight_version": version,
            "weight_versions": draft.spans or [{"version": version, "start": 0, "end": 0}],
        }
        if body.get("return_logprob"):
            pairs = zip(draft.logprobs, draft.output_ids, strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        return {"output_ids": draft.output_ids, "meta_info": meta}

    def _pause(self, body: Any) -> tuple[int, Any]:
        if self._faults.no_pause:
            return 404, {"detail": "Not Found"}
        self._goes_on.clear()
        if body.get("mode", "abort") == "abort":
            self._abort("")
        return 200, {"status": "ok", "message": "Generation paused successfully."}

    def _continue(self, _body: Any) -> tuple[int, Any]:
        if self._faults.no_pause:
            return 404, {"detail": "Not Found"}
        self._goes_on.set()
        return 200, {"status": "ok", "message": "Generation continued successfully."}

    def _abort_request(self, body: Any) -> tuple[int, Any]:
        if not body.get("abort_all") and not body.get("rid"):
            return 200, None  # as SGLang: an empty name aborts nothing
        if not self._faults.stuck:
            self._abort("" if body.get("abort_all") else str(body["rid"]))
        return 200, None

    def _abort(self, rid_prefix: str) -> None:
        with self._lock:
            for running in self._in_flight:
                if running.rid.startswith(rid_prefix):
                    running.aborted.set()

    def _update_weights(self, body: Any) -> tuple[int, Any]:
        number, faults = self._count("update")
        if _due(faults.die_on_update, number):
            os._exit(DEATH_EXIT_CODE)
        time.sleep(faults.update_s)
        path = Path(str(body.get("model_path")))
        if not (path / "config.json").is_file():
            return 400, {"success": False, "message": f"no config.json in {path}", "num_paused_requests": 0}
        with self._lock:
            self._model_path = str(path)
            if body.get("weight_version") and not faults.wrong_version:
                self._weight_version = str(body["weight_version"])
        return 200, {
            "success": True,
            "message": "Succeeded to update model weights.",
            "num_paused_requests": 0,
        }


def _only_new(answer: dict[str, Any], place: int, *, had: int) -> dict[str, Any]:
    """Return a sample's answer as a chunk: without the `had` tokens told before."""
    meta = dict(answer["meta_info"])
    if "output_token_logprobs" in meta:
        meta["output_token_logprobs"] = meta["output_token_logprobs"][had:]
    if meta["finish_reason"]["type"] == "":  # not ended; until then SGLang names its present weights only
        meta["finish_reason"] = None
        del meta["weight_versions"]
    return {"output_ids": answer["output_ids"][had:], "meta_info": meta, "index": place}


def _due(every_nth: int, number: int) -> bool:
    return every_nth > 0 and number % every_nth == 0


def _spoil(meta: dict[str, Any], faults: Faults, number: int) -> None:
    if _due(faults.short_logprobs, number):
        meta["output_token_logprobs"] = meta["output_token_logprobs"][:-1]
    first = {
        faults.nan_logprobs: float("nan"),
        faults.masked_logprobs: -9999.0,
        faults.positive_logprobs: 0.5,
    }
    for every_nth, value in first.items():
        if _due(every_nth, number) and meta["output_token_logprobs"]:
            meta["output_token_logprobs"][0][0] = value
    if _due(faults.odd_version, number):
        meta["weight_versions"] = [{**span, "version": "of nobody"} for span in meta["weight_versions"]]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512  # the default of 5 resets connections when a whole step arrives at once


def _handler_of(engine: FakeEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # header and body in one segment
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._reply(*engine.answer("GET", self.path.partition("?")[0], None))

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                body = json.loads(raw) if raw.strip() else {}
            except ValueError as error:
                self._reply(400, {"error": {"message": f"the body is not JSON: {error}"}})
                return
            self._reply(*engine.answer("POST", self.path.partition("?")[0], body))

        def _reply(self, status: int, content: Any) -> None:
            if isinstance(content, Iterator):
                self._reply_streaming(content)
                return
            text = "" if content is None else content if isinstance(content, str) else json.dumps(content)
            kind = "text/plain" if isinstance(content, str) else "application/json"
            payload = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def _reply_streaming(self, chunks: Iterator[dict[str, Any]]) -> None:
            self.close_connection = True  # its end is the end of the answer
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            with closing(chunks) as told:  # type: ignore[type-var]  # it is a generator
                for chunk in told:
                    self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                    self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:
                self.close_connection = True  # the client was killed or gave up: nobody is left to tell

        def finish(self) -> None:
            with suppress(ConnectionError):  # what a client that is gone was still to be told
                super().finish()

        def log_message(self, format: str, *args: Any) -> None:
            return None

    return Handler


def _switch(text: str) -> bool:
    return text.lower() in ("1", "true", "yes", "on")


def _parse(arguments: Sequence[str] | None) -> tuple[int | None, FakeEngineOptions]:
    parser = argparse.ArgumentParser(prog="python -m strawflow.testing.fake_engine", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--vocab-size", type=int, default=320)
    parser.add_argument("--eos", type=int, default=257)
    parser.add_argument("--model-path", default="fake/default")
    parser.add_argument("--weight-version")
    parser.add_argument("--mean-tokens", type=int, default=_MEAN_TOKENS)
    parser.add_argument("--stream-interval", type=int, default=1)
    parser.add_argument("--die-with-parent", type=int, metavar="PID", help="end when this parent does")
    for switch in fields(Faults):
        kind = _switch if isinstance(switch.default, bool) else type(switch.default)
        names = dict.fromkeys((f"--{switch.name.replace('_', '-')}", f"--{switch.name}"))
        parser.add_argument(*names, dest=switch.name, type=kind, default=switch.default)
    found = vars(parser.parse_args(arguments))
    parent = found.pop("die_with_parent")
    faults = Faults(**{switch.name: found.pop(switch.name) for switch in fields(Faults)})
    return parent, FakeEngineOptions(**found, faults=faults)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until killed; prints one JSON line with url and pid when it answers."""
    parent, options = _parse(arguments)
    if parent is not None:
        die_with_parent(parent)
    engine = FakeEngine(options)
    print(json.dumps({"url": engine.url, "pid": os.getpid()}), flush=True)
    engine.serve()


if __name__ == "__main__":
    main()
