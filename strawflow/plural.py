"""Counts with their nouns, in the right number: whatever tells people how many there are says it through here."""

from __future__ import annotations


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: `1 row`, `2 rows`; `many` is the plural where it is not the noun with an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"
