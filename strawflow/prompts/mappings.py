"""Prompt rows given as mappings: written down as JSON Lines, so that one reader checks every row, wherever it came from."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strawflow.errors import InvalidInputError
from strawflow.prompts.row import PromptKeys
from strawflow.prompts.source import PromptSource

_ROW_KEYS = ("prompt", "label", "metadata")
KEYS = PromptKeys(*_ROW_KEYS)


@contextmanager
def written_down(rows: Iterable[Mapping[str, Any]], *, name: str) -> Iterator[PromptSource]:
    """Have rows with `prompt` and, if wanted, `label` and `metadata` as a file; rows and messages call it `name`.

    Raises:
        InvalidInputError: names the row, counted from 1, and what is wrong with it.
    """
    with tempfile.TemporaryDirectory(prefix="strawflow-rows-") as folder:
        path = Path(folder) / "rows.jsonl"
        with path.open("w", encoding="utf-8") as file:
            file.writelines(_line(row, number) for number, row in enumerate(rows, start=1))
        yield PromptSource(path, name=name)


def _line(row: Mapping[str, Any], number: int) -> str:
    if not isinstance(row, Mapping):
        raise InvalidInputError(
            f"row {number} is {type(row).__name__}, not a mapping with prompt, label and metadata"
        )
    unknown = row.keys() - set(_ROW_KEYS)
    if unknown or "prompt" not in row:
        what = f"has unknown fields {sorted(unknown)}" if unknown else "has no prompt"
        raise InvalidInputError(f"row {number} {what}; rows have prompt and, if wanted, label and metadata")
    try:
        line = json.dumps({name: row.get(name) for name in _ROW_KEYS}, ensure_ascii=False) + "\n"
        line.encode()
    except (
        TypeError,
        ValueError,
    ) as error:  # no JSON value; half of a surrogate pair; a value that holds itself
        raise InvalidInputError(f"row {number} cannot be stored as JSON: {error}") from None
    return line
