"""A cheap reward that differs between samples, so that groups carry a signal."""

from __future__ import annotations


def even_share(response_text: str, *, prompt: str, label: object, metadata: object) -> float:
    """Return the share of characters with an even code."""
    if not response_text:
        return 0.0
    return sum(ord(c) % 2 == 0 for c in response_text) / len(response_text)
