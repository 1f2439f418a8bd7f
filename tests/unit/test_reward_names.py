"""Names of rewards: what each means, what is refused with which hint, and what a row may name."""

from __future__ import annotations

import pytest

from strawflow.config import load_config
from strawflow.errors import ConfigError
from strawflow.reward_names import BUILT_IN, RewardName, parse_reward, parse_row_reward


@pytest.mark.parametrize(
    "text, kind, target, boxed, takes_group",
    [
        *((name, "built_in", name, False, False) for name in BUILT_IN),
        ("boxed_math", "built_in", "math", True, False),
        ("boxed_reasoning_gym:gcd", "reasoning_gym", "gcd", True, False),
        ("reasoning_gym:gcd", "reasoning_gym", "gcd", False, False),
        ("mine.rewards:score", "function", "mine.rewards:score", False, False),
        ("boxed_mine:score", "function", "boxed_mine:score", False, False),
        ("group:mine:Grader.score", "function", "mine:Grader.score", False, True),
        ("remote:https://host/score/", "remote", "https://host/score", False, False),
        ("group:remote:http://h:1", "remote", "http://h:1", False, True),
        ("reward_model:http://h:30000", "reward_model", "http://h:30000", False, False),
    ],
)
def test_a_name_is_taken_apart(text: str, kind: str, target: str, boxed: bool, takes_group: bool) -> None:
    assert parse_reward(text) == RewardName(text, kind, target, boxed, takes_group)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text, told",
    [
        ("mth", "is unknown; did you mean 'math'?"),
        ("boxed_mth", "did you mean 'boxed_math'?"),
        ("code:pythonn", "did you mean 'code:python'?"),
        ("mine.rewards.score", "a function is written with a colon: 'mine.rewards:score'"),
        ("remote:host/score", "write remote:http://HOST:PORT/PATH"),
        ("remote:http://h:port", "write remote:http://HOST:PORT/PATH"),
        ("remote:http://[::1/score", "write remote:http://HOST:PORT/PATH"),
        ("remote:ftp://h/score", "write remote:http://HOST:PORT/PATH"),
        ("reward_model:", "write reward_model:http://HOST:PORT/PATH"),
        ("group:math", "scores one response at a time; leave out 'group:'"),
        ("group:reward_model:http://h", "leave out 'group:'"),
        ("reasoning_gym:", "did you mean 'reasoning_gym:'"),
        ("", "is unknown; known are exact"),
        ("two words", "is unknown; known are exact"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_reward(text)
    assert told in caught.value.message


def test_a_row_may_name_what_strawflow_grades_and_what_the_run_lists() -> None:
    listed = ("mine:score", "remote:http://h:1/score")
    for name in ("math", "boxed_exact", "reasoning_gym:gcd", "code:python", *listed):
        assert parse_row_reward(name, listed=listed).text == name
    for name in ("mine:other", "remote:http://elsewhere", "reward_model:http://h:1"):
        with pytest.raises(ConfigError, match="row_rewards does not list it"):
            parse_row_reward(name, listed=listed)
    with pytest.raises(ConfigError, match="did you mean 'math'"):
        parse_row_reward("maths", listed=listed)


@pytest.mark.parametrize(
    "flags, told",
    [
        ({"rollout.reward": "exakt"}, "rollout.reward: reward 'exakt' is unknown; did you mean 'exact'?"),
        ({"rollout.row_rewards": '["mine.score"]'}, "written with a colon: 'mine:score'"),
        ({"rollout.reward_post_process": "math"}, "'math' is no function; write package.module:function"),
    ],
)
def test_a_configuration_with_an_unknown_reward_is_refused(flags: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(flags=flags)
    assert told in caught.value.message
