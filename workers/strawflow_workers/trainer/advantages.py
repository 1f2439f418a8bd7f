"""Advantages of the members of prompt groups, as pure functions on numpy arrays.

1. One reward for each rollout; excluded members count neither in the baseline nor in the deviation.
2. Where members of a group are compared, a group that gives no signal (all valid rewards equal, or fewer than two valid
   members) is flagged and gets advantage 0.
3. A reward that is not a number is refused; it never becomes an advantage.
4. Nothing here knows of batches or storage; `gae`, `distilled` and `penalised` take the tokens of a packed micro-batch.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from strawflow.errors import InvalidInputError

DEVIATION_FLOOR = 1e-4
VARIANCE_FLOOR = 1e-8

Rewards = npt.NDArray[np.floating]
Advantages = tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]
"""float32 [G, n], and for each group whether it was filtered (no signal), bool [G]."""


def grpo_advantages(
    rewards: Rewards, valid: npt.NDArray[np.bool_], *, scale_by_deviation: bool = True
) -> Advantages:
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
    _check(rewards, valid)
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


def _check(rewards: Rewards, valid: npt.NDArray[np.bool_]) -> None:
    if rewards.ndim != 2 or rewards.shape != valid.shape:
        raise InvalidInputError(
            f"rewards: shape {rewards.shape} and valid: shape {valid.shape} must both be [groups, members]"
        )
    if not np.isfinite(rewards[valid]).all():
        raise InvalidInputError(
            "rewards: a valid member has a reward that is not finite; exclude it as failed instead"
        )


def rloo_advantages(rewards: Rewards, valid: npt.NDArray[np.bool_]) -> Advantages:
    """Compare each rollout with the mean of the others of its group.

    With m valid members whose rewards sum to S:

        advantage = reward - (S - reward) / (m - 1)

    Source: Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE-Style Optimization" (RLOO); Kool et al.
    2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free".

    Arguments, result and errors as of `grpo_advantages`.
    """
    _check(rewards, valid)
    known = np.where(valid, rewards, 0.0).astype(np.float64)
    count = valid.sum(axis=1, keepdims=True)
    others = (known.sum(axis=1, keepdims=True) - known) / np.maximum(count - 1, 1)
    filtered = _without_signal(rewards, valid)
    found = np.where(valid, known - others, 0.0)
    found[filtered] = 0.0
    return found.astype(np.float32), filtered


def reinforce_pp_advantages(
    rewards: Rewards,
    valid: npt.NDArray[np.bool_],
    num_tokens: npt.NDArray[np.integer],
    *,
    subtract_group_mean: bool = False,
) -> Advantages:
    """Normalise rewards over all trained tokens of the batch.

    Every token of a rollout has its reward, less the mean of its group with `subtract_group_mean` (the baseline variant). With
    mean and standard deviation over the trained tokens of all valid rollouts:

        advantage = (value - mean) / sqrt(deviation^2 + 1e-8)

    Without the group mean, groups of equal rewards differ from others and are not filtered, unless all rewards of the batch are
    equal. With it they are filtered, and do not count in the batch's mean and deviation.

    Source: Hu et al. 2025, "REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models".

    Args:
        rewards: [G, n].
        valid: [G, n].
        num_tokens: [G, n], trained tokens of each rollout.
        subtract_group_mean: True gives REINFORCE++-baseline.

    Returns, raises as `grpo_advantages`.
    """
    _check(rewards, valid)
    known = np.where(valid, rewards, 0.0).astype(np.float64)
    if subtract_group_mean:
        count = np.maximum(valid.sum(axis=1, keepdims=True), 1)
        known = known - known.sum(axis=1, keepdims=True) / count
        filtered = _without_signal(rewards, valid)
    else:
        filtered = np.full(
            len(rewards), bool(_without_signal(rewards.reshape(1, -1), valid.reshape(1, -1))[0])
        )
    weights = np.where(valid & ~filtered[:, None], num_tokens, 0).astype(np.float64)
    total = weights.sum()
    if total == 0:
        return np.zeros(rewards.shape, np.float32), filtered
    mean = (weights * known).sum() / total
    variance = (weights * (known - mean) ** 2).sum() / total
    found = (known - mean) / np.sqrt(variance + VARIANCE_FLOOR)
    return np.where(weights > 0, found, 0.0).astype(np.float32), filtered


def overlong_penalties(
    lengths: npt.NDArray[np.integer],
    *,
    longest: npt.NDArray[np.integer] | int,
    buffer: int,
    penalty: float = 1.0,
) -> npt.NDArray[np.float64]:
    """Return what the rewards of long responses change by, from 0 to -penalty: DAPO's soft overlong punishment.

    With L the response's length, M the longest allowed and C the buffer:

        0                              L <= M - C
        penalty * ((M - C) - L) / C    M - C < L <= M
        -penalty                       M < L

    Source: Yu et al. 2025, "DAPO", equation 13, where the penalty is 1.
    """
    if buffer == 0:
        return np.zeros(np.shape(lengths), np.float64)
    over = (np.asarray(lengths, np.float64) - (np.asarray(longest) - buffer)) / buffer
    result: npt.NDArray[np.float64] = -penalty * np.clip(over, 0.0, 1.0)
    return np.where(result == 0, 0.0, result)


def gae(
    rewards: npt.NDArray[np.floating],
    values: npt.NDArray[np.floating],
    *,
    discount: float,
    trace: float,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return generalised advantage estimates and returns (the critic's targets) of one episode, float32 [T] each.

    With V_T = 0 after the last token:

        delta_t = r_t + discount * V_{t+1} - V_t
        A_t     = delta_t + discount * trace * A_{t+1}
        R_t     = A_t + V_t

    Source: Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
    equation 16.

    Args:
        rewards: [T], those of the tokens; the reward of the rollout stands at its last.
        values: [T], of the state before each token.
        discount: gamma.
        trace: lambda.

    Raises:
        InvalidInputError: the shapes differ.
    """
    if rewards.ndim != 1 or rewards.shape != values.shape:
        raise InvalidInputError(
            f"rewards: shape {rewards.shape} and values: shape {values.shape} must both be [tokens]"
        )
    found = np.zeros(len(rewards), np.float64)
    following_value = following = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        delta = float(rewards[t]) + discount * following_value - float(values[t])
        following = delta + discount * trace * following
        following_value = float(values[t])
        found[t] = following
    return found.astype(np.float32), (found + values).astype(np.float32)


