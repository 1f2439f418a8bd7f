"""Rewards that compare text with the label: `exact` and `f1`."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact(response_text: str, *, prompt: str, label: str | None, metadata: Mapping[str, Any] | None) -> float:
    """Score 1 where the response is the label, white space around both aside, else 0."""
    del prompt, metadata
    return float(response_text.strip() == _required(label).strip())


def f1(response_text: str, *, prompt: str, label: str | None, metadata: Mapping[str, Any] | None) -> float:
    """Score the overlap of words with the label, or with the nearest of several: a JSON list of answers.

    The measure of SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1): both texts in lower case, without
    punctuation and the articles a, an, the; F1 of the two bags of words. Where one of them holds no word then, 1 if
    both do, else 0 (as in SQuAD 2.0, arXiv:1806.03822).
    """
    del prompt, metadata
    words = _words(response_text)
    return max(_f1(words, _words(answer)) for answer in _answers(_required(label)))


def _required(label: str | None) -> str:
    if label is None:
        raise ValueError("the row has no label to compare with")
    return label


def _answers(label: str) -> list[str]:
    """Return the accepted answers: a label that is a JSON list of texts holds several."""
    if label.lstrip().startswith("["):
        try:
            found = json.loads(label)
        except json.JSONDecodeError:
            return [label]
        if found and all(isinstance(answer, str) for answer in found):
            return list(found)
    return [label]


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _f1(response: list[str], answer: list[str]) -> float:
    if not response or not answer:
        return float(response == answer)
    common = (Counter(response) & Counter(answer)).total()
    # 2PR / (P + R) with P = common / len(response), R = common / len(answer)
    return 2 * common / (len(response) + len(answer))
