"""Hooks before any run: dotted paths, parameters, and the contract test that users run."""

from __future__ import annotations

import asyncio
import json
import textwrap
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strawflow.config import RunConfig
from strawflow.errors import ConfigError, CorruptPackError, InvalidInputError
from strawflow.flow.trajectory import Member, failed_member
from strawflow_workers.entry import main
from strawflow_workers.rollout.hooks import load
from strawflow_workers.rollout.hooks.check import check
from strawflow_workers.rollout.hooks.interfaces import Sample, TurnKey
from strawflow_workers.rollout.hooks.made_up import CheckEngine
from strawflow_workers.rollout.hooks.slime import arguments
from strawflow_workers.rollout.hooks.turns import TurnSession

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


def test_two_hooks_that_make_rollouts_are_refused() -> None:
    both = {"generate": HERE + "fans_out", "generate_groups": HERE + "makes_a_claim"}
    with pytest.raises(ConfigError, match="name one of them"):
        load.require(RunConfig.model_validate({"rollout": both}))
    with pytest.raises(
        ConfigError, match=r"expected is async \(groups, engines\), or \(args, rollout_id, data_source\)"
    ):
        load.load("generate_groups", SLIME + "generate", arguments(RunConfig()))


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
        HERE + "three_turns",
        HERE + "makes_a_claim",
        HERE + "turns_of_a_claim",
        SLIME + "generate_rollout",
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
        (
            HERE + "forgets_where_it_was",
            "goes on at each saved turn as if never broken off",
            "broken off after turn 1 it made another rollout; begin from session.turn",
        ),
        (HERE + "changes_its_mind", "says the same of the same", "asked again after a restart"),
        (
            HERE + "takes_too_much",
            "can be imported and called with the right parameters",
            "give --kind, one of generate",
        ),
        (
            "tests.fault.rewards:constant",
            "can be imported and called with the right parameters",
            "a reward is tried with `strawflow reward check`",
        ),
        (HERE + "makes_no_segment", "returns a rollout", "or a Rollout; got ['text']"),
        (
            HERE + "forgets_a_group",
            "returns a rollout for each sample, nested alike",
            "groups of [4, 1] members came back for groups of [4, 4, 1]",
        ),
        (
            SLIME + "samples_beyond_the_claim",
            "returns a rollout for each sample, nested alike",
            "asked for 2 groups of a claim of 1: strawflow claims as many as it has room for; over-sampling is",
        ),
        (SLIME + "forgets_logprobs", "returns a rollout", "ask the engine with return_logprob"),
    ],
)
def test_unsound_hooks_fail_it_with_what_to_do(path: str, requirement: str, told: str) -> None:
    (failed,) = [f for f in check(path) if not f.holds]
    assert failed.requirement == requirement
    assert told in failed.told


@pytest.mark.parametrize(
    "kind, path, told",
    [
        (
            "post_process",
            HERE + "spreads_rewards",
            "4 of 4 rows, 4 of 4 rows, 4 of 4 rows, 3 of 3 rows, 8 of 8 rows",
        ),
        (
            "convert",
            HERE + "trains_last_segments",
            "3 of 4 rows, 3 of 4 rows, 3 of 4 rows, 2 of 3 rows, 3 of 8 rows",
        ),
        ("post_process", SLIME + "centres_rewards", "8 of 8 rows"),
        ("convert", SLIME + "to_train_data", "8 of 8 rows"),
    ],
)
def test_hooks_that_shape_what_is_trained_pass_the_contract_test(kind: str, path: str, told: str) -> None:
    imported, made, same = check(path, kind)
    assert [imported.holds, made.holds, same.holds] == [True] * 3
    assert made.told.endswith(told)


@pytest.mark.parametrize(
    "kind, path, told",
    [
        ("post_process", HERE + "forgets_a_member", "3 rewards for 4 members that did not fail"),
        ("post_process", HERE + "says_nothing", "it must return a PostProcessed, it returned None"),
        ("convert", HERE + "says_nothing", "it must return a list of TrainingRow"),
        ("convert", HERE + "invents_a_segment", "member 0, segment 9: there is no such segment"),
        ("convert", HERE + "trains_what_was_not_sampled", "trains a token that no weights sampled"),
        ("convert", HERE + "shortens_a_list", "16 response tokens, but {'logprobs': 15}"),
        ("post_process", SLIME + "keeps_even_groups", "it must return (raw_rewards, rewards)"),
        (
            "convert",
            SLIME + "adds_a_row",
            "5 tokens for 4 samples: strawflow keeps a row for each stored segment",
        ),
        ("convert", SLIME + "changes_the_response", "are others than those that were sampled"),
        ("convert", SLIME + "needs_a_teacher", "has no use for teacher_log_probs; read are tokens"),
        ("convert", SLIME + "centres_rewards", "it must return a dict"),
        ("convert", SLIME + "postprocesses_tensors", "is slime's rollout_data_postprocess"),
        ("log", SLIME + "postprocesses_tensors", "belongs into assemble.post_process or assemble.convert"),
    ],
)
def test_what_would_train_something_else_is_refused_with_why(kind: str, path: str, told: str) -> None:
    (failed,) = [f for f in check(path, kind) if not f.holds]
    assert told in failed.told


