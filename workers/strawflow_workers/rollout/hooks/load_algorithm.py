"""The hooks of the section `algorithm`, loaded and wrapped so that what they return is checked before anything rests on it.

What is wrong, or raised, is a ConfigError with the setting's name: the assembler (or trainer) stops, it is mended, the run resumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from strawflow.config import RunConfig
from strawflow.errors import ConfigError
from strawflow_workers.rollout.hooks import load
from strawflow_workers.rollout.hooks.filtered import completed_group
from strawflow_workers.rollout.hooks.interfaces import CompletedGroup
from strawflow_workers.rollout.hooks.interfaces_algorithm import (
    Advantage,
    Loss,
    LossTokens,
    Reducer,
    Reduction,
    RolloutSize,
)

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
StoredGroup = tuple[int, Sequence[Mapping[str, Any]]]
"""A unit's id and its rows."""
CheckedAdvantage = Callable[[Sequence[StoredGroup]], list[npt.NDArray[np.float32]]]
"""Returns for each group the advantage of each member, 0 where it failed."""


@dataclass(frozen=True)
class AlgorithmHooks:
    """What the assembler asks; None: names of ours."""

    advantage: CheckedAdvantage | None = None
    reducer: Reducer | None = None


def load_algorithm_hooks(config: RunConfig) -> AlgorithmHooks:
    """Return the assembler's hooks of a configuration; raises ConfigError as `load.load`."""
    advantage = cast(Advantage | None, load.configured("advantage", config))
    reducer = cast(Reducer | None, load.configured("reducer", config))
    return AlgorithmHooks(
        None if advantage is None else checked_advantage(advantage),
        None if reducer is None else checked_reducer(reducer),
    )


def load_loss(name: str) -> Loss:
    """Return the loss hook of a dotted path, its answers checked; raises ConfigError as `load.load`."""
    return checked_loss(cast(Loss, load.load_own("loss", name)))


def checked_advantage(hook: Advantage) -> CheckedAdvantage:
    """Return the hook as scoring asks it.

    Raises (when called):
        ConfigError: it raised, or returned other than one finite number for each member that did not fail.
    """

    def ask(stored: Sequence[StoredGroup]) -> list[npt.NDArray[np.float32]]:
        groups = [completed_group(unit_id, [dict(row) for row in rows]) for unit_id, rows in stored]
        return _told("advantage", lambda: [*map(_of_members, groups, _exactly(hook(groups), groups))])

    return ask


def _exactly(found: Any, groups: Sequence[CompletedGroup]) -> Sequence[Sequence[float]]:
    if not isinstance(found, Sequence | np.ndarray) or len(found) != len(groups):
        raise TypeError(f"it must return one list of advantages for each of {len(groups)} groups")
    return cast(Sequence[Sequence[float]], found)


def _of_members(group: CompletedGroup, given: Sequence[float]) -> npt.NDArray[np.float32]:
    is_sound = np.array([m.status != "failed" for m in group.members])
    values = np.asarray(given, np.float32)
    if values.shape != (int(is_sound.sum()),):
        raise ValueError(
            f"unit {group.unit_id}: advantages of shape {values.shape} for {int(is_sound.sum())} members that did not fail"
        )
    if not np.isfinite(values).all():
        raise ValueError(f"unit {group.unit_id}: advantages {list(given)} are not all finite")
    found = np.zeros(len(is_sound), np.float32)
    found[is_sound] = values
    return found


def checked_reducer(hook: Reducer) -> Reducer:
    """Return the hook as weighing asks it.

    Raises (when called):
        ConfigError: it raised, or returned other than finite numbers above 0 for each rollout and mini-batch.
    """

    def ask(mini_batches: Sequence[Sequence[RolloutSize]]) -> Sequence[Reduction]:
        return _told("aggregation", lambda: _sound_reductions(hook(mini_batches), mini_batches))

    return ask


def _sound_reductions(found: Any, mini_batches: Sequence[Sequence[RolloutSize]]) -> list[Reduction]:
    found = list(found)
    if len(found) != len(mini_batches) or not all(isinstance(one, Reduction) for one in found):
        raise TypeError(f"it must return a Reduction for each of {len(mini_batches)} mini-batches")
    for reduction, rollouts in zip(found, mini_batches, strict=True):
        if len(reduction.weights) != len(rollouts):
            raise ValueError(f"{len(reduction.weights)} weights for {len(rollouts)} rollouts")
        numbers = [*reduction.weights, reduction.denominator]
        if not all(math.isfinite(n) and n > 0 for n in numbers):
            raise ValueError("weights and denominator must be finite and above 0")
    return [Reduction([float(w) for w in r.weights], float(r.denominator)) for r in found]


def checked_loss(hook: Loss) -> Loss:
    """Return the hook as the objective asks it.

    Raises (when called):
        ConfigError: it raised, or returned other than one loss a token with a gradient.
    """

    def ask(tokens: LossTokens) -> Tensor:
        return _told("loss", lambda: _sound_loss(hook(tokens), tokens))

    return ask


def _sound_loss(found: Any, tokens: LossTokens) -> Tensor:
    shape = tuple(getattr(found, "shape", ()))
    if shape != tuple(tokens.logprobs.shape):
        raise TypeError(f"it must return the loss of each token, {tuple(tokens.logprobs.shape)}, not {shape}")
    if tokens.logprobs.requires_grad and not found.requires_grad:
        raise ValueError("the loss has no gradient: it must come from tokens.logprobs, not detached")
    return cast("Tensor", found)


def _told(setting: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except Exception as error:  # user code; it is mended, and the run resumed
        raise ConfigError(f"algorithm.{setting}: {type(error).__name__}: {error}") from error
