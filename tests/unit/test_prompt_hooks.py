"""Curricula and data sources before any run: their paths, and the contract test that users run."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from strawflow.config import RunConfig, load_config
from strawflow.errors import ConfigError
from strawflow.flow.mixture import Order
from strawflow_workers.entry import main
from strawflow_workers.rollout.hooks import load
from strawflow_workers.rollout.hooks.check import check
from strawflow_workers.rollout.hooks.interfaces import PromptRequest
from strawflow_workers.rollout.hooks.mixed import mixing_hooks
from strawflow_workers.rollout.hooks.slime import arguments

HERE = "tests.integration.own_sources:"
RETURNS_WEIGHTS = "returns weights, one of them above 0"
MAKES_PROMPTS = "makes prompts that can be enqueued"


@pytest.mark.parametrize("path", ["harder_once_solved", "adds", "LinesOfSlime"])
def test_sound_hooks_pass_the_contract_test(path: str) -> None:
    findings = check(HERE + path)
    assert [f for f in findings if not f.holds] == []
    assert len(findings) == 4


@pytest.mark.parametrize(
    "path, requirement, told",
    [
        ("weighs_nothing", RETURNS_WEIGHTS, "the weights are 0 (easy) + 0 (hard) = 0"),
        ("speaks_of_others", RETURNS_WEIGHTS, "KeyError: 'sums'; name your own sets with --sets"),
        ("keeps_a_set_as_state", "its state can be stored: JSON, at most 1 MiB", "not JSON serializable"),
        ("tosses", "says the same of the same state", "keep all it remembers, chance too, in the state"),
        ("says_nothing", MAKES_PROMPTS, "must return Prompts with a list of rows, this one returned None"),
        ("makes_too_many", MAKES_PROMPTS, "5 prompts where 4 were wanted"),
        ("forgets_the_prompt", MAKES_PROMPTS, "row 1 has no prompt"),
        ("remembers_beside_its_state", "says the same of the same state", "asked again"),
        ("ForgetsOfSlime", "says the same of the same state", "asked again"),
        (
            "SavesNothingOfSlime",
            "can be imported and called with the right parameters",
            "has no save, load: it is to have get_samples, save, load",
        ),
    ],
)
def test_unsound_hooks_fail_it_with_what_to_do(path: str, requirement: str, told: str) -> None:
    (failed,) = [f for f in check(HERE + path) if not f.holds]
    assert failed.requirement == requirement
    assert told in failed.told


def test_a_curriculum_that_knows_its_sets_is_told_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hook", HERE + "speaks_of_others", "--sets", "sums,words", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"] is True


def test_the_readmes_hooks_pass_the_contract_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    code = readme.split("    # mine.py\n")[1].split("    strawflow hook check")[0]
    (tmp_path / "readme_prompts.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    assert all(finding.holds for finding in check("readme_prompts:grow"))
    assert all(finding.holds for finding in check("readme_prompts:harder", sets=["sums", "grown"]))


def test_hooks_of_a_configuration_are_looked_at_when_a_worker_starts() -> None:
    good = {
        "rollout.curriculum": HERE + "harder_once_solved",
        "data.prompts": f'[{{"source": "{HERE}adds"}}]',
    }
    load.require(load_config(flags=good))
    for flags, told in (
        ({"rollout.curriculum": HERE + "harder_once_solve"}, "did you mean 'harder_once_solved'"),
        ({"rollout.curriculum": HERE + "adds"}, "expected is (step, sets, state)"),
        (
            {"data.prompts": f'[{{"source": "{HERE}harder_once_solved"}}]'},
            "expected is (request, state), or (args)",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            load.require(load_config(flags=flags))
        assert told in caught.value.message
        assert next(iter(flags)) in caught.value.message


def test_what_a_hook_raises_names_it() -> None:
    config = load_config(
        flags={
            "rollout.curriculum": HERE + "speaks_of_others",
            "data.prompts": f'[{{"name": "sums", "source": "{HERE}says_nothing"}}, {{"name": "words"}}]',
        }
    )
    hooks = mixing_hooks(config)
    assert hooks.curriculum is not None
    with pytest.raises(ConfigError, match=r"rollout\.curriculum raised KeyError: 'sums'"):
        hooks.curriculum(0, {}, None)
    with pytest.raises(ConfigError, match="data source of prompt set 'sums' raised TypeError"):
        hooks.sources["sums"](Order("sums", 1, 0, 0), None)


def test_a_slime_source_goes_on_from_whatever_state_it_is_given() -> None:
    source = load.load("data_source", HERE + "LinesOfSlime", arguments(RunConfig()))

    def asked(count: int) -> PromptRequest:
        return PromptRequest(name="lines", count=count, num_made=0, step=0)

    first = source(asked(2), None)
    second = source(asked(2), first.state)
    assert [r["prompt"] for r in (*first.rows, *second.rows)] == ["line0\n", "line1\n", "line2\n", "line0\n"]
    assert second.rows[1]["metadata"] == {"epoch": 1}
    # What it made last was not taken (another worker admitted, a branch went back): it makes that again.
    assert source(asked(2), first.state) == second
    assert source(asked(2), None) == first
