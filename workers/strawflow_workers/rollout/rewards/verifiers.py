"""Verifiers by name, loaded inside a reward process. Which file holds which: the `match` in `load_verifier`.

1. A verifier of one is called as `verifier(response_text, *, prompt, label, metadata) -> float`: label is text or None, metadata
   the parsed object or None. One of a group is called once with the list of all its members' texts in the place of the text,
   and returns as many numbers. Either may be `async`. A function whose first parameter is `args` is called as slime does, for one
   response. What it raises, and what is no finite number, is a failure.
2. A function takes a group where its name begins with `group:` or it has a true attribute `takes_group`.
3. Loading is what can be wrong with the configuration, so it raises ConfigError; scoring never does.
4. This module knows no time limits and no processes.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from strawflow.errors import ConfigError
from strawflow.reward_names import RewardName, nearest_scheme, parse_reward
from strawflow_workers.rollout.hooks import slime
from strawflow_workers.rollout.rewards import (
    code_tests,
    gym,
    instructions,
    math_answer,
    multiple_choice,
    sandbox,
    text_match,
)
from strawflow_workers.rollout.rewards.boxed import last_boxed

Function = Callable[..., Any]


@dataclass(frozen=True)
class Verifier:
    """A loaded verifier."""

    function: Function
    takes_group: bool = False
    warnings: tuple[str, ...] = ()
    """What this host lacks for it, in words."""


def load_verifier(
    name: str,
    *,
    settings: Mapping[str, Any] | None = None,
    limit_s: float = 10.0,
    post_processes: bool = False,
) -> Verifier:
    """Return the verifier of a name; `limit_s` is the time that one of its calls may take in all.

    One that `post_processes` is given a group's rewards, and its texts by name.

    Raises:
        ConfigError: no such verifier, it cannot be imported, or it does not take what it is given.
    """
    parsed = parse_reward(name)
    if parsed.over_http:
        raise ConfigError(f"reward {name!r} is asked of a server; no process loads it")
    if parsed.kind == "function":
        function = import_function(name, parsed.target)
        takes_group = parsed.takes_group or bool(getattr(function, "takes_group", False))
        if slime.is_slimes(function):
            takes_group = takes_group or slime.takes_samples(function)
            function = slime.group_reward(function) if takes_group else slime.reward(function)
        else:
            _require_fit(name, function, takes_group=takes_group, post_processes=post_processes)
        return Verifier(function, takes_group=takes_group)
    function = _built_in(parsed, settings or {}, limit_s)
    warnings: tuple[str, ...] = ()
    if parsed.target == "code:python":
        warnings = tuple(
            f"code under test is not walled in whole: {text}" for text in sandbox.missing_walls()
        )
    if parsed.boxed:
        # math-verify finds bare LaTeX only where something marks it, so it gets the box with what is in it.
        return Verifier(_of_the_box(function, "\\boxed{%s}" if parsed.target == "math" else "%s"))
    return Verifier(function, warnings=warnings)


def import_function(name: str, path: str) -> Function:
    """Return what `package.module:function` names.

    Raises:
        ConfigError: it cannot be imported or is no function.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"reward {name!r} cannot be loaded: {error}{nearest_scheme(module_name)}"
        ) from error
    try:
        found = reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"reward {name!r} cannot be loaded: {error}{hint}") from error
    if not callable(found):
        raise ConfigError(f"reward {name!r} is {type(found).__name__}, not a function")
    function: Function = found
    return function


def _require_fit(name: str, function: Function, *, takes_group: bool, post_processes: bool) -> None:
    """Refuse a function that could not be called: each of its calls would fail a sample."""
    first = "rewards" if post_processes else "response_texts" if takes_group else "response_text"
    by_name = [*(["response_texts"] if post_processes else []), "prompt", "label", "metadata"]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it tells no parameters, as some that are not written in Python
        return
    try:
        signature.bind("", **dict.fromkeys(by_name))
    except TypeError as error:
        raise ConfigError(
            f"reward {name!r}{signature}: {error}; it is called with ({first}, *, {', '.join(by_name)})"
        ) from None


def _built_in(name: RewardName, settings: Mapping[str, Any], limit_s: float) -> Function:
    if name.kind == "reasoning_gym":
        return gym.load(name.target, settings)
    match name.target:
        case "exact":
            return text_match.exact
        case "f1":
            return text_match.f1
        case "math":
            return math_answer.load()
        case "multiple_choice":
            return multiple_choice.multiple_choice
        case "instructions":
            return instructions.instructions
        case "code:python":
            return code_tests.load(limit_s)
        case "random":
            return _random
    raise ConfigError(f"reward {name.text!r} has a name and no verifier")


def _random(response_text: str, **row: Any) -> float:
    """Score 0 or 1 by chance, whatever the response: for load tests, where nothing should be learnt."""
    del response_text, row
    return float(random.getrandbits(1))


def _of_the_box(function: Function, form: str) -> Function:
    """Score what the last box holds, put into `form`; a response without one scores 0."""

    def score(response_text: str, **row: Any) -> Any:
        answer = last_boxed(response_text)
        return 0.0 if answer is None else function(form % answer, **row)

    return score
