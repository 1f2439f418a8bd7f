"""Evaluation datasets from a YAML file: what they resolve to, and errors that name file, entry and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from strawflow.config import from_json, load_config, to_json
from strawflow.errors import ConfigError

WHOLE = """
defaults:
  samples_per_prompt: 8
  temperature: 0.6
  greedy: false
datasets:
  - name: sums
    prompts: sums.jsonl
    samples_per_prompt: 16
    top_p: 0.95
    max_response_tokens: 512
    reward: tests.fault.rewards:even_share
    reward_shape: raw
    pass_score: 0.5
  - name: words-2
    greedy: true
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "evals.yaml"


def test_an_entry_beats_the_defaults_and_both_beat_what_the_run_has(path: Path) -> None:
    path.write_text(WHOLE)
    flags = {
        "eval.datasets": str(path),
        "rollout.reward": "reasoning_gym:gcd",
        "rollout.max_response_tokens": "99",
    }
    config = load_config(flags=flags)
    sums, words = config.eval.datasets
    assert (sums.samples_per_prompt, sums.temperature, sums.top_p, sums.greedy) == (16, 0.6, 0.95, False)
    assert (sums.max_response_tokens, sums.reward, sums.reward_shape) == (
        512,
        "tests.fault.rewards:even_share",
        "raw",
    )
    assert (words.samples_per_prompt, words.temperature, words.top_p, words.greedy) == (8, 0.6, 1.0, True)
    assert (words.max_response_tokens, words.reward, words.reward_shape) == (99, "reasoning_gym:gcd", "exact")
    profiles = config.profiles()
    assert profiles["eval:sums"].num_samples == 16
    assert profiles["eval:sums"].reward == "tests.fault.rewards:even_share"
    greedy = profiles["eval:words-2:greedy"]
    assert (greedy.num_samples, greedy.temperature, greedy.purpose) == (1, 0.0, "eval")
    assert [(p.profile, p.pass_score) for p in config.eval_profiles()] == [
        ("eval_sampled", 1.0),
        ("eval_greedy", 1.0),
        ("eval:sums", 0.5),
        ("eval:words-2", 1.0),
        ("eval:words-2:greedy", 1.0),
    ]


def test_the_stored_configuration_says_all_of_it_and_needs_the_file_no_more(path: Path) -> None:
    path.write_text(WHOLE)
    config = load_config(flags={"eval.datasets": str(path)})
    path.unlink()
    stored = to_json(config)
    assert from_json(stored, path="config.json") == config
    assert '"samples_per_prompt": 16' in stored
    assert '"reward": "exact"' in stored


def test_a_toml_file_may_name_the_yaml_file_or_hold_the_datasets(path: Path, tmp_path: Path) -> None:
    path.write_text(WHOLE)
    toml = tmp_path / "run.toml"
    toml.write_text(f"[eval]\ndatasets = '{path}'\n")
    assert [d.name for d in load_config(toml).eval.datasets] == ["sums", "words-2"]
    toml.write_text("[[eval.datasets]]\nname = 'sums'\nsamples_per_prompt = 3\n")
    (sums,) = load_config(toml).eval.datasets
    assert (sums.name, sums.samples_per_prompt, sums.greedy) == ("sums", 3, True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "datasets: [{name: a, temprature: 1}]",
            "dataset 1 (a): unknown field temprature; did you mean temperature?",
        ),
        (
            "datasets: [{name: a}, {name: b, top_p: 1.5}]",
            "dataset 2 (b): top_p: Input should be less than or equal to 1",
        ),
        (
            "datasets: [{name: a, temperature: 0}]",
            "dataset 1 (a): temperature: Input should be greater than 0, not 0",
        ),
        (
            "datasets: [{name: a, samples_per_prompt: many}]",
            "dataset 1 (a): samples_per_prompt: Input should be a valid",
        ),
        ("datasets: [{samples_per_prompt: 1}]", "dataset 1: name is missing"),
        ("datasets: [{name: 7}]", "dataset 1: name 7 is no text"),
        ("datasets: [{name: A b}]", "dataset 1 (A b): name: use up to 40 of a-z"),
        (
            "datasets: [{name: prompts}]",
            "dataset 1 (prompts): name: every run has a dataset 'prompts' of its own",
        ),
        ("datasets: [{name: held_out}]", "dataset 1 (held_out): name: every run has"),
        ("datasets: [{name: a}, {name: a}]", "dataset 2 (a): name: dataset 1 is called so already"),
        ("datasets: [a]", "dataset 1 must map fields to values, and is str"),
        (
            "datasets: [{name: a, samples_per_prompt: 0, greedy: false}]",
            "dataset 1 (a): samples_per_prompt is 0 and greedy is false",
        ),
        (
            "datasets: [{name: a, pass_score: .nan}]",
            "dataset 1 (a): pass_score: Input should be a finite number",
        ),
        (
            "datasets: [{name: a, reward_shape: half}]",
            "dataset 1 (a): reward_shape: Input should be 'raw' or 'exact'",
        ),
        (
            "defaults: {top_p: 2}\ndatasets: [{name: a}]",
            "defaults: top_p: Input should be less than or equal to 1",
        ),
        ("defaults: {name: b}\ndatasets: [{name: a}]", "defaults: name differs from dataset to dataset"),
        ("defaults: 3\ndatasets: [{name: a}]", "defaults must map fields to values"),
        ("default: {}\ndatasets: [{name: a}]", "unknown key 'default'; known are defaults and datasets"),
        (
            "datasets: [{name: a, reward: mth}]",
            "dataset 1 (a): reward: reward 'mth' is unknown; did you mean 'math'?",
        ),
        ("datasets: []", "there must be a list `datasets:` with at least one entry"),
        ("", "there must be a list `datasets:`"),
        ("datasets: [{name: a, name: b}]", "key 'name' is given twice"),
        ("datasets: [{name: a", "is not valid YAML"),
        ("datasets: [!!python/object/apply:os.getcwd []]", "is not valid YAML"),
    ],
)
def test_what_is_wrong_is_told_with_file_entry_and_field(path: Path, text: str, told: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(flags={"eval.datasets": str(path)})
    assert refused.value.message.startswith(str(path))
    assert told in refused.value.message
    assert "\n" not in refused.value.message
    if "not valid YAML" in told:
        assert f'in "{path}", line 1' in refused.value.message


def test_a_file_that_is_not_there_or_no_text_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        load_config(flags={"eval.datasets": str(path)})
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(flags={"eval.datasets": str(path)})


def test_datasets_given_in_place_are_checked_alike() -> None:
    with pytest.raises(ConfigError, match=r"eval\.datasets: dataset 1 \(a\): top_p"):
        load_config(flags={"eval.datasets": '[{"name": "a", "top_p": 3}]'})
    assert load_config(flags={"eval.datasets": ""}).eval.datasets == ()
