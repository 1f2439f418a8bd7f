"""Advantages of the members of prompt groups, as pure functions on numpy arrays.

1. One reward for each rollout; excluded members count neither in the baseline nor in the deviation.
2. A group that gives no signal (all valid rewards equal, or fewer than two valid members) is flagged and gets
   advantage 0.
3. A reward that is not a number is refused; it never becomes an advantage.
4. Nothing here knows of tokens, batches or storage.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from strawflow.errors import InvalidInputError

DEVIATION_FLOOR = 1e-4


def grpo_advantages(
    rewards: npt.NDArray[np.floating], valid: npt.NDArray[np.bool_], *, scale_by_deviation: bool = True
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Compare each rollout with the others of its group.

    With mean and sample standard deviation (divisor n - 1) over the valid members of the group:

        advantage = (reward - mean) / (deviation + 1e-4)       or, without scale_by_deviation,  reward - mean

    Sources: Shao et al. 2024, "DeepSeekMath", section 4.1.2 (group-relative advantage); Liu et al. 2025,
    "Understanding R1-Zero-Like Training" (Dr. GRPO), which drops the division because it weighs questions by
    their spread.

    Args:
        rewards: [G, n].
        valid: [G, n], False for excluded members, whose reward is ignored and whose advantage is 0.
        scale_by_deviation: False gives Dr. GRPO.

    Returns:
        Advantages float32 [G, n] and, for each group, whether it was filtered (no signal), bool [G].

    Raises:
        InvalidInputError: shapes differ, or the reward of a valid member is not finite.
    """
    if rewards.ndim != 2 or rewards.shape != valid.shape:
        raise InvalidInputError(
            f"rewards: shape {rewards.shape} and valid: shape {valid.shape} must both be [groups, members]"
        )
    if not np.isfinite(rewards[valid]).all():
        raise InvalidInputError(
            "rewards: a valid member has a reward that is not finite; exclude it as failed instead"
        )
    known = np.where(valid, rewards, 0.0).astype(np.float64)
    count = valid.sum(axis=1, keepdims=True)
    mean = known.sum(axis=1, keepdims=True) / np.maximum(count, 1)
    centred = np.where(valid, known - mean, 0.0)
    filtered = _without_signal(rewards, valid)
    if scale_by_deviation:
        deviation = np.sqrt((centred**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1))
        centred = centred / (deviation + DEVIATION_FLOOR)
    centred[filtered] = 0.0
    return centred.astype(np.float32), filtered


def _without_signal(rewards: npt.NDArray[np.floating], valid: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Compare rewards themselves: the mean of equal numbers may differ from them by rounding."""
    highest = np.where(valid, rewards, -np.inf).max(axis=1, initial=-np.inf)
    lowest = np.where(valid, rewards, np.inf).min(axis=1, initial=np.inf)
    result: npt.NDArray[np.bool_] = highest <= lowest
    return result
