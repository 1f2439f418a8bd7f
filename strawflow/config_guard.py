"""The section `guard`: which updates are not applied, what happens then, and how far engine and trainer may differ."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strawflow.section import Section


class GuardSection(Section):
    max_grad_norm: float = Field(default=0.0, ge=0)
    """An update whose gradient norm, before clipping, is above this is not applied; 0: no bound. One that is not finite never is."""
    on_left_out: Literal["continue", "stop", "set_aside"] = "continue"
    """After an update that was not applied, told with its worst sequences: go on with the next one; stop the run, whose next start
    goes on without the update; or set the rest of the batch aside too."""
    agreement: Literal["off", "warn", "stop"] = "warn"
    """When the log-probabilities of engine and trainer differ by more than the two bounds below: nothing; an event and an alarm in
    `strawflow status`; or stop the run before the batch is trained (its first micro-batch is looked at first)."""
    max_mean_gap: float = Field(default=0.0, ge=0)
    """Largest mean difference over a step's tokens; 0: 0.001 for a float32 checkpoint, 0.05 for one of 16 bits."""
    max_gap: float = Field(default=0.0, ge=0)
    """Largest difference of a token; 0: 0.1 for a float32 checkpoint, 5 for one of 16 bits."""
