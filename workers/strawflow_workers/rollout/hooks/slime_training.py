"""Functions written for slime's interfaces between rollouts and training, called with one group at a time:

    (args, samples) -> (raw_rewards, rewards)          assemble.post_process     (custom_reward_post_process)
    (args, samples) -> {tokens, response_lengths, ...} assemble.convert          (convert_samples_to_train_data)
    (args, rollout_id, rollout_data)                   cannot be met             (rollout_data_postprocess)

1. slime calls them with the samples of a whole step, strawflow with those of one group, whenever it is planned: what compares
   groups with one another sees one alone.
2. What slime calls a reward at this point weighs the tokens: it becomes the advantage.
3. Failed members are not among the samples. Lists that come back have one item for each sample, in their order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strawflow.errors import ConfigError
from strawflow_workers.rollout.hooks import interfaces
from strawflow_workers.rollout.hooks.interfaces import CompletedGroup, PostProcessed, TrainingRow
from strawflow_workers.rollout.hooks.slime import Arguments, stored_samples

Function = Callable[..., Any]

_NEEDED = ("tokens", "response_lengths", "loss_masks")
_READ = (*_NEEDED, "rewards", "raw_reward", "rollout_log_probs")
_KNOWN = {
    *_READ,
    # What strawflow tells by itself, from the stored rows.
    "truncated",
    "sample_indices",
    "rollout_ids",
    "rollout_mask_sums",
    "round_number",
    "metadata",
    "total_lengths",
    "prompt",
}


def refuse_unmet(function: Function, *, named: str) -> None:
    """Raise ConfigError for a function of slime's that cannot be met wherever it is named."""
    try:
        names = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return
    if {"args", "rollout_data"} <= names:
        raise ConfigError(
            f"{named} is slime's rollout_data_postprocess, which changes a step's tensors inside the trainer, after it computed "
            "log-probabilities; strawflow stores batches before they are trained, so it cannot be called. What it does to "
            "rewards, masks or advantages belongs into assemble.post_process or assemble.convert"
        )


def post_process(function: Function, args: Arguments) -> interfaces.PostProcess:
    """Return slime's custom_reward_post_process as a post-processing hook."""

    def processed(group: CompletedGroup) -> PostProcessed:
        samples = _one_each(group)
        found = function(args, samples)
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(f"it must return (raw_rewards, rewards), it returned {found!r:.200}")
        raw, rewards = ([float(value) for value in values] for values in found)
        return PostProcessed(rewards=raw, advantages=rewards)

    return processed


def convert(function: Function, args: Arguments) -> interfaces.Convert:
    """Return slime's convert_samples_to_train_data as a conversion hook."""

    def converted(group: CompletedGroup) -> Sequence[TrainingRow]:
        members = [m for m in group.members if m.status != "failed"]
        samples = [s for m in members for s in stored_samples(group.unit_id, m)]
        rows = [row for m in members for row in m.segments]
        found = function(args, samples)
        _check(found, num_samples=len(samples))
        return [_training_row(found, at, row) for at, row in enumerate(rows)]

    return converted


def _one_each(group: CompletedGroup) -> list[Any]:
    """Return the sample of each member that did not fail; of several segments the last."""
    return [stored_samples(group.unit_id, m)[-1] for m in group.members if m.status != "failed"]


def _check(found: Any, *, num_samples: int) -> None:
    if not isinstance(found, Mapping):
        raise TypeError(f"it must return a dict, it returned {found!r:.200}")
    if missing := [name for name in _NEEDED if name not in found]:
        raise ValueError(f"the dict lacks {', '.join(missing)}")
    if unknown := sorted(found.keys() - _KNOWN):
        raise ValueError(
            f"strawflow's trainer has no use for {', '.join(unknown)}; read are {', '.join(_READ)}"
        )
    for name in _READ:
        if name in found and len(found[name]) != num_samples:
            raise ValueError(
                f"{len(found[name])} {name} for {num_samples} samples: strawflow keeps a row for each stored segment"
            )


def _training_row(found: Mapping[str, Any], at: int, row: Mapping[str, Any]) -> TrainingRow:
    made = TrainingRow.of(row)
    tokens, length = [int(t) for t in found["tokens"][at]], int(found["response_lengths"][at])
    if not 0 <= length < len(tokens):
        raise ValueError(f"sample {at}: response_length {length} of {len(tokens)} tokens")
    made.prompt_tokens, response = tokens[: len(tokens) - length], tokens[len(tokens) - length :]
    if response != list(row["response_tokens"]):
        raise ValueError(
            f"sample {at}: its response tokens are others than those that were sampled, so which weights sampled them is not "
            "told; give strawflow's own form of assemble.convert, (group)"
        )
    made.loss_mask = [int(m) for m in found["loss_masks"][at]]
    if "rollout_log_probs" in found:
        made.logprobs = [float(p) for p in found["rollout_log_probs"][at]]
    if "rewards" in found:
        made.advantages = float(found["rewards"][at])
    if "raw_reward" in found:
        made.reward = float(found["raw_reward"][at])
    return made
