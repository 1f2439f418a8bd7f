"""Hooks that replace a part of the algorithm: told by their parameters, tried by `hook check`, refused where they lie."""

from __future__ import annotations

from typing import Any

import pytest

from strawflow.config import RunConfig
from strawflow.errors import ConfigError
from strawflow_workers.rollout.hooks import load
from strawflow_workers.rollout.hooks.check import check
from strawflow_workers.rollout.hooks.interfaces_algorithm import Reduction

HERE = "tests.unit.test_hooks_of_algorithm:"


def half_rewards(groups: Any) -> Any:
    return [[reward / 2 for reward in group.rewards] for group in groups]


def one_too_few(groups: Any) -> Any:
    return [group.rewards[1:] for group in groups]


def by_rollout(mini_batches: Any) -> Any:
    return [Reduction([1 / r.num_tokens for r in mini], len(mini)) for mini in mini_batches]


def no_weight(mini_batches: Any) -> Any:
    return [Reduction([0.0 for _ in mini], len(mini)) for mini in mini_batches]


def policy_gradient(tokens: Any) -> Any:
    return -tokens.advantages * tokens.logprobs


def centred(tokens: Any) -> Any:
    return -(tokens.advantages - tokens.advantages.mean()) * tokens.logprobs


def without_gradient(tokens: Any) -> Any:
    return -tokens.advantages * tokens.logprobs.detach()


def summed(tokens: Any) -> Any:
    return -(tokens.advantages * tokens.logprobs).sum()


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("half_rewards", "advantage", "0 0.5 0 0.5"),
        ("by_rollout", "reducer", "[0.3333333333333333, 0.2, 1.0] / 3; [0.25] / 1"),
        ("policy_gradient", "loss", "sum "),
    ],
)
def test_a_sound_hook_is_told_by_its_parameters_and_holds(name: str, kind: str, told: str) -> None:
    findings = check(HERE + name)
    assert findings[0].told == f"as {kind}"
    assert all(f.holds for f in findings), findings
    assert told in findings[1].told


@pytest.mark.parametrize(
    ("name", "requirement", "told"),
    [
        (
            "one_too_few",
            "returns an advantage for each member",
            "advantages of shape (3,) for 4 members",
        ),
        ("no_weight", "returns weights and a denominator", "finite and above 0"),
        ("without_gradient", "returns the loss of each token, with a gradient", "not detached"),
        ("summed", "returns the loss of each token, with a gradient", "the loss of each token, (8,), not ()"),
        ("centred", "the loss of a sequence does not depend on others", "another micro-batch"),
    ],
)
def test_what_does_not_hold_of_a_hook_is_told(name: str, requirement: str, told: str) -> None:
    (wrong,) = [f for f in check(HERE + name) if not f.holds]
    assert wrong.requirement == requirement
    assert told in wrong.told


@pytest.mark.parametrize(
    ("setting", "path", "told"),
    [
        ("advantage", HERE + "half_reward", "did you mean 'half_rewards'?"),
        ("loss", "tests.integration.own_hooks:takes_too_much", "expected is \\(tokens\\)"),
        ("aggregation", "no_such_module_anywhere:f", "no module 'no_such_module_anywhere'"),
    ],
)
def test_a_run_whose_hook_cannot_be_used_does_not_start(setting: str, path: str, told: str) -> None:
    config = RunConfig.model_validate({"algorithm": {setting: path}})
    with pytest.raises(ConfigError, match=told.replace("?", r"\?")) as caught:
        load.require(config)
    assert f"algorithm.{setting}" in caught.value.message
    load.require(RunConfig())
