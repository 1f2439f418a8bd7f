"""Rewards of whole groups, rewards that rows name, and post-processing, with real processes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from strawflow.config import RolloutSection
from strawflow.errors import ConfigError
from strawflow.flow.claim import Prompt
from strawflow.flow.trajectory import Member, failed_member
from strawflow_workers.rollout.rewards import sandbox
from strawflow_workers.rollout.rewards.members import MemberRewards
from strawflow_workers.rollout.rewards.pool import RewardPool
from strawflow_workers.rollout.rewards.scorer import RewardScorer, ScorerOptions
from strawflow_workers.rollout.rewards.spec import RewardOutcome, RewardRequest, RewardSpec

GRADERS = '''

def length(response_text, *, prompt, label, metadata):
    return float(len(response_text))

def ranks(response_texts, *, prompt, label, metadata):
    """Score the place of each response by its length; do what the label says instead."""
    if label == "raise":
        raise ValueError("no ranking")
    if label == "hang":
        while True:
            pass
    if label == "short":
        return [1.0]
    if label == "number":
        return 1.0
    if label == "holes":
        return [float("nan") if text == "bad" else 1.0 for text in response_texts]
    order = sorted(response_texts, key=len)
    return [order.index(text) for text in response_texts]

async def later(response_text, *, label, **row):
    import asyncio
    await asyncio.sleep(0.01)
    if label == "raise":
        raise ValueError("too late")
    return 0.25

def declared(response_texts, **row):
    return [len(response_texts)] * len(response_texts)
declared.takes_group = True

def centred(rewards, *, response_texts, prompt, label, metadata):
    assert len(rewards) == len(response_texts)
    if label == "raise after":
        raise ArithmeticError("no mean")
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]
'''


@pytest.fixture(autouse=True)
def _graders_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "graders.py").write_text(GRADERS)
    (tmp_path / "slow_to_load.py").write_text("import time\ntime.sleep(1.0)\nfrom graders import length\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def with_scorer(
    spec: RewardSpec, body: Callable[[RewardScorer], Coroutine[Any, Any, Any]], **options: Any
) -> Any:
    async def run() -> Any:
        async with RewardScorer(ScorerOptions(spec=spec, **{"timeout_s": 20.0, **options})) as scorer:
            return await body(scorer)

    return asyncio.run(run())


def group_of(*texts: str, **row: Any) -> list[RewardRequest]:
    return [RewardRequest(text, "p", **row) for text in texts]


def settled(spec: RewardSpec, requests: list[RewardRequest], **options: Any) -> list[RewardOutcome]:
    """Score a group as a generator does."""

    async def body(scorer: RewardScorer) -> list[RewardOutcome]:
        outcomes = [RewardOutcome(None, None, None)] * len(requests)
        if not scorer.waits_for_group(requests[0].metadata):
            outcomes = list(await asyncio.gather(*map(scorer.score, requests)))
        return await scorer.settle_group(requests, outcomes)

    found: list[RewardOutcome] = with_scorer(spec, body, **options)
    return found


# ---- groups


@pytest.mark.parametrize("name", ["group:graders:ranks", "graders:declared"])
def test_a_function_of_a_group_is_called_once_with_all_its_responses(name: str) -> None:
    outcomes = settled(RewardSpec(name), group_of("ccc", "a", "bb"))
    expected = [2.0, 0.0, 1.0] if "ranks" in name else [3.0, 3.0, 3.0]
    assert [outcome.score for outcome in outcomes] == expected


@pytest.mark.parametrize(
    "label, why",
    [
        ("raise", "the reward raised ValueError: no ranking"),
        ("hang", "timed out after 0.5 s"),
        ("short", "the reward raised ValueError: a group of 2 needs as many rewards, these are 1"),
        ("number", "the reward raised TypeError: a group's rewards must be a list of numbers, this is float"),
    ],
)
def test_a_group_that_cannot_be_scored_fails_as_a_whole_with_the_reason(label: str, why: str) -> None:
    outcomes = settled(RewardSpec("group:graders:ranks"), group_of("a", "bb", label=label), timeout_s=0.5)
    assert outcomes == [RewardOutcome(None, None, why)] * 2


def test_a_hole_in_a_groups_scores_fails_that_member_alone() -> None:
    good, bad = settled(RewardSpec("group:graders:ranks"), group_of("good", "bad", label="holes"))
    assert good.score == 1.0
    assert bad == RewardOutcome(None, None, "ValueError: a reward must be a finite number, this one is nan")


def test_a_function_may_be_async() -> None:
    (good,) = settled(RewardSpec("graders:later"), group_of("a"))
    (bad,) = settled(RewardSpec("graders:later"), group_of("a", label="raise"))
    assert (good.score, bad.failure) == (0.25, "the reward raised ValueError: too late")


# ---- rewards that rows name


def named(name: str) -> str:
    return json.dumps({"reward": name})


def test_a_row_names_its_own_reward() -> None:
    spec = RewardSpec("exact", row_rewards=("graders:length", "group:graders:ranks"))

    async def body(scorer: RewardScorer) -> list[float | None]:
        rows = [
            RewardRequest("a b", "p", "b a", None),
            RewardRequest("a b", "p", "b a", named("f1")),
            RewardRequest("a b", "p", "b a", '{"rewards": "f1", "other": "\\"reward\\""}'),
            RewardRequest("a b", "p", None, named("graders:length")),
            RewardRequest("Answer: B", "p", "B", named("multiple_choice")),
        ]
        assert not any(scorer.waits_for_group(row.metadata) for row in rows)
        assert scorer.waits_for_group(named("group:graders:ranks"))
        ranked = await scorer.settle_group(group_of("a", "bb", metadata=named("group:graders:ranks")), [])
        return [*[(await scorer.score(row)).score for row in rows], *[outcome.score for outcome in ranked]]

    assert with_scorer(spec, body) == [0.0, 1.0, 0.0, 3.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "name, why",
    [
        ("exakt", "is unknown; did you mean 'exact'?"),
        ("os:getcwd", "the run's rollout.row_rewards does not list it"),
        ("reasoning_gym:spel_backward", "has no dataset of that name; did you mean 'spell_backward'?"),
    ],
)
def test_a_row_whose_reward_cannot_be_had_fails_with_the_reason_and_no_other(name: str, why: str) -> None:
    async def body(scorer: RewardScorer) -> list[RewardOutcome]:
        rows = [RewardRequest("x", "p", "x", named(name)), RewardRequest("x", "p", "x")]
        assert not scorer.waits_for_group(rows[0].metadata)
        return list(await asyncio.gather(*map(scorer.score, rows)))

    unknown, other = with_scorer(RewardSpec("exact"), body)
    assert why in unknown.failure
    assert other.score == 1.0


def test_loading_a_rows_reward_does_not_count_against_its_time(tmp_path: Path) -> None:
    (tmp_path / "math_verify.py").write_text(
        "import time\ntime.sleep(2.5)\ndef parse(text, **_): return [text]\ndef verify(*_, **__): return True\n"
    )

    async def run() -> tuple[list[RewardOutcome], list[int], list[int]]:
        async with RewardPool(RewardSpec("exact"), num_processes=1, timeout_s=1.5) as pool:
            before = pool.pids
            request = RewardRequest("x", "p", "x")
            return [await pool.score(request, reward="math") for _ in range(2)], before, pool.pids

    outcomes, before, after = asyncio.run(run())
    assert [outcome.score for outcome in outcomes] == [1.0, 1.0]
    assert set(before) <= set(after)


def test_a_listed_reward_that_cannot_be_loaded_is_told_at_the_start() -> None:
    async def body(scorer: RewardScorer) -> None:
        raise AssertionError("it has started")

    for spec, told in (
        (RewardSpec("exact", row_rewards=("graders:longth",)), "did you mean 'length'"),
        (RewardSpec("exact", post_process="graders:centered"), "did you mean 'centred'"),
        (RewardSpec("graders:rank"), "did you mean 'ranks'"),
    ):
        with pytest.raises(ConfigError, match=told):
            with_scorer(spec, body)


def test_what_this_host_lacks_for_a_reward_is_told_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two processes of a host without namespaces find the same out."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nsys.path[:0] = {[str(Path(sandbox.__file__).parents[3])]!r}\n"
        "import strawflow_workers.rollout.rewards.sandbox as sandbox\nsandbox.walls = lambda: frozenset()\n"
    )

    async def body(scorer: RewardScorer) -> None:
        while len(scorer._pool.pids) < 2:
            await asyncio.sleep(0.02)

    with caplog.at_level(logging.WARNING):
        with_scorer(RewardSpec("code:python"), body, num_processes=2)
    told = [record.message for record in caplog.records if "it can reach the network" in record.message]
    assert told == ["code under test is not walled in whole: it can reach the network"]


# ---- post-processing


def test_post_processing_turns_a_groups_rewards_into_others_and_leaves_the_scores() -> None:
    spec = RewardSpec("graders:length", post_process="graders:centred")
    outcomes = settled(spec, group_of("a", "bbb"))
    assert outcomes == [RewardOutcome(1.0, -1.0, None), RewardOutcome(3.0, 1.0, None)]


def test_post_processing_sees_the_members_that_have_a_reward() -> None:
    spec = RewardSpec("group:graders:ranks", post_process="graders:centred")
    good, bad, also = settled(spec, group_of("good", "bad", "also", label="holes"))
    assert [good.reward, also.reward] == [0.0, 0.0]
    assert bad.reward is None
    assert "must be a finite number" in (bad.failure or "")


def test_post_processing_that_raises_fails_the_group_with_the_reason() -> None:
    spec = RewardSpec("graders:length", post_process="graders:centred")
    outcomes = settled(spec, group_of("a", "b", label="raise after"))
    why = "post-processing: the reward raised ArithmeticError: no mean"
    assert outcomes == [RewardOutcome(None, None, why)] * 2


def test_a_post_processed_group_that_nobody_could_score_keeps_its_failures() -> None:
    spec = RewardSpec("group:graders:ranks", post_process="graders:centred")
    outcomes = settled(spec, group_of("a", "b", label="raise"))
    assert {outcome.failure for outcome in outcomes} == {"the reward raised ValueError: no ranking"}


# ---- members


def test_members_that_failed_before_take_no_part_in_their_groups_reward() -> None:
    prompt = Prompt(prompt="p", prompt_format="text", label=None, label_format=None, metadata=None)

    def sampled(number: int, text: str) -> Member:
        return Member(number, "finished", [1], [-0.1], "v", "stop", None, response_text=text)

    async def body(scorer: RewardScorer) -> list[Member]:
        rewards = MemberRewards(scorer, prompt, [5])
        members = [sampled(0, "ccc"), failed_member(1, "engine: aborted"), sampled(2, "a")]
        members = [await rewards.reward(member) for member in members]
        assert [member.reward for member in members] == [None, None, None]
        return await rewards.settle(members)

    members = with_scorer(RewardSpec("group:graders:ranks"), body)
    assert [(m.status, m.reward, m.failure) for m in members] == [
        ("finished", 1.0, None),
        ("failed", None, "engine: aborted"),
        ("finished", 0.0, None),
    ]
    for member in members:
        member.check()


def test_a_group_with_a_partial_member_is_not_settled() -> None:
    prompt = Prompt(prompt="p", prompt_format="text", label=None, label_format=None, metadata=None)
    ended = Member(0, "finished", [1], [-0.1], "v", "stop", 1.0, 1.0, response_text="a")
    partial = Member(1, "partial", [1], [-0.1], "v", "abort", None)

    async def body(scorer: RewardScorer) -> list[Member]:
        rewards = MemberRewards(scorer, prompt, [5])
        return await rewards.settle([ended, await rewards.reward(partial)])

    spec = RewardSpec("graders:length", post_process="graders:centred")
    assert with_scorer(spec, body) == [ended, partial]


def test_the_options_come_from_the_configuration() -> None:
    section = RolloutSection(
        reward="math",
        reward_shape="raw",
        reward_processes=3,
        reward_timeout_s=7.0,
        reward_concurrency=9,
        reward_retries=1,
        reward_model_input="text",
        reward_post_process="graders:centred",
        row_rewards=("graders:length",),
    )
    assert ScorerOptions.of(section) == ScorerOptions(
        spec=RewardSpec("math", "raw", row_rewards=("graders:length",), post_process="graders:centred"),
        num_processes=3,
        timeout_s=7.0,
        concurrency=9,
        retries=1,
        reward_model_input="text",
    )
