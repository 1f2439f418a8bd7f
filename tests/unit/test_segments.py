"""Quantities of whole sequences, and the correction for an engine that is not the trainer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strawflow_workers.trainer import segments


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


LENGTHS = torch.tensor([2, 0, 3])


def test_means_of_sequences_stand_at_each_of_their_tokens_and_one_without_tokens_has_none() -> None:
    found = segments.sequence_means(tensor(1.0, 3.0, 3.0, 6.0, 9.0), LENGTHS)
    assert found.tolist() == [2.0, 2.0, 6.0, 6.0, 6.0]


def test_a_sequence_split_over_ranks_has_one_mean_once_their_tables_are_added() -> None:
    values = tensor(1.0, 3.0, 3.0, 6.0, 9.0)
    parts = [
        (values[[0, 2]], torch.tensor([1, 0, 1])),
        (values[[1, 3, 4]], torch.tensor([1, 0, 2])),
    ]
    whole = sum(segments.sequence_sums(*part) for part in parts)
    found = [segments.sequence_means(*part, lambda _: whole).tolist() for part in parts]
    assert found == [[2.0, 6.0], [2.0, 6.0, 6.0]]


def test_the_mismatch_is_a_ratio_of_the_token_of_the_sequence_or_of_its_geometric_mean() -> None:
    # ratios 2, 0.5 | 4, 1, 2: products 1 and 8, geometric means 1 and 2
    old = torch.log(tensor(0.4, 0.2, 0.8, 0.5, 0.6))
    rollout = torch.log(tensor(0.2, 0.4, 0.2, 0.5, 0.3))

    def ratios(level: str) -> list[float]:
        return segments.mismatch_ratios(old, rollout, LENGTHS, level=level).tolist()

    assert ratios("token") == pytest.approx([2, 0.5, 4, 1, 2])
    assert ratios("sequence") == pytest.approx([1, 1, 8, 8, 8])
    assert ratios("geometric") == pytest.approx([1, 1, 2, 2, 2])
    with pytest.raises(ValueError, match="token, sequence or geometric"):
        ratios("word")


def test_truncation_bounds_the_ratio_from_above_and_the_mask_from_both_sides() -> None:
    ratios = tensor(0.1, 0.5, 1.0, 2.0, 2.1)

    def weights(mode: str) -> list[float]:
        return segments.mismatch_weights(ratios, mode=mode, low=0.5, high=2.0).tolist()

    assert weights("truncate") == [0.1, 0.5, 1.0, 2.0, 2.0]
    assert weights("mask") == [0.0, 1.0, 1.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="truncate or mask"):
        weights("clip")


def test_they_agree_with_an_independent_version_and_have_no_gradient() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 9, 20)
    old, rollout = rng.normal(size=(2, int(lengths.sum())))
    ends = np.cumsum(lengths)
    expected = np.concatenate(
        [np.full(n, (old - rollout)[end - n : end].mean()) for n, end in zip(lengths, ends, strict=True) if n]
    )
    given = torch.from_numpy(old).requires_grad_()
    found = segments.sequence_means(given - torch.from_numpy(rollout), torch.from_numpy(lengths))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    geometric = segments.mismatch_ratios(
        given, torch.from_numpy(rollout), torch.from_numpy(lengths), level="geometric"
    )
    np.testing.assert_allclose(geometric.numpy(), np.exp(expected), rtol=1e-12)
    assert not found.requires_grad
    assert not geometric.requires_grad
