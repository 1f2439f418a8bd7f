"""A rollout worker admits by the user's curriculum and data sources, and goes on with their states after it was ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strawflow.errors import ConfigError
from strawflow.flow.mixer import Mixture
from strawflow.flow.run import Run
from strawflow.flow.status import snapshot, unit_detail
from strawflow.index import datasets, mixtures
from tests.integration.rollout_runs import NUM_UNITS, Worker, completed, trainer_of

HERE = "tests.integration.own_sources:"


def prompts_of(run: Run) -> dict[str, list[dict[str, Any]]]:
    """Return the prompts of the completed groups by prompt set, in order of admission."""
    found: dict[str, list[dict[str, Any]]] = {}
    for unit_id in sorted(u.unit_id for u in completed(run)):
        detail = unit_detail(run, unit_id)
        assert detail.prompt is not None
        found.setdefault(detail.dataset, []).append(detail.prompt)
    return found


def test_groups_follow_the_curriculum_and_come_from_sources_of_both_kinds(
    make_run: Callable[..., Run],
) -> None:
    sets = [
        {"name": "lines", "source": HERE + "LinesOfSlime"},
        {"name": "prompts"},
        {"name": "sums", "source": HERE + "adds", "weight": 0},
    ]
    run = make_run(steps=3, data={"prompts": sets}, curriculum=HERE + "harder_once_solved")
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:
            worker.wait(lambda: len(completed(run)) >= NUM_UNITS)
        before = prompts_of(run)
        assert [p["prompt"] for p in before["lines"]] == ["line0\n", "line1\n", "line2\n", "line0\n"]
        publish(1)
        with Worker(run) as worker:
            worker.wait(lambda: len(completed(run)) >= 2 * NUM_UNITS)
    found = prompts_of(run)
    rewards = snapshot(run).prompt_sets["lines"].mean_reward
    assert rewards is not None
    assert rewards > 0
    num_sums = len(found["sums"])
    assert num_sums == round(4 * level_of(run))
    assert [p["prompt"] for p in found["sums"]] == [f"sum{n}\n" for n in range(num_sums)]
    assert f'"difficulty":{level_of(run)}' in found["sums"][0]["metadata"].replace(" ", "")
    numbers = [p["prompt"] for p in found["lines"]]
    assert numbers == [f"line{n % 3}\n" for n in range(len(numbers))], (
        "a new worker went on where the old one ended"
    )
    assert "prompts" not in found, "the curriculum left it out"


def level_of(run: Run) -> float:
    """Return the state of the curriculum."""
    with run.index.read() as connection:
        level: float = Mixture.from_text(mixtures.find(connection, run.branch)).curriculum
    return level


def test_a_source_that_fails_ends_the_worker_with_what_it_raised(make_run: Callable[..., Run]) -> None:
    run = make_run(data={"prompts": [{"name": "sums", "source": HERE + "says_nothing"}]})
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:
            worker.ended()
    assert isinstance(worker.error, ConfigError)
    assert "the data source of prompt set 'sums' raised TypeError" in str(worker.error)
    with run.index.read() as connection:
        assert datasets.segments_of(connection, "sums") == []
