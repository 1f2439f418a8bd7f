"""Runs with a fake engine, a rollout worker in a thread of this process, and a trainer that only publishes weights."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strawflow.config import RunConfig
from strawflow.flow import admit, assemble, consume, publish_weights
from strawflow.flow.enqueue import EnqueueRequest, enqueue
from strawflow.flow.run import Run, create_run
from strawflow.flow.session import WorkerSession
from strawflow.index import units
from strawflow.prompts.row import PromptKeys
from strawflow.prompts.source import PromptSource
from strawflow.states import UnitState
from strawflow.weights.verify import weights_digest
from strawflow_workers.drain import Drain
from strawflow_workers.rollout.loop import RolloutLoop

NUM_UNITS = 4
NUM_SAMPLES = 4


def make_run(
    folder: Path,
    model: Path,
    *,
    engine_options: dict[str, str] | None = None,
    assemble: dict[str, Any] | None = None,
    evaluate: dict[str, Any] | None = None,
    num_evaluated: dict[str, int] | None = None,
    steps: int = 2,
    prompts: int | None = None,
    rows: Sequence[dict[str, Any]] = (),
    storage: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    sections: dict[str, Any] | None = None,
    **rollout: Any,
) -> Run:
    """Create a run in `folder` with prompts for `steps` steps of `NUM_UNITS` groups (or `prompts`, or these `rows`), and so many of
    each evaluated dataset; `sections` are further ones of the configuration."""
    config = RunConfig.model_validate(
        {
            "run": {"durability": "process"},
            "model": {"path": str(model)},
            "rollout": {
                "engine": "fake",
                "engine_options": engine_options or {},
                "prompts_per_step": NUM_UNITS,
                "samples_per_prompt": NUM_SAMPLES,
                "max_response_tokens": 5,
                "reward": "tests.fault.rewards:even_share",
                "reward_shape": "raw",
                "reward_timeout_s": 1.0,
                **rollout,
            },
            "assemble": assemble or {},
            "storage": storage or {},
            "data": data or {},
            "eval": evaluate or {},
            "trainer": {"steps": steps},
            **(sections or {}),
        }
    )
    run = create_run(folder / "run", config)
    with WorkerSession(run, "enqueue") as session:
        for dataset, num_prompts in {
            admit.PROMPTS: prompts or NUM_UNITS * steps,
            **(num_evaluated or {}),
        }.items():
            word = "word" if dataset == admit.PROMPTS else dataset
            path = folder / f"{dataset}.jsonl"
            made = [{"prompt": f"{word}{i}\n", "images": None} for i in range(num_prompts)]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows or made))
            source, purpose = PromptSource.parse(str(path)), "train" if dataset == admit.PROMPTS else "eval"
            enqueue(
                session, EnqueueRequest(dataset, purpose, source, PromptKeys("prompt", images_key="images"))
            )
    return run


@contextmanager
def trainer_of(run: Run) -> Iterator[Callable[[int], str]]:
    """Be the trainer of a run; yields what publishes its model as the weights of a step and returns their id."""
    with WorkerSession(run, "train") as session:
        taken = consume.take_over(session)
        assert taken is not None
        role = taken.role

        def publish(step: int) -> str:
            digest = weights_digest(run.model_path / "model.safetensors")
            version_id = publish_weights.version_name(run, role, step=step, digest=digest)
            shutil.copytree(run.model_path, run.root / publish_weights.weights_path(version_id))
            publish_weights.publish_weights(session, role, step=step, version_id=version_id, digest=digest)
            return version_id

        yield publish


class Worker:
    """A rollout worker in a thread of this process, beside a trainer role that publishes weights."""

    def __init__(self, run: Run, *, engine_url: str | None = None, slot_id: int | None = None) -> None:
        self.run = run
        self._engine_url, self._slot_id = engine_url, slot_id
        self.drain = Drain()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Worker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.drain.request()
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()

    def wait(self, condition: Callable[[], bool], *, seconds: float = 40.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"the worker did not get there; its error: {self.error}"
            if self.error is not None:
                raise self.error
            time.sleep(0.02)

    def ended(self) -> None:
        """Wait until it ended by itself."""
        self._thread.join(timeout=40)
        assert not self._thread.is_alive()

    def sleep(self, seconds: float) -> None:
        """Let it work for a while."""
        time.sleep(seconds)
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        try:
            with WorkerSession(self.run, "rollout") as session:
                loop = RolloutLoop(session, self.drain, engine_url=self._engine_url, slot_id=self._slot_id)
                asyncio.run(loop.run())
        except BaseException as error:
            self.error = error


def completed(run: Run) -> list[units.Unit]:
    with run.index.read() as connection:
        return units.listed(connection, run.branch, state=UnitState.COMPLETED)


def rows_of(run: Run) -> list[dict[str, Any]]:
    with WorkerSession(run, "look") as session:
        trajectories = assemble.read_trajectories(session, completed(run))
    return [row for batch in trajectories.values() for row in batch.to_pylist()]
