"""Prompts from two files and a data source, mixed by weight: what runs that are killed admit, and what must hold of it."""

from __future__ import annotations

from typing import Any

from strawflow.flow.mixer import draw
from strawflow.flow.run import Run
from strawflow.flow.status import unit_detail
from strawflow.index import datasets, units
from strawflow_workers.rollout.hooks.interfaces import PromptRequest, Prompts

SETS = {"prompts": 2.0, "words": 1.0, "made": 1.0}
"""Prompt sets and their weights."""
NUM_WORDS = 3
"""Rows of `words`: few, so that it goes through epochs."""


def counts_up(request: PromptRequest, state: Any) -> Prompts:
    """The prompts of `made`: its state is the next number."""
    first = state or 0
    rows = [{"prompt": f"made {n}\n", "label": str(n)} for n in range(first, first + request.count)]
    return Prompts(rows=rows, state=first + request.count)


def prompt_sets() -> list[dict[str, Any]]:
    """Return what `data.prompts` of such a run is."""
    own = {"made": {"source": "tests.fault.mixed_prompts:counts_up"}}
    return [{"name": name, "weight": weight, **own.get(name, {})} for name, weight in SETS.items()]


def check_draws(run: Run) -> None:
    """Groups were drawn by weight as if nobody had ever been killed, each row once an epoch; what was made is there once."""
    with run.index.read() as connection:
        found = [u for u in units.listed(connection, run.branch, limit=1_000_000) if u.purpose == "train"]
        dataset_of = datasets.of_segments(connection, (u.segment_id for u in found))
        state = datasets.source_state(connection, run.branch, "made")
    assert [dataset_of[u.segment_id] for u in found] == draw(SETS, {}, len(found))[0]
    assert len({(u.segment_id, u.epoch, u.position) for u in found}) == len(found)
    epochs = [u.epoch for u in found if dataset_of[u.segment_id] == "words"]
    assert epochs == [number // NUM_WORDS for number in range(len(epochs))]
    details = [unit_detail(run, u.unit_id) for u in found if dataset_of[u.segment_id] == "made"]
    made = [d.prompt and d.prompt["prompt"] for d in details]
    assert made == [f"made {n}\n" for n in range(len(made))]
    assert state == str(len(made))
