"""How much of SGLang's speed on a GPU is left behind a rollout worker: 256 samples at once of a model of half a billion parameters.

    python bench/gpu.py [--quick] [--json] [--folder DIR] [--rounds N] [--model-shape SHAPE] [--concurrency N] [--groups N]
                        [--response-tokens N] [--launch-arg=FLAG ...]

1. One server with random weights answers everyone, in turn: a bare client, a rollout worker that completes each group durably,
   one that saves progress every second besides, and a bare client whose answers are streamed as that worker's are.
2. Each worker is a process of its own, as `strawflow resume` starts them; while another side has its turn it only looks for work.
3. All ask for the same prompts of 64 tokens in the same order; the engine's cache is emptied before each turn.
4. Responses end by themselves (the model is nearly uniform over 320 tokens) or at --response-tokens.

`--launch-arg=FLAG` passes SGLang a flag (repeat it for a value): --launch-arg=--attention-backend --launch-arg=triton.
Without a GPU `--model-shape tiny --concurrency 64` tries it all on the CPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollout import SAMPLES, STREAMING, Rollout, bare_client
from rows import Bench, Row, Side, at_least, compare, main, take_turns

from strawflow_workers.quickstart.model import TINY, ModelShape, make_model
from strawflow_workers.rollout.generate import sampling_params
from strawflow_workers.rollout.sglang_server import SglangOptions, SglangServer

LABEL = "bench"
NUM_PROMPTS = 4096
SHAPES = {
    "half_billion": ModelShape(
        hidden_size=1024,
        num_layers=32,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=3072,
        max_position_embeddings=4096,
    ),
    "tiny": TINY,
}
"""`half_billion`: 504 million parameters, layers as those of Qwen3-0.6B; the vocabulary has 320 tokens, so that sampling costs
the engine less than it does with a real one."""


class ProcessRollout(Rollout):
    """A run whose rollout worker is a process of its own."""

    def __init__(self, folder: Path, *, log_path: Path, profile: Path | None = None, **options: Any) -> None:
        super().__init__(folder, **options)
        self._log_path = log_path
        self._profile = ["-m", "cProfile", "-o", str(profile)] if profile is not None else []

    def _begin(self) -> None:
        command = [sys.executable, *self._profile, "-m", "strawflow_workers.entry", "rollout"]
        command += [
            str(self.store.run.root),
            "--engine-url",
            self._url,
            "--die-with-parent",
            str(os.getpid()),
        ]
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._process.wait()

    def require_working(self) -> None:
        if (code := self._process.poll()) is not None:
            tail = "\n".join(self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-25:])
            raise RuntimeError(f"the rollout worker ended with exit code {code}; the end of its log:\n{tail}")

    def tokens_per_second(self, num_groups: int) -> float:
        before = self.num_tokens()
        seconds = self.groups(num_groups)
        return (self.num_tokens() - before) / seconds


PROMPTS = [f"{number:07d} ".ljust(64, ".") for number in range(NUM_PROMPTS)]


def empty_cache(url: str) -> None:
    """Empty the engine's cache of prompts; the engine refuses while its last requests end."""
    deadline = time.monotonic() + 10
    while True:
        try:
            with urllib.request.urlopen(
                urllib.request.Request(f"{url}/flush_cache", method="POST"), timeout=10
            ):
                return
        except urllib.error.HTTPError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def logs(bench: Bench) -> Path:
    folder: Path = bench.options.logs or bench.folder
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def told(name: str, side: Side, url: str) -> Side:
    """Return a side that tells each of its turns on standard error: together they take minutes."""

    def measure() -> float:
        empty_cache(url)
        started, rate = time.monotonic(), side()
        print(
            f"  {name}: {rate:.0f} tokens/s in {time.monotonic() - started:.1f} s",
            file=sys.stderr,
            flush=True,
        )
        return rate

    return measure


def server(bench: Bench, model: Path) -> SglangServer:
    options = SglangOptions(
        model_path=model,
        log_path=logs(bench) / "sglang.log",
        weight_version=LABEL,
        extra_args=(*STREAMING, *bench.options.launch_arg),
    )
    return SglangServer(options)


def beside_bare_client(bench: Bench) -> Iterator[Row]:
    """Tokens a second of all sides."""
    options = bench.options
    at_once = options.concurrency // SAMPLES
    count = options.groups or bench.pick(2, 5) * at_once
    model = make_model(bench.folder / "model", seed=0, shape=SHAPES[options.model_shape])
    with ExitStack() as stack:
        url = stack.enter_context(server(bench, model)).url

        def worker(name: str, *, save_every_s: float) -> ProcessRollout:
            settings = {
                "rollout.units_in_flight": at_once,
                "rollout.save_every_s": save_every_s,
                "rollout.stream_interval": int(STREAMING[-1]),
            }
            rollout = ProcessRollout(
                bench.path(name),
                log_path=logs(bench) / f"{name}.log",
                profile=options.profile and options.profile / f"{name}.prof",
                url=url,
                tokens=options.response_tokens,
                label=LABEL,
                engine="sglang",
                model=model,
                prompts=PROMPTS,
                settings=settings,
            )
            return stack.enter_context(rollout)

        completing, saving = worker("completing", save_every_s=0), worker("saving", save_every_s=1)
        params = sampling_params(completing.store.run.config.profiles()["train"], num_samples=SAMPLES)
        turns = {False: itertools.count(), True: itertools.count()}

        def bare(*, is_streamed: bool) -> float:
            first = 1 + next(turns[is_streamed]) * count  # the workers have asked for the first already
            asked = PROMPTS[first : first + count]
            return bare_client(url, asked, params=params, num_at_once=at_once, is_streamed=is_streamed)[0]

        sides: dict[str, Side] = {
            "bare": lambda: bare(is_streamed=False),
            "completing": lambda: completing.tokens_per_second(count),
            "saving": lambda: saving.tokens_per_second(count),
            "streamed": lambda: bare(is_streamed=True),
        }
        rates = take_turns({name: told(name, side, url) for name, side in sides.items()}, bench.rounds)
    name = f"SGLang, {options.model_shape}, {at_once * SAMPLES} samples at once: tokens completed durably"
    unit = "tokens/s"
    ours, saved = rates["completing"], rates["saving"]
    yield compare(name, ours, unit, against="bare client", theirs=rates["bare"], target=at_least(0.97))
    yield compare(
        "the same with progress saved every second",
        saved,
        unit,
        against="without",
        theirs=ours,
        target=at_least(0.98),
    )
    yield compare("the same", saved, unit, against="bare client, streamed", theirs=rates["streamed"])
    yield compare(
        "a bare client whose answers are streamed",
        rates["streamed"],
        unit,
        against="not streamed",
        theirs=rates["bare"],
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-shape", choices=list(SHAPES), default="half_billion")
    parser.add_argument("--concurrency", type=int, default=256, help="samples at once, in groups of 8")
    parser.add_argument(
        "--groups", type=int, default=0, help="groups a turn; default: 5 (--quick: 2) times those at once"
    )
    parser.add_argument("--response-tokens", type=int, default=384, help="most tokens of a response")
    parser.add_argument("--launch-arg", action="append", default=[], help="a flag for SGLang, or its value")
    parser.add_argument(
        "--logs", type=Path, help="folder for the logs of server and workers, which are removed without it"
    )
    parser.add_argument(
        "--profile", type=Path, help="folder for profiles of the workers, which slow them down"
    )


if __name__ == "__main__":
    raise SystemExit(main(__doc__ or "", {"beside_bare_client": beside_bare_client}, add_options=add_options))
