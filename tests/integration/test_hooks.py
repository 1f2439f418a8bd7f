"""Hooks in the rollout path: what users' functions make is stored, judged once and trained as what it is."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from strawflow.cli.status import render
from strawflow.errors import ConfigError, WorkerFailedError
from strawflow.flow import retain
from strawflow.flow.check import check
from strawflow.flow.placed import read_extent
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.flow.status import snapshot
from strawflow.flow.trajectory import with_every_token
from strawflow.index import batches, events, packs, units
from strawflow.testing.invariants import check_exactly_once
from strawflow_workers.assemble.loop import AssemblerLoop
from strawflow_workers.drain import Drain
from strawflow_workers.rollout.hooks.filtered import nonzero_deviation
from tests.integration import own_hooks
from tests.integration.rollout_runs import NUM_SAMPLES, NUM_UNITS, Worker, completed, rows_of, trainer_of
from tests.integration.test_stale_groups import assembler, fates

HERE = "tests.integration.own_hooks:"


def run_until(run: Run, num_completed: int = NUM_UNITS) -> list[dict[str, Any]]:
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:
            worker.wait(lambda: len(completed(run)) >= num_completed)
    return rows_of(run)


def of_members(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [list(own) for _, own in groupby(rows, key=lambda row: (row["unit_id"], row["member"]))]


def test_segments_of_a_rollout_are_stored_and_read_again_with_their_nesting(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(generate=HERE + "fans_out")
    members = of_members(run_until(run))
    assert [len(m) for m in members] == list(own_hooks.FAN_OUT) * NUM_UNITS
    for segments in members:
        assert [s["segment"] for s in segments] == list(range(len(segments)))
        assert len({(s["reward"], s["score"], s["status"]) for s in segments}) == 1
        assert len({len(s["prompt_tokens"]) for s in segments}) == len(segments)
        for s in segments:
            lengths = {
                len(s[name]) for name in ("response_tokens", "loss_mask", "logprobs", "token_versions")
            }
            assert lengths == {len(s["response_tokens"])}
            (masked,) = [at for at, mask in enumerate(s["loss_mask"]) if not mask]
            assert (s["token_versions"][masked], s["logprobs"][masked]) == (-1, 0.0)
            assert len(s["weight_versions"]) == 1
    means = {u.unit_id: u.mean_reward for u in completed(run)}
    for unit_id, of_unit in groupby(members, key=lambda m: m[0]["unit_id"]):
        assert means[unit_id] == pytest.approx(np.mean([m[0]["reward"] for m in of_unit]))


def test_a_rollout_of_several_segments_counts_once_and_stays_in_one_mini_batch(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(generate=HERE + "fans_out", assemble={"mini_batches": 2})
    with trainer_of(run) as publish, Worker(run) as worker:
        publish(0)
        worker.wait(lambda: len(completed(run)) >= NUM_UNITS)
        with assembler(run):
            worker.wait(lambda: bool(fates(run)))
    with run.index.read() as connection:
        batch = batches.require(connection, run.branch, run.consumer, 1)
        extent = packs.find_extents(connection, [batch.plan_extent_id])[batch.plan_extent_id]
    with WorkerSession(run, "look") as session:
        plan = read_extent(run, session.reader, extent).to_pylist()
    members = of_members(plan)
    assert len(members) == NUM_UNITS * NUM_SAMPLES
    for segments in members:
        assert len({(s["mini_batch"], s["advantage"], s["outcome"]) for s in segments}) == 1
    assert {s["mini_batch"] for s in plan if s["outcome"] == "trained"} == {0, 1}
    check_exactly_once(run, finished=False)
    assert check(run).findings == []
    for _, of_unit in groupby(members, key=lambda m: m[0]["unit_id"]):
        rewards, advantages = np.array([(m[0]["reward"], m[0]["advantage"]) for m in of_unit]).T
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        assert advantages == pytest.approx(expected, abs=1e-5)


def test_members_that_are_finished_are_kept_with_their_segments_when_a_drain_breaks_their_group_off(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_hooks, "IS_SLOW", [True])
    run = make_run(generate=HERE + "fans_out_slowly")
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:
            worker.wait(lambda: any(u.session_id for u in units_of(run)))
            worker.sleep(0.7)
        parked = [u for u in units_of(run) if u.parks]
        assert len(parked) == NUM_UNITS
        with WorkerSession(run, "look") as session:
            before = {u.unit_id: rows_at(run, session, u) for u in parked}
        own_hooks.IS_SLOW[0] = False
        with Worker(run) as worker:
            worker.wait(lambda: len(completed(run)) >= NUM_UNITS)
    told = (
        "unit_id",
        "member",
        "segment",
        "prompt_tokens",
        "response_tokens",
        "loss_mask",
        "logprobs",
        "reward",
    )
    rows = rows_of(run)
    for unit_id, saved in before.items():
        kept = [[r[name] for name in told] for r in saved if r["member"] == 1]
        assert [len(kept), {r["status"] for r in saved if r["member"] != 1}] == [3, {"partial"}]
        assert [
            [r[name] for name in told] for r in rows if (r["unit_id"], r["member"]) == (unit_id, 1)
        ] == kept
    assert [len(m) for m in of_members(rows)] == list(own_hooks.FAN_OUT) * NUM_UNITS


def rows_at(run: Run, session: WorkerSession, unit: units.Unit) -> list[dict[str, Any]]:
    """The rows that a parked group's continuation holds."""
    with run.index.read() as connection:
        assert unit.extent_id is not None
        extent = packs.find_extents(connection, [unit.extent_id])[unit.extent_id]
    rows = read_extent(run, session.reader, extent)
    return with_every_token(rows).slice(unit.row_start, unit.row_count).to_pylist()


