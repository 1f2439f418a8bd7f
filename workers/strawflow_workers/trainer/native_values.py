"""Values of Megatron's settings: read from words of a command line or from plain values, checked, and turned into Megatron's.

1. A kept value is plain: true or false, a number, a text, a list of such, or None. Types of torch and members of enumerations are
   kept by name.
2. What does not fit its field is refused with what it takes; nothing is converted from one kind to another, but whole numbers to
   numbers.
3. Reading what was kept gives the same value again.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from typing import Any

import torch

from strawflow_workers.trainer.native_fields import Kind

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,  # as Megatron's own --exp-avg-dtype means it
    **{
        str(one).removeprefix("torch."): one
        for one in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8)
    },
}


def from_words(kind: Kind, words: Sequence[str]) -> Any:
    """Return the value that words of a command line mean.

    Raises:
        ValueError: they do not fit.
    """
    if kind.shape == "switch":
        raise ValueError(
            f"is a switch and takes no value, and {' '.join(words)!r} was given: the name of the run stands before"
        )
    if not words:
        raise ValueError(f"takes {kind.told()}, and nothing was given")
    if kind.takes_none and list(words) == ["none"] and "none" not in kind.choices:
        return None
    if kind.shape == "one" or (kind.shape == "either" and len(words) == 1 and words[0][:1] != "["):
        if len(words) > 1:
            raise ValueError(f"takes one value ({kind.told()}), and {' '.join(words)!r} was given")
        return _scalar_from_text(kind, words[0])
    if len(words) == 1 and words[0][:1] == "[":
        try:
            return from_plain(kind, json.loads(words[0]))
        except json.JSONDecodeError as error:
            raise ValueError(f"{words[0]!r} is no JSON list: {error}") from None
    return _of_length(kind, [_scalar_from_text(kind, word) for word in words])


def from_plain(kind: Kind, value: Any) -> Any:
    """Return a value of a file or a kept one, as it is kept.

    Raises:
        ValueError: it does not fit.
    """
    if value is None or (value == "none" and "none" not in kind.choices):
        if kind.takes_none:
            return None
        raise ValueError(f"takes {kind.told()}, and has no 'none'")
    if kind.shape == "switch":
        if isinstance(value, bool):
            return value
        raise ValueError(f"is a switch: true or false, not {value!r}")
    if isinstance(value, list | tuple):
        if kind.shape == "one":
            raise ValueError(f"takes one value ({kind.told()}), and a list was given")
        return _of_length(kind, [_scalar(kind, item) for item in value])
    if kind.shape == "several":
        raise ValueError(f"takes a list ({kind.told()}), and {value!r} was given")
    return _scalar(kind, value)


def to_megatron(kind: Kind, value: Any) -> Any:
    """Return a kept value as Megatron's configuration takes it."""
    if isinstance(value, list | tuple):
        items = [to_megatron(kind, item) for item in value]
        return tuple(items) if kind.length else items
    if isinstance(value, str) and str not in kind.of:
        if torch.dtype in kind.of:
            return DTYPES[value]
        for one in kind.of:
            if issubclass(one, enum.Enum):
                return one[value]
    return value


def plain(value: Any) -> Any:
    """Return a value of one of Megatron's configurations as JSON can hold it; a function by its name."""
    if isinstance(value, enum.Enum):  # some are texts or numbers too
        return value.name
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return getattr(value, "__qualname__", None) or type(value).__name__


def _of_length(kind: Kind, items: list[Any]) -> list[Any]:
    if kind.length is not None and len(items) != kind.length:
        raise ValueError(f"takes {kind.length} values, and {len(items)} were given")
    return items


def _scalar_from_text(kind: Kind, text: str) -> Any:
    if kind.choices:
        by_text = {str(choice): choice for choice in kind.choices}
        if text in by_text:
            return by_text[text]
        raise _misfit(kind, text)
    for one in kind.of:
        try:
            if one in (int, float):
                return one(text)
            if one is bool:
                return {"true": True, "false": False}[text.lower()]
            return _scalar(kind, text)
        except (ValueError, KeyError):
            continue
    raise _misfit(kind, text)


def _scalar(kind: Kind, value: Any) -> Any:
    if kind.choices:
        # 1 is no choice where true is, though Python takes them for equal.
        if any(value == choice and type(value) is type(choice) for choice in kind.choices):
            return value
        raise _misfit(kind, value)
    for one in kind.of:
        if one in (bool, int, str) and type(value) is one:
            return value
        if one is float and type(value) in (int, float):
            return float(value)
        if one is torch.dtype and value in DTYPES:
            return str(DTYPES[value]).removeprefix("torch.")
        if issubclass(one, enum.Enum) and value in one.__members__:
            return value
    raise _misfit(kind, value)


def _misfit(kind: Kind, value: Any) -> ValueError:
    return ValueError(f"takes {kind.told()}, not {value!r}")
