"""One accepted prompt row: its fields, its identity, and its two stored forms (Arrow and JSON Lines).

1. The content digest depends on content alone: never on the file, the line, the order or the neighbours of a row.
2. Text is verbatim. What was JSON is kept as compact JSON text with its key order and its number text.
3. Row -> Arrow -> row -> JSON Lines -> row gives back the same content and the same digest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
import xxhash

from strawflow.errors import InvalidInputError
from strawflow.prompts.images import data_address
from strawflow.records import PROMPT

PromptFormat = Literal["text", "messages"]
LabelFormat = Literal["text", "json"]

_DIGEST_VERSION = b"\x01"


@dataclass(frozen=True)
class PromptKeys:
    """The names under which a file keeps its fields; None: the file has no such field."""

    input_key: str = "prompt"
    label_key: str | None = None
    metadata_key: str | None = None
    images_key: str | None = None

    def __post_init__(self) -> None:
        names = self.names()
        if not all(names) or len(set(names)) != len(names):
            raise InvalidInputError(
                f"input, label, metadata and images keys must be different names, got {names}"
            )

    def names(self) -> list[str]:
        """Return the keys in use, the input key first."""
        keys = (self.input_key, self.label_key, self.metadata_key, self.images_key)
        return [name for name in keys if name is not None]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A checked row of a prompt file."""

    prompt: str
    """Text verbatim, or the JSON of a list of chat messages."""
    prompt_format: PromptFormat
    label: str | None
    label_format: LabelFormat | None
    metadata: str | None
    """A JSON object."""
    source: str
    source_line: int
    """Physical line, or the row number from 1 in a columnar file."""
    content_digest: bytes
    images: tuple[bytes, ...] | None = None
    """Image files as they are, in the order of the prompt; None without any."""


def content_digest(
    prompt: str,
    prompt_format: PromptFormat,
    *,
    label: str | None,
    label_format: LabelFormat | None,
    metadata: str | None,
    images: Sequence[bytes] | None = None,
) -> bytes:
    """Return the 16-byte xxh3-128 (big endian) of a row's content.

    Every field is hashed as a presence byte, its length in UTF-8 bytes (8 bytes, little endian) and its bytes, so no
    two different rows share an encoding; images, which nearly no row has, come last and are nothing where there are none.
    """
    parts = [_DIGEST_VERSION]
    for field in (prompt_format, prompt, label_format, label, metadata):
        if field is None:
            parts.append(b"\x00")
        else:
            encoded = field.encode("utf-8")
            parts += (b"\x01" + len(encoded).to_bytes(8, "little"), encoded)
    for image in images or ():
        parts += (b"\x02" + len(image).to_bytes(8, "little"), image)
    return xxhash.xxh3_128_digest(b"".join(parts))


def to_record_batch(
    rows: Sequence[PromptRow], *, first_position: int, occurrences: Sequence[int]
) -> pa.RecordBatch:
    """Build the stored form of rows: schema `records.PROMPT`, one Arrow row each, in order.

    Args:
        rows: Rows in the order of their positions.
        first_position: Position of the first row in its dataset segment.
        occurrences: Per row, how many earlier rows of the dataset have the same content.

    Raises:
        InvalidInputError: `occurrences` does not match the rows.
    """
    if len(occurrences) != len(rows):
        raise InvalidInputError(f"{len(rows)} prompt rows came with {len(occurrences)} occurrence numbers")
    columns: dict[str, Sequence[object]] = {
        "position": range(first_position, first_position + len(rows)),
        "content_digest": [row.content_digest for row in rows],
        "occurrence": occurrences,
        "prompt": [row.prompt for row in rows],
        "prompt_format": [row.prompt_format for row in rows],
        "label": [row.label for row in rows],
        "label_format": [row.label_format for row in rows],
        "metadata": [row.metadata for row in rows],
        "source": [row.source for row in rows],
        "source_line": [row.source_line for row in rows],
        "images": [None if row.images is None else list(row.images) for row in rows],
    }
    arrays = [pa.array(columns[field.name], type=field.type) for field in PROMPT]
    return pa.RecordBatch.from_arrays(arrays, schema=PROMPT)


def from_record_batch(batch: pa.RecordBatch) -> Iterator[PromptRow]:
    """Yield the rows of a stored batch of schema `records.PROMPT`, digests as stored."""
    for row in batch.to_pylist():
        images = None if row["images"] is None else tuple(row["images"])
        yield PromptRow(**{name: row[name] for name in PromptRow.__dataclass_fields__} | {"images": images})


def to_json_line(row: PromptRow, keys: PromptKeys) -> str:
    """Write a row as one line of JSON Lines (no newline) that reads back, with the same keys, to the same content.

    Raises:
        InvalidInputError: the row has a label, metadata or images and `keys` names no place for it.
    """
    places = (
        (row.label, keys.label_key),
        (row.metadata, keys.metadata_key),
        (row.images, keys.images_key),
    )
    if any(value is not None and key is None for value, key in places):
        raise InvalidInputError(
            f"{row.source}:{row.source_line}: the keys leave no place for its label, metadata or images"
        )
    members = [(keys.input_key, _text(row.prompt) if row.prompt_format == "text" else row.prompt)]
    if keys.label_key is not None:
        label = "null" if row.label is None else row.label
        members.append((keys.label_key, _text(label) if row.label_format == "text" else label))
    if keys.metadata_key is not None:
        members.append((keys.metadata_key, "null" if row.metadata is None else row.metadata))
    if keys.images_key is not None:
        members.append((keys.images_key, json.dumps([data_address(image) for image in row.images or ()])))
    return "{" + ",".join(f"{_text(name)}:{value}" for name, value in members) + "}"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
