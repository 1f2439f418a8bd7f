"""The reward `multiple_choice`: the letter that a response chooses against the right one, as in GPQA and MMLU.

1. The right letter is the label ("B", "(B)", "B.") or, where `metadata.choices` lists the options, their text or number from 0.
2. A response that chooses nothing, or several, scores 0; a row that does not tell what is right is a failure.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from strawflow_workers.rollout.rewards.boxed import last_boxed

_MAX_CHOICES = 10
"""A to J where a row does not list its options: MMLU-Pro has ten."""
_DRESSED = r"(?:\*\*|\$|\\text\{|\\mathrm\{|\\textbf\{|[\s(\[{<:\"'`])*"
_AFTER = r"(?![\w'])"
_STATED = re.compile(
    rf"(?i:answer|choice|option)(?i:\s+(?:is|would\s+be|must\s+be))?\s*[:=]?{_DRESSED}"
    rf"(?:([A-Z]){_AFTER}|([a-z])(?=\s*(?:[)\]}}.:;,*$]|$)))",  # "the answer is a city" chooses nothing
    re.MULTILINE,
)
_ALONE = re.compile(rf"{_DRESSED}([A-Z])(?:\*\*|[\s)\]}}>.:\"'`$])*", re.IGNORECASE)


def multiple_choice(
    response_text: str, *, prompt: str, label: str | None, metadata: Mapping[str, Any] | None
) -> float:
    """Score 1 where the response chooses the right option, else 0."""
    del prompt
    choices = _choices(metadata)
    letters = string.ascii_uppercase[: len(choices) or _MAX_CHOICES]
    return float(_chosen(response_text, choices, letters) == _right(label, choices, letters))


def _choices(metadata: Mapping[str, Any] | None) -> Sequence[str]:
    choices = (metadata or {}).get("choices", [])
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("metadata.choices must be a list of texts")
    if len(choices) > len(string.ascii_uppercase):
        raise ValueError(f"metadata.choices holds {len(choices)} options; there are 26 letters")
    return choices


def _right(label: str | None, choices: Sequence[str], letters: str) -> str:
    if label is None:
        raise ValueError("the row has no label to compare with")
    label = label.strip()
    if label in choices:
        return letters[choices.index(label)]
    if choices and label.isdecimal() and int(label) < len(choices):
        return letters[int(label)]
    found = _ALONE.fullmatch(label)
    if found is None or found[1].upper() not in letters:
        raise ValueError(f"the label {label[:100]!r} is none of the options {letters[0]} to {letters[-1]}")
    return found[1].upper()


def _chosen(response_text: str, choices: Sequence[str], letters: str) -> str | None:
    """Return the letter chosen: boxed, else stated last ("the answer is (B)"), else alone on the last line."""
    boxed = last_boxed(response_text)
    if boxed is not None:
        return _named(boxed, choices, letters)
    stated = [(found[1] or found[2]).upper() for found in _STATED.finditer(response_text)]
    if stated := [letter for letter in stated if letter in letters]:
        return stated[-1]
    lines = response_text.strip().splitlines()
    return _named(lines[-1], choices, letters) if lines else None


def _named(text: str, choices: Sequence[str], letters: str) -> str | None:
    """Return the letter that a text is, behind which the option's own words may follow, or whose option it is."""
    text = text.strip()
    alone = _ALONE.fullmatch(text) or re.match(rf"{_DRESSED}([A-Z])(?:\*\*)?\s*[).:\]]", text)
    if alone is not None and alone[1].upper() in letters:
        return alone[1].upper()
    found = [letter for letter, choice in zip(letters, choices, strict=False) if choice.strip() == text]
    return found[0] if len(found) == 1 else None
