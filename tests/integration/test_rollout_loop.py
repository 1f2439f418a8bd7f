"""The rollout worker against an engine that misbehaves: what is wrong becomes a failed member or attempt, never a value."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strawflow.errors import ConfigError, CorruptCheckpointError, EngineError
from strawflow.flow import admit, publish_weights
from strawflow.flow.enqueue import EnqueueRequest, enqueue
from strawflow.flow.progress import Standing
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.index import datasets, units
from strawflow.index.weights import WeightVersion
from strawflow.prompts.row import PromptKeys
from strawflow.prompts.source import PromptSource
from strawflow.states import UnitState
from strawflow_workers.rollout.engine import ServedEngine
from strawflow_workers.rollout.loop import RolloutLoop
from tests.integration.rollout_runs import (
    NUM_SAMPLES,
    NUM_UNITS,
    Worker,
    completed,
    rows_of,
    trainer_of,
)


def run_until(run: Run, num_completed: int) -> list[dict[str, Any]]:
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:
            worker.wait(lambda: len(completed(run)) >= num_completed)
    return rows_of(run)


def test_responses_are_stored_with_logprobs_and_the_version_that_sampled_them(
    make_run: Callable[..., Run],
) -> None:
    run = make_run()
    rows = run_until(run, NUM_UNITS)
    assert len(rows) == NUM_UNITS * NUM_SAMPLES
    for row in rows:
        assert row["status"] in ("finished", "truncated")
        assert (
            len(row["response_tokens"])
            == len(row["logprobs"])
            == len(row["token_versions"])
            == len(row["loss_mask"])
        )
        assert len(row["weight_versions"]) == 1
        assert row["weight_versions"][0].startswith("v000000-main-f1-")
        assert row["reward"] == row["score"]
    assert len({tuple(r["response_tokens"]) for r in rows}) > NUM_UNITS, "samples of a group do not differ"


def test_a_worker_whose_hook_cannot_be_imported_ends_with_one_line_of_why(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(generate="no_such_module_anywhere:f")
    ended = subprocess.run(
        [sys.executable, "-m", "strawflow_workers.entry", "rollout", str(run.root)],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == ConfigError.exit_code
    assert "rollout.generate 'no_such_module_anywhere:f' cannot be imported" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_short_log_probabilities_fail_the_sample_with_the_reason(make_run: Callable[..., Run]) -> None:
    rows = run_until(make_run(engine_options={"short-logprobs": "1"}, quarantine_after=0), NUM_UNITS)
    assert {row["status"] for row in rows} == {"failed"}
    assert all(row["reward"] is None for row in rows)
    assert all("log-prob" in row["failure"] for row in rows), rows[0]["failure"]


def test_one_unsound_answer_fails_nobody_when_asked_again(make_run: Callable[..., Run]) -> None:
    rows = run_until(make_run(engine_options={"nan-logprobs": "5"}), NUM_UNITS)
    failed = [row for row in rows if row["status"] == "failed"]
    assert len(failed) < len(rows) / 2
    assert all(row["reward"] is None and "log-prob" in row["failure"] for row in failed)


def test_a_reward_that_raises_fails_the_sample_and_never_scores_zero(make_run: Callable[..., Run]) -> None:
    rows = run_until(make_run(reward="tests.fault.rewards:always_raises"), NUM_UNITS)
    assert {row["status"] for row in rows} == {"failed"}
    assert all(row["reward"] is None for row in rows)
    assert all("no such word" in row["failure"] for row in rows)


def test_a_reward_that_hangs_fails_its_group_alone(make_run: Callable[..., Run]) -> None:
    rows = run_until(
        make_run(reward="tests.fault.rewards:hangs_on_one_prompt", reward_processes=2), NUM_UNITS
    )
    by_unit: dict[int, set[str]] = {}
    for row in rows:
        by_unit.setdefault(row["unit_id"], set()).add(row["status"])
    assert sum(statuses == {"failed"} for statuses in by_unit.values()) == 1
    assert all("timed out" in row["failure"] for row in rows if row["status"] == "failed")


def test_an_engine_error_costs_an_attempt_and_the_unit_is_tried_again(make_run: Callable[..., Run]) -> None:
    run = make_run(engine_options={"error-rate-every-nth": "3"})
    rows = run_until(run, NUM_UNITS)
    assert {row["status"] for row in rows} <= {"finished", "truncated"}
    assert max(u.attempts for u in completed(run)) > 1


def test_a_prompt_that_the_template_refuses_fails_alone_and_the_others_go_on(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_run()
    path = tmp_path / "poison.jsonl"  # the model has no chat template
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": "hi"}]}) + "\n")
    with WorkerSession(run, "enqueue") as session:
        source = PromptSource.parse(str(path))
        enqueue(session, EnqueueRequest(admit.PROMPTS, "train", source, PromptKeys("prompt")))
        with run.index.begin() as connection:
            segment = datasets.segments_of(connection, admit.PROMPTS)[-1]
            poison = units.NewUnit("train", "train", segment.segment_id, 0, 0, priority=5)
            units.admit(connection, run.branch, [poison], ids=[units.take_ids(connection, 1)])
    rows = run_until(run, NUM_UNITS)
    assert len(rows) == NUM_UNITS * NUM_SAMPLES
    with run.index.read() as connection:
        (failed,) = units.listed(connection, run.branch, state=UnitState.FAILED)
    assert failed.segment_id == segment.segment_id
    assert failed.attempts == run.config.rollout.max_attempts
    assert "chat_template" in str(failed.last_error)


def test_units_in_flight_are_released_when_the_worker_drains(make_run: Callable[..., Run]) -> None:
    run = make_run(engine_options={"hang": "1"})
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:

            def leased() -> bool:
                with run.index.read() as connection:
                    return bool(units.listed(connection, run.branch, state=UnitState.LEASED))

            worker.wait(leased)
        with run.index.read() as connection:
            found = units.listed(connection, run.branch)
    assert {u.state for u in found} == {UnitState.READY}
    assert {u.attempts for u in found} == {0}


def test_an_engine_that_reports_other_weights_after_a_reload_is_not_used(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(engine_options={"wrong-version": "1"})
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:
            worker.wait(lambda: len(completed(run)) >= NUM_UNITS)
            publish(1)
            with pytest.raises(EngineError, match="reports"):
                worker.wait(lambda: len(completed(run)) >= 2 * NUM_UNITS)
    assert len(completed(run)) == NUM_UNITS


def test_weights_that_are_not_what_was_published_are_never_loaded(make_run: Callable[..., Run]) -> None:
    run = make_run()
    with trainer_of(run) as publish:
        version_id = publish(0)
        path = run.root / publish_weights.weights_path(version_id) / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-100] ^= 0xFF
        path.write_bytes(content)
        with (
            Worker(run) as worker,
            pytest.raises(CorruptCheckpointError, match="does not hold what was published"),
        ):
            worker.wait(lambda: bool(completed(run)))
    assert completed(run) == []


def test_what_may_be_begun_after_a_load_is_looked_at_after_it(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[tuple[float, float]] = []
    loaded: list[float] = []
    really_fill, really_reload = RolloutLoop._store_and_fill, ServedEngine.reload

    async def fill(self: RolloutLoop, standing: Standing) -> bool:
        assert self._seen is not None
        looked.append((time.monotonic(), self._seen.at))
        return await really_fill(self, standing)

    async def reload(self: ServedEngine, version: WeightVersion) -> None:
        await really_reload(self, version)
        loaded.append(time.monotonic())

    monkeypatch.setattr(RolloutLoop, "_store_and_fill", fill)
    monkeypatch.setattr(ServedEngine, "reload", reload)
    run = make_run(engine_options={"update-s": "0.3"})
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:
            worker.wait(lambda: len(completed(run)) >= NUM_UNITS)
            publish(1)
            worker.wait(lambda: bool(loaded) and looked[-1][0] > loaded[0])
    assert min(seen_at for at, seen_at in looked if at > loaded[0]) > loaded[0]
