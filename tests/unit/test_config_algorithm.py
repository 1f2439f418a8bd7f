"""The section `algorithm`: its earlier name, and combinations that are refused with their reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strawflow.config import RunConfig, from_json, load_config, refuse_senseless, to_json
from strawflow.config_algorithm import ADVANTAGES, AGGREGATIONS, LOSSES, refuse_single_samples
from strawflow.errors import ConfigError


def test_the_configuration_of_an_earlier_run_is_read_with_its_advantage() -> None:
    tree = json.loads(to_json(RunConfig()))
    del tree["algorithm"]
    tree["assemble"]["advantage"] = "dr_grpo"
    found = from_json(json.dumps(tree), path="config.json")
    assert found.algorithm.advantage == "dr_grpo"
    assert found.algorithm.loss == "ppo"
    assert from_json(to_json(found), path="config.json") == found


def test_a_file_may_use_the_earlier_name_and_a_contradiction_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[assemble]\nadvantage = "dr_grpo"\n')
    assert load_config(path).algorithm.advantage == "dr_grpo"
    with pytest.raises(ConfigError, match=r"earlier name of algorithm.advantage, which says 'rloo'"):
        load_config(path, flags={"algorithm.advantage": "rloo"})
    with pytest.raises(ConfigError, match=r"did you mean --algorithm.advantage"):
        load_config(flags={"assemble.advantage": "dr_grpo"})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("advantage", "grppo", "did you mean 'grpo'"),
        ("advantage", "gae", "needs values of a critic"),
        ("loss", "dpo", "needs pairs of one chosen and one rejected response"),
        ("loss", "gsop", "did you mean 'gspo'"),
        ("aggregation", "tokens", "did you mean 'token'"),
    ],
)
def test_a_name_that_is_none_is_refused_with_the_nearest_or_with_what_it_needs(
    field: str, value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.{field}: .*{message}"):
        load_config(flags={f"algorithm.{field}": value})


def test_a_dotted_path_is_taken_in_the_place_of_a_name() -> None:
    flags = {f"algorithm.{name}": "mine:f" for name in ("advantage", "loss", "aggregation")}
    refuse_senseless(load_config(flags=flags))


KL = {"kl": "loss", "kl_coefficient": 0.01}


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"dual_clip": 0.9}, "must be above 1"),
        ({"dual_clip": 3.0, "loss": "cispo"}, "dual_clip bounds the loss `ppo`"),
        ({"mismatch": "token"}, "set algorithm.old_logprobs to recomputed"),
        ({"mismatch_mode": "mask"}, "without algorithm.mismatch does nothing"),
        (
            {
                "mismatch": "token",
                "old_logprobs": "recomputed",
                "mismatch_mode": "mask",
                "mismatch_low": 2.0,
            },
            "every token would be masked",
        ),
        ({"kl": "loss"}, "set both, or neither"),
        ({"kl_coefficient": 0.1}, "set both, or neither"),
        ({"reference": "/some/model"}, "used by algorithm.kl alone"),
        ({**KL, "kl_estimator": "k1"}, "gradient whose mean is 0"),
        ({"kl": "reward", "kl_coefficient": 0.1, "kl_estimator": "unbiased"}, "there is none yet"),
        ({"advantage": "none"}, "nothing to learn from"),
        ({"loss": "reinforce"}, "assemble.mini_batches 2 moves it"),
        ({**KL, "reference": "/no/such/folder"}, "algorithm.reference: /no/such/folder is no Hugging Face"),
        ({"advantage": "none", "teacher": "/no/such"}, "algorithm.teacher: /no/such is no Hugging Face"),
    ],
)
def test_settings_without_sense_are_refused_with_the_reason(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse_senseless(RunConfig.model_validate({"algorithm": algorithm}))


def test_every_name_of_ours_has_a_combination_that_is_allowed() -> None:
    for advantage in (name for name in ADVANTAGES if name != "none"):
        for loss in LOSSES:
            for aggregation in AGGREGATIONS:
                algorithm = {"advantage": advantage, "loss": loss, "aggregation": aggregation}
                refuse_senseless(
                    RunConfig.model_validate({"algorithm": algorithm, "assemble": {"mini_batches": 1}})
                )


def test_one_sample_a_prompt_cannot_be_compared_with_others() -> None:
    for name in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"):
        algorithm = RunConfig.model_validate({"algorithm": {"advantage": name}}).algorithm
        with pytest.raises(ConfigError, match=r"rollout\.samples_per_prompt is 1"):
            refuse_single_samples(algorithm, samples_per_prompt=1)
        refuse_single_samples(algorithm, samples_per_prompt=2)
    whole = RunConfig.model_validate({"algorithm": {"advantage": "reinforce_pp"}}).algorithm
    refuse_single_samples(whole, samples_per_prompt=1)
