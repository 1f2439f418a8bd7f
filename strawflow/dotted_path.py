"""Dotted paths `package.module:function`, by which a setting names a user's function. Judged by form; nothing is imported."""

from __future__ import annotations

import re

from strawflow.errors import ConfigError

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_dotted_path(text: str) -> bool:
    """Tell whether a text has the form of a dotted path."""
    return _PATH.fullmatch(text) is not None


def checked_path(text: str) -> str:
    """Return the text, which may be empty.

    Raises:
        ConfigError: it has not the form of a dotted path.
    """
    if text and not is_dotted_path(text):
        raise ConfigError(f"{text!r} is no dotted path; write package.module:function")
    return text