def test_a_hook_may_give_the_reward_itself(make_run: Callable[..., Run]) -> None:
    rows = run_until(make_run(generate=HERE + "rewards_itself", reward="tests.fault.rewards:always_raises"))
    assert {(row["member"], row["reward"], row["score"]) for row in rows} == {
        (n, float(n), float(n)) for n in range(NUM_SAMPLES)
    }


def test_a_groups_reward_takes_one_response_a_rollout(make_run: Callable[..., Run]) -> None:
    rows = run_until(make_run(generate=HERE + "fans_out", reward="group:tests.fault.rewards:places"))
    assert {(row["member"], row["reward"]) for row in rows} == {(n, float(n)) for n in range(NUM_SAMPLES)}
    assert len(rows) == NUM_UNITS * sum(own_hooks.FAN_OUT)


def test_what_a_hook_does_wrong_fails_that_member_with_the_reason(make_run: Callable[..., Run]) -> None:
    rows = run_until(make_run(generate=HERE + "fails_on_member_1"))
    told = {(r["member"], r["failure"]) for r in rows if r["status"] == "failed"}
    assert told == {(1, "generate: RuntimeError: the tool is not there")}
    assert len(rows) == NUM_UNITS * NUM_SAMPLES


def test_a_hook_cannot_have_tokens_trained_that_no_weights_sampled(make_run: Callable[..., Run]) -> None:
    rows = run_until(make_run(generate=HERE + "trains_on_the_environment"))
    assert all("a token that no weights sampled has loss_mask 1" in row["failure"] for row in rows)


def test_a_hook_that_takes_too_long_fails_its_member(make_run: Callable[..., Run]) -> None:
    rows = run_until(make_run(generate=HERE + "never_ends", generate_timeout_s=0.2))
    (told,) = {row["failure"] for row in rows}
    assert "took longer than rollout.generate_timeout_s, 0.2 s" in told


