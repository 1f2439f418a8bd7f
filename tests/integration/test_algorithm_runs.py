"""Whole runs with another algorithm than the default, and with updates that are not applied: trained, stopped, replayed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strawflow.cli.status import _alarms
from strawflow.errors import WorkerFailedError
from strawflow.flow import consume, history
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.flow.status import snapshot
from strawflow.index import events
from strawflow.packs.reader import PackReader
from strawflow_workers.drain import Drain
from strawflow_workers.trainer.batch_facts import BatchContent, BatchFacts
from strawflow_workers.trainer.batches import MiniBatch
from strawflow_workers.trainer.loop import TrainerLoop
from strawflow_workers.trainer.megatron import MegatronTrainer
from strawflow_workers.trainer.replay import replay
from strawflow_workers.trainer.team import stage_settings, to_mini_batches
from strawflow_workers.trainer.watch import Watch
from tests.integration.rollout_runs import Worker
from tests.integration.test_stale_groups import assembler

pytestmark = pytest.mark.alone

GSPO = {
    "advantage": "reinforce_pp",
    "loss": "gspo",
    "aggregation": "rollout",
    "old_logprobs": "recomputed",
    "mismatch": "geometric",
    "mismatch_high": 1e-3,  # what the fake engine says is likelier than the model does by far
    "kl": "loss",
    "kl_estimator": "unbiased",
    "kl_coefficient": 0.01,
    "entropy_coefficient": 0.001,
}
OTHERS: list[dict[str, Any]] = [
    {"advantage": "rloo", "loss": "cispo", "aggregation": "prompt", "kl": "reward", "kl_coefficient": 0.01},
    {"advantage": "reinforce_pp_baseline", "dual_clip": 3.0, "aggregation": "constant", "overlong_buffer": 3},
    {"advantage": "reward", "loss": "tests.integration.test_algorithms:squared_gap"},
    {"advantage": "none", "teacher": "model"},
]


def train(run: Run, *, stops_with: str = "") -> None:
    # A session that ends without an error gives its role back at once.
    stopped = pytest.raises(WorkerFailedError, match=stops_with) if stops_with else nullcontext()
    with WorkerSession(run, "train") as session, stopped:
        TrainerLoop(session, Drain()).run()


def packed_rows(run: Run, step: int) -> list[dict[str, Any]]:
    batch = consume.batch_of_step(run, step)
    assert batch is not None
    with closing(PackReader(run.root)) as reader:
        return [row for _, rows in consume.read_batch(run, reader, batch) for row in rows.to_pylist()]


def run_and_replay(run: Run) -> list[dict[str, Any]]:
    """Train a run to its end and again from its stored batches; returns what was recorded of each step."""
    with Worker(run), assembler(run):
        train(run)
    replayed = list(replay(run))
    assert [(s.step, s.is_equal) for s in replayed] == [(step, True) for step in range(1, len(replayed) + 1)]
    assert replayed[-1].state_equal is True
    return history.steps(run)


def the_trainer_weighs_tokens_as_planned(run: Run, step: int) -> None:
    batch = consume.batch_of_step(run, step)
    assert batch is not None
    with closing(PackReader(run.root)) as reader:
        stored = list(consume.read_batch(run, reader, batch))
    packed = [m for mini in to_mini_batches(batch, stored) for m in mini.micro_batches]
    for (_, rows), micro in zip(stored, packed, strict=True):
        weights = [w or 1.0 for w in rows.column("loss_weight").to_pylist()]
        expected = [
            np.array(m) * w for m, w in zip(rows.column("loss_mask").to_pylist(), weights, strict=True)
        ]
        np.testing.assert_allclose(micro.loss_mask, np.concatenate(expected), rtol=1e-6)
    total = sum(float(m.loss_mask.sum()) for m in packed)
    assert total == pytest.approx(batch.num_sequences, rel=1e-5)


def the_disagreement_of_a_real_engine_would_be_told(run: Run) -> None:
    """The log-probabilities of the fake engine are wrong: take them for those of a real one."""

    def watched(policy: str) -> Run:
        rollout = run.config.rollout.model_copy(update={"engine": "sglang"})
        guard = run.config.guard.model_copy(update={"agreement": policy})
        return replace(run, config=run.config.model_copy(update={"rollout": rollout, "guard": guard}))

    batch = consume.batch_of_step(run, 1)
    assert batch is not None
    trainer = MegatronTrainer(run.model_path, stage_settings(run.config, "grpo"), seed=0)
    with closing(PackReader(run.root)) as reader:
        rows = list(consume.read_batch(run, reader, batch))
    mini_batches = to_mini_batches(batch, rows)
    own = [
        MiniBatch(
            tuple(replace(m, rollout_logprobs=trainer.logprobs(m)) for m in mini.micro_batches),
            mini.denominator,
        )
        for mini in mini_batches
    ]
    whole, agreeing = (BatchContent(rows, minis, BatchFacts(1)) for minis in (mini_batches, own))
    with WorkerSession(watched("stop"), "train") as session:
        watch = Watch(session, trainer)
        watch.before(batch, agreeing)
        with pytest.raises(
            WorkerFailedError,
            match=r"step 1 is not trained: mean log-probability gap \S+ above 0.001, largest .* in its first micro-batch",
        ):
            watch.before(batch, whole)
        told = watch.disagreement(batch, {"logprob_gap_mean": 0.5, "logprob_gap_max": 0.05})
        assert told == "mean log-probability gap 0.5 above 0.001"
        assert watch.disagreement(replace(batch, max_staleness=1), {}) is None
        watch.after(batch, agreeing, {"disagreement": told, "left_out": ()})
    with WorkerSession(watched("warn"), "train") as session:
        Watch(session, trainer).before(batch, whole)
    with WorkerSession(run, "train") as session:
        assert Watch(session, trainer).disagreement(batch, {}) is None, "the fake engine is not judged"
    with run.index.read() as connection:
        found = events.latest(connection, limit=9, name_prefix="step.disagreement")
    assert sorted(e["facts"]["trained"] for e in found) == [False, True]
    shown = replace(snapshot(run), last_metrics={"step": 1, "disagreement": told})
    assert ("AGREEMENT", f"engine and trainer differ at step 1: {told}") in _alarms(shown)
    assert "AGREEMENT" not in dict(_alarms(snapshot(run)))


def test_a_run_of_another_algorithm_is_trained_by_planned_weights_and_replays_bit_equal(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(steps=2, sections={"algorithm": GSPO})
    recorded = run_and_replay(run)
    for step in recorded:
        batch = consume.batch_of_step(run, step["step"])
        rows = packed_rows(run, step["step"])
        assert batch is not None
        assert {np.float32(1 / sum(r["loss_mask"])) for r in rows} == {r["loss_weight"] or 1 for r in rows}
        assert sum(batch.denominators) == len(rows) == batch.num_sequences
        the_trainer_weighs_tokens_as_planned(run, step["step"])
        assert step["left_out"] == []
        assert step["entropy"] > 0
        assert step["reference_kl"] is not None
        assert 0 < step["corrected_fraction"] <= 1
    the_disagreement_of_a_real_engine_would_be_told(run)
    # Its own start is the reference: the first step begins there, the second has left it.
    assert abs(recorded[0]["reference_kl"]) < abs(recorded[1]["reference_kl"])


@pytest.mark.long
@pytest.mark.parametrize("algorithm", OTHERS, ids=lambda a: a["advantage"])
def test_runs_of_further_algorithms_replay_bit_equal(
    make_run: Callable[..., Run], tiny_model: Path, algorithm: dict[str, Any]
) -> None:
    if "teacher" in algorithm:
        algorithm = {**algorithm, "teacher": str(tiny_model)}
    run = make_run(steps=2, sections={"algorithm": algorithm})
    for step in run_and_replay(run):
        assert step["loss"] is not None
        assert step["grad_norm"] > 0


def told(run: Run) -> list[dict[str, Any]]:
    with run.index.read() as connection:
        return [e["facts"] for e in events.latest(connection, limit=9, name_prefix="step.left_out")]


def test_a_run_stops_for_an_update_that_explodes_and_its_next_start_goes_on_without_it(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(steps=1, sections={"guard": {"max_grad_norm": 1e-9, "on_left_out": "stop"}})
    with Worker(run), assembler(run):
        train(
            run,
            stops_with=r"step 1, batch 1: 2 of 2 updates were not applied .* unit \d+ member \d \(loss .*, largest gap ",
        )
        (facts,) = told(run)
        assert (facts["step"], facts["left_out"], facts["policy"]) == (1, [0, 1], "stop")
        keys = {(r["unit_id"], r["fence"], r["seq"], r["member"], r["segment"]) for r in packed_rows(run, 1)}
        worst = facts["worst"]
        assert {tuple(w[k] for k in ("unit_id", "fence", "seq", "member", "segment")) for w in worst} <= keys
        gaps = [w["largest_gap"] for w in worst]
        assert len(gaps) == 5
        assert gaps == sorted(gaps, reverse=True)
        train(run)
    assert len(told(run)) == 1, "decided once"
    (step,) = history.steps(run)
    assert (step["left_out"], step["loss"], step["skipped_updates"]) == ([0, 1], None, 2)
    assert [s.is_equal for s in replay(run)] == [True]
