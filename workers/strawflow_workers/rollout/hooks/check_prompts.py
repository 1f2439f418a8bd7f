"""The contract tests of curricula and data sources: asked with made-up standings, their states stored and read again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from strawflow.errors import ConfigError, InvalidInputError
from strawflow.flow.mixture import Order, SetStanding, text_of
from strawflow.prompt_sets import refuse_nothing_to_draw
from strawflow.prompts.mappings import KEYS, written_down
from strawflow.prompts.reader import read_prompts
from strawflow_workers.rollout.hooks.interfaces import Curriculum, DataSource
from strawflow_workers.rollout.hooks.mixed import prompts_of, steering_by

NUM_ASKED = 4
"""Times a curriculum is asked, and prompts wanted of a data source at a time."""


@dataclass(frozen=True)
class Finding:
    """One requirement."""

    requirement: str
    holds: bool
    told: str = ""


_KEPT = "its state can be stored: JSON, at most 1 MiB"
_SAME = "says the same of the same state"


def check_curriculum(hook: Curriculum, sets: Sequence[str]) -> list[Finding]:
    """Ask a curriculum as a run does whose rewards rise: before the first reward, and three times after."""
    steer = steering_by(hook)
    findings: list[Finding] = []
    state: Any = None
    same, told = True, []
    for number in range(NUM_ASKED):
        standings = {name: _standing(number, at, len(sets)) for at, name in enumerate(sets)}
        try:
            steering, again = (steer(10 * number, standings, _stored(state)) for _ in range(2))
            if unknown := sorted(steering.weights.keys() - set(sets)):
                raise ConfigError(f"no such prompt set: {unknown[0]!r} (of {', '.join(sets)})")
            if wrong := [w for w in steering.weights.values() if not 0 <= w < float("inf")]:
                raise ConfigError(f"the weight {wrong[0]!r}; weights are numbers from 0")
            refuse_nothing_to_draw({n: steering.weights.get(n, 0.0) for n in sets}, where="weights")
        except ConfigError as error:
            hint = "; name your own sets with --sets" if "KeyError" in error.message else ""
            return [*findings, Finding("returns weights, one of them above 0", False, error.message + hint)]
        try:
            text_of(steering.state, of="the curriculum")
        except InvalidInputError as error:
            return [*findings, Finding(_KEPT, False, error.message)]
        same = same and steering == again
        state = steering.state
        told.append(" ".join(f"{name} {steering.weights.get(name, 0):g}" for name in sets))
    return [
        Finding("returns weights, one of them above 0", True, ", then ".join(told)),
        Finding(_KEPT, True),
        _is_same(same),
    ]


def _standing(number: int, at: int, num_sets: int) -> SetStanding:
    """Return how a made-up set stands the `number`-th time: later sets have lower rewards."""
    reward = None if not number else max(0.0, 0.3 * number - 0.2 * at)
    return SetStanding(1 / num_sets, 100, 20 * number, 0, 16 if number else 0, reward)


def check_data_source(hook: DataSource, load_again: Callable[[], DataSource]) -> list[Finding]:
    """Ask a data source twice, and each time another worker that knows the stored state alone."""
    first = prompts_of("check", hook)
    findings: list[Finding] = []
    state: Any = None
    num_made, same, told = 0, True, []
    for number in range(2):
        order = Order("check", NUM_ASKED, num_made, number)
        try:
            rows, after = first(order, _stored(state))
            rows_again, after_again = prompts_of("check", load_again())(order, _stored(state))
            if len(rows) > NUM_ASKED:
                raise ConfigError(
                    f"{len(rows)} prompts where {NUM_ASKED} were wanted; keep what is left over in the state"
                )
            if rows:
                with written_down(rows, name="prompts") as source:
                    list(read_prompts(source, KEYS))
        except (ConfigError, InvalidInputError) as error:
            return [*findings, Finding("makes prompts that can be enqueued", False, error.message)]
        try:
            text_of(after, of="the data source")
        except InvalidInputError as error:
            return [*findings, Finding(_KEPT, False, error.message)]
        same = same and (list(rows), after) == (list(rows_again), after_again)
        state, num_made = after, num_made + len(rows)
        told.append(f"{len(rows)} of {NUM_ASKED}")
    findings.append(Finding("makes prompts that can be enqueued", bool(num_made), ", then ".join(told)))
    findings.append(Finding(_KEPT, True))
    return [*findings, _is_same(same)]


def _is_same(same: bool) -> Finding:
    why = "it is asked again where another worker admitted meanwhile: keep all it remembers, chance too, in the state"
    return Finding(_SAME, same, "" if same else why)


def _stored(state: Any) -> Any:
    """Return a state as it comes back from the index."""
    return None if state is None else json.loads(text_of(state, of="the hook"))