@pytest.mark.parametrize("hook", ["one_turn", "never_ends", "swallows_everything"])
def test_a_drain_breaks_hooks_off_and_gives_their_groups_back(
    make_run: Callable[..., Run], hook: str
) -> None:
    run = make_run(generate=HERE + hook, engine_options={"delay-s": "60"})
    with trainer_of(run) as publish, Worker(run) as worker:
        publish(0)
        worker.wait(lambda: any(u.session_id for u in units_of(run)))
        worker.sleep(0.3)
        started = time.monotonic()
        worker.drain.request()
        worker.wait(lambda: not any(u.session_id for u in units_of(run)))
        assert time.monotonic() - started < 12.0, "it waited for answers, or for the bound of a drain"
    assert worker.error is None
    assert {(u.state, u.attempts) for u in units_of(run)} == {("ready", 0)}


def units_of(run: Run) -> list[units.Unit]:
    with run.index.read() as connection:
        return units.listed(connection, run.branch)


def test_the_sample_filter_drops_a_rollout_once_before_its_reward(make_run: Callable[..., Run]) -> None:
    own_hooks.JUDGED.clear()
    rows = run_until(make_run(sample_filter=HERE + "drops_member_2", units_in_flight=NUM_UNITS))
    assert {r["member"]: r["failure"] for r in rows} == {
        0: None,
        1: None,
        2: "sample filter: too_long",
        3: None,
    }
    assert all(row["response_tokens"] for row in rows)
    assert len(own_hooks.JUDGED) == len(set(own_hooks.JUDGED)), "what the filter dropped was sampled again"


def test_groups_that_the_filter_drops_are_told_why_and_replaced(make_run: Callable[..., Run]) -> None:
    own_hooks.SEEN.clear()
    run = make_run(
        steps=1,
        prompts=3 * NUM_UNITS,
        assemble={"group_filter": HERE + "keeps_even_units"},
        generate=HERE + "fans_out",
    )
    with trainer_of(run) as publish, Worker(run) as worker:
        publish(0)
        with assembler(run):
            worker.wait(lambda: any(outcome == "trained" for outcome, _ in fates(run)))
    assert fates(run).count(("trained", None)) == NUM_UNITS
    assert ("dropped", "odd") in fates(run)
    assert len(own_hooks.SEEN) == len(set(own_hooks.SEEN)), "a group was filtered twice"
    assert {n for _, n in own_hooks.SEEN} == {NUM_SAMPLES}, "segments were taken for members"


def starved(run: Run) -> str:
    """Run until the assembler gives the run up; returns why."""
    with Worker(run) as worker:
        with WorkerSession(run, "assemble") as session, pytest.raises(WorkerFailedError) as caught:
            AssemblerLoop(session, Drain()).run()
        assert worker.error is None
    return str(caught.value)


