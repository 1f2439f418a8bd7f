"""Rewards that servers give, asked of real HTTP servers in this process: what is tried again, what is not, and what waits for whom."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from strawflow.errors import ConfigError
from strawflow_workers.rollout.rewards.scorer import RewardScorer, ScorerOptions
from strawflow_workers.rollout.rewards.spec import RewardOutcome, RewardRequest, RewardSpec

Answer = tuple[int, bytes]


@dataclass
class Server:
    """A server that answers as a test says, and what it was asked."""

    url: str = ""
    answer: Callable[[dict[str, Any]], Answer] = lambda body: (200, b"1")
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_generation: bool = False


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, json.dumps({"is_generation": found.is_generation}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with found.lock:
                found.asked.append((self.path, body))
                found.at_once += 1
                found.most_at_once = max(found.most_at_once, found.at_once)
            try:
                status, content = found.answer(body)
            finally:
                with found.lock:
                    found.at_once -= 1
            if status == 0:  # hang up without a word
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self._send(status, content)

        def _send(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            if 300 <= status < 400:
                self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:  # a client that did not wait
            pass

    with Quiet(("127.0.0.1", 0), Handler) as running:
        found.url = f"http://127.0.0.1:{running.server_port}/score"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        running.shutdown()
        thread.join()


@pytest.fixture
def dead_url() -> Iterator[str]:
    """An address where nobody listens, and nobody else can come to."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}/score"


@pytest.fixture
def silent_url() -> Iterator[str]:
    """An address where connections are taken and nothing is ever answered."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen(100)
        yield f"http://127.0.0.1:{held.getsockname()[1]}/score"


def asked_for(text: str = "r", **row: Any) -> RewardRequest:
    return RewardRequest(text, "p", **row)


def with_scorer(name: str, body: Callable[[RewardScorer], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    async def run() -> Any:
        spec = RewardSpec(name, row_rewards=options.pop("row_rewards", ()))
        async with RewardScorer(ScorerOptions(spec=spec, **{"retries": 2, **options})) as scorer:
            return await body(scorer)

    return asyncio.run(run())


def outcome_of(name: str, request: RewardRequest | None = None, **options: Any) -> RewardOutcome:
    found: RewardOutcome = with_scorer(name, lambda scorer: scorer.score(request or asked_for()), **options)
    return found


# ---- remote


@pytest.mark.parametrize("content", [b"0.5", b'{"score": 0.5, "why": "half"}'])
def test_a_server_is_sent_the_sample_and_gives_the_score(server: Server, content: bytes) -> None:
    server.answer = lambda body: (200, content)
    request = asked_for("resp\u2028", label="l", metadata='{"a":[1,null]}')
    assert outcome_of(f"remote:{server.url}", request) == RewardOutcome(0.5, 0.5, None)
    sent = {"prompt": "p", "response": "resp\u2028", "label": "l", "metadata": {"a": [1, None]}}
    assert server.asked == [("/score", sent)]


@pytest.mark.parametrize(
    "status, content, told",
    [
        (400, b"no such\nrubric", "answered 400: no such rubric"),
        (404, b"", "answered 404"),
        (429, b"slow down", "answered 429: slow down"),
        (302, b"", "answered 302"),
        (204, b"", "answered 204"),
        (200, b"fine!", "answered what is no JSON: fine!"),
        (200, b"null", "must be a number, this one is NoneType"),
        (200, b"NaN", "must be a finite number, this one is nan"),
        (200, b'{"reward": 1}', "must be a number, this one is dict"),
    ],
)
def test_what_another_try_would_not_mend_is_a_failure_at_once(
    server: Server, status: int, content: bytes, told: str
) -> None:
    server.answer = lambda body: (status, content)
    outcome = outcome_of(f"remote:{server.url}")
    assert outcome.score is None
    assert told in (outcome.failure or "")
    assert server.url in (outcome.failure or "")
    assert len(server.asked) == 1


@pytest.mark.parametrize("status", [0, 500, 503])
def test_server_errors_and_lost_connections_are_tried_again_with_back_off(
    server: Server, status: int
) -> None:
    server.answer = lambda body: (status, b"busy") if len(server.asked) < 3 else (200, b"1")
    began = time.monotonic()
    assert outcome_of(f"remote:{server.url}").score == 1.0
    assert time.monotonic() - began > 0.375  # half of 0.25 s and of 0.5 s
    assert len(server.asked) == 3


def test_after_the_last_try_the_failure_says_what_the_server_said(server: Server) -> None:
    server.answer = lambda body: (503, b"out of memory")
    failure = outcome_of(f"remote:{server.url}", retries=1).failure
    assert failure == f"{server.url} answered 503: out of memory, tried 2 times"


def test_a_server_that_is_down_is_a_failure_that_names_it(dead_url: str) -> None:
    failure = outcome_of(f"remote:{dead_url}", retries=1).failure or ""
    assert dead_url in failure
    assert failure.endswith(", tried 2 times")


def test_a_server_that_never_answers_is_waited_for_once(silent_url: str) -> None:
    began = time.monotonic()
    assert outcome_of(f"remote:{silent_url}", timeout_s=0.3).failure == (
        f"{silent_url} did not answer within 0.3 s"
    )
    assert time.monotonic() - began < 5


def test_no_more_requests_than_allowed_are_under_way(server: Server) -> None:
    def slow(body: dict[str, Any]) -> Answer:
        time.sleep(0.05)
        return 200, b"1"

    server.answer = slow

    async def body(scorer: RewardScorer) -> list[RewardOutcome]:
        return list(await asyncio.gather(*(scorer.score(asked_for(str(n))) for n in range(20))))

    outcomes = with_scorer(f"remote:{server.url}", body, concurrency=3)
    assert [outcome.score for outcome in outcomes] == [1.0] * 20
    assert server.most_at_once == 3


def test_dead_and_silent_servers_hold_up_neither_processes_nor_other_servers(
    server: Server, dead_url: str, silent_url: str
) -> None:
    """Rows route to each; what waits for the dead takes no place from what others could answer."""
    names = (f"remote:{dead_url}", f"remote:{silent_url}", f"remote:{server.url}")

    def row(name: str) -> RewardRequest:
        return asked_for("x", label="x", metadata=json.dumps({"reward": name}))

    async def body(scorer: RewardScorer) -> float:
        waiting = [asyncio.create_task(scorer.score(row(name))) for name in names[:2] for _ in range(50)]
        await scorer.score(row("exact"))
        began = time.monotonic()
        rest = [scorer.score(row(name)) for name in ("exact", names[2]) for _ in range(50)]
        assert [outcome.score for outcome in await asyncio.gather(*rest)] == [1.0] * 100
        seconds = time.monotonic() - began
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        return seconds

    assert with_scorer("exact", body, concurrency=4, timeout_s=60.0, retries=9, row_rewards=names) < 5


def test_a_run_whose_reward_is_a_servers_starts_no_process(server: Server) -> None:
    async def body(scorer: RewardScorer) -> list[int]:
        await scorer.score(asked_for())
        return scorer._pool.pids

    assert with_scorer(f"remote:{server.url}", body) == []


@pytest.mark.parametrize("content", [b"[1, 0.5]", b'{"scores": [1, 0.5]}'])
def test_a_server_of_groups_is_sent_all_responses_at_once(server: Server, content: bytes) -> None:
    server.answer = lambda body: (200, content)

    async def body(scorer: RewardScorer) -> list[RewardOutcome]:
        assert scorer.waits_for_group(None)
        requests = [asked_for("one"), asked_for("two")]
        return await scorer.settle_group(requests, [RewardOutcome(None, None, None)] * 2)

    assert [outcome.score for outcome in with_scorer(f"group:remote:{server.url}", body)] == [1.0, 0.5]
    (sent,) = server.asked
    assert sent[1]["responses"] == ["one", "two"]


def test_a_group_that_gets_another_number_of_scores_is_a_failure(server: Server) -> None:
    server.answer = lambda body: (200, b'[1, "x"]')

    async def body(scorer: RewardScorer) -> list[list[str | None]]:
        two = await scorer.settle_group([asked_for(), asked_for()], [])
        three = await scorer.settle_group([asked_for()] * 3, [])
        return [[outcome.failure for outcome in outcomes] for outcomes in (two, three)]

    two, three = with_scorer(f"group:remote:{server.url}", body)
    assert two == [None, "TypeError: a reward must be a number, this one is str"]
    assert three == [f"{server.url}: a group of 3 needs as many rewards, these are 2"] * 3


# ---- a reward model, as SGLang 0.5.23 serves it (integration/test_reward_model.py asks a real one)


def classify(body: dict[str, Any]) -> Answer:
    """Answer as SGLang's /classify does: the length of what it was given."""
    given = body.get("input_ids", body.get("text", ""))
    return 200, json.dumps({"embedding": [float(len(given))], "meta_info": {"prompt_tokens": 5}}).encode()


