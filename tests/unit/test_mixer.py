"""Draws by weight: every set has its share at every moment, whatever the weights and however the draws are cut up."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from hypothesis import example, given, settings
from hypothesis import strategies as st

from strawflow.flow.mixer import WHOLE, Mixture, draw

WEIGHTS = st.dictionaries(
    st.sampled_from("abcdefg"),
    st.one_of(st.integers(0, 9).map(float), st.floats(0.001, 1.0)),
    min_size=1,
).filter(lambda weights: sum(weights.values()) > 0)


@settings(deadline=None)
@given(weights=WEIGHTS, count=st.integers(1, 200))
@example(weights={"a": 0.9, **dict.fromkeys("bcdef", 0.02)}, count=200)
def test_after_any_number_of_draws_each_share_is_within_one_of_its_weight(
    weights: dict[str, float], count: int
) -> None:
    drawn, _ = draw(weights, {}, count)
    total = sum(Fraction(weight) for weight in weights.values())
    so_far: Counter[str] = Counter()
    for number, name in enumerate(drawn, start=1):
        so_far[name] += 1
        for one, weight in weights.items():
            # Shares are kept in parts of 2^-40.
            assert abs(so_far[one] - number * Fraction(weight) / total) <= 1 + Fraction(number, WHOLE)


@settings(deadline=None)
@given(weights=WEIGHTS, cuts=st.lists(st.integers(1, 20), min_size=1, max_size=12))
def test_draws_cut_up_are_the_draws_at_once(weights: dict[str, float], cuts: list[int]) -> None:
    whole, lags_of_whole = draw(weights, {}, sum(cuts))
    pieces: list[str] = []
    lags: dict[str, int] = {}
    for count in cuts:
        drawn, lags = draw(weights, lags, count)
        pieces += drawn
        assert sum(lags.values()) == 0
    assert (pieces, lags) == (whole, lags_of_whole)


@settings(deadline=None)
@given(changes=st.lists(st.tuples(WEIGHTS, st.integers(1, 40)), min_size=2, max_size=8))
def test_whatever_the_weights_change_to_every_draw_finds_a_set_that_has_some(
    changes: list[tuple[dict[str, float], int]],
) -> None:
    lags: dict[str, int] = {}
    for weights, count in changes:
        drawn, lags = draw(weights, lags, count)
        assert all(weights[name] > 0 for name in drawn)
        assert len(drawn) == count
        assert sum(lags.values()) == 0


def test_new_weights_count_from_where_they_came_in() -> None:
    _, lags = draw({"a": 1.0, "b": 0.0}, {}, 1000)
    drawn, _ = draw({"a": 0.5, "b": 0.5}, lags, 10)
    assert Counter(drawn) == {"a": 5, "b": 5}, "b does not catch up on the time when it had no weight"


def test_without_any_weight_nothing_is_drawn() -> None:
    assert draw({"a": 0.0}, {}, 3) == ([], {})


def test_what_draws_go_on_from_survives_being_stored() -> None:
    mixture = Mixture(7, {"a": 0.25}, {"a": -WHOLE // 3}, {"phase": [1]})
    assert Mixture.from_text(mixture.to_text()) == mixture
    assert Mixture.from_text(None).version == 0
