"""Evaluation by a rollout worker: bound to its weights under every policy, scored in its own way, counted once after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strawflow.flow import evaluation, rescue
from strawflow.flow.evaluation import EVAL
from strawflow.flow.run import Run
from strawflow.index import units
from strawflow.states import UnitState
from tests.integration.rollout_runs import Worker, rows_of, trainer_of

SLOW = {"token-s": "0.05", "mean-tokens": "100000"}
"""Every response has max_response_tokens tokens, and each takes 50 ms."""
REPOSITORY = Path(__file__).parents[2]
SUMS = {"name": "sums", "samples_per_prompt": 2, "greedy": False, "max_response_tokens": 16}
HARD = {
    "name": "hard",
    "samples_per_prompt": 0,
    "greedy": True,
    "reward": "tests.fault.rewards:always_raises",
}


def eval_rows(run: Run) -> list[dict[str, Any]]:
    return [row for row in rows_of(run) if row["purpose"] == EVAL]


def eval_units(run: Run, state: UnitState | None = None) -> list[units.Unit]:
    with run.index.read() as connection:
        return units.listed(connection, run.branch, purpose=EVAL, state=state)


def evaluated_steps(run: Run) -> set[int]:
    return {result.step for result in evaluation.recorded(run)}


@pytest.mark.parametrize("policy", ["park", "continue"])
def test_an_evaluation_ends_on_its_own_weights_while_training_groups_move_on(
    make_run: Callable[..., Run], policy: str
) -> None:
    run = make_run(
        engine_options=SLOW,
        on_new_weights=policy,
        samples_per_prompt=1,
        max_response_tokens=60,
        max_staleness=1,
        schedule="sync",
        evaluate={"interval": 1, "greedy": False, "samples_per_prompt": 1, "datasets": [SUMS]},
        num_evaluated={"sums": 3},
    )
    with trainer_of(run) as publish:
        versions = [publish(0)]
        with Worker(run) as worker:
            worker.wait(lambda: len(eval_units(run, UnitState.LEASED)) == 3)
            versions.append(publish(1))  # in the middle of the first evaluation
            worker.wait(lambda: evaluated_steps(run) == {0, 1})
    assert {(u.state, u.parks, u.attempts) for u in eval_units(run)} == {(UnitState.COMPLETED, 0, 1)}
    required = {u.unit_id: u.required_version_id for u in eval_units(run)}
    assert Counter(required.values()) == dict.fromkeys(versions, 3)
    for row in eval_rows(run):
        assert row["weight_versions"] == [required[row["unit_id"]]]
        assert len(row["response_tokens"]) == 16
    assert [(r.step, r.version_id, r.num_answers) for r in evaluation.recorded(run)] == [
        (step, version, 6) for step, version in enumerate(versions)
    ]
    with run.index.read() as connection:
        trained = units.listed(connection, run.branch, purpose="train")
    moved_on = any(u.parks for u in trained) or any(
        len(row["weight_versions"]) == 2 for row in rows_of(run) if row["purpose"] == "train"
    )
    assert moved_on, "no training group was in flight when the weights changed"


def test_each_dataset_is_sampled_and_scored_in_its_own_way(make_run: Callable[..., Run]) -> None:
    run = make_run(
        evaluate={"samples_per_prompt": 3, "greedy": False, "datasets": [SUMS, HARD]},
        num_evaluated={"held_out": 2, "sums": 2, "hard": 2},
    )
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:
            worker.wait(lambda: evaluated_steps(run) == {0})
    found = {result.profile: result for result in evaluation.recorded(run)}
    assert {name: (r.num_prompts, r.num_answers, r.num_failed) for name, r in found.items()} == {
        "eval_sampled": (2, 6, 0),
        "eval:sums": (2, 4, 0),
        "eval:hard:greedy": (2, 2, 2),
    }
    assert found["eval:hard:greedy"].mean_reward is None
    assert found["eval:hard:greedy"].pass_at == {1: 0.0}
    scores: dict[str, list[float]] = {}
    for row in eval_rows(run):
        scores.setdefault(next(u.profile for u in eval_units(run) if u.unit_id == row["unit_id"]), []).append(
            row["score"]
        )
    for name in ("eval_sampled", "eval:sums"):
        assert found[name].mean_reward == pytest.approx(sum(scores[name]) / len(scores[name]))
        assert found[name].num_passed == sum(score >= 1.0 for score in scores[name])
    assert {row["temperature"] for row in eval_rows(run)} == {0.0, 1.0}


def test_an_evaluation_whose_worker_was_killed_goes_on_and_is_counted_once(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(
        engine_options={"token-s": "0.05", "mean-tokens": "100000"},
        max_response_tokens=16,
        units_in_flight=1,
        evaluate={"greedy": False, "datasets": [SUMS]},
        num_evaluated={"sums": 20},
    )
    with trainer_of(run) as publish:
        version = publish(0)
        killed = subprocess.Popen(
            [sys.executable, "-m", "strawflow_workers.entry", "rollout", str(run.root)],
            cwd=REPOSITORY,
            stderr=subprocess.DEVNULL,
        )
        try:
            Worker(run).wait(lambda: 0 < len(eval_units(run, UnitState.COMPLETED)) < 20)
        finally:
            os.kill(killed.pid, signal.SIGKILL)
            killed.wait()
        before = {u.unit_id: u.extent_id for u in eval_units(run, UnitState.COMPLETED)}
        assert 0 < len(before) < 20
        rescue.declare_dead_processes_lost(run)
        with Worker(run) as worker:
            worker.wait(lambda: evaluated_steps(run) == {0})
    (result,) = evaluation.recorded(run)
    assert (result.version_id, result.num_prompts, result.num_answers) == (version, 20, 40)
    after = {u.unit_id: u.extent_id for u in eval_units(run, UnitState.COMPLETED)}
    assert before.items() <= after.items(), "an answered prompt was asked again"
    answers = Counter((row["unit_id"], row["member"]) for row in eval_rows(run))
    assert set(answers.values()) == {1}
    assert len(answers) == 40
