"""Prompt rows given as mappings: written down as JSON Lines, so that one reader checks every row, wherever it came from."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strawflow.errors import InvalidInputError
from strawflow.prompts.images import data_address
from strawflow.prompts.row import PromptKeys
from strawflow.prompts.source import PromptSource

_ROW_KEYS = ("prompt", "label", "metadata", "images")
KEYS = PromptKeys(*_ROW_KEYS)


@contextmanager
def written_down(rows: Iterable[Mapping[str, Any]], *, name: str) -> Iterator[PromptSource]:
    """Have rows with `prompt` and, if wanted, `label`, `metadata` and `images` as a file; rows and messages call it `name`.

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
            f"row {number} is {type(row).__name__}, not a mapping with prompt, label, metadata and images"
        )
    unknown = row.keys() - set(_ROW_KEYS)
    if unknown or "prompt" not in row:
        what = f"has unknown fields {sorted(unknown)}" if unknown else "has no prompt"
        raise InvalidInputError(
            f"row {number} {what}; rows have prompt and, if wanted, label, metadata and images"
        )
    told = {name: row.get(name) for name in _ROW_KEYS}
    if told["images"] is not None:
        many = told["images"] if isinstance(told["images"], list | tuple) else [told["images"]]
        told["images"] = [_image_text(image) for image in many]
    try:
        line = json.dumps(told, ensure_ascii=False) + "\n"
        line.encode()
    except (
        TypeError,
        ValueError,
    ) as error:  # no JSON value; half of a surrogate pair; a value that holds itself
        raise InvalidInputError(f"row {number} cannot be stored as JSON: {error}") from None
    return line


def _image_text(image: Any) -> Any:
    """Return an image as a line of JSON can hold it; what is none, the reader refuses."""
    if isinstance(image, Path):
        return str(image)
    return data_address(bytes(image)) if isinstance(image, bytes | bytearray | memoryview) else image
