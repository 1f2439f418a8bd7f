"""Losses of tokens: numbers worked by hand, and an independent numpy version over random inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

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


def test_a_bad_token_made_much_likelier_loses_at_most_the_dual_clip() -> None:
    # A = -1, ratio e^2 = 7.389: the loss 7.389 is bounded by 3 * 1; ratio 1.1: 1.1 stays; A = 1 is not touched: -1.28
    found = losses.policy_loss(
        tensor(-1.0, -1.0, -1.0),
        tensor(-3.0, -1.0 - np.log(1.1), -3.0),
        tensor(-1.0, -1.0, 1.0),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
    )
    assert found.tolist() == pytest.approx([3.0, 1.1, -1.28])


def test_gspo_takes_the_ratio_of_the_sequence_for_every_token_of_it() -> None:
    # gaps of one sequence: 0.2 and -0.1, mean 0.05: s = 1.05127; bounds 0.0003 and 0.0004
    gaps = tensor(0.05, 0.05)
    good = losses.gspo_loss(tensor(-1.0, -2.0), gaps, tensor(2.0, 2.0), clip_low=3e-4, clip_high=4e-4)
    assert good.tolist() == pytest.approx([-2.0008, -2.0008])
    bad = losses.gspo_loss(tensor(-1.0, -2.0), gaps, tensor(-2.0, -2.0), clip_low=3e-4, clip_high=4e-4)
    assert bad.tolist() == pytest.approx([2 * np.exp(0.05)] * 2)


@pytest.mark.parametrize("advantage", [1.5, -0.5])
@pytest.mark.parametrize("bound", [0.01, 0.5])
def test_the_token_form_of_gspo_has_value_and_gradient_of_the_sequence_form(
    advantage: float, bound: float
) -> None:
    new, old = tensor(-1.0, -2.0, -0.5).requires_grad_(), tensor(-1.3, -1.9, -0.9)
    by_sequence = new.clone().detach().requires_grad_()
    ratio = ((by_sequence - old).mean()).exp()
    sequence = -torch.min(ratio * advantage, ratio.clamp(1 - bound, 1 + bound) * advantage)
    sequence.backward()
    mean_gap = (new - old).detach().mean().expand(3)
    tokens = losses.gspo_loss(
        new, mean_gap, torch.full((3,), advantage, dtype=torch.float64), clip_low=bound, clip_high=bound
    )
    (tokens.sum() / 3).backward()
    assert (tokens.sum() / 3).item() == pytest.approx(sequence.item(), rel=1e-12)
    assert by_sequence.grad is not None
    assert new.grad is not None
    np.testing.assert_allclose(new.grad.numpy(), by_sequence.grad.numpy(), rtol=1e-12, atol=1e-15)


def test_cispo_bounds_the_weight_and_keeps_every_gradient() -> None:
    # ratios e^1 (bounded by 1.28), e^-1, 1; loss = -weight * A * logprob
    new = tensor(-1.0, -2.0, -0.5).requires_grad_()
    found = losses.cispo_loss(
        new, tensor(-2.0, -1.0, -0.5), tensor(2.0, -1.0, 3.0), clip_low=1.0, clip_high=0.28
    )
    assert found.tolist() == pytest.approx([1.28 * 2 * 1.0, -np.exp(-1) * 2.0, 3.0 * 0.5])
    found.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-1.28 * 2, np.exp(-1), -3.0])


def test_the_policy_gradient_is_minus_advantage_times_log_likelihood() -> None:
    assert losses.reinforce_loss(tensor(-0.5, -2.0), tensor(2.0, -1.0)).tolist() == [1.0, -2.0]


def test_dpo_is_ln_2_without_a_margin_and_falls_with_it() -> None:
    # margins 0 and (-1 + 3) - (-4 + 3) = 3, times 0.5: ln(1 + e^-1.5)
    found = losses.dpo_loss(
        tensor(-1.0, -1.0), tensor(-2.0, -4.0), tensor(-1.0, -3.0), tensor(-2.0, -3.0), beta=0.5
    )
    assert found.tolist() == pytest.approx([np.log(2), np.log(1 + np.exp(-1.5))])


def test_the_value_loss_is_that_of_the_worse_of_value_and_clipped_value() -> None:
    # V = 2, old 1, clip 0.2: bounded 1.2. R = 2: max(0, 0.64) / 2; R = 0: max(4, 1.44) / 2; inside the clip: (1.1 - 1)^2 / 2
    found = losses.value_loss(tensor(2.0, 2.0, 1.1), tensor(1.0, 1.0, 1.0), tensor(2.0, 0.0, 1.0), clip=0.2)
    assert found.tolist() == pytest.approx([0.32, 2.0, 0.005])


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(number, number, st.floats(-5, 5)), min_size=1, max_size=9),
    low=st.floats(0, 1),
    high=st.floats(0, 2),
    dual=st.floats(1.01, 5),
)
def test_the_other_losses_agree_with_independent_versions(
    rows: list[tuple[float, float, float]], low: float, high: float, dual: float
) -> None:
    new, old, advantages = (np.array(column) for column in zip(*rows, strict=True))
    given = [torch.from_numpy(values) for values in (new, old, advantages)]
    bounds = {"clip_low": low, "clip_high": high}
    plain = [surrogate_by_cases(*row, low, high) for row in rows]
    bounded = [min(one, dual * -a) if a < 0 else one for one, a in zip(plain, advantages, strict=True)]
    found = losses.policy_loss(*given, **bounds, dual_clip=dual)
    np.testing.assert_allclose(found.numpy(), bounded, rtol=1e-12, atol=1e-12)
    weight = np.minimum(np.maximum(np.exp(new - old), 1 - low), 1 + high)
    np.testing.assert_allclose(
        losses.cispo_loss(*given, **bounds).numpy(), -(weight * advantages * new), rtol=1e-12, atol=1e-12
    )
    mean = float((new - old).mean())
    of_sequence = [surrogate_by_cases(mean, 0.0, float(a), low, high) for a in advantages]
    found = losses.gspo_loss(given[0], torch.full_like(given[0], mean), given[2], **bounds)
    np.testing.assert_allclose(found.numpy(), of_sequence, rtol=1e-12, atol=1e-12)


def test_every_loss_has_the_gradient_that_its_differences_say() -> None:
    # Values away from the kinks; what is a constant inside (the weight of cispo, the scale of gspo) is given as one.
    new = tensor(-1.0, -2.1, -0.7, -1.4).requires_grad_()
    old, advantages = tensor(-1.1, -1.2, -0.2, -2.9), tensor(0.7, -1.3, 0.4, -0.8)
    bounds = {"clip_low": 0.2, "clip_high": 0.28}
    assert gradcheck(lambda x: losses.policy_loss(x, old, advantages, **bounds), (new,))
    assert gradcheck(lambda x: losses.policy_loss(x, old, advantages, **bounds, dual_clip=2.0), (new,))
    assert gradcheck(lambda x: losses.reinforce_loss(x, advantages), (new,))
    assert gradcheck(losses.sft_loss, (new,))
    assert gradcheck(lambda x: losses.dpo_loss(x[:2], x[2:], old[:2], old[2:], beta=0.3), (new,))
    assert gradcheck(lambda x: losses.value_loss(x, old, advantages, clip=0.3), (new,))


def test_the_gradient_of_cispo_is_that_of_its_weighted_log_likelihood() -> None:
    new = tensor(-1.0, -2.1, -0.7).requires_grad_()
    old, advantages = tensor(-1.1, -1.2, -0.2), tensor(0.7, -1.3, 0.4)
    losses.cispo_loss(new, old, advantages, clip_low=0.2, clip_high=0.28).sum().backward()
    weight = np.clip(np.exp([0.1, -0.9, -0.5]), 0.8, 1.28)
    assert new.grad is not None
    np.testing.assert_allclose(new.grad.numpy(), -weight * [0.7, -1.3, 0.4], rtol=1e-12)
