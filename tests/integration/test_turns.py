"""Rollouts of several turns: broken off they go on at the last turn boundary, on any worker. That nothing of it differs from an
unbroken rollout is asked of real SGLang (test_sglang_server)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strawflow.flow import rescue
from strawflow.flow.claim import Grant
from strawflow.flow.run import Run, identity_of
from strawflow.index import units
from strawflow_workers.rollout.generate import UnitGenerator
from tests.integration import own_hooks, rollout_runs
from tests.integration.rollout_runs import NUM_SAMPLES, NUM_UNITS, Worker, completed, rows_of, trainer_of
from tests.integration.test_hooks import of_members, units_of

pytestmark = pytest.mark.alone

HERE = "tests.integration.own_hooks:"
OF_A_ROW = ("unit_id", "member", "segment", "fence", "engine")
ONE = {"prompts": 1, "steps": 1, "prompts_per_step": 1, "samples_per_prompt": 1, "max_response_tokens": 40}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    own_hooks.TOOL_CALLS.clear()
    own_hooks.STANDS_AT.clear()


def broken_off_at(run: Run, turns: list[int], *, engine_url: str | None = None) -> list[units.Unit]:
    """Work with a new worker after each of these turns; returns the unit as it was parked each time."""
    parked = []
    own_hooks.STANDS_AT[:] = turns
    with trainer_of(run) as publish:
        publish(0)
        for turn in turns:
            with Worker(run, engine_url=engine_url) as worker:
                worker.wait(lambda turn=turn: turn not in own_hooks.STANDS_AT)  # type: ignore[misc]
            parked += units_of(run)
        with Worker(run, engine_url=engine_url) as worker:
            worker.wait(lambda: len(completed(run)) == 1)
    return parked


def without_names(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in OF_A_ROW} for row in rows]


def unbroken_and_broken(model: Path, folder: Path, *, engine_url: str | None = None) -> list[dict[str, Any]]:
    """Make one rollout of three turns twice, once parked after every turn, and find them equal; returns its rows."""
    rows, keys = [], []
    for name, turns in (("whole", []), ("broken", [1, 2, 3])):
        (folder / name).mkdir()
        run = rollout_runs.make_run(folder / name, model, generate=HERE + "three_turns", **ONE)
        parked = broken_off_at(run, turns, engine_url=engine_url)
        assert [(u.state, u.parks, u.attempts) for u in parked] == [("ready", n, 0) for n in turns]
        rows.append(rows_of(run))
        assert {key.run_id for key in own_hooks.TOOL_CALLS} == {identity_of(run.root)}
        keys.append([replace(key, run_id="") for key in own_hooks.TOOL_CALLS])
        own_hooks.TOOL_CALLS.clear()
        run.close()
    whole, broken = rows
    assert without_names(broken) == without_names(whole)
    assert keys[0] == keys[1], "a tool was called again, or after other tokens"
    assert [(key.turn, key.call) for key in keys[0]] == [(0, 0), (1, 0), (2, 0)]
    return whole


@pytest.mark.parametrize("setting", ["generate", "generate_groups"])
def test_members_of_groups_go_on_each_from_its_own_turn(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    asked: list[tuple[UnitGenerator, Grant]] = []
    generate = UnitGenerator.generate

    def noted(self: UnitGenerator, grant: Grant, *given: Any) -> Any:
        asked.append((self, grant))
        return generate(self, grant, *given)

    monkeypatch.setattr(UnitGenerator, "generate", noted)
    hook = {"generate": "three_turns", "generate_groups": "turns_of_a_claim"}[setting]
    run = make_run(steps=1, max_response_tokens=40, **{setting: HERE + hook})
    own_hooks.STANDS_AT[:] = [1, 2, 2, 3]
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:
            worker.wait(lambda: not own_hooks.STANDS_AT)
            so_far = [result for generator, grant in asked for _, result in generator.progress([grant])]
            saved = [member for result in so_far for member in result.members]
        assert len(saved) >= 4, "whoever saves progress meanwhile is not told of saved turns"
        assert {(m.status, m.environment is None) for m in saved} == {("partial", False)}
        with Worker(run) as worker:
            worker.wait(lambda: len(completed(run)) == NUM_UNITS)
    members = of_members(rows_of(run))
    assert len(members) == NUM_UNITS * NUM_SAMPLES
    for segments in members:
        assert [s["loss_mask"].count(0) > 0 for s in segments] == [True, True]
        assert "".join(s["response_text"] for s in segments).count("!") >= 3
    told = [(key.unit_id, key.member, key.turn, key.call) for key in own_hooks.TOOL_CALLS]
    assert len(told) == len(set(told)) == 3 * len(members), "a saved turn was played again"


def test_a_call_that_is_made_again_has_the_key_of_the_first(make_run: Callable[..., Run]) -> None:
    run = make_run(generate=HERE + "three_turns", **ONE)
    own_hooks.IS_STUCK[0] = True
    try:
        with trainer_of(run) as publish:
            publish(0)
            with Worker(run) as worker:
                worker.wait(lambda: bool(own_hooks.TOOL_CALLS))
            own_hooks.IS_STUCK[0] = False
            with Worker(run) as worker:
                worker.wait(lambda: len(completed(run)) == 1)
    finally:
        own_hooks.IS_STUCK[0] = False
    first, again, *_ = own_hooks.TOOL_CALLS
    assert first == again
    assert len({str(key) for key in own_hooks.TOOL_CALLS}) == 3


@pytest.mark.long
def test_a_tool_recognises_the_call_that_a_killed_worker_made(
    make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(generate=HERE + "two_turns_with_a_journal", **ONE)
    journal = tmp_path / "journal"
    journal.with_suffix(".stuck").touch()
    monkeypatch.setenv(own_hooks.JOURNAL, str(journal))
    command = [sys.executable, "-m", "strawflow_workers.entry", "rollout", str(run.root)]
    with trainer_of(run) as publish:
        publish(0)
        with subprocess.Popen([*command, "--die-with-parent", str(os.getpid())]) as worker:
            deadline = time.monotonic() + 60
            while not journal.exists():
                assert worker.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            worker.kill()
        (unit,) = units_of(run)
        assert unit.session_id is not None
        rescue.declare_lost(run, unit.session_id, reason="killed")
        journal.with_suffix(".stuck").unlink()
        with Worker(run) as again:
            again.wait(lambda: len(completed(run)) == 1)
    calls = [line.split() for line in journal.read_text().splitlines()]
    assert [told for _, told in calls] == ["new", "again", "new"]
    assert len({key for key, _ in calls}) == 2
    (row,) = rows_of(run)
    assert row["response_text"].endswith("!")
