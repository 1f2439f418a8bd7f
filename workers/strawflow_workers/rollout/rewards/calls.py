"""One call of a verifier in a reward process, and its answer, as they cross the wire.

A call is answered by as many values as it has texts, each a finite number or what is wrong with this one, or by one failure for
all of them.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strawflow_workers.rollout.rewards.spec import RewardRequest

Value = float | str
"""A number, or the text of this member's failure."""


@dataclass(frozen=True, slots=True)
class Call:
    """Which function is called with what: one response, all of a group, or a group's rewards."""

    function: str
    texts: tuple[str, ...]
    prompt: str
    label: str | None
    metadata: str | None
    rewards: tuple[float, ...] | None = None
    """Of a group whose rewards are post-processed; None: the responses are to be scored."""

    @classmethod
    def of(
        cls, function: str, requests: Sequence[RewardRequest], *, rewards: Sequence[float] | None = None
    ) -> Call:
        """Return the call for the members of one group, whose prompt, label and metadata are the same."""
        first = requests[0]
        texts = tuple(request.response_text for request in requests)
        given = None if rewards is None else tuple(rewards)
        return cls(function, texts, first.prompt, first.label, first.metadata, given)

    def as_row(self) -> list[Any]:
        return [self.function, self.texts, self.prompt, self.label, self.metadata, self.rewards]


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a call."""

    values: tuple[Value, ...] | None
    failure: str | None = None

    def for_each(self, num_texts: int) -> list[Value]:
        """Return a number or a failure for each text."""
        if self.values is None:
            return [self.failure or "the reward gave no answer"] * num_texts
        return list(self.values)


def checked_values(found: Any, *, num_texts: int) -> list[Value]:
    """Return what a function of a group returned, each value a finite number or what is wrong with it.

    Raises:
        TypeError: it is no sequence.
        ValueError: it has another length than the group.
    """
    if isinstance(found, str | bytes) or not hasattr(found, "__len__") or not hasattr(found, "__iter__"):
        raise TypeError(f"a group's rewards must be a list of numbers, this is {type(found).__name__}")
    if len(found) != num_texts:
        raise ValueError(f"a group of {num_texts} needs as many rewards, these are {len(found)}")
    values: list[Value] = []
    for each in found:
        try:
            values.append(finite_number(each))
        except (TypeError, ValueError) as error:
            values.append(f"{type(error).__name__}: {error}")
    return values


def finite_number(value: Any) -> float:
    """Return a value as a float.

    Raises:
        TypeError: it is no number.
        ValueError: it is not finite.
    """
    if not isinstance(value, numbers.Real):
        raise TypeError(f"a reward must be a number, this one is {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a reward must be a finite number, this one is {number}")
    return number
