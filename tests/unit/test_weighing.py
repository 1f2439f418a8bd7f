"""What a trained token weighs: by token, rollout, prompt or constant, or as a hook says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from strawflow.errors import ConfigError
from strawflow_workers.assemble.weighing import Reduction, RolloutSize, weigh
from strawflow_workers.rollout.hooks.load_algorithm import checked_reducer

# Prompt 1 has rollouts of 2 and 6 tokens in the first update and one of 2 in the second; prompt 2 one of 4 there.
STEP = [[RolloutSize(1, 0, 2), RolloutSize(1, 1, 6)], [RolloutSize(2, 0, 4), RolloutSize(1, 2, 2)]]


def weighed(aggregation: str) -> list[tuple[list[float], float]]:
    found = weigh(STEP, aggregation, max_response_tokens=8)
    return [(list(r.weights), r.denominator) for r in found]


def test_each_token_each_rollout_each_prompt_or_each_constant_length_counts_the_same() -> None:
    assert weighed("token") == [([1, 1], 8), ([1, 1], 6)]
    assert weighed("rollout") == [([1 / 2, 1 / 6], 2), ([1 / 4, 1 / 2], 2)]
    assert weighed("prompt") == [
        ([1 / 10, 1 / 10], pytest.approx(0.8)),
        ([1 / 4, 1 / 10], pytest.approx(1.2)),
    ]
    assert weighed("constant") == [([1 / 8, 1 / 8], 2), ([1 / 8, 1 / 8], 2)]


@pytest.mark.parametrize("aggregation", ["token", "rollout", "prompt"])
def test_the_weights_of_an_update_sum_to_its_denominator(aggregation: str) -> None:
    rng = np.random.default_rng(0)
    step = [
        [RolloutSize(int(rng.integers(4)), at, int(rng.integers(1, 50))) for at in range(7)] for _ in range(3)
    ]
    for rollouts, reduction in zip(step, weigh(step, aggregation, max_response_tokens=64), strict=True):
        total = sum(w * r.num_tokens for w, r in zip(reduction.weights, rollouts, strict=True))
        assert total == pytest.approx(reduction.denominator, rel=1e-12)


def by_square_root(mini_batches: Sequence[Sequence[RolloutSize]]) -> list[Reduction]:
    return [Reduction([r.num_tokens**-0.5 for r in rollouts], len(rollouts)) for rollouts in mini_batches]


def test_a_hook_says_what_counts() -> None:
    found = weigh(STEP, "mine:f", max_response_tokens=8, custom=checked_reducer(by_square_root))
    assert [list(r.weights) for r in found] == [[2**-0.5, 6**-0.5], [0.5, 2**-0.5]]
    assert [r.denominator for r in found] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([Reduction([1.0, 1.0], 8.0)], "a Reduction for each of 2 mini-batches"),
        ([Reduction([1.0, 1.0], 8.0), Reduction([1.0], 6.0)], "1 weights for 2 rollouts"),
        ([Reduction([1.0, 1.0], 8.0), Reduction([1.0, 0.0], 6.0)], "finite and above 0"),
        ([Reduction([1.0, 1.0], float("nan")), Reduction([1.0, 1.0], 6.0)], "finite and above 0"),
    ],
)
def test_a_hook_that_says_what_cannot_be_is_an_error_of_the_configuration(
    found: list[Reduction], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.aggregation: .*{message}"):
        checked_reducer(lambda _: found)(STEP)
