"""JSON as prompt files need it: strict to read, and written back without changing a number's text.

1. Refused: duplicate keys, NaN and Infinity, control characters in strings, lone surrogates, endless nesting.
2. A number whose text Python would not print again as it stood (1.50, 1e5, -0, thirty digits) is kept as its text.
3. Output is compact, keeps the order of keys, and escapes nothing but what JSON demands.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


class StrictJsonError(ValueError):
    """The text is not JSON this reader takes; `reason` is a stable word to count by."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class NumberText:
    """A number kept as the text it was written with."""

    text: str


# str(int) refuses more digits than this, and so does int(str).
_MAX_INT_DIGITS = 4000


def parse(text: str) -> Any:
    """Parse one JSON value; numbers come as int, float or NumberText.

    Raises:
        StrictJsonError: with a reason of not_json, duplicate_key, non_finite_number, nested_too_deeply or
            lone_surrogate.
    """
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise StrictJsonError("not_json", f"not JSON: {error.msg} at column {error.pos + 1}") from error
    except RecursionError as error:
        raise StrictJsonError("nested_too_deeply", "nested too deeply to be read") from error
    if "\\u" in text and _has_lone_surrogate(text, value):
        raise StrictJsonError("lone_surrogate", r"holds half of a \u surrogate pair, which is no character")
    return value


def dump(value: Any) -> str:
    """Write a parsed value as compact JSON text.

    Raises:
        StrictJsonError: nested_too_deeply, or non_finite_number (a value that did not come from `parse`).
        TypeError: a value that JSON has no form for.
    """
    try:
        return _ENCODER.encode(value)
    except _NeedsNumberText:
        pieces: list[str] = []
        _write(value, pieces)
        return "".join(pieces)
    except RecursionError as error:
        raise StrictJsonError("nested_too_deeply", "nested too deeply to be written") from error
    except ValueError as error:
        raise StrictJsonError("non_finite_number", "NaN or Infinity has no JSON form") from error


class _NeedsNumberText(TypeError):
    """The C encoder met a NumberText, which it cannot write unquoted."""


def _refuse_default(value: object) -> Any:
    if isinstance(value, NumberText):
        raise _NeedsNumberText
    raise TypeError(f"{type(value).__name__} is not JSON")


def _write(value: Any, pieces: list[str]) -> None:
    if isinstance(value, NumberText):
        pieces.append(value.text)
    elif isinstance(value, dict):
        opening = "{"
        for key, member in value.items():
            pieces.append(f"{opening}{_ENCODER.encode(key)}:")
            _write(member, pieces)
            opening = ","
        pieces.append("}" if value else "{}")
    elif isinstance(value, list):
        opening = "["
        for member in value:
            pieces.append(opening)
            _write(member, pieces)
            opening = ","
        pieces.append("]" if value else "[]")
    else:
        pieces.append(_ENCODER.encode(value))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise StrictJsonError("duplicate_key", f"key {twice!r} stands twice in one object")
    return members


def _integer(text: str) -> int | NumberText:
    if len(text) > _MAX_INT_DIGITS or text == "-0":
        return NumberText(text)
    return int(text)


def _fraction(text: str) -> float | NumberText:
    value = float(text)
    return value if repr(value) == text else NumberText(text)


def _constant(text: str) -> Any:
    raise StrictJsonError("non_finite_number", f"{text} is not a JSON number")


def _has_lone_surrogate(text: str, value: Any) -> bool:
    # Only an escape can bring one in (the text came from UTF-8), so most rows never pay for this.
    if "\\ud" not in text and "\\uD" not in text:
        return False
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_fraction, parse_constant=_constant
)
_ENCODER = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_refuse_default, check_circular=False
)