def test_a_kind_told_by_parameters_that_others_have_too_is_told_with_the_others() -> None:
    imported, *_ = check(HERE + "spreads_rewards")
    assert imported.told == "as group_filter (if it is another, give --kind post_process or convert)"
    assert [check(HERE + "spreads_rewards", "post_process")[0].told, check(HERE + "prints")[0].told] == [
        "as post_process",
        "as log",
    ]


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


def session_of(saved: Member | None = None, **sampling: Any) -> TurnSession:
    engine = CheckEngine()
    sample = Sample(
        unit_id=1,
        member=2,
        prompt="a",
        prompt_format="text",
        prompt_tokens=[97],
        sampling={"max_new_tokens": 20, **sampling},
        purpose="train",
    )
    engine.begin(sample, saved)
    return engine.session()


@pytest.mark.parametrize(
    "state", [None, b"", b"\x00{\n}", {"board": [1, 2.5, None], "text": "\n"}, "text", 3]
)
def test_a_session_goes_on_with_state_and_segments_as_they_were_saved(state: Any) -> None:
    session = session_of()
    asyncio.run(session.sample())
    session.add_environment([7, 8])
    session.save(0)
    session.begin_segment([1, 2, 3])
    session.add_environment([9])
    session.segments[1].text = "told"
    session.save(state)
    session.add_environment([10])
    again = session_of(session.saved)
    assert (again.turn, again.state) == (2, state)
    first, second = again.segments
    assert (first.tokens, first.logprobs) == (session.segments[0].tokens, session.segments[0].logprobs)
    assert first.loss_mask == [1] * 17 + [0, 0]
    assert [bool(version) for version in first.versions] == [True] * 17 + [False] * 2
    assert (second.tokens, second.loss_mask, second.text, second.prompt_tokens) == (
        [9],
        [0],
        "told",
        [1, 2, 3],
    )


def test_a_state_comes_back_alike_with_and_without_a_break() -> None:
    session = session_of()
    state = {1: (2, 3)}
    session.save(state)
    state[1] = (4, 5)
    assert session.state == session_of(session.saved).state == {"1": [2, 3]}


def test_a_session_never_samples_beyond_the_samples_limit() -> None:
    session = session_of(max_new_tokens=10)
    session.add_environment([7] * 4)
    found = asyncio.run(session.sample({"max_new_tokens": 100}))
    assert (len(found.tokens), found.finish_reason, session.tokens_left) == (6, "length", 0)
    assert asyncio.run(session.sample()).tokens == []
    session.begin_segment([1])
    assert session.tokens_left == 10


def test_what_cannot_be_stored_is_refused_when_it_is_saved() -> None:
    session = session_of()
    session.save({"turn": 1})
    for state in (object(), float("nan"), {1, 2}):
        with pytest.raises((TypeError, ValueError)):
            session.save(state)
    session.add_environment([7])
    session.segments[0].loss_mask = [1, 1]
    with pytest.raises(InvalidInputError, match="equally many"):
        session.save()
    assert (session.turn, session.state, session_of(session.saved).turn) == (1, {"turn": 1}, 1)
    with pytest.raises(CorruptPackError, match="none that a session wrote"):
        session_of(replace(session.saved or failed_member(0, ""), environment=b"[]"))


def test_calls_of_one_turn_have_keys_of_their_own_and_sync_tools_run_in_a_thread() -> None:
    session = session_of()
    caller = threading.get_ident()

    def tool(text: str, *, key: TurnKey) -> tuple[str, TurnKey, bool]:
        return text, key, threading.get_ident() == caller

    async def turns() -> list[Any]:
        told = [await session.call(tool, "a"), await session.call(tool, "b")]
        session.save()
        return [*told, await session.call(tool, "c")]

    told = asyncio.run(turns())
    assert [text for text, _, _ in told] == ["a", "b", "c"]
    assert not any(in_loop for _, _, in_loop in told)
    assert [(key.turn, key.call, key.member) for _, key, _ in told] == [(0, 0, 2), (0, 1, 2), (1, 0, 2)]
    assert len({key.content for _, key, _ in told}) == 1
    session.add_environment([7])
    (_, key, _) = asyncio.run(session.call(tool, "d"))
    assert key.content != told[0][1].content
