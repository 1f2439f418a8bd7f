"""The rules a raw row must meet to become a prompt row, each with a stable word to count by.

1. A row is judged alone: what is accepted never depends on other rows.
2. A blank prompt is refused unless it was asked for (users met placeholders that trained silently).
3. Nothing is mended: no trimming, no defaults for absent keys, no conversion of types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strawflow.errors import ConfigError
from strawflow.prompts import strict_json
from strawflow.prompts.images import BadImageError, read_images
from strawflow.prompts.row import LabelFormat, PromptFormat, PromptKeys, PromptRow, content_digest
from strawflow.prompts.strict_json import StrictJsonError
from strawflow.reward_names import parse_row_reward


class BadRowError(ValueError):
    """A row that cannot be used; `reason` is a stable word, `detail` says what is wrong and what to do."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class RowRules:
    """What makes a row of one source acceptable, and how it is named."""

    keys: PromptKeys
    source: str
    allow_empty: bool = False
    row_rewards: tuple[str, ...] = ()
    """Functions and addresses that `metadata.reward` may name, beside the rewards that strawflow has."""
    folder: Path = Path()
    """What paths of images are relative to."""

    def check(self, raw: object, *, line: int) -> PromptRow:
        """Return the checked row.

        Raises:
            BadRowError: the row breaks a rule.
        """
        if not isinstance(raw, dict):
            raise BadRowError(
                "not_object", f"the row is {_kind(raw)}, not an object; write one object per line"
            )
        prompt, prompt_format = self._prompt(_member(raw, self.keys.input_key))
        label, label_format = self._label(raw)
        metadata = self._metadata(raw)
        images = self._images(raw)
        return PromptRow(
            prompt=prompt,
            prompt_format=prompt_format,
            label=label,
            label_format=label_format,
            metadata=metadata,
            source=self.source,
            source_line=line,
            content_digest=content_digest(
                prompt,
                prompt_format,
                label=label,
                label_format=label_format,
                metadata=metadata,
                images=images,
            ),
            images=images,
        )

    def _prompt(self, value: object) -> tuple[str, PromptFormat]:
        key = self.keys.input_key
        if value is None:
            raise BadRowError("null_prompt", f"{key!r} is null; give it a prompt or take the row out")
        if isinstance(value, str):
            if not value.strip() and not self.allow_empty:
                raise BadRowError(
                    "empty_prompt", f"{key!r} is blank; give it a prompt, or allow empty prompts"
                )
            return value, "text"
        if isinstance(value, list):
            if not self.allow_empty and not any(_says_something(message) for message in value):
                raise BadRowError("empty_prompt", f"{key!r} holds no message with content")
            for place, message in enumerate(value):
                _check_message(message, f"{key}[{place}]")
            return _json_text(value, key), "messages"
        raise BadRowError(
            "wrong_type", f"{key!r} is {_kind(value)}; it must be a string or a list of messages"
        )

    def _label(self, raw: Mapping[str, Any]) -> tuple[str | None, LabelFormat | None]:
        if self.keys.label_key is None:
            return None, None
        value = _member(raw, self.keys.label_key)
        if value is None:
            return None, None
        if isinstance(value, str):
            return value, "text"
        return _json_text(value, self.keys.label_key), "json"

    def _metadata(self, raw: Mapping[str, Any]) -> str | None:
        key = self.keys.metadata_key
        if key is None:
            return None
        value = _member(raw, key)
        if value is None:
            return None
        if isinstance(value, str):
            # Columnar files often keep free-form metadata as JSON text.
            try:
                value = strict_json.parse(value)
            except StrictJsonError as error:
                raise BadRowError(
                    "wrong_type", f"{key!r} is a string but no JSON object ({error.detail})"
                ) from error
        if not isinstance(value, dict):
            raise BadRowError("wrong_type", f"{key!r} is {_kind(value)}; it must be an object")
        self._check_reward(value)
        return _json_text(value, key)

    def _images(self, raw: Mapping[str, Any]) -> tuple[bytes, ...] | None:
        key = self.keys.images_key
        if key is None:
            return None
        try:
            return read_images(_member(raw, key), key=key, folder=self.folder)
        except BadImageError as error:
            raise BadRowError(error.reason, error.detail) from error

    def _check_reward(self, metadata: Mapping[str, Any]) -> None:
        """Refuse a row whose own reward no worker could grade, now and not after its responses were sampled."""
        if "reward" not in metadata:
            return
        name, field = metadata["reward"], f"{self.keys.metadata_key}.reward"
        if not isinstance(name, str):
            raise BadRowError(
                "unknown_reward", f"{field!r} is {_kind(name)}; it must name the reward that scores this row"
            )
        try:
            parse_row_reward(name, listed=self.row_rewards)
        except ConfigError as error:
            raise BadRowError("unknown_reward", f"{field!r}: {error.message}") from error


def _member(raw: Mapping[str, Any], key: str) -> object:
    try:
        return raw[key]
    except KeyError:
        keys = ", ".join(map(str, list(raw)[:10])) or "no keys at all"
        raise BadRowError("missing_key", f"no key {key!r}; the row has {keys}") from None


def _check_message(message: object, where: str) -> None:
    if not isinstance(message, dict):
        raise BadRowError("malformed_messages", f"{where} is {_kind(message)}; a message is an object")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRowError("malformed_messages", f"{where} has no 'role' string")
    if "content" not in message:
        raise BadRowError("malformed_messages", f"{where} has no 'content'")
    content = message["content"]
    if content is None:
        # The assistant turn of a tool call has its calls in place of content.
        if not isinstance(message.get("tool_calls"), list):
            raise BadRowError("malformed_messages", f"{where} has null 'content' and no 'tool_calls'")
    elif not isinstance(content, str | list | dict):
        raise BadRowError(
            "malformed_messages",
            f"{where}.content is {_kind(content)}; it must be a string, a list or an object",
        )


def _says_something(message: object) -> bool:
    # What is no message is reported as malformed, not as empty.
    if not isinstance(message, dict):
        return True
    content = message.get("content", True)
    return bool(content.strip() if isinstance(content, str) else content) or bool(message.get("tool_calls"))


def _json_text(value: object, key: str) -> str:
    try:
        return strict_json.dump(value)
    except StrictJsonError as error:
        raise BadRowError(error.reason, f"{key!r}: {error.detail}") from error
    except TypeError as error:
        raise BadRowError(
            "wrong_type", f"{key!r} holds a value with no JSON form: {error}; store it as text"
        ) from error


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float() | strict_json.NumberText():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case dict():
            return "an object"
        case _:
            return f"of type {type(value).__name__}"
