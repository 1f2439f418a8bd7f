"""Weighing: what a trained token counts in the loss of its update, and what the update's sum is divided by.

1. Both are decided here once, for the whole step, and stored with the batch: a loss is sum(weight * token loss) / denominator on
   any parallelism. The denominator is the sum of the weights, so that a loss is a weighted mean, but for `constant`.
2. All segments of a rollout have one weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from strawflow_workers.rollout.hooks.interfaces_algorithm import Reducer, Reduction, RolloutSize

__all__ = ["Reduction", "RolloutSize", "weigh"]


def weigh(
    mini_batches: Sequence[Sequence[RolloutSize]],
    aggregation: str,
    *,
    max_response_tokens: int,
    custom: Reducer | None = None,
) -> list[Reduction]:
    """Return weights and denominator of each mini-batch of a step.

        token      weight 1                                    every trained token of the update counts the same (DAPO)
        rollout    1 / trained tokens of the rollout           every rollout counts the same (GRPO as published)
        prompt     1 / trained tokens of the prompt's rollouts every prompt of the step counts the same
        constant   1 / max_response_tokens                     divided by the number of rollouts (Dr. GRPO)

    Sources: Yu et al. 2025, "DAPO", section 3.3 (token); Shao et al. 2024, "DeepSeekMath", equation 3 (rollout); Khatri et al.
    2025, "The Art of Scaling Reinforcement Learning Compute for LLMs" (prompt); Liu et al. 2025, "Understanding
    R1-Zero-Like Training" (constant).

    Args:
        mini_batches: the rollouts of each, none without a trained token.
        aggregation: one of the names above; not looked at with `custom`.
        max_response_tokens: of the run.
        custom: the hook that algorithm.aggregation names.
    """
    if custom is not None:
        return list(custom(mini_batches))
    of_prompt: Counter[int] = Counter()
    for rollouts in mini_batches:
        for rollout in rollouts:
            of_prompt[rollout.unit_id] += rollout.num_tokens
    return [_reduction(rollouts, aggregation, max_response_tokens, of_prompt) for rollouts in mini_batches]


def _reduction(
    rollouts: Sequence[RolloutSize], aggregation: str, max_response_tokens: int, of_prompt: Counter[int]
) -> Reduction:
    num_tokens = float(sum(r.num_tokens for r in rollouts))
    match aggregation:
        case "token":
            return Reduction([1.0] * len(rollouts), num_tokens)
        case "rollout":
            return Reduction([1.0 / r.num_tokens for r in rollouts], float(len(rollouts)))
        case "prompt":
            shares = [r.num_tokens / of_prompt[r.unit_id] for r in rollouts]
            return Reduction([1.0 / of_prompt[r.unit_id] for r in rollouts], sum(shares))
        case "constant":
            return Reduction([1.0 / max_response_tokens] * len(rollouts), float(len(rollouts)))
        case _:
            raise ValueError(f"aggregation {aggregation!r}")
