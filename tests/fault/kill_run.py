"""A small run under a supervisor in a process of its own, and ways to kill its parts."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from strawflow.config import RunConfig
from strawflow.flow.enqueue import EnqueueRequest, enqueue
from strawflow.flow.progress import standing
from strawflow.flow.run import Run, create_run, open_run
from strawflow.flow.session import WorkerSession
from strawflow.index import sessions, weights
from strawflow.prompts.row import PromptKeys
from strawflow.prompts.source import PromptSource
from strawflow.testing.invariants import check_batches_unchanged, check_exactly_once
from strawflow_workers.quickstart.model import TINY, make_model
from strawflow_workers.trainer.replay import replay
from tests.fault.mixed_prompts import NUM_WORDS, check_draws, prompt_sets

WORDS = [a + b + c for a in "bcdfg" for b in "aeiou" for c in "lmnrst"]


def make_run(
    root: Path,
    *,
    engine: str,
    steps: int,
    seed: int,
    parallel: dict[str, object] | None = None,
    **rollout: object,
) -> Run:
    """Create a run with a tiny model, demonstrations and prompts of several sets; rewards come from an exact match."""
    config = RunConfig.model_validate(
        {
            "run": {"seed": seed},
            "model": {"path": "model"},
            "data": {"prompts": prompt_sets()},
            "warm_start": {"steps": 2, "prompts_per_step": 4},
            "rollout": {
                "engine": engine,
                "prompts_per_step": 4,
                "samples_per_prompt": 4,
                "max_response_tokens": 6,
                "units_in_flight": 4,
                "reward": "tests.fault.rewards:even_share",
                "reward_shape": "raw",
                **rollout,
            },
            "assemble": {"max_tokens_per_micro_batch": 64} if parallel else {},
            "trainer": {"steps": steps, "checkpoint_interval": 3, "lr": 1e-3},
            "parallel": parallel or {},
            "lease": {"ttl_s": 6.0, "heartbeat_s": 1.0, "margin_s": 2.0, "grace_s": 0.5},
        }
    )
    run = create_run(root, config)
    make_model(run.model_path, seed=seed, shape=TINY)
    path = root / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{w}\n", "label": w[::-1]}) + "\n" for w in WORDS))
    with WorkerSession(run, "enqueue") as session:
        for dataset_id, purpose, part in (
            ("demonstrations", "demo", "[:40]"),
            ("prompts", "train", "[40:]"),
            ("words", "train", f"[:{NUM_WORDS}]"),
        ):
            source = PromptSource.parse(f"{path}@{part}")
            enqueue(session, EnqueueRequest(dataset_id, purpose, source, PromptKeys("prompt", "label")))
    return run


class SupervisedRun:
    """The supervisor as a child process; `kill` takes down a part of the run with SIGKILL."""

    def __init__(self, root: Path, *, fault: str = "") -> None:
        self.root, self.fault = root, fault
        self.process: subprocess.Popen[bytes] | None = None
        self.num_kills: dict[str, int] = {}

    def start(self) -> None:
        environment = {**os.environ, "STRAWFLOW_FAULT": self.fault} if self.fault else dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")]
        )
        with (self.root / "supervisor.log").open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "strawflow_workers.entry", "supervise", str(self.root)],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self, what: str) -> bool:
        """SIGKILL a part: train, assemble, rollout, engine or everything; False when it is not running just now."""
        assert self.process is not None
        if what == "everything":
            self.process.kill()
            self.process.wait()
            wait_until(
                lambda: not processes_of(self.root), seconds=10, what="children to die with the supervisor"
            )
        else:
            pids = [pid for pid, kind in processes_of(self.root).items() if kind == what]
            if not pids:
                return False
            os.kill(pids[0], signal.SIGKILL)
        self.num_kills[what] = self.num_kills.get(what, 0) + 1
        return True

    def finish(self, *, seconds: float) -> None:
        assert self.process is not None
        code = self.process.wait(timeout=seconds)
        log = (self.root / "supervisor.log").read_text(errors="replace")
        assert code == 0, f"the run ended with code {code}:\n{log[-4000:]}"


def processes_of(root: Path) -> dict[int, str]:
    """Return {pid: part} of the workers and engines of a run; zombies do not count."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state == "Z" or not any(str(root) in word for word in words):
            continue
        if "strawflow.testing.fake_engine" in words or "sglang.launch_server" in words:
            found[int(entry.name)] = "engine"
        elif "strawflow_workers.entry" in words:
            kind = words[words.index("strawflow_workers.entry") + 1]
            if kind != "supervise":
                found[int(entry.name)] = kind
    return found


