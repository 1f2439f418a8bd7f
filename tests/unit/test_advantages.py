"""Group-relative advantages: numbers worked by hand, excluded members, and an independent version by
statistics."""

from __future__ import annotations

import math
import statistics

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strawflow.errors import InvalidInputError
from strawflow_workers.trainer.advantages import grpo_advantages


def advantages(
    rewards: list[list[float]], valid: list[list[bool]] | None = None, **options: bool
) -> tuple[npt.NDArray[np.float32], list[bool]]:
    array = np.array(rewards, dtype=np.float64)
    mask = np.ones(array.shape, dtype=bool) if valid is None else np.array(valid)
    found, filtered = grpo_advantages(array, mask, **options)
    return found, filtered.tolist()


def test_one_right_answer_of_four_stands_out_by_one_and_a_half_deviations() -> None:
    # mean 0.25, squares 0.5625 + 3 * 0.0625 = 0.75, divided by 3: 0.25, deviation 0.5
    found, filtered = advantages([[1, 0, 0, 0]])
    np.testing.assert_allclose(found, [[0.75 / 0.5001, *[-0.25 / 0.5001] * 3]], rtol=1e-6)
    assert filtered == [False]
    assert found.dtype == np.float32


def test_without_division_the_advantage_is_reward_minus_mean() -> None:
    found, _ = advantages([[1, 0, 0, 0], [4, 2, 2, 0]], scale_by_deviation=False)
    np.testing.assert_array_equal(found, [[0.75, -0.25, -0.25, -0.25], [2, 0, 0, -2]])


def test_equal_rewards_give_no_advantage_and_count_as_filtered_even_where_their_mean_is_rounded() -> None:
    found, filtered = advantages([[0.1] * 7, [0, 1, 0, 1, 0, 1, 0]])
    assert (found[0] == 0).all()
    assert (found[1] != 0).all()
    assert filtered == [True, False]


def test_an_excluded_member_counts_neither_in_mean_nor_deviation_and_gets_nothing() -> None:
    found, filtered = advantages([[1, 0, 500, 0]], [[True, True, False, True]])
    alone, _ = advantages([[1, 0, 0]])
    np.testing.assert_array_equal(found[0, [0, 1, 3]], alone[0])
    assert found[0, 2] == 0
    assert filtered == [False]


def test_the_reward_of_an_excluded_member_may_be_missing() -> None:
    found, filtered = advantages([[1, math.nan, 0]], [[True, False, True]])
    assert np.isfinite(found).all()
    assert filtered == [False]


def test_a_group_with_fewer_than_two_valid_members_is_filtered() -> None:
    found, filtered = advantages([[3, 5], [3, 5]], [[True, False], [False, False]])
    assert (found == 0).all()
    assert filtered == [True, True]


def test_a_valid_reward_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="not finite"):
        advantages([[1, math.nan]])


def test_arrays_of_different_shapes_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="must both be"):
        grpo_advantages(np.zeros((2, 3)), np.ones((2, 2), dtype=bool))


group = st.lists(st.tuples(st.integers(-4, 4).map(lambda k: k / 4), st.booleans()), min_size=3, max_size=3)


@settings(max_examples=200, deadline=None)
@given(groups=st.lists(group, min_size=1, max_size=6), scale=st.booleans())
def test_advantages_agree_with_the_statistics_module_group_by_group(
    groups: list[list[tuple[float, bool]]], scale: bool
) -> None:
    rewards = [[reward for reward, _ in members] for members in groups]
    valid = [[use for _, use in members] for members in groups]
    found, filtered = advantages(rewards, valid, scale_by_deviation=scale)
    for row, members in enumerate(groups):
        kept = [reward for reward, use in members if use]
        assert filtered[row] == (len(set(kept)) < 2)
        for column, (reward, use) in enumerate(members):
            expected = 0.0
            if use and not filtered[row]:
                expected = reward - statistics.fmean(kept)
                expected /= statistics.stdev(kept) + 1e-4 if scale else 1.0
            assert found[row, column] == pytest.approx(expected, rel=1e-5, abs=1e-6)
