"""Prompt sets: the named sets of prompts a run trains on, mixed by weight, as `data.prompts` tells them.

    sums.jsonl                                        one file; its set is called `prompts`
    sums.jsonl:0.7,puzzles=words.jsonl@[:500]:0.3     several: [NAME=]FILE:WEIGHT each, named after the file if left out
    [{"name": "sums", "path": "sums.jsonl", "weight": 0.7}, ...]      the same as tables, JSON or TOML

1. The name of a set is that of its dataset: what is enqueued there is drawn for it.
2. Weights are relative: their sum is a whole. A set of weight 0 is drawn from only once a curriculum gives it some.
3. Whether anything was enqueued is not known here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from strawflow.errors import ConfigError
from strawflow.eval_datasets import DEMONSTRATIONS, HELD_OUT, PROMPTS
from strawflow.ids import NAME_RULE, is_name

_PART = re.compile(r"(?:(?P<name>[^=/]*)=)?(?P<path>.+):(?P<weight>[^:/\]]+)", re.DOTALL)


class PromptSet(BaseModel):
    """One set of prompts to train on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = PROMPTS
    path: str = ""
    """Prompt file, for the command that `run create` prints."""
    source: str = ""
    """Hook `package.module:function` that makes the prompts of this set as the run goes on; empty: they are enqueued."""
    weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Its share of what is admitted, relative to the weights of the others."""


DEFAULT = (PromptSet(),)


def read_prompt_sets(given: Any) -> list[Any]:
    """Return what `data.prompts` was given as, as a list of tables; what is neither text nor list is left to be refused.

    Raises:
        ConfigError: a text that names several files does not tell name and weight of each.
    """
    if not isinstance(given, str):
        return list(given) if isinstance(given, list | tuple) else [given]
    if not given:
        return []
    parts = [_PART.fullmatch(part.strip()) for part in given.split(",")]
    if len(parts) == 1 and (parts[0] is None or not _is_number(parts[0]["weight"])):
        return [{"path": given}]
    return [_table(part, text) for part, text in zip(parts, given.split(","), strict=True)]


def _table(part: re.Match[str] | None, text: str) -> dict[str, Any]:
    if part is None or not _is_number(part["weight"]):
        raise ConfigError(
            f"{text.strip()!r} is no [NAME=]FILE:WEIGHT, as sums.jsonl:0.7; a file whose name has a comma is given as a table"
        )
    name = part["name"] or re.sub(r"@\[.*", "", Path(part["path"]).name).partition(".")[0]
    return {"name": name, "path": part["path"], "weight": float(part["weight"])}


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def refuse_wrong_sets(sets: Sequence[PromptSet], *, taken: Sequence[str] = ()) -> None:
    """Raise ConfigError for names that cannot be or are `taken`, for a set that is both read and made, for weights of sum 0."""
    seen: set[str] = set()
    for number, one in enumerate(sets, start=1):
        at = f"data.prompts: set {number} ({one.name})"
        if not is_name(one.name):
            raise ConfigError(f"{at}: name: {NAME_RULE}")
        if one.name in seen:
            raise ConfigError(
                f"{at}: another set is called so already; give one of them a name: NAME=FILE:WEIGHT"
            )
        if one.name in (DEMONSTRATIONS, HELD_OUT, *taken):
            raise ConfigError(
                f"{at}: the dataset {one.name!r} of this run is not for training; choose another name"
            )
        if one.path and one.source:
            raise ConfigError(f"{at}: its prompts come from a file or from a data source, not from both")
        seen.add(one.name)
    if sets:
        refuse_nothing_to_draw({one.name: one.weight for one in sets}, where="data.prompts")


def refuse_nothing_to_draw(weights: Mapping[str, float], *, where: str) -> None:
    """Raise ConfigError for weights of which none is above 0: no prompt could ever be drawn."""
    if not any(weight > 0 for weight in weights.values()):
        shown = " + ".join(f"{weight:g} ({name})" for name, weight in weights.items())
        raise ConfigError(f"{where}: the weights are {shown} = 0: nothing could be drawn; set one above 0")
