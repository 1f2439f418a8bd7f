"""Evaluation datasets of a run: what a YAML file says of them, checked entry by entry.

    defaults:                       # what entries leave out
      samples_per_prompt: 8
    datasets:
      - name: short_sums            # enqueued with `strawflow enqueue RUN FILE --dataset short_sums`
        temperature: 0.7

1. An entry beats the file's defaults; what both leave out is the run's own, filled in when the run is created.
2. Every error names file, entry and field. A key that is given twice is refused: YAML would take the last.
3. It knows no run: names of a run's own datasets are all that an entry may not be called.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from strawflow.errors import ConfigError
from strawflow.ids import NAME_RULE, is_name
from strawflow.reward_names import parse_reward
from strawflow.strict_yaml import read_yaml

PROMPTS, DEMONSTRATIONS, HELD_OUT = "prompts", "demonstrations", "held_out"
RUN_DATASETS = (PROMPTS, DEMONSTRATIONS, HELD_OUT)
"""Datasets that every run may have; `held_out` has its settings in the section eval."""


class EvalDataset(BaseModel):
    """One dataset that is evaluated, and how it is sampled and scored. None: as the run has it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    prompts: str = ""
    """Prompt file, for the command that `run create` prints."""
    samples_per_prompt: int | None = Field(default=None, ge=0)
    """Answers sampled to every prompt; 0: none. None: eval.samples_per_prompt."""
    greedy: bool | None = None
    """Also answer every prompt once greedily. None: eval.greedy."""
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_response_tokens: int | None = Field(default=None, ge=1)
    """None: rollout.max_response_tokens."""
    reward: str | None = None
    """None: rollout.reward."""
    reward_shape: Literal["raw", "exact"] | None = None
    """None: rollout.reward_shape."""
    pass_score: float = Field(default=1.0, allow_inf_nan=False)
    """An answer passes if its score is at least this."""


def read_eval_datasets(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a YAML file, the file's defaults filled in.

    Raises:
        ConfigError: there is no such file, or it is not of this form; names the entry and the field.
    """
    tree = read_yaml(path, what="evaluation datasets")
    if not isinstance(tree, dict) or not isinstance(tree.get("datasets"), list) or not tree["datasets"]:
        raise ConfigError(f"{path}: there must be a list `datasets:` with at least one entry")
    if unknown := sorted(str(key) for key in tree.keys() - {"defaults", "datasets"}):
        raise ConfigError(f"{path}: unknown key {unknown[0]!r}; known are defaults and datasets")
    defaults = tree.get("defaults") or {}
    if not isinstance(defaults, dict):
        raise ConfigError(f"{path}: defaults must map fields to values")
    for key in ("name", "prompts"):
        if key in defaults:
            raise ConfigError(
                f"{path}: defaults: {key} differs from dataset to dataset; give it in the entries"
            )
    _checked({**defaults, "name": "defaults"}, f"{path}: defaults")
    return checked_entries(tree["datasets"], where=str(path), defaults=defaults)


def checked_entries(
    entries: Any, *, where: str, defaults: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return entries with defaults filled in, each of them a valid `EvalDataset`.

    Raises:
        ConfigError: one is wrong, or two have the same name; names the entry and the field.
    """
    if not isinstance(entries, list | tuple):
        raise ConfigError(f"{where} must be the name of a YAML file, or a list of datasets")
    found: list[dict[str, Any]] = []
    first_of: dict[str, int] = {}
    for number, entry in enumerate(entries, start=1):
        at = f"{where}: dataset {number}"
        if not isinstance(entry, dict):
            raise ConfigError(f"{at} must map fields to values, and is {type(entry).__name__}")
        name = entry.get("name")
        if not isinstance(name, str):
            raise ConfigError(f"{at}: name is missing" if name is None else f"{at}: name {name!r} is no text")
        at = f"{at} ({name})"
        if not is_name(name):
            raise ConfigError(f"{at}: name: {NAME_RULE}")
        if name in RUN_DATASETS:
            raise ConfigError(f"{at}: name: every run has a dataset {name!r} of its own; choose another name")
        if name in first_of:
            raise ConfigError(f"{at}: name: dataset {first_of[name]} is called so already")
        first_of[name] = number
        filled = {**(defaults or {}), **entry}
        _checked(filled, at)
        found.append(filled)
    return found


def refuse_unanswered(datasets: Sequence[EvalDataset], *, where: str) -> None:
    """Raise ConfigError for a dataset to which no answers would be sampled."""
    for number, dataset in enumerate(datasets, start=1):
        if dataset.samples_per_prompt == 0 and not dataset.greedy:
            raise ConfigError(
                f"{where}: dataset {number} ({dataset.name}): samples_per_prompt is 0 and greedy is false: nothing would be "
                "answered"
            )


def _checked(fields: Mapping[str, Any], at: str) -> EvalDataset:
    try:
        dataset = EvalDataset.model_validate(fields)
        if dataset.reward is not None:
            parse_reward(dataset.reward)
        return dataset
    except ConfigError as error:
        raise ConfigError(f"{at}: reward: {error.message}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(field, EvalDataset.model_fields, n=1)
            hint = (
                f"; did you mean {near[0]}?" if near else f"; known are {', '.join(EvalDataset.model_fields)}"
            )
            raise ConfigError(f"{at}: unknown field {field}{hint}") from None
        raise ConfigError(f"{at}: {field}: {first['msg']}, not {fields.get(field)!r}") from None
