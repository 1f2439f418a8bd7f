"""Hooks between rollouts and training: what they make of a group lies in the batch, and the stored trajectories stay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from strawflow.errors import ConfigError
from strawflow.flow import consume
from strawflow.flow.check import check
from strawflow.flow.placed import read_extent
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.index import batches, packs
from strawflow.packs.reader import PackReader
from strawflow.testing.invariants import check_exactly_once
from strawflow_workers.assemble.loop import AssemblerLoop
from strawflow_workers.drain import Drain
from tests.integration import own_hooks
from tests.integration.rollout_runs import NUM_UNITS, Worker, rows_of, trainer_of
from tests.integration.test_stale_groups import assembler, fates

HERE = "tests.integration.own_hooks:"
SLIME = "tests.integration.slime_functions:"
Key = tuple[int, int, int]


def planned(run: Run) -> tuple[dict[Key, Any], dict[Key, Any], dict[Key, Any]]:
    """Plan a batch; returns packed rows, plan rows and stored trajectories by (unit, member, segment)."""
    with trainer_of(run) as publish, Worker(run) as worker:
        publish(0)
        with assembler(run):
            worker.wait(lambda: bool(fates(run)))
    with run.index.read() as connection:
        batch = batches.require(connection, run.branch, run.consumer, 1)
        extent = packs.find_extents(connection, [batch.plan_extent_id])[batch.plan_extent_id]
    with closing(PackReader(run.root)) as reader:
        packed = [row for _, rows in consume.read_batch(run, reader, batch) for row in rows.to_pylist()]
        plan = read_extent(run, reader, extent).to_pylist()
    assert check(run).findings == []
    check_exactly_once(run, finished=False)
    return by_key(packed), by_key(plan), by_key(rows_of(run))


def by_key(rows: list[dict[str, Any]]) -> dict[Key, Any]:
    found = {(row["unit_id"], row["member"], row["segment"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def test_post_processed_rewards_and_advantages_are_trained_and_planned(make_run: Callable[..., Run]) -> None:
    run = make_run(steps=1, generate=HERE + "fans_out", assemble={"post_process": HERE + "spreads_rewards"})
    packed, plan, stored = planned(run)
    assert packed.keys() == stored.keys(), "a group without deviation was dropped though it has advantages"
    for key, row in packed.items():
        start, of_member = row["prompt_length"], float(key[1] - 1)
        assert row["reward"] == 2 * stored[key]["reward"] == plan[key]["reward"]
        assert set(row["advantages"][start:]) == {of_member} == {plan[key]["advantage"]}


def test_converted_rows_are_trained_and_what_is_left_out_is_recorded(make_run: Callable[..., Run]) -> None:
    run = make_run(steps=1, generate=HERE + "fans_out", assemble={"convert": HERE + "trains_last_segments"})
    packed, plan, stored = planned(run)
    last = {m: n - 1 for m, n in enumerate(own_hooks.FAN_OUT)}
    assert {(m, s) for _, m, s in packed} == {(m, s) for m, s in last.items() if m != 3}
    assert len(packed) == 3 * NUM_UNITS
    for key, row in packed.items():
        start, response = row["prompt_length"], stored[key]["response_tokens"]
        assert row["tokens"] == [*stored[key]["prompt_tokens"], *response]
        assert row["loss_mask"][start:] == [0, *stored[key]["loss_mask"][1:]]
        expected = np.array([1 / (1 + at) for at in range(len(response))], np.float32)
        assert np.array_equal(np.array(row["advantages"][start:], np.float32), expected)
        assert (row["reward"], plan[key]["outcome"], plan[key]["reason"]) == (0.25, "trained", None)
        mask = np.array(row["loss_mask"][start:], bool)
        assert plan[key]["advantage"] == pytest.approx(expected[mask].mean())
    left_out = {key: (row["outcome"], row["reason"]) for key, row in plan.items() if key not in packed}
    assert set(left_out.values()) == {("filtered", "conversion")}
    assert plan.keys() == stored.keys()


def test_groups_that_convert_to_nothing_are_dropped_with_that_reason(make_run: Callable[..., Run]) -> None:
    run = make_run(steps=1, assemble={"convert": HERE + "converts_to_nothing"})
    packed, plan, _ = planned(run)
    assert not packed
    assert {row["reason"] for row in plan.values()} == {"conversion"}
    assert set(fates(run)) == {("dropped", "conversion")}


def test_a_hook_that_returns_what_cannot_be_trained_stops_the_assembler_naming_the_group(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(steps=1, assemble={"convert": HERE + "shortens_a_list"})
    with trainer_of(run) as publish, Worker(run) as worker:
        publish(0)
        with (
            WorkerSession(run, "assemble") as session,
            pytest.raises(
                ConfigError, match=r"assemble.convert at unit \d+: ValueError: member 0, segment 0: "
            ),
        ):
            AssemblerLoop(session, Drain()).run()
        assert worker.error is None
    assert fates(run) == []


def test_slimes_post_processing_and_conversion_shape_a_batch(make_run: Callable[..., Run]) -> None:
    hooks = {"post_process": SLIME + "centres_rewards", "convert": SLIME + "to_train_data"}
    run = make_run(steps=1, generate=HERE + "fans_out", assemble=hooks)
    packed, plan, stored = planned(run)
    assert plan.keys() == stored.keys()
    assert {m for _, m, _ in packed} == {0, 1, 2, 3}
    for key, row in packed.items():
        start = row["prompt_length"]
        assert row["loss_mask"][start:] == [*stored[key]["loss_mask"][:-1], 0]
        assert set(row["advantages"][start:]) == {float(key[1])}
        assert row["reward"] == 0.5
        assert row["logprobs"][start:] == stored[key]["logprobs"]
