"""Verifiers by name, reward shapes and the frames between pool and process; no process is started here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strawflow.errors import ConfigError
from strawflow_workers.rollout.rewards.frames import FrameBuffer, encode_frame
from strawflow_workers.rollout.rewards.spec import RewardOutcome, RewardSpec
from strawflow_workers.rollout.rewards.verifiers import load_verifier

QUICK_LOAD = """
import json, sys
from strawflow_workers.rollout.rewards.verifiers import load_verifier
score = load_verifier(sys.argv[1], settings=json.loads(sys.argv[2])).function
entry = json.loads(sys.argv[3])
scores = [score(text, prompt="", label=entry["answer"], metadata=entry) for text in json.loads(sys.argv[4])]
print(json.dumps([scores, "matplotlib" in sys.modules]))
"""


def gym_scores(name: str, entry: object, answers: list[str], **settings: object) -> tuple[list[float], bool]:
    """Score in a process of its own, as reward processes do; also tell whether the whole package was imported."""
    arguments = [name, json.dumps(settings), json.dumps(entry), json.dumps(answers)]
    done = subprocess.run(
        [sys.executable, "-c", QUICK_LOAD, *arguments], capture_output=True, text=True, check=True
    )
    scores, whole = json.loads(done.stdout)
    return scores, whole


def test_exact_compares_without_outer_white_space() -> None:
    score = load_verifier("exact").function
    assert [score(text, prompt="", label="a b\n", metadata=None) for text in ("a b", " a b ", "ab", "")] == [
        1,
        1,
        0,
        0,
    ]
    with pytest.raises(ValueError, match="no label"):
        score("a", prompt="", label=None, metadata=None)


def test_a_gym_verifier_scores_as_the_package_does_without_importing_all_of_it() -> None:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset("spell_backward", seed=5, size=1, min_word_len=5, max_word_len=5)
    answers = [dataset[0]["answer"], dataset[0]["answer"].upper(), dataset[0]["answer"] + "x", "zzzzz", ""]
    scores, whole = gym_scores("reasoning_gym:spell_backward", dataset[0], answers)
    assert scores == [dataset.score_answer(answer, dataset[0]) for answer in answers]
    assert (scores[0], whole) == (1.0, False)


def test_a_gym_verifier_takes_the_settings_of_its_dataset() -> None:
    entry = {"question": "?", "answer": "5", "metadata": {}}
    assert gym_scores("reasoning_gym:chain_sum", entry, ["5", "6"], max_terms=3)[0][0] == 1.0
    with pytest.raises(subprocess.CalledProcessError) as caught:
        gym_scores("reasoning_gym:chain_sum", entry, ["5"], no_such_setting=1)
    assert "does not take these settings" in caught.value.stderr


def test_without_an_entry_the_row_itself_is_scored() -> None:
    score = load_verifier("reasoning_gym:gcd").function
    assert score("6", prompt="gcd of 12 and 18?", label="6", metadata=None) == 1.0
    assert score("6", prompt="gcd of 12 and 18?", label="6", metadata={"difficulty": 1}) == 1.0
    with pytest.raises(ValueError, match="neither an entry in its metadata nor a label"):
        score("6", prompt="gcd of 12 and 18?", label=None, metadata=None)


@pytest.mark.parametrize(
    "name, message",
    [
        ("exactly", "is unknown; did you mean 'exact'"),
        ("reasoning_gym:", "is unknown; did you mean 'reasoning_gym:'"),
        ("reasoning_gym:spel_backward", "no dataset of that name; did you mean 'spell_backward'"),
        (
            "reasonin_gym:gcd",
            "cannot be loaded: No module named 'reasonin_gym'; did you mean 'reasoning_gym:'",
        ),
        ("no.such.module:function", "cannot be loaded: No module named"),
        ("json:loadz", "cannot be loaded: module 'json' has no attribute 'loadz'; did you mean 'load"),
        ("json:__name__", "is str, not a function"),
        (
            "shutil:which",
            r"got an unexpected keyword argument 'prompt'; it is called with \(response_text, \*, prompt, label, metadata\)",
        ),
        ("group:shutil:which", r"it is called with \(response_texts, "),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_a_configuration_error(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_verifier(name)


def test_what_post_processes_is_asked_to_take_the_texts_by_name() -> None:
    with pytest.raises(ConfigError, match=r"it is called with \(rewards, \*, response_texts, prompt, "):
        load_verifier("shutil:which", post_processes=True)


def test_the_exact_shape_pays_for_full_scores_only() -> None:
    raw, exact = RewardSpec("exact"), RewardSpec("exact", shape="exact")
    scores = (0.0, 0.8, 0.9999999999999999, 1.0, 1.0000000000000002)
    assert [raw.reward_of(score) for score in scores] == list(scores)
    assert [exact.reward_of(score) for score in scores] == [0.0, 0.0, 0.0, 1.0, 0.0]
    with pytest.raises(ConfigError, match="'raw' or 'exact'"):
        RewardSpec("exact", shape="other")  # type: ignore[arg-type]


def test_an_outcome_is_a_score_or_a_failure() -> None:
    spec = RewardSpec("exact", shape="exact")
    assert RewardOutcome.scored(0.5, spec=spec) == RewardOutcome(score=0.5, reward=0.0, failure=None)
    assert RewardOutcome.failed("why") == RewardOutcome(score=None, reward=None, failure="why")


@given(st.lists(st.dictionaries(st.text(), st.text() | st.integers() | st.none())), st.integers(1, 40))
def test_frames_come_out_whole_however_the_stream_is_cut(values: list[object], cut: int) -> None:
    stream = b"".join(map(encode_frame, values))
    frames, out = FrameBuffer(), []
    for start in range(0, len(stream), cut):
        frames.push(stream[start : start + cut])
        out += list(frames.pop_all())
    assert out == values
