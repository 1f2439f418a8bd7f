"""Scoring: from the rewards of a step's groups to the advantage of each member, by the configured estimator.

1. Estimators that compare the members of a group work group by group; the others see all groups of the step at once.
2. A group without signal is dropped with the reason `zero_deviation`; what a hook said of advantages replaces ours.
3. Stored rewards stay as they are: a punishment for length changes what advantages are made of, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from strawflow.config import RunConfig
from strawflow.config_algorithm import COMPARING
from strawflow_workers.assemble.groups import Group
from strawflow_workers.rollout.hooks.load_algorithm import CheckedAdvantage
from strawflow_workers.trainer import advantages as estimators

ZERO_DEVIATION = "zero_deviation"
CONVERSION = "conversion"
"""Why a group is dropped."""

CountTrained = Callable[[Mapping[str, Any]], int]


def score(
    groups: Sequence[Group],
    objective: str,
    config: RunConfig,
    *,
    num_trained: CountTrained,
    custom: CheckedAdvantage | None = None,
) -> dict[int, str]:
    """Set each group's advantages; returns unit id to reason for groups that are dropped.

    `num_trained` counts the trained tokens of a row, `custom` is the hook that algorithm.advantage names.
    """
    if objective == "sft":
        for group in groups:
            group.advantages = np.ones(len(group.members), np.float32)
        return {}
    filtered = _estimate(groups, config, num_trained, custom)
    dropped: dict[int, str] = {}
    for group, without_signal in zip(groups, filtered, strict=True):
        shaped = group.shaped
        if shaped is not None and shaped.member_advantages is not None:
            given = shaped.member_advantages
            group.advantages = np.array(
                [given.get(first["member"], 0.0) for first, *_ in group.members], np.float32
            )
        elif without_signal and not (shaped is not None and shaped.row_advantages):
            dropped[group.unit.unit_id] = ZERO_DEVIATION
        trained = {(r["member"], r["segment"]) for r in group.rows if r["status"] != "failed"}
        if trained <= group.left_out:
            dropped[group.unit.unit_id] = CONVERSION
    return dropped


def _estimate(
    groups: Sequence[Group], config: RunConfig, num_trained: CountTrained, custom: CheckedAdvantage | None
) -> list[bool]:
    """Set advantages by the configured estimator; returns for each group whether it has no signal."""
    name = config.algorithm.advantage
    if custom is not None:
        for group, found in zip(groups, custom([(g.unit.unit_id, g.rows) for g in groups]), strict=True):
            group.advantages = found
        return [False] * len(groups)
    rewards = [_rewards(group, config) for group in groups]
    if name in COMPARING and name != "reinforce_pp_baseline":
        filtered = []
        for group, of_group in zip(groups, rewards, strict=True):
            found, without_signal = _compare(name, of_group[None, :], group.valid[None, :])
            group.advantages = found[0]
            filtered.append(bool(without_signal[0]))
        return filtered
    if name in ("reward", "none"):
        for group, of_group in zip(groups, rewards, strict=True):
            kept = of_group if name == "reward" else np.zeros_like(of_group)
            group.advantages = np.where(group.valid, kept, 0.0).astype(np.float32)
        return [False] * len(groups)
    counts = [_num_tokens(group, num_trained) for group in groups]
    found, without_signal = estimators.reinforce_pp_advantages(
        _padded(rewards),
        _padded([group.valid for group in groups]).astype(np.bool_),
        _padded(counts).astype(np.int64),
        subtract_group_mean=name == "reinforce_pp_baseline",
    )
    for group, of_group in zip(groups, found, strict=True):
        group.advantages = of_group[: len(group.members)]
    return [bool(one) for one in without_signal]


def _compare(
    name: str, rewards: npt.NDArray[np.float64], valid: npt.NDArray[np.bool_]
) -> estimators.Advantages:
    if name == "rloo":
        return estimators.rloo_advantages(rewards, valid)
    return estimators.grpo_advantages(rewards, valid, scale_by_deviation=name == "grpo")


def _rewards(group: Group, config: RunConfig) -> npt.NDArray[np.float64]:
    """Return what the members' advantages are made of: rewards, less what long responses lose."""
    rewards = np.array(
        [0.0 if first["reward"] is None else first["reward"] for first, *_ in group.members], np.float64
    )
    algorithm = config.algorithm
    if not algorithm.overlong_buffer:
        return rewards
    lengths = np.array([sum(len(row["response_tokens"]) for row in rows) for rows in group.members])
    return rewards + estimators.overlong_penalties(
        lengths,
        longest=config.rollout.max_response_tokens,
        buffer=algorithm.overlong_buffer,
        penalty=algorithm.overlong_penalty,
    )


def _num_tokens(group: Group, num_trained: CountTrained) -> npt.NDArray[np.int64]:
    """Return the trained tokens of each member; segments that a hook left out are not trained."""
    kept = [
        [row for row in rows if (row["member"], row["segment"]) not in group.left_out]
        for rows in group.members
    ]
    return np.array([sum(num_trained(row) for row in rows) for rows in kept], np.int64)


def _padded(rows: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
    """Return rows of different lengths as one array, filled up with 0."""
    found = np.zeros((len(rows), max(map(len, rows), default=0)), np.float64)
    for at, row in enumerate(rows):
        found[at, : len(row)] = row
    return found
