"""The section `trainer`: optimizer, checkpoints, Megatron's own settings, and where its metrics go."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from strawflow.native import NativeValue, Roles, with_underscores
from strawflow.section import Section


class TrainerSection(Section):
    steps: int = Field(default=60, ge=1)
    """Reinforcement-learning steps, after the warm start."""
    lr: float = Field(default=1e-4, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, gt=0, lt=1)
    adam_beta2: float = Field(default=0.95, gt=0, lt=1)
    clip_grad: float = Field(default=1.0, gt=0)
    clip_low: float = Field(default=0.2, gt=0)
    clip_high: float = Field(default=0.2, gt=0)
    checkpoint_interval: int = Field(default=10, ge=1)
    """Steps between checkpoints; the warm start's end and the last step always have one."""
    keep_weights: int = Field(default=2, ge=1)
    """Weight versions whose files stay on disk, beside those in use."""
    threads: int = Field(default=1, ge=1)
    megatron: dict[str, NativeValue] = Field(default_factory=dict)
    """Megatron's own settings by name, as the installed one has them (`strawflow worker train --help-megatron`); on the command
    line each is a flag of its own."""
    roles: Roles | Literal[""] = ""
    """What the model of a role (actor, critic, reference, teacher) has otherwise than `megatron` says: a YAML file, read when
    the run is created."""
    tensorboard: str = ""
    """Folder that the metrics of every step are written to for TensorBoard, as event files; empty: none."""
    wandb: str = ""
    """Project of Weights & Biases that the metrics are logged to, offline, below the run's folder; empty: none."""
    profile_steps: str = ""
    """Steps FIRST:LAST that torch's profiler traces, into profiles/ of the run's folder; empty: none."""
    peak_tflops: float = Field(default=0.0, ge=0)
    """What the trainer's devices could do, in 1e12 floating-point operations a second each, for MFU; 0: what is known of them."""

    @field_validator("megatron", mode="before")
    @classmethod
    def _have_one_spelling(cls, given: Any) -> Any:
        return with_underscores(given)

    @field_validator("profile_steps")
    @classmethod
    def _is_a_window(cls, text: str) -> str:
        if text:
            profile_window(text)
        return text


def profile_window(text: str) -> range:
    """Return the steps that FIRST:LAST means, both included.

    Raises:
        ValueError: it means none.
    """
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ValueError(f"{text!r} names no steps; write FIRST:LAST, such as 10:12")
    return range(int(first), int(last) + 1)
