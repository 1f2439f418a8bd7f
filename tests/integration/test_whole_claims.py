"""Hooks that make all rollouts of one claim: gathered into one call, judged member by member."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from strawflow.flow.run import Run
from strawflow_workers.rollout.rewards.verifiers import load_verifier
from tests.integration import own_hooks, slime_functions
from tests.integration.rollout_runs import NUM_SAMPLES, NUM_UNITS, Worker, completed, rows_of, trainer_of
from tests.integration.test_hooks import run_until

HERE = "tests.integration.own_hooks:"
SLIME = "tests.integration.slime_functions:"


@pytest.fixture(autouse=True)
def _fresh() -> None:
    own_hooks.CLAIMS.clear()
    slime_functions.ASKED.clear()


def test_the_groups_of_a_claim_are_made_in_one_call_and_stored_each_as_its_own(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(generate_groups=HERE + "makes_a_claim", steps=1)
    rows = run_until(run)
    assert own_hooks.CLAIMS == [[NUM_SAMPLES] * NUM_UNITS]
    assert len({(row["unit_id"], row["member"]) for row in rows}) == NUM_UNITS * NUM_SAMPLES
    assert all(row["reward"] is not None for row in rows)
    assert {tuple(row["prompt_tokens"]) for row in rows if row["unit_id"] == 1} != {
        tuple(row["prompt_tokens"]) for row in rows if row["unit_id"] == 2
    }


def test_what_is_wrong_with_one_member_fails_it_alone_after_a_second_try(
    make_run: Callable[..., Run],
) -> None:
    rows = run_until(make_run(generate_groups=HERE + "spoils_member_1", steps=1))
    assert {row["member"] for row in rows if row["status"] == "failed"} == {1}
    assert len([row for row in rows if row["status"] == "failed"]) == NUM_UNITS
    assert [[NUM_SAMPLES] * NUM_UNITS, *[[1]] * NUM_UNITS] == own_hooks.CLAIMS


def test_a_call_that_comes_to_nothing_fails_every_member_of_the_claim(make_run: Callable[..., Run]) -> None:
    rows = run_until(make_run(generate_groups=HERE + "forgets_a_group", steps=1))
    assert len(rows) == NUM_UNITS * NUM_SAMPLES
    assert all(row["failure"].startswith("generate_groups: TypeError: groups of [") for row in rows)


def test_slimes_rollout_function_makes_claims_and_evaluation_with_its_own_sampling(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(
        generate_groups=SLIME + "generate_rollout",
        steps=1,
        temperature=0.5,
        evaluate={"greedy": False, "samples_per_prompt": 2},
        num_evaluated={"held_out": 3},
    )
    with trainer_of(run) as publish, Worker(run) as worker:
        publish(0)
        worker.wait(lambda: len(completed(run)) == NUM_UNITS + 3)
    assert {
        (samples, evaluation, temperature) for _, samples, evaluation, temperature in slime_functions.ASKED
    } == {
        (NUM_SAMPLES, False, 0.5),
        (2, False, 1.0),
    }
    assert sum(groups for groups, *_ in slime_functions.ASKED) == NUM_UNITS + 3
    rows = rows_of(run)
    assert {row["status"] for row in rows} == {"finished"}
    assert all(row["loss_mask"].count(0) == 2 for row in rows)


@pytest.mark.parametrize(
    "function, told",
    [
        ("keeps_for_later", "strawflow's data source has no add_samples"),
        ("samples_beyond_the_claim", "dynamic sampling assemble.group_filter"),
    ],
)
def test_what_slimes_rollout_function_asks_beyond_the_claim_fails_its_members_with_why(
    make_run: Callable[..., Run], function: str, told: str
) -> None:
    rows = run_until(make_run(generate_groups=SLIME + function, steps=1))
    assert all(told in row["failure"] for row in rows)


def test_samples_that_slimes_rollout_function_leaves_out_fail_alone(make_run: Callable[..., Run]) -> None:
    rows = run_until(make_run(generate_groups=SLIME + "leaves_out_a_sample", steps=1))
    assert {(row["member"], row["failure"]) for row in rows if row["failure"]} == {
        (2, "generate: the function returned nothing for this sample")
    }


@pytest.mark.parametrize(
    "function, rewards",
    [("rewards_by_rank", [0.0, 1.0, 2.0, 3.0]), ("sets_rewards", [10.0, 11.0, 12.0, 13.0])],
)
def test_slimes_reward_of_a_group_takes_its_samples(
    make_run: Callable[..., Run], function: str, rewards: list[float]
) -> None:
    assert load_verifier(SLIME + function).takes_group, "its second parameter is `samples`"
    rows = run_until(make_run(reward=SLIME + function, steps=1))
    by_member: dict[int, set[Any]] = {}
    for row in rows:
        by_member.setdefault(row["member"], set()).add(row["reward"])
    assert by_member == {n: {reward} for n, reward in enumerate(rewards)}
