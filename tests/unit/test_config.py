"""The configuration: where a value comes from, what is refused, and that it is stored as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from strawflow.config import (
    ENV_PREFIX,
    AssembleSection,
    RunConfig,
    field_names,
    from_json,
    load_config,
    refuse_deadlocks,
    to_json,
)
from strawflow.errors import ConfigError
from strawflow.eval_datasets import EvalDataset
from strawflow.native import Role, Roles
from strawflow.prompt_sets import PromptSet
from strawflow.topology import Topology

HOOKS = (
    "rollout.generate",
    "rollout.generate_groups",
    "rollout.sample_filter",
    "rollout.curriculum",
    "assemble.post_process",
    "assemble.convert",
    "assemble.log",
)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        "[rollout]\ntemperature = 0.1\ntop_p = 0.2\nmax_staleness = 3\nengine_args = ['--a', '1']\n"
        "[eval]\ngreedy = false\n",
        encoding="utf-8",
    )
    return path


# ---- precedence


def test_without_anything_given_all_is_default() -> None:
    assert load_config() == RunConfig()


def test_a_file_beats_the_default(toml: Path) -> None:
    config = load_config(toml)
    assert (config.rollout.temperature, config.rollout.top_p, config.rollout.max_staleness) == (0.1, 0.2, 3)
    assert config.rollout.engine_args == ("--a", "1")
    assert config.eval.greedy is False
    assert config.rollout.prompts_per_step == RunConfig().rollout.prompts_per_step


def test_a_variable_beats_the_file_and_a_flag_beats_the_variable(toml: Path) -> None:
    environ = {"STRAWFLOW_ROLLOUT_TEMPERATURE": "0.3", "STRAWFLOW_ROLLOUT_TOP_P": "0.4"}
    config = load_config(toml, flags={"rollout.temperature": "0.5"}, environ=environ)
    assert (config.rollout.temperature, config.rollout.top_p, config.rollout.max_staleness) == (0.5, 0.4, 3)


def test_the_process_environment_is_not_read_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRAWFLOW_RUN_SEED", "7")
    assert load_config().run.seed == 0


def test_variables_of_other_things_are_passed_over() -> None:
    environ = {"STRAWFLOW_FAULT": "commit.before", "STRAWFLOW_JSON": "1", "RUN_SEED": "7", "PATH": "/bin"}
    assert load_config(environ=environ) == RunConfig()


@pytest.mark.parametrize("name", field_names())
def test_every_field_can_be_given_as_flag_and_as_variable(name: str) -> None:
    section, field = name.split(".")
    default = getattr(getattr(RunConfig(), section), field)
    text, value = another(name, default)
    variable = ENV_PREFIX + name.replace(".", "_").upper()
    for config in (load_config(flags={name: text}), load_config(environ={variable: text})):
        assert getattr(getattr(config, section), field) == value
        # and nothing else changed
        assert config.model_copy(update={section: getattr(RunConfig(), section)}) == RunConfig()


def another(name: str, default: Any) -> tuple[str, Any]:
    """Return a text and the value it means, other than the default, that the field allows."""
    choices = {
        "run.durability": "process",
        "data.on_bad_row": "skip",
        "rollout.engine": "fake",
        "rollout.reward": "boxed_math",
        "rollout.reward_shape": "raw",
        "parallel.recompute": "full",
        "parallel.precision": "bf16",
        "rollout.schedule": "sync",
        "rollout.on_new_weights": "park",
        "rollout.reward_model_input": "text",
        "rollout.reward_post_process": "mine:centred",
        "algorithm.advantage": "dr_grpo",
        "guard.on_left_out": "stop",
        "guard.agreement": "stop",
        "algorithm.loss": "gspo",
        "algorithm.aggregation": "rollout",
        "algorithm.old_logprobs": "recomputed",
        "algorithm.mismatch": "token",
        "algorithm.mismatch_mode": "mask",
        "algorithm.kl": "loss",
        "algorithm.kl_estimator": "k2",
        "assemble.failed_member": "drop-group",
        "assemble.stale": "mask",
        "trainer.profile_steps": "10:12",
    }
    if name == "rollout.stop_token_ids":
        return "[5, 7]", (5, 7)
    if name == "data.prompts":
        return "sums.jsonl:2", (PromptSet(name="sums", path="sums.jsonl", weight=2.0),)
    if name == "trainer.roles":
        given = {"actor": {"overrides": {"bucket_size": 7}}}
        return json.dumps(given), Roles(actor=Role(overrides={"bucket_size": 7}))
    if name == "rollout.topology":
        tree = {"models": [{"name": "policy", "server_groups": [{"count": 2}]}]}
        return json.dumps(tree), Topology.model_validate(tree)
    if name == "eval.datasets":
        whole = {"samples_per_prompt": 2, "greedy": False, "max_response_tokens": 9, "reward": "exact"}
        entry = {"name": "sums", **whole, "reward_shape": "raw"}
        return json.dumps([entry]), (EvalDataset.model_validate(entry),)
    if name in choices:
        return choices[name], choices[name]
    if name in HOOKS:
        return "my_hooks:one", "my_hooks:one"
    if name == "rollout.row_rewards":
        return '["mine:score"]', ("mine:score",)
    match default:
        case bool():
            return str(not default).lower(), not default
        case int():
            return str(default + 1), default + 1
        case float():
            return str(default / 2 + 0.125), default / 2 + 0.125
        case tuple():
            return '["--flag", "x y"]', ("--flag", "x y")
        case dict():
            return '{"delay": "1"}', {"delay": "1"}
        case _:
            return "some text", "some text"


def test_no_two_fields_share_a_variable() -> None:
    variables = [name.replace(".", "_") for name in field_names()]
    assert len(set(variables)) == len(variables)


def test_an_empty_text_is_a_value() -> None:
    assert load_config(flags={"data.metadata_key": ""}).data.metadata_key == ""
    assert load_config(environ={"STRAWFLOW_RUN_INDEX_URL": ""}).run.index_url == ""


# ---- what is refused


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rollout.temprature", "did you mean --rollout.temperature?"),
        ("trainer.step", "did you mean --trainer.steps?"),
        ("rolout.top_p", "did you mean --rollout.top_p?"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_nearest_name(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting --{name}") as refused:
        load_config(flags={name: "1"})
    assert hint in str(refused.value)


def test_an_unknown_flag_like_no_other_is_refused_without_a_hint() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(flags={"zzz.qqq": "1"})
    assert "did you mean" not in str(refused.value)


def test_an_unknown_name_in_a_file_is_refused_with_file_name_and_hint(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[trainer]\nstep = 3\n", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    message = str(refused.value)
    assert str(path) in message
    assert "trainer.step" in message
    assert "did you mean trainer.steps?" in message


def test_an_unknown_section_in_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[trainr]\nsteps = 3\n", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"setting trainr: there is no such setting; did you mean trainer\?"
    ):
        load_config(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rollout.temperature", "cold"),
        ("rollout.temperature", "0"),
        ("rollout.temperature", "nan"),
        ("rollout.top_p", "1.5"),
        ("trainer.steps", "0"),
        ("trainer.steps", "2.5"),
        ("run.durability", "eternal"),
        ("eval.greedy", "perhaps"),
        ("rollout.engine_args", "[1"),
        ("rollout.engine_options", '{"a": }'),
        ("rollout.engine_args", "--flag"),
    ],
)
def test_a_bad_value_is_refused_naming_the_field(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load_config(flags={name: text})


def test_a_bad_value_is_told_with_where_it_was_given(toml: Path) -> None:
    variable = "STRAWFLOW_ROLLOUT_TOP_P"
    with pytest.raises(ConfigError, match=r"^--rollout\.temperature: setting rollout\.temperature: "):
        load_config(toml, flags={"rollout.temperature": "hot"}, environ={variable: "0.4"})
    with pytest.raises(ConfigError, match=f"^{variable}: setting rollout.top_p: "):
        load_config(toml, flags={"rollout.temperature": "0.5"}, environ={variable: "most"})
    with pytest.raises(ConfigError, match=r"^STRAWFLOW_ROLLOUT_ENGINE_ARGS: not valid JSON"):
        load_config(toml, environ={"STRAWFLOW_ROLLOUT_ENGINE_ARGS": "[1"})
    toml.write_text("[rollout]\ntemperature = 'hot'\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.toml: setting rollout\.temperature: "):
        load_config(toml, environ={variable: "0.4"})


def test_a_file_that_is_missing_or_no_toml_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file .*absent\.toml"):
        load_config(tmp_path / "absent.toml")
    path = tmp_path / "broken.toml"
    path.write_text("[rollout\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML"):
        load_config(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(path)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)


def test_a_setting_outside_a_section_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("seed = 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="'seed' must be a"):
        load_config(path)


# ---- what is stored


def test_a_configuration_comes_back_from_its_json_as_it_was(toml: Path) -> None:
    config = load_config(
        toml, flags={"rollout.engine_options": '{"delay": "0.1"}', "data.prompts": "päth@[1:]"}
    )
    assert from_json(to_json(config), path="config.json") == config
    assert to_json(from_json(to_json(config), path="config.json")) == to_json(config)


def test_a_stored_configuration_of_another_program_is_refused_naming_file_and_field() -> None:
    with pytest.raises(ConfigError, match=r"config\.json: setting rollout\.beam"):
        from_json('{"rollout": {"beam": 3}}', path="config.json")
    with pytest.raises(ConfigError, match=r"config\.json"):
        from_json("{", path="config.json")


def test_a_configuration_cannot_be_changed() -> None:
    config = RunConfig()
    with pytest.raises(ValidationError):
        config.assemble = AssembleSection()
    with pytest.raises(ValidationError):
        config.rollout.temperature = 0.5


# ---- what follows from it


def test_profiles_say_how_each_kind_of_unit_is_sampled() -> None:
    config = load_config(
        flags={
            "rollout.temperature": "0.7",
            "rollout.top_p": "0.9",
            "rollout.samples_per_prompt": "6",
            "rollout.max_response_tokens": "12",
            "eval.samples_per_prompt": "3",
        }
    )
    profiles = config.profiles()
    shown = {name: (p.purpose, p.num_samples, p.temperature, p.top_p) for name, p in profiles.items()}
    assert shown == {
        "train": ("train", 6, 0.7, 0.9),
        "demo": ("demo", 1, 0.7, 0.9),
        "eval_sampled": ("eval", 3, 1.0, 1.0),
        "eval_greedy": ("eval", 1, 0.0, 1.0),
    }
    assert {p.max_response_tokens for p in profiles.values()} == {12}


def test_total_steps_count_the_warm_start() -> None:
    assert load_config(flags={"warm_start.steps": "5", "trainer.steps": "7"}).total_steps == 12


def test_an_engine_without_an_address_is_refused_when_the_run_is_made() -> None:
    refuse_deadlocks(load_config(flags={"rollout.engine_urls": '["http://a:30000"]'}))
    with pytest.raises(
        ConfigError, match=r"rollout\.engine_urls: 'b:30000' is no address of an engine; write http"
    ):
        refuse_deadlocks(load_config(flags={"rollout.engine_urls": '["http://a:30000", "b:30000"]'}))


@pytest.mark.parametrize("setting", HOOKS)
def test_a_hook_that_is_no_dotted_path_is_refused_before_a_run_is_made(setting: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(flags={setting: "my_hooks.fans_out"})
    assert refused.value.message == (
        f"--{setting}: setting {setting}: 'my_hooks.fans_out' is no dotted path; write package.module:function"
    )
    assert (
        load_config(flags={setting: "my_hooks:fans_out"}) != load_config() == load_config(flags={setting: ""})
    )
