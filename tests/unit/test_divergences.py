"""Divergences and entropy of tokens: numbers worked by hand, enumerated expectations and independent numpy versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from strawflow_workers.trainer import divergences


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_kl_estimate_is_zero_for_equal_policies_and_known_for_a_gap() -> None:
    # d = ln 2: 2 - 1 - ln 2; d = -ln 2: 0.5 - 1 + ln 2
    found = divergences.kl_estimate(
        tensor(-1.0, -1.0, -1.0), tensor(-1.0, -1.0 - np.log(2), -1.0 + np.log(2))
    )
    assert found.tolist() == pytest.approx([0.0, 1 - np.log(2), np.log(2) - 0.5])


LN2 = float(np.log(2))


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0.0, -LN2, LN2]),
        ("k2", [0.0, LN2**2 / 2, LN2**2 / 2]),
        ("k3", [0.0, 1 - LN2, LN2 - 0.5]),
        ("unbiased", [0.0, 1.5 * (1 - LN2), 1.5 * (LN2 - 0.5)]),
    ],
)
def test_the_estimators_of_the_divergence_from_a_reference_are_known_for_a_gap(
    estimator: str, expected: list[float]
) -> None:
    # reference / policy = 1, 2, 1/2; policy / old = 1.5
    new = tensor(-1.0, -1.0, -1.0)
    found = divergences.reference_kl(new, tensor(-1.0, -1.0 + LN2, -1.0 - LN2), estimator, new - np.log(1.5))
    assert found.tolist() == pytest.approx(expected)


def all_tokens(seed: int) -> tuple[np.ndarray, ...]:
    """Logits of three policies over 6 tokens."""
    return tuple(np.random.default_rng(seed).normal(size=(3, 6)))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum())


def test_in_the_mean_over_all_tokens_the_values_are_the_divergence() -> None:
    new, old, reference = (log_softmax(z) for z in all_tokens(1))
    exact = float((np.exp(new) * (new - reference)).sum())
    given = [torch.from_numpy(values) for values in (new, reference)]
    for estimator in ("k1", "k3"):
        found = divergences.reference_kl(*given, estimator).numpy()
        assert float((np.exp(new) * found).sum()) == pytest.approx(exact, rel=1e-12)
    # Tokens of another policy, weighted by the ratio:
    found = divergences.reference_kl(*given, "unbiased", torch.from_numpy(old)).numpy()
    assert float((np.exp(old) * found).sum()) == pytest.approx(exact, rel=1e-12)


def mean_gradient(estimator: str, sampled_by: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradient, in the logits, of the estimator's mean over sampled tokens, and that of the exact divergence."""
    new_logits, old_logits, reference_logits = all_tokens(2)
    old, reference = (torch.from_numpy(log_softmax(z)) for z in (old_logits, reference_logits))
    found = []
    for exact in (False, True):
        logits = torch.from_numpy(new_logits.copy()).requires_grad_()
        new = logits.log_softmax(0)
        if exact:
            (new.exp() * (new - reference)).sum().backward()
        else:
            weights = (old if sampled_by == "old" else new.detach()).exp()
            reference_old = old if sampled_by == "old" else new.detach()
            (weights * divergences.reference_kl(new, reference, estimator, reference_old)).sum().backward()
        assert logits.grad is not None
        found.append(logits.grad.numpy())
    return found[0], found[1]


def test_as_a_loss_k2_and_the_unbiased_estimator_have_the_gradient_of_the_divergence() -> None:
    np.testing.assert_allclose(*mean_gradient("k2", "new"), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(*mean_gradient("unbiased", "new"), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(*mean_gradient("unbiased", "old"), rtol=1e-10, atol=1e-12)


def test_as_a_loss_k1_has_no_gradient_in_the_mean_and_k3_another_than_the_divergence() -> None:
    found, exact = mean_gradient("k1", "new")
    assert np.abs(found).max() < 1e-12 < 0.01 < np.abs(exact).max()
    found, exact = mean_gradient("k3", "new")
    assert np.abs(found - exact).max() > 0.01


def test_an_unknown_estimator_and_an_unbiased_one_without_old_log_probabilities_are_refused() -> None:
    for estimator in ("k4", "unbiased"):
        with pytest.raises(ValueError, match="k1, k2, k3, or unbiased with old"):
            divergences.reference_kl(tensor(-1.0), tensor(-1.0), estimator)


def test_the_entropy_of_a_uniform_row_is_the_logarithm_of_its_size_and_of_a_certain_one_zero() -> None:
    found = divergences.vocab_parallel_entropy(
        torch.tensor([[3.0] * 8, [100.0] + [0.0] * 7], dtype=torch.float64)
    )
    assert found.tolist() == pytest.approx([np.log(8), 0.0])


def test_the_entropy_agrees_with_an_independent_version_and_so_does_its_gradient() -> None:
    rows = np.random.default_rng(0).normal(size=(5, 7)) * 3
    p = np.exp(rows) / np.exp(rows).sum(-1, keepdims=True)
    logits = torch.from_numpy(rows).requires_grad_()
    found = divergences.vocab_parallel_entropy(logits)
    np.testing.assert_allclose(found.detach().numpy(), -(p * np.log(p)).sum(-1), rtol=1e-12)
    assert gradcheck(divergences.vocab_parallel_entropy, (logits,))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "unbiased"])
def test_every_estimator_has_the_gradient_that_its_differences_say(estimator: str) -> None:
    new = tensor(-1.0, -2.1, -0.7).requires_grad_()
    reference, old = tensor(-0.6, -2.4, -0.2), tensor(-1.2, -1.9, -0.7)
    assert gradcheck(lambda x: divergences.reference_kl(x, reference, estimator, old), (new,))


@pytest.mark.long
@pytest.mark.alone
def test_two_ranks_with_half_of_the_vocabulary_each_have_the_entropy_and_gradient_of_the_whole(
    tmp_path: Path,
) -> None:
    program = Path(__file__).parents[1] / "integration" / "entropy_ranks.py"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            env=environment,
        )
        for rank in range(2)
    ]
    told = [json.loads(rank.communicate(timeout=60)[0]) for rank in ranks]
    whole = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(7)) * 3
    whole.requires_grad_()
    logprobs = whole.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    (entropy * tensor(1.0, 2.0, -1.0)).sum().backward()
    assert whole.grad is not None
    for rank, found in enumerate(told):
        np.testing.assert_allclose(found["entropy"], entropy.detach().numpy(), rtol=1e-12)
        part = whole.grad[:, 4 * rank : 4 * rank + 4].numpy()
        np.testing.assert_allclose(found["gradient"], part, rtol=1e-10, atol=1e-14)
