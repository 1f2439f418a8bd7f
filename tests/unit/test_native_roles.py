"""Megatron's settings as a run keeps them, and the file of what each role overrides; without Megatron."""

from __future__ import annotations

from pathlib import Path

import pytest

from strawflow.cli.native import split_native_flags
from strawflow.config import from_json, load_config, to_json
from strawflow.errors import ConfigError


def test_settings_of_a_file_are_kept_with_underscores_and_read_back_as_they_are(tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(
        '[trainer.megatron]\nrecompute-granularity = "full"\nmoe_z_loss_coeff = 1.0\nbucket_size = 4\n'
        'recompute_modules = ["mlp", "core_attn"]\nbf16 = false\n'
    )
    config = load_config(toml)
    expected = {
        "recompute_granularity": "full",
        "moe_z_loss_coeff": 1.0,
        "bucket_size": 4,
        "recompute_modules": ("mlp", "core_attn"),
        "bf16": False,
    }
    assert dict(config.trainer.megatron) == expected
    again = from_json(to_json(config), path="config.json").trainer.megatron
    assert again == expected
    assert [type(value) for value in again.values()] == [str, float, int, tuple, bool]


def test_a_setting_in_two_spellings_is_refused() -> None:
    with pytest.raises(ConfigError, match="bucket_size is given twice: as bucket_size"):
        load_config(flags={"trainer.megatron": '{"bucket-size": 1, "bucket_size": 2}'})


def test_a_role_file_is_kept_as_a_table(tmp_path: Path) -> None:
    path = tmp_path / "roles.yaml"
    path.write_text("actor:\n  overrides:\n    recompute-granularity: selective\n    bucket-size: 40\n")
    config = load_config(flags={"trainer.roles": str(path)})
    stored = from_json(to_json(config), path="config.json").trainer.roles
    assert stored != ""
    assert stored.actor.overrides == {"recompute_granularity": "selective", "bucket_size": 40}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("actr: {}", "unknown role actr; did you mean actor"),
        (
            "critic: {overrides: {bf16: true}}",
            "critic: this trainer has no such model, and its overrides would be ignored",
        ),
        ("actor: {override: {}}", "actor: override: there is no such field"),
        ("actor: {overrides: {a: {b: 1}}}", "actor: overrides: a: give a text, a number"),
        ("actor: {overrides: {a-b: 1, a_b: 2}}", "actor: overrides: a_b is given twice"),
        ("actor: {}\nactor: {}", "key 'actor' is given twice"),
        ("- actor", "there must be a table of roles"),
    ],
)
def test_a_role_file_that_would_not_be_followed_is_refused_by_name_and_place(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "roles.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        load_config(flags={"trainer.roles": str(path)})
    assert str(path) in str(refused.value)


def test_flags_that_are_not_the_commands_are_taken_apart_with_their_values() -> None:
    line = [
        "a",
        "--use-x",
        "--sizes",
        "1",
        "-2",
        "--json",
        "--rate=-3",
        "--config",
        "f",
        "--no-bias",
        "--",
        "b",
    ]
    assert split_native_flags(line, own={"--json", "--config"}) == (
        ["--use-x", "--sizes", "1", "-2", "--rate=-3", "--no-bias"],
        ["a", "--json", "--config", "f", "--", "b"],
    )


@pytest.mark.parametrize("text", ["10", "12:10", "0:3", "a:b", "1:"])
def test_a_profile_window_that_names_no_steps_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write FIRST:LAST, such as 10:12"):
        load_config(flags={"trainer.profile_steps": text})
