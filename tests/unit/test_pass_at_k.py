"""pass@k against hand-worked numbers, and against every way of drawing k of n answers."""

from __future__ import annotations

from itertools import combinations

import pytest

from strawflow.pass_at_k import ks_of, mean_pass_at_k, pass_at_k


@pytest.mark.parametrize(
    ("n", "c", "k", "by_hand"),
    [
        (4, 0, 1, 0.0),
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (4, 2, 2, 5 / 6),  # 1 - C(2,2)/C(4,2) = 1 - 1/6
        (4, 3, 2, 1.0),  # no two of them both fail
        (5, 2, 3, 9 / 10),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (4, 4, 4, 1.0),
        (1, 1, 1, 1.0),
        (1, 0, 1, 0.0),
    ],
)
def test_hand_worked_numbers(n: int, c: int, k: int, by_hand: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(by_hand, abs=1e-15)


def test_it_is_the_share_of_all_draws_that_hold_a_passing_answer() -> None:
    for n in range(1, 10):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = [any(answer < c for answer in drawn) for drawn in combinations(range(n), k)]
                assert pass_at_k(n, c, k) == pytest.approx(sum(draws) / len(draws), abs=1e-15)


def test_large_numbers_neither_overflow_nor_lose_digits() -> None:
    n = 100_000
    assert pass_at_k(n, 1, 1) == 1 / n
    assert pass_at_k(n, 1, 1000) == 1000 / n  # one passing answer is among k of n with chance k/n
    assert 0 < 1 - pass_at_k(n, 3, n // 2) < 1 / 8 + 1e-4


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)])
def test_what_cannot_be_drawn_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="must hold"):
        pass_at_k(n, c, k)


def test_the_mean_is_over_prompts() -> None:
    assert ks_of(1) == [1]
    assert ks_of(4) == [1, 2, 4]
    assert ks_of(6) == [1, 2, 4, 6]
    found = mean_pass_at_k({0: 1, 2: 1, 4: 2}, n=4)
    assert found == pytest.approx({1: (0 + 0.5 + 2) / 4, 2: (0 + 5 / 6 + 2) / 4, 4: 3 / 4})
    assert mean_pass_at_k({}, n=4) == {}
