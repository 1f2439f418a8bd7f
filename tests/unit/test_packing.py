"""Packing: advantages, order, denominators and the fate of every member."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strawflow.config import RunConfig
from strawflow.errors import ConfigError
from strawflow.index.units import Unit
from strawflow.states import UnitState
from strawflow_workers.assemble.groups import Group, is_usable, min_group_size
from strawflow_workers.assemble.packing import build_batch
from strawflow_workers.rollout.hooks.converted import Shaped
from strawflow_workers.rollout.hooks.load_algorithm import AlgorithmHooks, checked_advantage


def unit(unit_id: int) -> Unit:
    return Unit(
        unit_id=unit_id,
        branch_id="main",
        purpose="train",
        profile="train",
        segment_id=1,
        epoch=0,
        position=unit_id,
        state=UnitState.COMPLETED,
        required_version_id=None,
        fence=1,
        seq=1,
        attempts=1,
        crashes=0,
        parks=0,
        requeues=0,
        session_id=None,
        last_error=None,
        extent_id=1,
        row_start=0,
        row_count=1,
        version_step=0,
        mean_reward=None,
        num_tokens=None,
    )


def row(unit_id: int, member: int, *, reward: float | None, num_tokens: int = 3) -> dict[str, Any]:
    failed = reward is None
    return {
        "unit_id": unit_id,
        "fence": 1,
        "seq": 1,
        "member": member,
        "segment": 0,
        "status": "failed" if failed else "finished",
        "failure": "reward: ValueError" if failed else None,
        "score": reward,
        "prompt_tokens": [10, 11],
        "response_tokens": [100 + unit_id, 20 + member, *range(num_tokens - 2)],
        "loss_mask": [1] * num_tokens,
        "logprobs": [-0.5 - member] * num_tokens,
        "token_versions": [0] * num_tokens,
        "weight_versions": ["v4"],
        "reward": reward,
        "temperature": 0.7,
    }


def group(unit_id: int, rewards: list[float | None], **more: Any) -> Group:
    return Group(unit(unit_id), [row(unit_id, m, reward=r, **more) for m, r in enumerate(rewards)])


def config(**assemble: Any) -> RunConfig:
    return RunConfig.model_validate({"assemble": assemble})


def build(groups: list[Group], **assemble: Any) -> Any:
    return build_batch(groups, step=5, objective="grpo", version_steps={"v4": 4}, config=config(**assemble))


def test_packed_arrays_are_aligned_to_tokens_and_prompts_are_never_trained() -> None:
    plan = build([group(1, [1.0, 0.0])], mini_batches=1)
    (micro,) = plan.micro_batches
    for packed in micro.rows.to_pylist():
        lengths = {
            len(packed[name]) for name in ("tokens", "loss_mask", "logprobs", "advantages", "version_steps")
        }
        assert lengths == {5}
        assert packed["loss_mask"] == [0, 0, 1, 1, 1]
        assert packed["version_steps"] == [-1, -1, 4, 4, 4]
        assert packed["tokens"][:2] == [10, 11]
        assert packed["tokens"][2] == 101
        assert packed["logprobs"][2:] == [-0.5 - packed["member"]] * 3
        assert packed["temperature"] == np.float32(0.7)


def test_a_group_of_equal_rewards_is_dropped_with_its_reason_and_not_packed() -> None:
    plan = build([group(1, [1.0, 1.0]), group(2, [1.0, 0.0])])
    fates = {a.unit_id: (a.outcome, a.reason) for a in plan.assignments}
    assert fates == {1: ("dropped", "zero_deviation"), 2: ("trained", None)}
    packed = {r["unit_id"] for m in plan.micro_batches for r in m.rows.to_pylist()}
    assert packed == {2}
    outcomes = {(r["unit_id"], r["outcome"], r["reason"]) for r in plan.plan.to_pylist()}
    assert outcomes == {(1, "filtered", "zero_deviation"), (2, "trained", None)}


def test_a_failed_member_is_excluded_from_baseline_and_rows_and_named_in_the_plan() -> None:
    plan = build([group(1, [1.0, None, 0.0, 0.5])], mini_batches=1)
    rows = plan.micro_batches[0].rows.to_pylist()
    assert sorted(r["member"] for r in rows) == [0, 2, 3]
    total = sum(r["advantages"][-1] for r in rows)
    assert total == pytest.approx(0.0, abs=1e-6)
    excluded = [r for r in plan.plan.to_pylist() if r["outcome"] == "excluded"]
    assert [(r["member"], r["reason"]) for r in excluded] == [(1, "reward: ValueError")]


def test_denominators_count_the_trained_tokens_of_each_mini_batch() -> None:
    plan = build([group(u, [1.0, 0.0, 0.0], num_tokens=3 + u) for u in range(1, 5)], mini_batches=2)
    for mini, denominator in enumerate(plan.denominators):
        masks = [
            sum(r["loss_mask"])
            for m in plan.micro_batches
            if m.mini_batch == mini
            for r in m.rows.to_pylist()
        ]
        assert denominator == sum(masks)
    assert sum(plan.denominators) == sum(3 * (3 + u) for u in range(1, 5))


def test_micro_batches_stay_below_the_token_limit_and_lose_nothing() -> None:
    groups = [group(u, [1.0, 0.0]) for u in range(1, 11)]
    plan = build(groups, mini_batches=2, max_tokens_per_micro_batch=12)
    sizes = [len(m.rows.column("tokens").flatten()) for m in plan.micro_batches]
    assert max(sizes) <= 12
    assert plan.num_sequences == 20
    assert len({(m.mini_batch, m.micro_batch) for m in plan.micro_batches}) == len(plan.micro_batches)


def test_the_same_groups_give_the_same_bytes() -> None:
    groups = [group(u, [1.0, 0.0]) for u in range(1, 6)]
    first, second = build(groups), build(groups)
    assert [m.rows for m in first.micro_batches] == [m.rows for m in second.micro_batches]


def test_a_step_without_any_signal_has_no_rows_but_every_fate() -> None:
    plan = build([group(1, [0.0, 0.0]), group(2, [1.0, 1.0])])
    assert plan.micro_batches == []
    assert plan.denominators == ()
    assert [a.reason for a in plan.assignments] == ["zero_deviation"] * 2


def test_staleness_is_the_distance_to_the_oldest_weights() -> None:
    plan = build_batch(
        [group(1, [1.0, 0.0])], step=8, objective="grpo", version_steps={"v4": 4}, config=config()
    )
    assert plan.max_staleness == 3


@pytest.mark.parametrize(("members", "least"), [(1, 1), (2, 2), (3, 2), (4, 2), (8, 4), (9, 5)])
def test_half_the_members_must_remain(members: int, least: int) -> None:
    assert min_group_size(members) == least


def test_drop_group_drops_at_the_first_failed_member() -> None:
    whole, broken = group(1, [1.0, 0.0, 0.5, 0.5]), group(2, [1.0, None, 0.5, 0.5])
    assert is_usable(broken, config(failed_member="exclude"))
    assert not is_usable(broken, config(failed_member="drop-group"))
    assert is_usable(whole, config(failed_member="drop-group"))


def test_stale_tokens_are_masked_and_their_rewards_stay_in_the_baseline() -> None:
    rows = [row(1, member, reward=float(member % 2), num_tokens=4) for member in range(4)]
    rows[0] |= {"weight_versions": ["v2", "v4"], "token_versions": [0, 0, 1, 1]}
    rows[1] |= {"weight_versions": ["v2"], "token_versions": [0] * 4}

    def packed(stale: str) -> Any:
        return build_batch(
            [Group(unit(1), [dict(r) for r in rows])],
            step=5,
            objective="grpo",
            version_steps={"v2": 2, "v4": 4},
            config=RunConfig.model_validate(
                {"assemble": {"mini_batches": 1, "stale": stale}, "rollout": {"max_staleness": 1}}
            ),
        )

    plan = packed("mask")
    by_member = {r["member"]: r for m in plan.micro_batches for r in m.rows.to_pylist()}
    assert by_member[0]["loss_mask"] == [0, 0, 0, 0, 1, 1]  # two of the prompt, two stale, two fresh
    assert by_member.keys() == {0, 2, 3}, "a member without a fresh token is not packed"
    assert plan.denominators == (10.0,)
    assert plan.num_masked_tokens == 6
    fates = {r["member"]: (r["outcome"], r["reason"]) for r in plan.plan.to_pylist()}
    assert fates[1] == ("filtered", "stale")
    whole = packed("train")
    advantages = {r["member"]: r["advantage"] for r in whole.plan.to_pylist()}
    assert {r["member"]: r["advantage"] for r in plan.plan.to_pylist()} == advantages
    assert whole.denominators == (16.0,)
    assert whole.num_masked_tokens == 0


def of_segments(unit_id: int, rewards: list[float | None], counts: list[int]) -> Group:
    """A group whose members have so many segments each, the last of each with a masked token."""
    rows = []
    for member, (reward, count) in enumerate(zip(rewards, counts, strict=True)):
        for segment in range(count):
            made = row(unit_id, member, reward=reward)
            rows.append({**made, "segment": segment, "loss_mask": [1, 0, 1] if segment else [1, 1, 1]})
    return Group(unit(unit_id), rows)


def test_a_member_counts_once_however_many_segments_it_has() -> None:
    plan = build([of_segments(1, [1.0, 0.0, 0.5], [1, 3, 2])], mini_batches=1)
    rows = plan.plan.to_pylist()
    assert [(r["member"], r["segment"]) for r in rows] == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    for member, expected in enumerate([0.5 / 0.5001, -0.5 / 0.5001, 0.0]):
        assert {round(r["advantage"], 5) for r in rows if r["member"] == member} == {round(expected, 5)}
    assert plan.mean_reward == 0.5
    assert plan.denominators == (3.0 + 3 + 2 + 2 + 3 + 2,)
    assert plan.num_sequences == 6


def test_segments_of_a_rollout_stay_in_one_mini_batch_and_share_its_denominator() -> None:
    groups = [of_segments(n, [1.0, 0.0, 0.5, 0.25], [1, 3, 2, 1]) for n in range(6)]
    plan = build(groups, mini_batches=4)
    places: dict[tuple[int, int], set[int]] = {}
    for r in plan.plan.to_pylist():
        places.setdefault((r["unit_id"], r["member"]), set()).add(r["mini_batch"])
    assert {len(found) for found in places.values()} == {1}
    assert set().union(*places.values()) == {0, 1, 2, 3}
    assert sum(plan.denominators) == 6 * (4 * 3 + 3 * 2)


def test_a_group_is_usable_by_its_members_not_by_its_segments() -> None:
    assert not is_usable(of_segments(1, [1.0, None, None, None], [4, 1, 1, 1]), config())
    assert is_usable(of_segments(1, [1.0, 0.5, None, None], [1, 1, 4, 4]), config())


def test_a_segment_without_a_token_to_train_is_filtered_with_its_reason() -> None:
    group = of_segments(1, [1.0, 0.0], [1, 2])
    group.rows[2]["loss_mask"] = [0, 0, 0]
    rows = build([group], mini_batches=1).plan.to_pylist()
    assert [(r["outcome"], r["reason"]) for r in rows] == [("trained", None)] * 2 + [("filtered", "masked")]


def with_algorithm(groups: list[Group], hooks: AlgorithmHooks | None = None, **algorithm: Any) -> Any:
    run = RunConfig.model_validate(
        {"algorithm": algorithm, "assemble": {"mini_batches": 1}, "rollout": {"max_response_tokens": 8}}
    )
    return build_batch(groups, step=5, objective="grpo", version_steps={"v4": 4}, config=run, hooks=hooks)


def advantages_of(plan: Any) -> dict[tuple[int, int], float]:
    return {(r["unit_id"], r["member"]): r["advantage"] for r in plan.plan.to_pylist()}


@pytest.mark.parametrize(
    ("name", "expected", "is_equal_group_kept"),
    [
        ("grpo", [0.75 / 0.5001, -0.25 / 0.5001], False),
        ("dr_grpo", [0.75, -0.25], False),
        ("rloo", [1.0, -1 / 3], False),
        ("reinforce_pp", [(1 - 0.625) / 0.234375**0.5, -0.625 / 0.234375**0.5], True),
        ("reinforce_pp_baseline", [0.75 / 0.1875**0.5, -0.25 / 0.1875**0.5], False),
        ("reward", [1.0, 0.0], True),
    ],
)
def test_the_configured_estimator_makes_the_advantages(
    name: str, expected: list[float], is_equal_group_kept: bool
) -> None:
    # All rollouts have as many tokens. Over the batch: 5 of 8 rewards are 1, variance 15/64.
    groups = [group(1, [1.0, 0.0, 0.0, 0.0]), group(2, [1.0, 1.0, 1.0, 1.0])]
    plan = with_algorithm(groups, advantage=name)
    found = advantages_of(plan)
    assert [found[1, 0], found[1, 1]] == pytest.approx(expected, rel=1e-5)
    assert {a.unit_id: a.outcome for a in plan.assignments} == {
        1: "trained",
        2: "trained" if is_equal_group_kept else "dropped",
    }


def test_a_group_with_fewer_members_is_normalised_with_the_others() -> None:
    groups = [group(1, [1.0, None]), group(2, [0.0]), group(3, [1.0, 0.0, 1.0])]
    found = advantages_of(with_algorithm(groups, advantage="reinforce_pp"))
    # valid: 1 | 0 | 1 0 1, mean 0.6, variance 0.24
    high, low = 0.4 / 0.24**0.5, -0.6 / 0.24**0.5
    assert found == {
        (1, 0): pytest.approx(high),
        (1, 1): None,
        (2, 0): pytest.approx(low),
        (3, 0): pytest.approx(high),
        (3, 1): pytest.approx(low),
        (3, 2): pytest.approx(high),
    }


def test_segments_that_a_hook_left_out_do_not_count_in_the_normalisation() -> None:
    # tokens 3 of reward 1, and of reward 0 those of its first segment alone: mean 1/2, deviation 1/2
    group = of_segments(1, [1.0, 0.0], [1, 3])
    group.shaped = Shaped(group.rows, left_out=frozenset({(1, 1), (1, 2)}))
    rows = with_algorithm([group], advantage="reinforce_pp").plan.to_pylist()
    assert {r["member"]: r["advantage"] for r in rows} == {0: pytest.approx(1.0), 1: pytest.approx(-1.0)}


def weights_of(plan: Any) -> dict[tuple[int, int, int], float | None]:
    return {
        (r["unit_id"], r["member"], r["segment"]): r["loss_weight"]
        for m in plan.micro_batches
        for r in m.rows.to_pylist()
    }


def test_segments_of_a_rollout_share_the_weight_of_their_rollout() -> None:
    # trained tokens: member 0 has 3, member 1 has 3 + 2 + 2, member 2 has 3 + 2
    group = of_segments(1, [1.0, 0.0, 0.5], [1, 3, 2])
    plan = with_algorithm([group], aggregation="rollout")
    assert plan.denominators == (3.0,)
    assert weights_of(plan) == {
        (1, 0, 0): pytest.approx(1 / 3),
        **{(1, 1, segment): pytest.approx(1 / 7) for segment in range(3)},
        **{(1, 2, segment): pytest.approx(1 / 5) for segment in range(2)},
    }
    by_prompt = with_algorithm([group], aggregation="prompt")
    assert set(weights_of(by_prompt).values()) == {np.float32(1 / 15)}
    assert by_prompt.denominators == (pytest.approx(1.0),)
    assert set(weights_of(with_algorithm([group], aggregation="constant")).values()) == {1 / 8}


def test_by_token_no_weight_is_stored() -> None:
    plan = with_algorithm([group(1, [1.0, 0.0])])
    assert set(weights_of(plan).values()) == {None}
    assert plan.denominators == (6.0,)


def test_a_long_response_loses_reward_for_its_advantage_and_keeps_the_stored_one() -> None:
    rows = [row(1, 0, reward=1.0, num_tokens=2), row(1, 1, reward=1.0, num_tokens=8)]
    plan = with_algorithm(
        [Group(unit(1), rows)], advantage="dr_grpo", overlong_buffer=4, overlong_penalty=0.5
    )
    # 8 of at most 8 tokens: 1 - 0.5; mean 0.75
    assert advantages_of(plan) == {(1, 0): pytest.approx(0.25), (1, 1): pytest.approx(-0.25)}
    assert {r["reward"] for m in plan.micro_batches for r in m.rows.to_pylist()} == {1.0}
    assert plan.mean_reward == 1.0


def test_a_truncated_response_is_not_trained_and_counts_in_the_baseline() -> None:
    rows = [row(1, 0, reward=1.0), {**row(1, 1, reward=0.0), "status": "truncated"}, row(1, 2, reward=0.5)]
    plan = with_algorithm([Group(unit(1), rows)], advantage="dr_grpo", mask_truncated=True)
    fates = {r["member"]: (r["outcome"], r["reason"]) for r in plan.plan.to_pylist()}
    assert fates == {0: ("trained", None), 1: ("filtered", "truncated"), 2: ("trained", None)}
    assert advantages_of(plan)[1, 0] == 0.5
    assert (plan.denominators, plan.num_masked_tokens) == ((6.0,), 0)


def test_a_hook_makes_advantages_of_all_groups_of_the_step_at_once() -> None:
    def ranks(groups: Any) -> list[list[float]]:
        rewards = sorted(r for g in groups for r in g.rewards)
        return [[float(rewards.index(r)) for r in g.rewards] for g in groups]

    groups = [group(1, [0.25, None]), group(2, [0.5, 0.0])]
    hooks = AlgorithmHooks(advantage=checked_advantage(ranks))
    plan = with_algorithm(groups, hooks, advantage="mine:ranks")
    found = advantages_of(plan)
    assert found == {(1, 0): 1.0, (1, 1): None, (2, 0): 2.0, (2, 1): 0.0}
    broken = AlgorithmHooks(advantage=checked_advantage(lambda groups: [[1.0]] * len(groups)))
    with pytest.raises(
        ConfigError, match=r"algorithm.advantage: ValueError: unit 2: advantages of shape \(1,\) for 2"
    ):
        with_algorithm(groups, broken, advantage="mine:broken")
