"""What is asked of a reward, and what comes back.

1. An outcome has either a score and a reward or a failure, never both and never neither: a failure is no zero.
2. `score` is the verifier's own number; `reward` is what training sees of it.
3. These are plain values: they know neither processes nor verifiers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from strawflow.errors import ConfigError

RewardShape = Literal["raw", "exact"]


@dataclass(frozen=True)
class RewardSpec:
    """Which rewards a run has, and how their scores become rewards."""

    name: str
    """The run's reward, as `strawflow.reward_names` has it."""
    shape: RewardShape = "raw"
    """`raw`: the score as it is. `exact`: 1 where the score is exactly 1, else 0 (partial credit counts nothing)."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of a reasoning-gym dataset, where its verifier needs one; JSON values."""
    row_rewards: tuple[str, ...] = ()
    """Functions and addresses that rows may name."""
    post_process: str = ""
    """`package.module:function` that turns the rewards of a group into others; empty: none."""

    def __post_init__(self) -> None:
        if self.shape not in ("raw", "exact"):
            raise ConfigError(f"reward shape is {self.shape!r}; it must be 'raw' or 'exact'")

    def reward_of(self, score: float) -> float:
        """Shape a score into the reward."""
        return score if self.shape == "raw" else float(score == 1.0)


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """A response to be scored, with what its prompt row holds."""

    response_text: str
    prompt: str
    label: str | None = None
    """As stored: text verbatim, or JSON text."""
    metadata: str | None = None
    """As stored: the JSON text of an object."""
    prompt_is_messages: bool = False
    """The prompt is the JSON text of chat messages."""
    prompt_tokens: Sequence[int] = ()
    response_tokens: Sequence[int] = ()
    """The very ids that were sampled, for a reward model of the same vocabulary."""


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """What a verifier made of a response."""

    score: float | None
    reward: float | None
    failure: str | None

    @classmethod
    def scored(cls, score: float, *, spec: RewardSpec) -> RewardOutcome:
        return cls(score=score, reward=spec.reward_of(score), failure=None)

    @classmethod
    def failed(cls, why: str) -> RewardOutcome:
        return cls(score=None, reward=None, failure=why)