def test_a_run_whose_groups_are_all_dropped_stops_says_why_and_goes_on_when_that_is_mended(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(steps=1, assemble={"group_filter": HERE + "drops_all", "starved_after_batches": 2})
    with trainer_of(run) as publish:
        publish(0)
        told = starved(run)
        assert "starved: 8 groups (100%) were dropped since the last batch was planned: 8 too_easy" in told
        seen = snapshot(run).drops
        waiting = snapshot(run).offered.get("train", 0)  # completed while the assembler gave up
        assert (seen.is_starved, seen.reasons, seen.step) == (True, {"too_easy": 8}, 1)
        assert seen.drop_rate == 8 / (8 + waiting)
        shown = Console(width=200, file=io.StringIO())
        shown.print(render(snapshot(run)))
        alarm = f"8 groups ({seen.drop_rate:.0%}) were dropped while step 1 was planned: 8 too_easy"
        assert alarm in shown.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
        with run.index.read() as connection:
            (event,) = events.latest(connection, limit=1, name_prefix="run.starved")
        assert event["facts"] == {"reasons": {"too_easy": 8}, "drop_rate": 1.0}
        generated = len(units_of(run))
        monkeypatch.setattr(own_hooks, "drops_all", nonzero_deviation)  # the user mends the file
        with Worker(run) as worker, assembler(run):
            worker.wait(lambda: ("trained", None) in fates(run))
    assert generated <= 3 * NUM_UNITS, "more was generated than what was dropped and one step"
    assert not snapshot(run).drops.is_starved


def test_groups_without_signal_are_no_use_to_dynamic_sampling(make_run: Callable[..., Run]) -> None:
    settings = {"group_filter": "nonzero_deviation", "starved_after_batches": 1}
    run = make_run(steps=1, reward="tests.fault.rewards:constant", assemble=settings)
    with trainer_of(run) as publish:
        publish(0)
        assert "4 zero_deviation" in starved(run)


def test_a_filter_that_says_nothing_stops_the_run(make_run: Callable[..., Run]) -> None:
    run = make_run(steps=1, assemble={"group_filter": HERE + "says_nothing"})
    with trainer_of(run) as publish, Worker(run) as worker:
        publish(0)
        with WorkerSession(run, "assemble") as session, pytest.raises(ConfigError, match="returned None"):
            AssemblerLoop(session, Drain()).run()
        assert worker.error is None


def test_what_a_filter_dropped_frees_its_storage(make_run: Callable[..., Run]) -> None:
    filtered = {"group_filter": HERE + "keeps_even_units"}
    run = make_run(steps=1, prompts=3 * NUM_UNITS, assemble=filtered, storage={"keep_steps": 1})
    with trainer_of(run) as publish, Worker(run) as worker:
        publish(0)
        with assembler(run):
            worker.wait(lambda: ("trained", None) in fates(run))
    dropped = {u.unit_id for u in units_of(run) if u.unit_id % 2}
    with run.index.begin() as connection:
        connection.exec_driver_sql("UPDATE consumers SET planned = 9, position = 9")
    with WorkerSession(run, "retain") as session:
        retain.retain(session, retain.policy_of(run.config))
    assert not dropped & {u.unit_id for u in units_of(run)}


def test_the_log_hook_is_told_of_every_batch_once_and_stops_nothing(make_run: Callable[..., Run]) -> None:
    own_hooks.LOGGED.clear()
    hooks = {"group_filter": HERE + "keeps_even_units", "log": HERE + "logs_and_raises"}
    run = make_run(
        steps=2, prompts=6 * NUM_UNITS, max_staleness=2, assemble=hooks, generate=HERE + "fans_out"
    )
    with trainer_of(run) as publish, Worker(run) as worker:
        publish(0)
        with assembler(run):
            worker.wait(lambda: len(own_hooks.LOGGED) == 2)
    assert [step for step, _, _ in own_hooks.LOGGED] == [1, 2]
    _, rows, metrics = own_hooks.LOGGED[0]
    assert len(rows) == NUM_UNITS * sum(own_hooks.FAN_OUT)
    trained = [row for row in rows if row["outcome"] == "trained"]
    assert metrics["num_sequences"] == len(trained) > 0
    assert metrics["drops"]["odd"] > 0
    assert all(row["reason"] == "zero_deviation" for row in rows if row["outcome"] == "filtered")


def test_hooks_that_do_not_fit_are_refused_before_an_engine_starts(make_run: Callable[..., Run]) -> None:
    run = make_run(sample_filter=HERE + "takes_too_much")
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:
            worker.ended()
    assert isinstance(worker.error, ConfigError)
    assert "missing a required argument: 'more'" in str(worker.error)
    assert not list((run.root / "logs").glob("engine-*"))


def test_hook_check_runs_a_file_in_the_folder_where_it_is_typed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from strawflow_workers.rollout.hooks.interfaces import Verdict\n\n\n"
        "def filter(group):\n    return Verdict(len(group.rewards) > 3, 'few')\n"
    )
    command = [sys.executable, "-m", "strawflow.cli.main", "hook", "check", "mine:filter", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["findings"][1]["told"]
    assert told == "keep, keep, keep, drop (few), keep"
