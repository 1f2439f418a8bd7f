"""The reward `instructions`: constraints that a program can check, named as in IFEval (Zhou et al. 2023, arXiv:2311.07911).

The row's metadata holds `instruction_id_list`, names of the table CHECKS, and `kwargs`, one object for each (nulls count as
absent), which is the form of the IFEval data set. The score is the share of constraints that hold; with the reward shape
`exact` all must. Left out are the constraints of IFEval that need a language detector or a sentence splitter.

A name that is not in the table, or an argument that is missing, is a failure of the row, never a constraint that does not hold.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[..., bool]

_BULLET = re.compile(r"^\s*(?:\*(?!\*)|-)\s*\S.*$", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*[^*\n]+\*\*|\*[^*\n]+\*")
_TITLE = re.compile(r"<<[^\n]+>>")
_PLACEHOLDER = re.compile(r"\[[^\[\]]+\]")
_WORD = re.compile(r"\w[\w'-]*")


def instructions(
    response_text: str, *, prompt: str, label: str | None, metadata: Mapping[str, Any] | None
) -> float:
    """Score the share of the row's constraints that the response meets; a blank response meets none."""
    del prompt, label
    names = (metadata or {}).get("instruction_id_list")
    if not isinstance(names, list) or not names:
        raise ValueError("metadata.instruction_id_list must be a list that names the constraints")
    arguments = (metadata or {}).get("kwargs") or [{}] * len(names)
    if not isinstance(arguments, list) or len(arguments) != len(names):
        raise ValueError(f"metadata.kwargs must be a list of {len(names)} objects, one for each constraint")
    held = [_holds(response_text, name, given or {}) for name, given in zip(names, arguments, strict=True)]
    return sum(held) / len(held) if response_text.strip() else 0.0


def _holds(text: str, name: str, given: Mapping[str, Any]) -> bool:
    check = CHECKS.get(name)
    if check is None:
        near = difflib.get_close_matches(str(name), CHECKS, n=1)
        raise ValueError(
            f"no constraint is named {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    arguments = {key: value for key, value in given.items() if value is not None}
    try:
        return check(text, **arguments)
    except TypeError as error:
        raise ValueError(f"constraint {name!r} does not take the arguments {arguments}: {error}") from error


def _compared(count: int, bound: int, relation: str) -> bool:
    match relation:
        case "at least":
            return count >= bound
        case "at most":
            return count <= bound
        case "less than":
            return count < bound
    raise ValueError(f"the relation {relation!r} must be 'at least', 'at most' or 'less than'")


def _occurrences(text: str, keyword: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(keyword)}(?!\w)", text, re.IGNORECASE))


# ---- keywords


def _existence(text: str, *, keywords: list[str]) -> bool:
    return all(_occurrences(text, keyword) for keyword in keywords)


def _forbidden_words(text: str, *, forbidden_words: list[str]) -> bool:
    return not any(_occurrences(text, word) for word in forbidden_words)


def _frequency(text: str, *, keyword: str, frequency: int, relation: str = "at least") -> bool:
    return _compared(_occurrences(text, keyword), frequency, relation)


def _letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str = "at least") -> bool:
    return _compared(text.lower().count(letter.lower()), let_frequency, let_relation)


# ---- length


def _number_words(text: str, *, num_words: int, relation: str = "at least") -> bool:
    return _compared(len(_WORD.findall(text)), num_words, relation)


def _number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Paragraphs are parted by a line of three asterisks."""
    parts = re.split(r"\s*\*\*\*\s*", text.strip())
    return len(parts) == num_paragraphs and all(part.strip() for part in parts)


# ---- format


def _number_bullets(text: str, *, num_bullets: int) -> bool:
    return len(_BULLET.findall(text)) == num_bullets


def _number_highlights(text: str, *, num_highlights: int) -> bool:
    return sum(bool(found.strip("* ")) for found in _HIGHLIGHT.findall(text)) >= num_highlights


def _multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"(?<!\w){re.escape(section_spliter)}\s*\d+", text)) >= num_sections


def _json_format(text: str) -> bool:
    body = re.sub(r"^```(?:json)?\s*\n|\n?```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(body)
    except json.JSONDecodeError:
        return False
    return True


def _title(text: str) -> bool:
    return any(found.strip("<> ") for found in _TITLE.findall(text))


def _number_placeholders(text: str, *, num_placeholders: int) -> bool:
    return len(_PLACEHOLDER.findall(text)) >= num_placeholders


def _postscript(text: str, *, postscript_marker: str) -> bool:
    return re.search(rf"^\s*{re.escape(postscript_marker)}\s*\S", text, re.MULTILINE) is not None


# ---- case, punctuation, beginning and end


def _lowercase(text: str) -> bool:
    return text == text.lower()


def _capital(text: str) -> bool:
    return text == text.upper()


def _capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: str = "at least") -> bool:
    return _compared(sum(word.isupper() for word in _WORD.findall(text)), capital_frequency, capital_relation)


def _no_comma(text: str) -> bool:
    return "," not in text


def _end_checker(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text.startswith('"') and text.endswith('"')


def _repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


CHECKS: dict[str, Check] = {
    "keywords:existence": _existence,
    "keywords:forbidden_words": _forbidden_words,
    "keywords:frequency": _frequency,
    "keywords:letter_frequency": _letter_frequency,
    "length_constraints:number_words": _number_words,
    "length_constraints:number_paragraphs": _number_paragraphs,
    "detectable_format:number_bullet_lists": _number_bullets,
    "detectable_format:number_highlighted_sections": _number_highlights,
    "detectable_format:multiple_sections": _multiple_sections,
    "detectable_format:json_format": _json_format,
    "detectable_format:title": _title,
    "detectable_content:number_placeholders": _number_placeholders,
    "detectable_content:postscript": _postscript,
    "change_case:english_lowercase": _lowercase,
    "change_case:english_capital": _capital,
    "change_case:capital_word_frequency": _capital_word_frequency,
    "punctuation:no_comma": _no_comma,
    "startend:end_checker": _end_checker,
    "startend:quotation": _quotation,
    "combination:repeat_prompt": _repeat_prompt,
    "combination:two_responses": _two_responses,
}
"""Constraint by IFEval's name; the arguments after `text` are those of its `kwargs`."""
