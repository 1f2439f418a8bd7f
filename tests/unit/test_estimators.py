"""Advantages beside GRPO's: numbers worked by hand and independent versions in plain Python."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strawflow.errors import InvalidInputError
from strawflow_workers.trainer.advantages import (
    distilled,
    gae,
    overlong_penalties,
    penalised,
    reinforce_pp_advantages,
    rloo_advantages,
)


def ones(rewards: np.ndarray) -> np.ndarray:
    return np.ones(rewards.shape, dtype=bool)


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    # 1 - 0, 0 - 1/3; and 4 - 4/3, 2 - 2, 2 - 2, 0 - 8/3
    rewards = np.array([[1.0, 0, 0, 0], [4, 2, 2, 0]])
    found, filtered = rloo_advantages(rewards, ones(rewards))
    np.testing.assert_allclose(found, [[1, -1 / 3, -1 / 3, -1 / 3], [8 / 3, 0, 0, -8 / 3]], rtol=1e-6)
    assert filtered.tolist() == [False, False]
    assert found.dtype == np.float32


def test_leave_one_out_leaves_excluded_members_and_equal_groups_out() -> None:
    rewards = np.array([[1.0, 99, 0, 0], [1, 1, 1, 5]])
    valid = np.array([[True, False, True, True], [True, True, True, False]])
    found, filtered = rloo_advantages(rewards, valid)
    np.testing.assert_allclose(found, [[1, 0, -0.5, -0.5], [0, 0, 0, 0]], rtol=1e-6)
    assert filtered.tolist() == [False, True]


def test_global_normalisation_weighs_rollouts_by_their_trained_tokens() -> None:
    # tokens 1, 3 of group one (rewards 1, 0), 2, 2 of group two (rewards 1, 1):
    # mean 5/8, variance 5/8 * (3/8)^2 + 3/8 * (5/8)^2 = 15/64
    rewards = np.array([[1.0, 0], [1, 1]])
    found, filtered = reinforce_pp_advantages(rewards, ones(rewards), np.array([[1, 3], [2, 2]]))
    high, low = (3 / 8) / math.sqrt(15 / 64 + 1e-8), -(5 / 8) / math.sqrt(15 / 64 + 1e-8)
    np.testing.assert_allclose(found, [[high, low], [high, high]], rtol=1e-6)
    assert filtered.tolist() == [False, False], "a group of equal rewards differs from the others"


def test_the_baseline_variant_takes_the_mean_of_the_group_first_and_filters_equal_groups() -> None:
    # centred 0.5, -0.5 with 1 and 3 tokens: mean -0.25, variance 0.25 * 0.75^2 + 0.75 * 0.25^2 = 0.1875
    rewards = np.array([[1.0, 0], [1, 1]])
    found, filtered = reinforce_pp_advantages(
        rewards, ones(rewards), np.array([[1, 3], [2, 2]]), subtract_group_mean=True
    )
    scale = math.sqrt(0.1875 + 1e-8)
    np.testing.assert_allclose(found, [[0.75 / scale, -0.25 / scale], [0, 0]], rtol=1e-6)
    assert filtered.tolist() == [False, True]


def test_a_batch_of_equal_rewards_has_no_signal() -> None:
    rewards = np.full((2, 2), 0.1)
    found, filtered = reinforce_pp_advantages(rewards, ones(rewards), np.full((2, 2), 3))
    assert not found.any()
    assert filtered.tolist() == [True, True]


cell = st.tuples(st.integers(-4, 4).map(lambda k: k / 4), st.booleans(), st.integers(1, 9))
batch = st.lists(st.lists(cell, min_size=3, max_size=3), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(groups=batch, baseline=st.booleans())
def test_they_agree_with_versions_told_token_by_token(
    groups: list[list[tuple[float, bool, int]]], baseline: bool
) -> None:
    rewards, valid, tokens = (np.array([[c[at] for c in g] for g in groups]) for at in range(3))
    found, filtered = rloo_advantages(rewards.astype(float), valid)
    for row, members in enumerate(groups):
        kept = [r for r, use, _ in members if use]
        for column, (reward, use, _) in enumerate(members):
            others = [r for at, (r, ok, _) in enumerate(members) if ok and at != column]
            expected = 0.0
            if use and len(set(kept)) > 1:
                expected = reward - statistics.fmean(others)
            assert found[row, column] == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert filtered[row] == (len(set(kept)) < 2)
    found, filtered = reinforce_pp_advantages(
        rewards.astype(float), valid, tokens, subtract_group_mean=baseline
    )
    of_tokens: list[tuple[int, int, float]] = []
    everything = [r for g in groups for r, use, _ in g if use]
    for row, members in enumerate(groups):
        kept = [r for r, use, _ in members if use]
        if len(set(kept)) < 2 and baseline:
            continue
        for column, (reward, use, count) in enumerate(members):
            value = reward - (statistics.fmean(kept) if baseline and kept else 0.0)
            of_tokens += [(row, column, value)] * (count if use else 0)
    expected_table = np.zeros(rewards.shape)
    if of_tokens and (baseline or len(set(everything)) > 1):
        values = [value for _, _, value in of_tokens]
        mean, deviation = statistics.fmean(values), math.sqrt(statistics.pvariance(values) + 1e-8)
        for row, column, value in of_tokens:
            expected_table[row, column] = (value - mean) / deviation
    np.testing.assert_allclose(found, expected_table, rtol=2e-4, atol=2e-4)


def test_a_response_loses_reward_from_the_buffer_on_and_all_of_the_penalty_at_its_end() -> None:
    lengths = np.array([10, 80, 85, 90, 100, 120])
    found = overlong_penalties(lengths, longest=100, buffer=20, penalty=0.5)
    np.testing.assert_allclose(found, [0, 0, -0.125, -0.25, -0.5, -0.5])
    assert not overlong_penalties(lengths, longest=100, buffer=0).any()


def test_generalised_advantages_of_three_tokens() -> None:
    # gamma 0.9, lambda 0.5: deltas -0.1 + 0.18 ... worked from the end
    rewards, values = np.array([0.0, 0.5, 1.0]), np.array([0.1, 0.2, 0.3])
    last = 1.0 - 0.3
    middle = 0.5 + 0.9 * 0.3 - 0.2 + 0.45 * last
    first = 0.0 + 0.9 * 0.2 - 0.1 + 0.45 * middle
    found, returns = gae(rewards, values, discount=0.9, trace=0.5)
    np.testing.assert_allclose(found, [first, middle, last], rtol=1e-6)
    np.testing.assert_allclose(returns, [first + 0.1, middle + 0.2, 1.0], rtol=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=8),
    discount=st.floats(0, 1),
    trace=st.floats(0, 1),
)
def test_generalised_advantages_are_the_weighted_sum_of_all_later_errors(
    steps: list[tuple[float, float]], discount: float, trace: float
) -> None:
    rewards, values = (np.array(column) for column in zip(*steps, strict=True))
    after = np.append(values[1:], 0.0)
    errors = rewards + discount * after - values
    expected = [
        sum((discount * trace) ** k * errors[t + k] for k in range(len(errors) - t))
        for t in range(len(errors))
    ]
    found, _ = gae(rewards, values, discount=discount, trace=trace)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_without_trace_and_discount_the_sum_of_rewards_less_the_value_is_left() -> None:
    rewards, values = np.array([0.0, 0.5, 1.0]), np.array([0.1, 0.2, 0.3])
    found, returns = gae(rewards, values, discount=1.0, trace=1.0)
    np.testing.assert_allclose(found, [1.4, 1.3, 0.7], rtol=1e-6)
    np.testing.assert_allclose(returns, [1.5, 1.5, 1.0], rtol=1e-6)
    with pytest.raises(InvalidInputError, match="must both be"):
        gae(rewards, values[:2], discount=1.0, trace=1.0)


def test_a_teacher_adds_what_it_finds_a_token_likelier_by() -> None:
    found = distilled(np.array([0.0, 1.0]), np.array([-1.0, -2.0]), np.array([-0.5, -3.0]), coefficient=2.0)
    assert found.tolist() == [1.0, -1.0]


def test_a_token_loses_what_it_and_the_trained_tokens_after_it_in_its_sequence_diverge_by() -> None:
    divergences = np.array([9.0, 1.0, np.nan, 2.0, 9.0, 4.0])
    trained = np.array([False, True, False, True, False, True])
    found = penalised(
        np.array([5.0, 1, 7, 1, 5, 1]), divergences, trained, np.array([0, 4, 6]), coefficient=0.5
    )
    assert found.tolist() == [5.0, 1 - 1.5, 7.0, 1 - 1.0, 5.0, 1 - 2.0]
