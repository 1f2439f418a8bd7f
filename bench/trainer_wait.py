"""The share of a trainer's step that goes by until the rows of its batch are there: section `wait` of the trainer's bench.

1. The batches are planned and stored before anything is trained, so what is waited for is reading, checking and laying out alone.
2. The trainer is the real loop in this process, on one thread, with its index, checkpoints and metrics; the shares are those that it
   records of its steps (`read_wait_share`), without the first, which nothing can be read ahead of.
3. Model and batch are small: a larger model computes longer over the same bytes.

    python bench/trainer_wait.py [--quick] [--json] [--folder DIR]
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
from rows import Bench, Row, alone, at_most, main

from strawflow.flow import assemble, history
from strawflow.flow.assemble import PackedMicroBatch
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.records import BATCH
from strawflow.testing.runs import made_up_plan, small_run

SEQUENCES, MEAN_TOKENS, MAX_TOKENS = 32, 128, 512
MICRO_BATCH_TOKENS = 16384


def wait(bench: Bench) -> Iterable[Row]:
    """Measure the shares with and without reading ahead, on the same batches."""
    steps = bench.pick(6, 20)
    for name, ahead, target in (
        ("share of a step until its rows are there, read ahead", True, at_most(2.0)),
        ("the same, each batch read when it is wanted", False, None),
    ):
        run = _stored_run(bench.path("ahead" if ahead else "wanted"), steps)
        _train(run, ahead=ahead)
        recorded = history.steps(run)[1:]
        run.close()
        yield alone(name, [100 * s["read_wait_share"] for s in recorded], "%", target=target)
        if ahead:
            yield alone("tokens trained", [s["tokens_per_second"] for s in recorded], "tokens/s")


def _train(run: Run, *, ahead: bool) -> None:
    from strawflow_workers.drain import Drain
    from strawflow_workers.trainer import loop

    feed = functools.partial(loop.BatchFeed, ahead=ahead)
    with mock.patch.object(loop, "BatchFeed", feed), WorkerSession(run, "train") as session:
        loop.TrainerLoop(session, Drain()).run()


def _stored_run(folder: Path, steps: int) -> Run:
    from strawflow_workers.quickstart.model import TINY, make_model

    model = make_model(folder / "hf", seed=0, shape=TINY)
    made = small_run(
        folder,
        num_prompts=4 * steps,
        settings={
            "model.path": str(model),
            "trainer.steps": str(steps),
            "trainer.checkpoint_interval": str(steps),
            "rollout.max_staleness": str(steps),
        },
    )
    made.sessions.pop("train").end()  # the real trainer takes over from it
    made.sample()
    session, role = made.session("assemble"), made.assembler()
    rng = np.random.default_rng(0)
    for step in range(1, steps + 1):
        groups = assemble.offered(session, purpose="train", limit=4)
        plan = made_up_plan(step, groups, assemble.read_trajectories(session, groups))
        packed = _packed(rng, step)
        denominator = float(sum(int(np.asarray(m.rows.column("loss_mask").flatten()).sum()) for m in packed))
        assemble.plan_batch(session, role, replace(plan, micro_batches=packed, denominators=(denominator,)))
    for other in made.sessions.values():
        other.end()
    made.sessions.clear()
    return made.run


def _packed(rng: np.random.Generator, step: int) -> list[PackedMicroBatch]:
    """Pack random sequences of log-normal lengths, in order, up to the bound of a micro-batch."""
    lengths = np.clip(rng.lognormal(np.log(MEAN_TOKENS), 0.6, SEQUENCES).astype(int), 16, MAX_TOKENS)
    micro: list[list[int]] = [[]]
    for length in lengths:
        if sum(micro[-1]) + length > MICRO_BATCH_TOKENS:
            micro.append([])
        micro[-1].append(int(length))
    return [PackedMicroBatch(0, 0, at, _rows(rng, step, at, part)) for at, part in enumerate(micro)]


def _rows(rng: np.random.Generator, step: int, micro_batch: int, lengths: list[int]) -> pa.RecordBatch:
    made: list[dict[str, Any]] = []
    for length in lengths:
        prompt = length // 8
        made.append(
            {
                **dict.fromkeys(("unit_id", "fence", "seq", "member", "segment", "mini_batch", "slice"), 0),
                "step": step,
                "micro_batch": micro_batch,
                "tokens": rng.integers(0, 256, length).tolist(),
                "loss_mask": [0] * prompt + [1] * (length - prompt),
                "logprobs": [-5.0] * length,
                "advantages": rng.normal(size=length).tolist(),
                "version_steps": [-1] * prompt + [step - 1] * (length - prompt),
                "prompt_length": prompt,
                "temperature": 1.0,
                "reward": 0.5,
            }
        )
    return pa.RecordBatch.from_pylist(made, schema=BATCH)


if __name__ == "__main__":
    sys.exit(main(__doc__.splitlines()[0], {"wait": wait}))
