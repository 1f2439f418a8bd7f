"""What the verifiers of text make of answers: words, mathematics, letters, constraints, boxes. No process is started here."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import pytest

from strawflow_workers.rollout.rewards.boxed import last_boxed
from strawflow_workers.rollout.rewards.instructions import CHECKS
from strawflow_workers.rollout.rewards.verifiers import load_verifier


def score(
    reward: str, text: str, *, label: str | None = None, metadata: dict[str, Any] | None = None
) -> float:
    return float(load_verifier(reward).function(text, prompt="?", label=label, metadata=metadata))


# ---- F1


@pytest.mark.parametrize(
    "text, label, expected",
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0),
        ("it is the Eiffel Tower", "Eiffel Tower", 2 * 2 / (4 + 2)),
        ("tower tower", "tower", 2 * 1 / (2 + 1)),
        ("Paris", "London", 0.0),
        ("", "London", 0.0),
        ("the", "a", 1.0),  # no word is left of either
        ("U.S.", "us", 1.0),
        ("in 1889", '["the year 1889", "1889"]', 2 * 1 / (2 + 1)),  # the nearest of several
        ("[1]", "[1]", 1.0),  # JSON, but no list of texts
    ],
)
def test_f1_is_the_overlap_of_words_as_in_squad(text: str, label: str, expected: float) -> None:
    assert score("f1", text, label=label) == pytest.approx(expected)


# ---- mathematics


@pytest.mark.parametrize(
    "text, label, expected",
    [
        ("Adding up gives $\\frac{2}{4}$.", "\\frac{1}{2}", 1.0),
        ("The answer is 0.5", "1/2", 1.0),
        ("so x = \\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        ("\\boxed{\\{1, 2\\}}", "$\\{2, 1\\}$", 1.0),
        ("first \\boxed{3}. Then no. \\boxed{4}", "4", 1.0),
        ("The answer is 0.51", "1/2", 0.0),
        ("I do not know", "1/2", 0.0),
        ("", "1/2", 0.0),
    ],
)
def test_math_compares_as_mathematics(text: str, label: str, expected: float) -> None:
    assert score("math", text, label=label) == expected


def test_math_needs_no_signals_and_so_no_main_thread() -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(score("math", "$2$", label="2")))
    thread.start()
    thread.join()
    assert scores == [1.0]


def test_an_error_inside_the_comparison_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    import math_verify.grader

    def broken(*_: Any, **__: Any) -> bool:
        raise RuntimeError("no such simplification")

    monkeypatch.setattr(math_verify.grader, "sympy_expr_eq", broken)
    with pytest.raises(RuntimeError, match="no such simplification"):
        score("math", "$2$", label="2")


def test_a_label_without_mathematics_is_an_error_of_the_row() -> None:
    with pytest.raises(ValueError, match="holds no mathematics"):
        score("math", "2", label="")
    with pytest.raises(ValueError, match="no label"):
        score("math", "2")


# ---- boxes


@pytest.mark.parametrize(
    "text, found",
    [
        ("\\boxed{1}", "1"),
        ("\\boxed{\\frac{1}{2}} or \\boxed {\\sqrt{\\{2\\}}}", "\\sqrt{\\{2\\}}"),
        ("\\boxed{a \\boxed{b} c}", "a \\boxed{b} c"),
        ("\\boxed{1} and \\boxed{2", "1"),  # cut off
        ("\\boxed{\\}}", "\\}"),
        ("\\fboxed{7}", "7"),
        ("\\boxed{}", ""),
        ("boxed{1}", None),
        ("\\boxed 1", None),
        ("", None),
    ],
)
def test_the_last_box_whose_braces_balance_is_the_answer(text: str, found: str | None) -> None:
    assert last_boxed(text) == found


@pytest.mark.parametrize(
    "reward, text, label, expected",
    [
        ("boxed_exact", "cat? \\boxed{ dog }", "dog", 1.0),
        ("boxed_exact", "dog", "dog", 0.0),
        ("boxed_f1", "words \\boxed{the dog} words", "dog", 1.0),
        ("boxed_math", "5 then \\boxed{0.5}", "1/2", 1.0),
        ("boxed_math", "\\boxed{3}, no: \\boxed{\\frac{1}{2}}", "1/2", 1.0),
        ("boxed_math", "1/2", "1/2", 0.0),
        ("boxed_multiple_choice", "The answer is A. \\boxed{B}", "B", 1.0),
    ],
)
def test_a_boxed_reward_sees_the_box_alone(reward: str, text: str, label: str, expected: float) -> None:
    assert score(reward, text, label=label) == expected


# ---- multiple choice


@pytest.mark.parametrize(
    "text, chosen",
    [
        ("B", "B"),
        ("(b)", "B"),
        ("**B**", "B"),
        ("B. Paris", "B"),
        ("Thinking of A and C...\nAnswer: B", "B"),
        ("The correct answer is (B).", "B"),
        ("The answer is **B**, not C.", "B"),
        ("ANSWER: $B$", "B"),
        ("Answer: A\nWait. Answer: B", "B"),
        ("The best option is \\boxed{B}", "B"),
        ("The answer is \\boxed{\\text{B}}", "B"),
        ("So it must be\n(B) Paris", "B"),
        ("I think it is Paris\nParis", "B"),  # the option's own words
        ("The answer is a city", None),
        ("the answer is b", "B"),
        ("Option b) is right", "B"),
        ("A or B", None),
        ("The answer is Z", None),
        ("Be careful", None),
        ("", None),
    ],
)
def test_the_letter_that_a_response_chooses(text: str, chosen: str | None) -> None:
    choices = {"choices": ["Rome", "Paris", "Oslo", "Bonn"]}
    found = [
        letter for letter in "ABCD" if score("multiple_choice", text, label=letter, metadata=choices) == 1.0
    ]
    assert found == ([chosen] if chosen else [])


@pytest.mark.parametrize("label", ["B", "(b)", "B.", "Paris", "1"])
def test_the_right_option_is_a_letter_its_text_or_its_number(label: str) -> None:
    metadata = {"choices": ["Rome", "Paris"]}
    assert score("multiple_choice", "Answer: B", label=label, metadata=metadata) == 1.0
    assert score("multiple_choice", "Answer: A", label=label, metadata=metadata) == 0.0


def test_a_row_that_does_not_tell_the_right_option_is_an_error() -> None:
    for label in ("Madrid", "E", "7"):
        with pytest.raises(ValueError, match="none of the options A to B"):
            score("multiple_choice", "A", label=label, metadata={"choices": ["Rome", "Paris"]})
    with pytest.raises(ValueError, match="no label"):
        score("multiple_choice", "A")
    assert score("multiple_choice", "Answer: J", label="J") == 1.0  # without options, A to J


# ---- instructions

HOLDS_AND_NOT: dict[str, tuple[dict[str, Any], str, str]] = {
    "keywords:existence": ({"keywords": ["sea", "ship"]}, "A Ship at sea", "A shipment at sea"),
    "keywords:forbidden_words": ({"forbidden_words": ["sea"]}, "a search", "the sea"),
    "keywords:frequency": ({"keyword": "tea", "frequency": 2, "relation": "less than"}, "Tea", "tea, tea"),
    "keywords:letter_frequency": ({"letter": "E", "let_frequency": 2}, "tree", "tea"),
    "length_constraints:number_words": ({"num_words": 3, "relation": "at most"}, "don't go now", "a b c d"),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n- b", "* a\n**b**"),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*a* and **b**", "*a* and **"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1 a Section 2 b",
        "Section 1 a Sections",
    ),
    "detectable_format:json_format": ({}, '```json\n{"a": 1}\n```', "{a: 1}"),
    "detectable_format:title": ({}, "<<Spring>>\ntext", "<< >> text"),
    "detectable_content:number_placeholders": ({"num_placeholders": 1}, "Dear [name]", "Dear []"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Yours\nP.S. more", "Yours P.S. more"),
    "change_case:english_lowercase": ({}, "all small 1!", "One big"),
    "change_case:english_capital": ({}, "ALL BIG 1!", "ONE small"),
    "change_case:capital_word_frequency": ({"capital_frequency": 2}, "NO and YES", "NO and yes"),
    "punctuation:no_comma": ({}, "no pause", "a, pause"),
    "startend:end_checker": ({"end_phrase": "That is all."}, "Well. that is all. ", "That is all. Bye"),
    "startend:quotation": ({}, ' "quoted" ', '"quoted'),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Why?"}, "why? Because", "Because. Why?"),
    "combination:two_responses": ({}, "one ****** two", "one ****** one"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_constraint_holds_or_does_not(name: str) -> None:
    given, holds, does_not = HOLDS_AND_NOT[name]
    metadata = {"instruction_id_list": [name], "kwargs": [{**given, "unused_in_this_data_set": None}]}
    assert score("instructions", holds, metadata=metadata) == 1.0
    assert score("instructions", does_not, metadata=metadata) == 0.0
    assert score("instructions", " \n", metadata=metadata) == 0.0


def test_instructions_score_the_share_that_holds() -> None:
    names = ["punctuation:no_comma", "change_case:english_lowercase", "detectable_format:title"]
    assert score("instructions", "a B", metadata={"instruction_id_list": names}) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "metadata, told",
    [
        (None, "instruction_id_list must be a list"),
        ({"instruction_id_list": []}, "instruction_id_list must be a list"),
        ({"instruction_id_list": ["punctuation:no_coma"]}, "did you mean 'punctuation:no_comma'"),
        ({"instruction_id_list": ["keywords:existence"]}, "does not take the arguments {}"),
        (
            {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]},
            "kwargs must be a list of 1 objects",
        ),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 3, "relation": "around"}],
            },
            "the relation 'around' must be",
        ),
    ],
)
def test_a_row_with_constraints_that_cannot_be_checked_is_an_error(
    metadata: dict[str, Any] | None, told: str
) -> None:
    with pytest.raises(ValueError) as caught:
        score("instructions", "text", metadata=metadata)
    assert told in str(caught.value)


# ---- the rest


def test_random_scores_are_zeros_and_ones() -> None:
    assert {score("random", "x") for _ in range(200)} == {0.0, 1.0}


def test_gym_datasets_share_a_process_and_come_boxed() -> None:
    """What rows that name different datasets make of a process that imports each by itself (so not in this one)."""
    code = (
        "from strawflow_workers.rollout.rewards.verifiers import load_verifier\n"
        "import json, sys\n"
        "row = dict(prompt='', metadata=None)\n"
        "one = load_verifier('reasoning_gym:gcd').function('6', label='6', **row)\n"
        "two = load_verifier('reasoning_gym:chain_sum').function('5', label='5', **row)\n"
        "boxed = load_verifier('boxed_reasoning_gym:gcd').function\n"
        "in_box, bare = boxed('of 12: \\\\boxed{6}', label='6', **row), boxed('6', label='6', **row)\n"
        "print(json.dumps([one, two, in_box, bare, 'matplotlib' in sys.modules]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [1.0, 1.0, 1.0, 0.0, False]
