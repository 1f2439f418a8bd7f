"""Missing input is refused at the start with the command that brings it; dropped units are replaced by their own kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from strawflow.errors import ConfigError
from strawflow.flow import admit, assemble, inputs
from strawflow.index import units
from strawflow.index.consumers import Assignment
from strawflow.testing.runs import SmallRun, prompt_lines, small_run


def counts(small: SmallRun) -> dict[tuple[str, str], int]:
    with small.run.index.read() as connection:
        return units.count_by_state(connection, small.run.branch)


def test_a_run_without_prompts_is_refused_naming_the_command(tmp_path: Path) -> None:
    with (
        small_run(tmp_path, num_prompts=0) as small,
        pytest.raises(ConfigError, match=r"strawflow enqueue .* --dataset prompts"),
    ):
        inputs.require(small.run)


def test_a_run_without_a_model_is_refused(tmp_path: Path) -> None:
    with (
        small_run(tmp_path, num_prompts=4) as small,
        pytest.raises(ConfigError, match="Hugging Face checkpoint folder"),
    ):
        inputs.require(small.run)


def test_a_dropped_demonstration_is_replaced_by_a_demonstration_and_admits_no_prompt(tmp_path: Path) -> None:
    settings = {"warm_start.steps": "1", "warm_start.prompts_per_step": "2"}
    with small_run(tmp_path, num_prompts=8, settings=settings) as small:
        path = tmp_path / "demonstrations.jsonl"
        path.write_text(prompt_lines(8))
        small.enqueue(path, dataset=admit.DEMONSTRATIONS, purpose="demo")
        assert admit.admit_due(small.session("train")) == 2
        assert counts(small) == {("demo", "ready"): 2}
        small.sample(1, purposes=["demo"])
        role = small.assembler()
        (unit,) = assemble.offered(small.session("assemble"), purpose="demo", limit=9)
        assemble.drop(
            small.session("assemble"),
            role,
            [Assignment(unit.epoch, unit.unit_id, "dropped", "failed_members")],
        )
        assert admit.admit_due(small.session("train")) == 1
        assert counts(small) == {("demo", "completed"): 1, ("demo", "ready"): 2}
        small.publish(1)
        assert counts(small)["train", "ready"] == 2 * small.run.config.rollout.prompts_per_step
