"""The reward `math`: does the response's answer equal the label, as mathematics? Decided by the package `math-verify`.

1. 1 or 0: equal or not. A response in which no answer is found is a 0; a label that cannot be read is a failure.
2. Errors inside the comparison are raised, never counted as unequal. math-verify's own time limits hang on signals and are off
   here: the pool kills the process of a comparison that takes too long, and that one response is a failure.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from strawflow.errors import ConfigError


def load() -> Callable[..., float]:
    """Return the verifier.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        package = importlib.import_module("math_verify")
    except ImportError as error:
        raise ConfigError(f"reward 'math' cannot be loaded: {error}; pip install math-verify") from error
    # It warns once that nobody limits its time: the pool does.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    # The first comparisons build parsers and tables, for longer than some runs give a reward: part of loading.
    for one, other in (("$\\frac{1}{2}$", "0.5"), ("$x^2 + 2x + 1$", "$(x + 1)^2$")):
        _equal(package, _parse(package, one), _parse(package, other))

    @lru_cache(maxsize=1024)  # all members of a group have the same label
    def gold(label: str) -> list[Any]:
        found = _parse(package, label) if _says_where(label) else _parse(package, f"${label}$")
        found = found or _parse(package, label)
        if not found:
            raise ValueError(f"the label {label[:200]!r} holds no mathematics that math-verify can read")
        return found

    def score(
        response_text: str, *, prompt: str, label: str | None, metadata: Mapping[str, Any] | None
    ) -> float:
        del prompt, metadata
        if label is None:
            raise ValueError("the row has no label to compare with")
        expected = gold(label.strip())
        return float(_equal(package, expected, _parse(package, response_text)))

    return score


def _equal(package: Any, expected: list[Any], found: list[Any]) -> bool:
    return bool(package.verify(expected, found, timeout_seconds=None, raise_on_error=True))


def _parse(package: Any, text: str) -> list[Any]:
    return list(package.parse(text, parsing_timeout=None, raise_on_error=True))


def _says_where(label: str) -> bool:
    """Whether the label marks its mathematics itself; a bare `\\frac{1}{2}` is not found without marks."""
    return any(mark in label for mark in ("$", "\\boxed", "\\(", "\\["))