def distilled(
    advantages: npt.NDArray[np.floating],
    rollout_logprobs: npt.NDArray[np.floating],
    teacher_logprobs: npt.NDArray[np.floating],
    *,
    coefficient: float,
) -> npt.NDArray[np.float32]:
    """Return advantages plus on-policy distillation's: each token gains coefficient * (teacher - rollout log-probability).

    That is minus the one-sample estimate of KL(rollout policy || teacher) at the token, without the tokens after it (a
    discount of 0). Sources: Agarwal et al. 2024, "On-Policy Distillation of Language Models" (GKD); Lu et al. 2025,
    "On-Policy Distillation" (Thinking Machines), which takes it as advantage.

    All arrays are [T].
    """
    gain = teacher_logprobs.astype(np.float64) - rollout_logprobs
    return (advantages + coefficient * gain).astype(np.float32)


def penalised(
    advantages: npt.NDArray[np.floating],
    divergences: npt.NDArray[np.floating],
    trained: npt.NDArray[np.bool_],
    boundaries: npt.NDArray[np.integer],
    *,
    coefficient: float,
) -> npt.NDArray[np.float32]:
    """Return advantages with KL in the reward: each token loses coefficient * the sum of what it and the trained tokens after it
    in its sequence diverge from the reference by.

    It is the return of token rewards -coefficient * divergence, undiscounted. The baseline stays that of the task's rewards, and
    normalisation is not repeated. Source: Ouyang et al. 2022, "Training language models to follow instructions with human
    feedback", equation 2; per token as in Hu et al. 2025, "REINFORCE++".

    Args:
        advantages: [T].
        divergences: [T], ignored where not trained.
        trained: [T].
        boundaries: [S + 1], as in a packed micro-batch.
        coefficient: beta.
    """
    counted = np.where(trained, divergences, 0.0).astype(np.float64)
    # Sequence by sequence: a running sum over the pack would round by what else lies in it.
    from_here = np.concatenate(
        [counted[start:end][::-1].cumsum()[::-1] for start, end in itertools.pairwise(boundaries)]
    )
    return np.where(trained, advantages - coefficient * from_here, advantages).astype(np.float32)
