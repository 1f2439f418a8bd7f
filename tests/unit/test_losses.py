"""Losses of tokens: numbers worked by hand, and an independent numpy version over random inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strawflow_workers.trainer import losses


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def policy(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> list[float]:
    return losses.policy_loss(logprobs, old, advantages, clip_low=0.2, clip_high=0.28).tolist()


def test_an_unchanged_policy_has_minus_the_advantage_as_its_loss() -> None:
    assert policy(tensor(-1.0, -2.0), tensor(-1.0, -2.0), tensor(0.5, -1.5)) == [-0.5, 1.5]


def test_a_good_token_made_much_likelier_counts_only_up_to_the_upper_bound() -> None:
    # ratio e^1 = 2.718..., clipped at 1.28: -min(2.718 * 2, 1.28 * 2) = -2.56
    assert policy(tensor(-1.0), tensor(-2.0), tensor(2.0)) == pytest.approx([-2.56])


def test_a_bad_token_made_much_less_likely_counts_only_down_to_the_lower_bound() -> None:
    # ratio e^-1 = 0.3679, clipped at 0.8: -min(0.3679 * -1, 0.8 * -1) = 0.8
    assert policy(tensor(-2.0), tensor(-1.0), tensor(-1.0)) == pytest.approx([0.8])


def test_a_bad_token_made_likelier_is_not_clipped() -> None:
    # ratio e^1: -min(2.71828 * -1, 1.28 * -1) = 2.71828
    assert policy(tensor(-1.0), tensor(-2.0), tensor(-1.0)) == pytest.approx([np.e])


def test_a_good_token_made_less_likely_is_not_clipped() -> None:
    # ratio e^-1: -min(0.36788 * 1, 0.8 * 1) = -0.36788
    assert policy(tensor(-2.0), tensor(-1.0), tensor(1.0)) == pytest.approx([-np.exp(-1)])


def test_clipping_stops_the_gradient_and_an_unclipped_token_gets_minus_ratio_times_advantage() -> None:
    logprobs = tensor(-1.0, -2.0).requires_grad_()
    losses.policy_loss(
        logprobs, tensor(-2.0, -2.0), tensor(1.0, 3.0), clip_low=0.2, clip_high=0.2
    ).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -3.0])


def test_the_sft_loss_is_the_negative_log_likelihood() -> None:
    assert losses.sft_loss(tensor(-0.25, -3.0)).tolist() == [0.25, 3.0]


def test_the_kl_estimate_is_zero_for_equal_policies_and_known_for_a_gap() -> None:
    # d = ln 2: 2 - 1 - ln 2; d = -ln 2: 0.5 - 1 + ln 2
    found = losses.kl_estimate(tensor(-1.0, -1.0, -1.0), tensor(-1.0, -1.0 - np.log(2), -1.0 + np.log(2)))
    assert found.tolist() == pytest.approx([0.0, 1 - np.log(2), np.log(2) - 0.5])


def test_a_ratio_is_clipped_strictly_outside_its_bounds_on_either_side() -> None:
    gaps = tensor(0.0, np.log(1.27), np.log(1.29), np.log(0.81), np.log(0.79))
    found = losses.is_clipped(gaps, torch.zeros_like(gaps), clip_low=0.2, clip_high=0.28)
    assert found.tolist() == [False, False, True, False, True]


def test_the_masked_sum_ignores_whatever_untrained_tokens_hold() -> None:
    values, weights = tensor(1.0, float("nan"), float("inf"), 4.0), tensor(1.0, 0.0, 0.0, 0.5)
    assert losses.masked_sum(values, weights).item() == 3.0


def test_the_masked_sum_gives_untrained_tokens_a_gradient_of_zero_and_not_of_nan() -> None:
    values = tensor(1.0, float("inf"), 4.0).requires_grad_()
    losses.masked_sum(values, tensor(2.0, 0.0, 1.0)).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [2.0, 0.0, 1.0]


def surrogate_by_cases(new: float, old: float, advantage: float, low: float, high: float) -> float:
    """The same loss told by cases of the advantage's sign instead of a minimum."""
    ratio = float(np.exp(new - old))
    bounded = min(ratio, 1 + high) if advantage >= 0 else max(ratio, 1 - low)
    return -bounded * advantage


number = st.floats(-6, 0)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(number, number, st.floats(-5, 5)), min_size=1, max_size=9),
    low=st.floats(0, 0.9),
    high=st.floats(0, 2),
)
def test_the_policy_loss_agrees_with_an_independent_version(
    rows: list[tuple[float, float, float]], low: float, high: float
) -> None:
    new, old, advantages = (tensor(*column) for column in zip(*rows, strict=True))
    found = losses.policy_loss(new, old, advantages, clip_low=low, clip_high=high)
    expected = [surrogate_by_cases(*row, low, high) for row in rows]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)
