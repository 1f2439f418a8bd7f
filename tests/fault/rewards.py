"""Rewards for tests: a cheap one that differs between samples, and ones that break."""

from __future__ import annotations

import time


def even_share(response_text: str, *, prompt: str, label: object, metadata: object) -> float:
    """Return the share of characters with an even code."""
    if not response_text:
        return 0.0
    return sum(ord(c) % 2 == 0 for c in response_text) / len(response_text)


def always_raises(response_text: str, *, prompt: str, label: object, metadata: object) -> float:
    raise ValueError("no such word in the list")


def hangs_on_one_prompt(response_text: str, *, prompt: str, label: object, metadata: object) -> float:
    while prompt.startswith("word2"):
        time.sleep(0.1)
    return even_share(response_text, prompt=prompt, label=label, metadata=metadata)


def places(response_texts: list[str], *, prompt: str, label: object, metadata: object) -> list[float]:
    """Return each response's place in the group: no two are the same."""
    return [float(place) for place, _ in enumerate(response_texts)]


def minus_mean(rewards: list[float], *, response_texts: list[str], **row: object) -> list[float]:
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def constant(response_text: str, *, prompt: str, label: object, metadata: object) -> float:
    return 1.0
