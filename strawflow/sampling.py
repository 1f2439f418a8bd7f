"""Sampling profiles: the resolved settings of every kind of unit of a run, by the name that units carry.

1. `train` and `demo` are the trainer's. Every evaluated dataset has one profile for its sampled answers and one for greedy ones;
   those of `held_out` are called as when it was the only one.
2. Names never change: units and stored trajectories hold them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from strawflow.eval_datasets import HELD_OUT, EvalDataset

if TYPE_CHECKING:
    from strawflow.config import RunConfig


class SamplingProfile(BaseModel):
    """Resolved sampling settings of one kind of unit."""

    model_config = ConfigDict(frozen=True)

    purpose: Literal["train", "demo", "eval"]
    num_samples: int
    temperature: float
    top_p: float
    max_response_tokens: int
    min_response_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    reward: str = "exact"
    reward_shape: Literal["raw", "exact"] = "exact"


@dataclass(frozen=True)
class EvalProfile:
    """One of the ways in which a dataset is evaluated."""

    profile: str
    dataset: str
    is_greedy: bool
    pass_score: float
    """An answer passes if its score is at least this."""


def profiles(config: RunConfig) -> dict[str, SamplingProfile]:
    """Return the sampling settings by profile name."""
    r = config.rollout
    train = SamplingProfile(
        purpose="train",
        num_samples=r.samples_per_prompt,
        temperature=r.temperature,
        top_p=r.top_p,
        max_response_tokens=r.max_response_tokens,
        min_response_tokens=r.min_response_tokens,
        stop=r.stop,
        stop_token_ids=r.stop_token_ids,
        reward=r.reward,
        reward_shape=r.reward_shape,
    )
    found = {"train": train, "demo": train.model_copy(update={"purpose": "demo", "num_samples": 1})}
    for dataset in _evaluated(config):
        sampled = train.model_copy(
            update={
                "purpose": "eval",
                "num_samples": dataset.samples_per_prompt,
                "temperature": dataset.temperature,
                "top_p": dataset.top_p,
                "max_response_tokens": dataset.max_response_tokens,
                "min_response_tokens": min(r.min_response_tokens, dataset.max_response_tokens or 0),
                "reward": dataset.reward,
                "reward_shape": dataset.reward_shape,
            }
        )
        found[_name(dataset)] = sampled
        found[_name(dataset, greedy=True)] = sampled.model_copy(update={"num_samples": 1, "temperature": 0.0})
    return found


def eval_profiles(config: RunConfig) -> list[EvalProfile]:
    """Return how each dataset is evaluated: sampled, greedily or both, in the order of the configuration."""
    return [
        EvalProfile(_name(dataset, greedy=is_greedy), dataset.name, is_greedy, dataset.pass_score)
        for dataset in _evaluated(config)
        for is_greedy, is_wanted in ((False, dataset.samples_per_prompt), (True, dataset.greedy))
        if is_wanted
    ]


def with_filled_datasets(config: RunConfig) -> RunConfig:
    """Return the configuration in which every evaluation dataset says all of its settings."""
    filled = tuple(_evaluated(config)[1:])
    return config.model_copy(update={"eval": config.eval.model_copy(update={"datasets": filled})})


def _evaluated(config: RunConfig) -> list[EvalDataset]:
    """Return every evaluated dataset, `held_out` first, with what it leaves out filled in from the run."""
    own = {
        "samples_per_prompt": config.eval.samples_per_prompt,
        "greedy": config.eval.greedy,
        "max_response_tokens": config.rollout.max_response_tokens,
        "reward": config.rollout.reward,
        "reward_shape": config.rollout.reward_shape,
    }
    return [
        dataset.model_copy(update={k: v for k, v in own.items() if getattr(dataset, k) is None})
        for dataset in (EvalDataset(name=HELD_OUT), *config.eval.datasets)
    ]


def _name(dataset: EvalDataset, *, greedy: bool = False) -> str:
    if dataset.name == HELD_OUT:
        return "eval_greedy" if greedy else "eval_sampled"
    return f"eval:{dataset.name}:greedy" if greedy else f"eval:{dataset.name}"
