"""What stands in the last \\boxed{...} of a response."""

from __future__ import annotations

import re

_OPENING = re.compile(r"\\f?boxed\s*\{")


def last_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...} (or \\fbox-like \\fboxed) whose braces balance; None: there is none.

    Braces behind a backslash (\\{, \\}) are LaTeX's printed ones and do not count. A box that is never closed, as in a
    response that was cut off, is passed over; so is one inside another: the outer box is the answer.
    """
    found, end = None, 0
    for opening in _OPENING.finditer(text):
        if opening.start() < end:  # inside the box before
            continue
        closing = _closing_brace(text, opening.end())
        if closing is not None:
            found, end = text[opening.end() : closing], closing
    return found


def _closing_brace(text: str, at: int) -> int | None:
    depth = 1
    while at < len(text):
        match text[at]:
            case "\\":
                at += 1
            case "{":
                depth += 1
            case "}":
                depth -= 1
                if depth == 0:
                    return at
        at += 1
    return None