def test_a_reward_model_reads_the_very_tokens_that_were_sampled(server: Server) -> None:
    server.answer = classify
    base = server.url.removesuffix("/score")
    request = asked_for(prompt_tokens=[256, 5], response_tokens=[7, 7, 257])
    assert outcome_of(f"reward_model:{base}/", request).score == 5.0
    assert server.asked == [("/classify", {"input_ids": [256, 5, 7, 7, 257]})]


def test_a_reward_model_of_another_vocabulary_reads_text(server: Server) -> None:
    server.answer = classify
    base = server.url.removesuffix("/score")
    outcome = outcome_of(f"reward_model:{base}", asked_for("answer"), reward_model_input="text")
    assert outcome.score == 7.0
    assert server.asked == [("/classify", {"text": "panswer"})]


@pytest.mark.parametrize(
    "request_, options, content, told",
    [
        (asked_for(), {}, b"{}", "has no token ids; set rollout.reward_model_input to 'text'"),
        (
            asked_for(prompt_is_messages=True),
            {"reward_model_input": "text"},
            b"{}",
            "a prompt of chat messages has no text",
        ),
        (asked_for(response_tokens=[1]), {}, b"[1]", "holds no list 'embedding'"),
        (asked_for(response_tokens=[1]), {}, b'{"embedding": [1, 2]}', "gives 2 numbers for a response"),
        (asked_for(response_tokens=[1]), {}, b'{"embedding": [NaN]}', "must be a finite number"),
    ],
)
def test_what_is_no_score_of_a_reward_model_is_a_failure(
    server: Server, request_: RewardRequest, options: dict[str, Any], content: bytes, told: str
) -> None:
    server.answer = lambda body: (200, content)
    base = server.url.removesuffix("/score")
    assert told in (outcome_of(f"reward_model:{base}", request_, **options).failure or "")


def test_a_server_that_generates_is_refused_at_the_start(server: Server) -> None:
    server.is_generation = True
    with pytest.raises(ConfigError, match=r"generates, it does not score; start it .* --is-embedding"):
        outcome_of(f"reward_model:{server.url.removesuffix('/score')}")


def test_a_reward_model_that_is_not_up_yet_is_told_and_waited_for(
    dead_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = outcome_of(f"reward_model:{dead_url}", asked_for(response_tokens=[1]), retries=0)
    assert "does not answer (yet)" in caplog.text
    assert dead_url in (outcome.failure or "")
