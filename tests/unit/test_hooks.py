"""Hooks before any run: dotted paths, parameters, and the contract test that users run."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from strawflow.config import RunConfig
from strawflow.errors import ConfigError
from strawflow_workers.entry import main
from strawflow_workers.rollout.hooks import load
from strawflow_workers.rollout.hooks.check import check
from strawflow_workers.rollout.hooks.slime import arguments

HERE = "tests.integration.own_hooks:"
SLIME = "tests.integration.slime_functions:"


@pytest.mark.parametrize(
    "kind, path, told",
    [
        ("generate", "fans_out", "is no dotted path; write package.module:function"),
        ("group_filter", "nonzero_deviatoin", "did you mean 'nonzero_deviation'?"),
        (
            "generate",
            "tests.integration.own_hoks:fans_out",
            "no module 'tests.integration.own_hoks'; did you mean 'own_hooks'?",
        ),
        ("generate", "no_such_module_anywhere:f", "no module 'no_such_module_anywhere'"),
        ("generate", HERE + "fan_out", "has no 'fan_out'; did you mean 'fans_out'?"),
        ("generate", HERE + "NOT_A_FUNCTION", "is int, nothing that can be called"),
        ("generate", HERE + "is_not_async", "is no 'async def'; expected is async (sample, engine)"),
        ("sample_filter", HERE + "one_turn", "is an 'async def'; expected is (sample, rollout)"),
        (
            "sample_filter",
            HERE + "takes_too_much",
            "missing a required argument: 'more'; expected is (sample, rollout)",
        ),
        ("generate", SLIME + "keeps_even_groups", "too many positional arguments"),
        ("sample_filter", SLIME + "reward", "is an 'async def'"),
    ],
)
def test_a_path_that_does_not_fit_is_refused_with_the_nearest_name(kind: str, path: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load.load(kind, path, arguments(RunConfig()))
    assert told in caught.value.message
    assert load.KINDS[kind].setting in caught.value.message


def test_a_module_that_raises_is_told_with_what_it_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hook_that_raises.py").write_text("import json\njson.loads('{')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot be imported: JSONDecodeError"):
        load.load("generate", "hook_that_raises:f", arguments(RunConfig()))


def test_every_configured_hook_is_looked_at() -> None:
    good = {"generate": HERE + "fans_out", "sample_filter": HERE + "drops_member_2"}
    load.require(
        RunConfig.model_validate({"rollout": good, "assemble": {"group_filter": "nonzero_deviation"}})
    )
    for section, name in (
        ("rollout", "generate"),
        ("rollout", "sample_filter"),
        ("assemble", "group_filter"),
    ):
        with pytest.raises(ConfigError, match=f"{section}.{name}"):
            load.require(RunConfig.model_validate({section: {name: HERE + "missing"}}))


@pytest.mark.parametrize(
    "path",
    [
        HERE + "fans_out",
        HERE + "rewards_itself",
        HERE + "drops_member_2",
        HERE + "keeps_even_units",
        "nonzero_deviation",
        HERE + "prints",
        SLIME + "generate",
        SLIME + "generate_several",
        SLIME + "keeps_members_before_3",
        SLIME + "keeps_even_groups",
    ],
)
def test_sound_hooks_pass_the_contract_test(path: str) -> None:
    findings = check(path)
    assert [f for f in findings if not f.holds] == []
    assert len(findings) >= 2


@pytest.mark.parametrize(
    "path, requirement, told",
    [
        (HERE + "trains_on_the_environment", "returns a rollout", "no weights sampled has loss_mask 1"),
        (HERE + "says_nothing", "returns a verdict", "returned None"),
        (HERE + "logs_and_raises", "takes a batch", "OSError: the dashboard is away"),
        (HERE + "blocks", "leaves the event loop to others", "await, or use asyncio.to_thread"),
        (HERE + "masks_all", "has tokens to train", "no token has loss_mask 1"),
        (HERE + "asks_for_ever", "ends when its group is broken off", "let Interrupted pass"),
        (HERE + "changes_its_mind", "says the same of the same", "asked again after a restart"),
        (
            HERE + "takes_too_much",
            "can be imported and called with the right parameters",
            "give --kind, one of generate",
        ),
        (SLIME + "forgets_logprobs", "returns a rollout", "ask the engine with return_logprob"),
    ],
)
def test_unsound_hooks_fail_it_with_what_to_do(path: str, requirement: str, told: str) -> None:
    (failed,) = [f for f in check(path) if not f.holds]
    assert failed.requirement == requirement
    assert told in failed.told


def test_the_verb_prints_findings_and_exits_by_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hook", "nonzero_deviation", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"] is True
    assert main(["hook", HERE + "says_nothing", "--kind", "group_filter"]) == ConfigError.exit_code
    assert "FAIL  returns a verdict" in capsys.readouterr().out


def test_the_readmes_hook_passes_the_contract_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    code = readme.split("    # turns.py\n")[1].split("    strawflow hook check")[0]
    (tmp_path / "turns.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    assert all(finding.holds for finding in check("turns:generate"))
