"""Curricula and data sources as users write them: for runs of tests, and good and bad ones for the contract test."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from strawflow_workers.rollout.hooks.interfaces import Mix, PromptRequest, Prompts, PromptSetMetrics


def harder_once_solved(step: int, sets: Mapping[str, PromptSetMetrics], state: Any) -> Mix:
    """Move weight from the first set to the last as the first is solved; never back."""
    easy, *_, hard = sets
    level = max(state or 0.0, min(sets[easy].mean_reward or 0.0, 0.9))
    return Mix(weights={easy: 1 - level, hard: level}, state=level, difficulties={hard: level})


def adds(request: PromptRequest, state: Any) -> Prompts:
    """Sums whose numbers follow from how many there were."""
    first = state or 0
    rows = [
        {"prompt": f"sum{n}\n", "label": str(n), "metadata": {"difficulty": request.difficulty}}
        for n in range(first, first + request.count)
    ]
    return Prompts(rows=rows, state=first + request.count)


def weighs_nothing(step: int, sets: Mapping[str, PromptSetMetrics], state: Any) -> Mix:
    return Mix(weights=dict.fromkeys(sets, 0.0))


def speaks_of_others(step: int, sets: Mapping[str, PromptSetMetrics], state: Any) -> Mix:
    return Mix(weights={"sums": sets["sums"].weight})


def keeps_a_set_as_state(step: int, sets: Mapping[str, PromptSetMetrics], state: Any) -> Mix:
    return Mix(weights=dict.fromkeys(sets, 1.0), state={step})


def tosses(step: int, sets: Mapping[str, PromptSetMetrics], state: Any) -> Mix:
    return Mix(weights=dict.fromkeys(sets, random.random()))


def says_nothing(request: PromptRequest, state: Any) -> None:
    return None


def makes_too_many(request: PromptRequest, state: Any) -> Prompts:
    return Prompts(rows=[{"prompt": "x"}] * (request.count + 1))


def forgets_the_prompt(request: PromptRequest, state: Any) -> Prompts:
    return Prompts(rows=[{"label": "4"}])


_NUM_CALLS = [0]


def remembers_beside_its_state(request: PromptRequest, state: Any) -> Prompts:
    _NUM_CALLS[0] += 1
    return Prompts(rows=[{"prompt": f"call {_NUM_CALLS[0]}"}])


class LinesOfSlime:
    """A data source as slime's users write it: rows of a list, epoch after epoch, its place saved to a file."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.place = 0

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = []
        for _ in range(num_samples):
            metadata = {"epoch": self.place // 3}
            sample = SimpleNamespace(prompt=f"line{self.place % 3}\n", label="1", metadata=metadata)
            groups.append([sample] * self.args.n_samples_per_prompt)
            self.place += 1
        return groups

    def add_samples(self, samples: Any) -> None:
        raise AssertionError("it is never called")

    def _path(self, folder: str, rollout_id: int) -> Path:
        return Path(folder) / "rollout" / f"global_dataset_state_dict_{rollout_id}.json"

    def save(self, rollout_id: int) -> None:
        path = self._path(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"place": self.place}))

    def load(self, rollout_id: int | None = None) -> None:
        assert rollout_id is not None
        self.place = json.loads(self._path(self.args.load, rollout_id).read_text())["place"]


class ForgetsOfSlime(LinesOfSlime):
    """Its place is not in what it saves."""

    def load(self, rollout_id: int | None = None) -> None:
        return


class SavesNothingOfSlime:
    """Without save and load nothing could be gone on from."""

    def __init__(self, args: Any) -> None:
        self.args = args

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        return []
