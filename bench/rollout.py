"""How much of an engine's speed is left behind a rollout worker that stores everything, against a bare client.

    python bench/rollout.py [--quick] [--json] [--folder DIR] [--only SECTION]

Both sides ask the same engine for the same prompts with the same number of requests at once; the worker also scores every
sample, and a group counts once its completion is durable. Rows and rounds are explained in bench/rows.py.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import aiohttp
from quick_engine import LABEL, QuickEngine
from rows import Bench, Row, alone, at_least, at_most, compare, main, take_turns
from tail_engine import TailEngine

import strawflow
from strawflow.flow import assemble, consume, publish_weights
from strawflow.flow.session import WorkerSession
from strawflow.index import units
from strawflow.index.consumers import Role
from strawflow.testing.runs import made_up_plan
from strawflow.weights.verify import weights_digest
from strawflow_workers.drain import Drain
from strawflow_workers.quickstart.model import TINY, make_model
from strawflow_workers.rollout.generate import sampling_params
from strawflow_workers.rollout.loop import RolloutLoop
from strawflow_workers.rollout.sglang_server import SglangOptions, SglangServer

GROUPS_AT_ONCE = 32
SAMPLES = 8


class Rollout:
    """A run with a rollout worker in a thread of this process, which goes on until this is left."""

    def __init__(
        self,
        folder: Path,
        *,
        url: str,
        tokens: int,
        label: str | None,
        engine: str,
        model: Path | None = None,
        prompts: Sequence[str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Without `model` and `prompts` a tiny model is made, and the prompts are words; `settings` beside those set here."""
        model = model or make_model(folder / "model", seed=0, shape=TINY)
        self.store = strawflow.create(
            folder / "run",
            prompts=[{"prompt": prompt, "label": "drow"} for prompt in prompts or words(4096)],
            settings={
                "model.path": str(model),
                "rollout.engine": engine,
                "rollout.prompts_per_step": 1,
                "rollout.samples_per_prompt": SAMPLES,
                "rollout.max_response_tokens": tokens,
                "rollout.units_in_flight": GROUPS_AT_ONCE,
                "trainer.steps": 1,
                **(settings or {}),
            },
        )
        self._url, self._label = url, label
        self._drain = Drain()
        self._thread = threading.Thread(target=self._work)
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self._publish()
        self._begin()
        self.groups(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self.store.close()

    def _begin(self) -> None:
        self._thread.start()

    def _end(self) -> None:
        self._drain.request()
        self._thread.join()

    def _publish(self) -> None:
        with WorkerSession(self.store.run, "train") as session:
            taken = consume.take_over(session)
            assert taken is not None
            self.publish(session, taken.role, 0)

    def publish(self, session: WorkerSession, role: Role, step: int) -> None:
        """Publish the run's model as the weights of a step."""
        run = self.store.run
        digest = weights_digest(run.model_path / "model.safetensors")
        version_id = self._label or publish_weights.version_name(run, role, step=step, digest=digest)
        shutil.copytree(run.model_path, run.root / publish_weights.weights_path(version_id))
        publish_weights.publish_weights(session, role, step=step, version_id=version_id, digest=digest)

    def require_working(self) -> None:
        """Raise what ended the worker, if anything did."""
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            with WorkerSession(self.store.run, "rollout") as session:
                asyncio.run(RolloutLoop(session, self._drain, engine_url=self._url).run())
        except BaseException as error:
            self._error = error

    def groups(self, count: int) -> float:
        """Have `count` groups sampled, scored and completed durably; returns seconds."""
        started = time.perf_counter()
        self.store.admit(count)
        while self._num_open():
            self.require_working()
            time.sleep(0.01)  # asked more often, the question itself would slow the worker down
        return time.perf_counter() - started

    def num_tokens(self) -> int:
        """Return the response tokens of all completed groups."""
        run = self.store.run
        with run.index.read() as connection:
            return units.total_tokens(connection, run.branch)

    def _num_open(self) -> int:
        run = self.store.run
        with run.index.read() as connection:
            return units.num_unfinished(connection, run.branch, purpose="train")


def words(count: int) -> list[str]:
    return [f"word{number}" for number in range(count)]


def bare_client(
    url: str,
    prompts: Sequence[str],
    *,
    params: dict[str, Any],
    num_at_once: int = GROUPS_AT_ONCE,
    is_streamed: bool = False,
) -> tuple[float, float]:
    """Ask for a group of each prompt as plainly as can be, the answers parsed from JSON; returns (tokens, samples) a second."""

    async def ask() -> tuple[float, float]:
        num_tokens = 0
        connector = aiohttp.TCPConnector(limit=num_at_once)
        left = iter(prompts)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def one_after_another() -> None:
                nonlocal num_tokens
                for prompt in left:
                    body = {
                        "input_ids": list(prompt.encode()),
                        "sampling_params": params,
                        "return_logprob": True,
                        "stream": is_streamed,
                    }
                    async with session.post(f"{url}/generate", json=body) as answer:
                        found = await (_streamed(answer) if is_streamed else _whole(answer))
                        num_tokens += found  # not in one: others add to it during the wait

            started = time.perf_counter()
            await asyncio.gather(*(one_after_another() for _ in range(num_at_once)))
            seconds = time.perf_counter() - started
            return num_tokens / seconds, len(prompts) * SAMPLES / seconds

    return asyncio.run(ask())


async def _whole(answer: aiohttp.ClientResponse) -> int:
    found = await answer.json()
    assert len(found) == SAMPLES
    return sum(len(sample["output_ids"]) for sample in found)


async def _streamed(answer: aiohttp.ClientResponse) -> int:
    """Read a streamed answer whose chunks hold the tokens since the last one; returns its number of tokens."""
    num_tokens, ended, rest = 0, set(), b""
    async for piece in answer.content.iter_any():
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                continue
            chunk = json.loads(data)
            num_tokens += len(chunk["output_ids"])
            if chunk["meta_info"]["finish_reason"] is not None:
                ended.add(chunk["index"])
    assert len(ended) == SAMPLES
    return num_tokens


def quick(bench: Bench) -> Iterator[Row]:
    """An engine that answers in 5 ms: how many samples a worker process completes."""
    tokens, count = 32, bench.pick(192, 1024)
    with (
        QuickEngine(tokens=tokens, samples=SAMPLES, delay_s=0.005) as engine,
        Rollout(bench.path("quick"), url=engine.url, tokens=tokens, label=LABEL, engine="fake") as rollout,
    ):
        params = sampling_params(rollout.store.run.config.profiles()["train"], num_samples=SAMPLES)
        rates = take_turns(
            {
                "ours": lambda: count * SAMPLES / rollout.groups(count),
                "bare": lambda: bare_client(engine.url, words(count), params=params)[1],
            },
            bench.rounds,
        )
    yield alone(
        f"samples of {tokens} tokens completed, engine of 5 ms",
        rates["ours"],
        "samples/s",
        target=at_least(2000),
    )
    yield compare("the same", rates["ours"], "samples/s", against="bare client", theirs=rates["bare"])


STREAMING = ("--incremental-streaming-output", "--stream-interval", "32")
"""How a run that saves progress starts its engines."""


@contextmanager
def sglang_server(folder: Path, *, label: str) -> Iterator[str]:
    """A real SGLang server on this machine with a small random model; yields its address.

    It streams as the engines of a run that saves progress do; an answer that is not streamed is the same with and without.
    """
    model = make_model(folder / "served", seed=0, shape=TINY)
    options = SglangOptions(
        model_path=model,
        log_path=folder / "sglang.log",
        weight_version=label,
        extra_args=STREAMING,
    )
    with SglangServer(options) as server:
        yield server.url


def sglang(bench: Bench) -> Iterator[Row]:
    """Real SGLang on the CPU: behind a worker and without it, then a worker that saves progress beside one that does not.

    All runs name the very weights that the server started with, so that each worker can stay while others have their turns.
    """
    folder = bench.path("sglang")
    short, long = bench.pick(32, 64), bench.pick(128, 256)
    # Several waves a turn: in one, as long as the longest answer takes, its begin and end are most of it.
    many, at_once = bench.pick(96, 128), GROUPS_AT_ONCE
    few, few_at_once = bench.pick(8, 32), bench.pick(4, 8)

    def rollout(name: str, url: str, tokens: int, **settings: float) -> Rollout:
        own = folder / name
        own.mkdir()
        given = {f"rollout.{key}": value for key, value in settings.items()}
        return Rollout(own, url=url, tokens=tokens, label=LABEL, engine="sglang", settings=given)

    def rate(of: Rollout, count: int) -> float:
        before = of.num_tokens()
        seconds = of.groups(count)
        return (of.num_tokens() - before) / seconds

    with sglang_server(folder, label=LABEL) as url:
        with rollout("plain", url, short, save_every_s=0, units_in_flight=at_once) as ours:
            params = sampling_params(ours.store.run.config.profiles()["train"], num_samples=SAMPLES)
            rates = take_turns(
                {
                    "ours": lambda: rate(ours, many),
                    "bare": lambda: bare_client(url, words(many), params=params, num_at_once=at_once)[0],
                },
                bench.rounds,
            )
        yield compare(
            f"SGLang: tokens of {at_once} groups of {SAMPLES} at once, up to {short} each, completed durably",
            rates["ours"],
            "tokens/s",
            against="bare client",
            theirs=rates["bare"],
            target=at_least(0.97),
        )
        with (
            rollout(
                "saving",
                url,
                long,
                save_every_s=1.0,
                stream_interval=int(STREAMING[-1]),
                units_in_flight=few_at_once,
            ) as saves,
            rollout("without", url, long, save_every_s=0, units_in_flight=few_at_once) as keeps,
        ):
            rates = take_turns(
                {"saving": lambda: rate(saves, few), "not": lambda: rate(keeps, few)}, bench.rounds
            )
    yield compare(
        f"SGLang: tokens of {few_at_once} groups of {SAMPLES} at once, up to {long} each, progress saved every second",
        rates["saving"],
        "tokens/s",
        against="saving none, not streamed",
        theirs=rates["not"],
        target=at_least(0.98),
    )


GROUPS, MEMBERS = 8, 4
MAX_TOKENS = 1000


class TailRun:
    """A run against an engine with a long tail: its batches are planned as soon as they can be, its trainer takes no time."""

    def __init__(self, folder: Path, url: str, num_batches: int, settings: Mapping[str, Any]) -> None:
        settings = {
            "rollout.prompts_per_step": GROUPS,
            "rollout.samples_per_prompt": MEMBERS,
            "rollout.save_every_s": 0,
            "trainer.steps": num_batches,
            **settings,
        }
        self._num_batches = num_batches
        self._rollout = Rollout(
            folder, url=url, tokens=MAX_TOKENS, label=None, engine="fake", settings=settings
        )

    def collect(self) -> tuple[float, int]:
        """Collect all batches; returns (seconds, tokens of all that is stored, parked groups included)."""
        run = self._rollout.store.run
        with self._rollout, WorkerSession(run, "train") as train, WorkerSession(run, "assemble") as session:
            taken, role = consume.take_over(train), assemble.take_role(session)
            assert taken is not None
            assert role is not None
            started = time.perf_counter()
            for step in range(1, self._num_batches + 1):
                while len(groups := assemble.offered(session, purpose="train", limit=GROUPS)) < GROUPS:
                    self._rollout.require_working()
                    session.mark_progress()
                    time.sleep(0.005)
                rows = assemble.read_trajectories(session, groups)
                assemble.plan_batch(session, role, made_up_plan(step, groups, rows))
                self._rollout.publish(train, taken.role, step)
            seconds = time.perf_counter() - started
        with run.index.read() as connection:
            return seconds, units.total_tokens(connection, run.branch)


def tail(bench: Bench) -> Iterator[Row]:
    """Log-normal lengths: the time to collect batches by over-provisioning, the tail parked, against plain synchronous."""
    plain = {"rollout.schedule": "sync", "rollout.max_staleness": 0, "rollout.on_new_weights": "finish"}
    ahead = {
        "rollout.schedule": "sync",
        "rollout.over_provision": GROUPS,
        "rollout.max_staleness": 4,
        "rollout.on_new_weights": "park",
    }
    numbers, lost = itertools.count(), []
    num_batches, token_s = bench.pick(3, 10), bench.pick(7, 40) * 0.0001

    def side(settings: Mapping[str, Any]) -> float:
        own = bench.path(f"tail{next(numbers)}")
        with TailEngine(median=80, sigma=1.0, max_tokens=MAX_TOKENS, token_s=token_s) as engine:
            run = TailRun(own, engine.url, num_batches, settings)
            seconds, stored = run.collect()
            if settings is ahead:
                lost.append(float(engine.num_made() - stored))
        return seconds

    times = take_turns({"plain": lambda: side(plain), "ahead": lambda: side(ahead)}, bench.rounds)
    yield compare(
        f"{num_batches} batches of {GROUPS} x {MEMBERS}, log-normal lengths: speed of over-provisioning by a batch, tail parked",
        [1 / s for s in times["ahead"]],
        "collections/s",
        against="plain synchronous",
        theirs=[1 / s for s in times["plain"]],
        target=at_least(1.3),
    )
    yield alone("tokens that were sampled and not kept, over-provisioning", lost, "tokens", target=at_most(0))


if __name__ == "__main__":
    raise SystemExit(main(__doc__ or "", {"quick": quick, "sglang": sglang, "tail": tail}))