@contextmanager
def standing_still(root: Path) -> Iterator[None]:
    """Stop a run's workers while it is looked at by several questions, which must see one moment."""
    workers = [pid for pid, kind in processes_of(root).items() if kind != "engine"]
    for pid in workers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def serving_engines(root: Path) -> set[str]:
    """Return the engines of live workers that reported what they serve (not those that are still starting)."""
    run = open_run(root)
    try:
        with run.index.read() as connection:
            live = {s.session_id for s in sessions.listed(connection, live_only=True)}
            live -= {s.session_id for s in sessions.live_but_gone(connection)}
            found = weights.engines_listed(connection)
        return {e.engine_id for e in found if e.session_id in live and e.url}
    finally:
        run.close()


def num_planned(root: Path) -> int:
    """Return the last step with a stored batch."""
    run = open_run(root)
    try:
        return standing(run).planned
    finally:
        run.close()


def wait_for_new_engine(root: Path, known: set[str]) -> set[str]:
    """Wait until an engine that is not among `known` serves; returns those that serve."""
    wait_until(lambda: bool(serving_engines(root) - known), seconds=150, what="a new engine to serve")
    return serving_engines(root)


def wait_until(condition: Callable[[], bool], *, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def campaign(
    supervised: SupervisedRun,
    parts: list[str],
    *,
    seed: int,
    gap_s: tuple[float, float],
    seconds: float,
    once_serving: bool = False,
) -> dict[int, str]:
    """Kill the named parts in order at random instants, restarting the supervisor; check the promises after each kill.

    With `once_serving` each instant is counted from when an engine reported to serve again, so that a slow start is not
    all that gets killed. Returns the last seen {step: batch digest}.
    """
    rng = random.Random(seed)
    deadline = time.monotonic() + seconds
    digests: dict[int, str] = {}
    hit: set[str] = set()
    supervised.start()
    for part in parts:
        if once_serving:
            hit |= wait_for_new_engine(supervised.root, hit)
        due = time.monotonic() + rng.uniform(*gap_s)
        while time.monotonic() < due or not supervised.kill(part):
            assert time.monotonic() < deadline, f"no {part} to kill within {seconds} s"
            assert supervised.is_running(), (
                f"the run ended before a {part} could be killed: give it more steps"
            )
            time.sleep(0.02)
        if not supervised.is_running():
            supervised.start()
        run = open_run(supervised.root)
        digests = check_batches_unchanged(digests, run)
        check_exactly_once(run, finished=False)
        run.close()
    return digests


def check_finished(root: Path, digests: dict[int, str]) -> None:
    """Check the promises at the end, and that an uninterrupted replay of the store ends at the same weights."""
    run = open_run(root)
    assert not processes_of(root), "processes of the run are left"
    check_batches_unchanged(digests, run)
    fates = check_exactly_once(run, finished=True)
    assert "trained" in fates.values()
    check_draws(run)
    config = run.config
    planned = config.warm_start.steps * config.warm_start.prompts_per_step
    planned += config.trainer.steps * config.rollout.prompts_per_step
    assert len(fates) >= planned
    steps = list(replay(run))
    assert [s.step for s in steps] == list(range(1, config.total_steps + 1))
    different = [s for s in steps if not s.is_equal]
    assert not different, f"replay differs from the run: {different[:3]}"
    assert steps[-1].state_equal is True, "the last step has no checkpoint to compare with"
    run.close()
