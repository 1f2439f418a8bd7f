"""Which prompt set the next group is drawn from: by weight, without chance, and never a whole group off.

1. A set's lag is what its weight owed it so far minus what was drawn from it. While the weights stay as they are, every lag
   lies between -1 and 1: after N draws each set has its share of N, at most one group more or less.
2. Lags are whole numbers of 2^-40 of a group and sum to 0: nothing drifts, and what is drawn follows from them alone.
3. New weights count from where they came in: lags stay what they were, so no set catches up on a time when it had less.
4. A set that has nothing when it is drawn loses that turn (flow.mixture): the others share what is left by their weights.

Each draw has a window: a set may be drawn from once it is owed some of a group, and must be before it is owed a whole one more.
Of those that may, the one that must be drawn from first is (earliest deadline first, which meets all deadlines wherever that is
possible; here it is, since the weights sum to one draw a time: Tijdeman, "The chairman assignment problem", 1980).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

WHOLE = 1 << 40
"""One group, in the unit of lags."""


@dataclass(frozen=True)
class Mixture:
    """What the draws of a branch go on from."""

    version: int = 0
    """Counts the admissions drawn by weight."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """By which the last were drawn."""
    lags: Mapping[str, int] = field(default_factory=dict)
    curriculum: Any = None
    """What the curriculum goes on from, as JSON gives it."""

    def to_text(self) -> str:
        return json.dumps(
            [self.version, dict(self.weights), dict(self.lags), self.curriculum], separators=(",", ":")
        )

    @classmethod
    def from_text(cls, text: str | None) -> Mixture:
        return cls() if text is None else cls(*json.loads(text))


def parts_of(weights: Mapping[str, float]) -> dict[str, int]:
    """Return the share of each set of weight above 0, in parts of WHOLE; they sum to it."""
    exact = {name: Fraction(weight) for name, weight in weights.items() if weight > 0}
    total = sum(exact.values())
    parts = {name: int(weight * WHOLE / total) for name, weight in exact.items()}
    # What rounding down left over is less than one part for each set.
    by_loss = sorted(parts, key=lambda name: parts[name] - exact[name] * WHOLE / total)
    for name in by_loss[: WHOLE - sum(parts.values())]:
        parts[name] += 1
    return parts


def draw(
    weights: Mapping[str, float], lags: Mapping[str, int], count: int
) -> tuple[list[str], dict[str, int]]:
    """Return the set of each of the next `count` groups, and the lags after them; none where no weight is above 0."""
    after = dict(lags)
    if not any(weight > 0 for weight in weights.values()):
        return [], after
    parts = parts_of(weights)
    return [_next(parts, after) for _ in range(count)], after


def _next(parts: Mapping[str, int], lags: dict[str, int]) -> str:
    """Draw once; `lags` are moved on."""
    for name, part in parts.items():
        lags[name] = lags.get(name, 0) + part
    # After a change of weights it may be that nothing is owed to any that still has some: then all of them may.
    owed: Sequence[str] = [name for name in parts if lags[name] > 0] or list(parts)
    # How many draws from now it is owed a whole group more; a set of tiny weight may have no part at all.
    first = min(owed, key=lambda name: (-((lags[name] - WHOLE) // max(parts[name], 1)), -lags[name]))
    lags[first] -= WHOLE
    return first
