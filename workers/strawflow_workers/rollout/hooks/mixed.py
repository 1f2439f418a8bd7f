"""Calling the curriculum and data sources: what they return is checked, and what they raise names the hook."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from strawflow.config import RunConfig
from strawflow.errors import ConfigError
from strawflow.flow.mixture import Hooks, Order, SetStanding, Steering
from strawflow_workers.rollout.hooks.interfaces import (
    Curriculum,
    DataSource,
    Mix,
    PromptRequest,
    Prompts,
    PromptSetMetrics,
)
from strawflow_workers.rollout.hooks.load import load_curriculum, load_data_sources

T = TypeVar("T")

log = logging.getLogger(__name__)

TELL_S = 60.0
"""How often it is told that a data source makes too little: it is asked again and again."""


def mixing_hooks(config: RunConfig, *, model_path: str = "") -> Hooks:
    """Return the hooks that an admission of a run calls.

    Raises:
        ConfigError: one of them cannot be imported or called.
    """
    curriculum = load_curriculum(config)
    sources = load_data_sources(config, model_path=model_path)
    return Hooks(
        None if curriculum is None else steering_by(curriculum),
        {name: prompts_of(name, source) for name, source in sources.items()},
    )


def steering_by(curriculum: Curriculum) -> Callable[[int, Mapping[str, SetStanding], Any], Steering]:
    """Return a curriculum as an admission asks it; whatever it raises is a ConfigError."""

    def steer(step: int, standings: Mapping[str, SetStanding], state: Any) -> Steering:
        sets = {name: PromptSetMetrics(**asdict(one)) for name, one in standings.items()}
        mix = _asked("rollout.curriculum", lambda: checked_mix(curriculum(step, sets, state)))
        return Steering(mix.weights, mix.state, mix.priorities, mix.difficulties)

    return steer


def prompts_of(
    name: str, source: DataSource
) -> Callable[[Order, Any], tuple[Sequence[Mapping[str, Any]], Any]]:
    """Return a data source as an admission asks it; whatever it raises is a ConfigError."""

    told_at = -TELL_S

    def make(order: Order, state: Any) -> tuple[Sequence[Mapping[str, Any]], Any]:
        nonlocal told_at
        request = PromptRequest(**asdict(order))
        made = _asked(
            f"the data source of prompt set {name!r}", lambda: checked_prompts(source(request, state))
        )
        if len(made.rows) < order.count and time.monotonic() - told_at >= TELL_S:
            told_at = time.monotonic()
            log.warning("prompt set %s: %d of %d prompts were made", name, len(made.rows), order.count)
        return made.rows, made.state

    return make


def _asked(what: str, ask: Callable[[], T]) -> T:
    try:
        return ask()
    except Exception as error:  # user code; it is mended, and the run resumed
        raise ConfigError(f"{what} raised {type(error).__name__}: {error}") from error


def checked_mix(found: object) -> Mix:
    """Return what a curriculum returned.

    Raises:
        TypeError: it is no Mix of numbers.
    """
    if not isinstance(found, Mix):
        raise TypeError(f"a curriculum must return a Mix, this one returned {found!r:.200}")
    for name, weight in found.weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise TypeError(f"the weight of {name!r} is no number: {weight!r:.200}")
    for name, priority in found.priorities.items():
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"the priority of {name!r} is no whole number: {priority!r:.200}")
    return found


def checked_prompts(found: object) -> Prompts:
    """Return what a data source returned.

    Raises:
        TypeError: it is no Prompts with a list of rows.
    """
    if inspect.isawaitable(found):
        raise TypeError("a data source is a plain function, this one is async")
    if not isinstance(found, Prompts) or not isinstance(found.rows, list | tuple):
        raise TypeError(
            f"a data source must return Prompts with a list of rows, this one returned {found!r:.200}"
        )
    return found
