"""Where a response that went on after a break ends: stop texts may lie across the joint, where no engine sees them whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from strawflow.config import SamplingProfile


def first_stop(
    tokens: Sequence[int], *, start: int, profile: SamplingProfile, decode: Callable[[Sequence[int]], str]
) -> int | None:
    """Return how many of `tokens` a response keeps that ends at its first stop text, when that ends behind token `start`.

    A stop that lies wholly behind `start` is the engine's to find and is found as well; one that ended before was none, or the
    response would not have gone on. None: no stop text.
    """
    if not profile.stop:
        return None
    # A text of n characters has at most n tokens with a character each; some tokens are but a part of one (3 for safety).
    reach = 4 * max(len(stop) for stop in profile.stop)
    begin = max(0, start - reach)
    before = decode(tokens[begin:start])
    for end in range(start + 1, min(len(tokens), start + reach) + 1):
        text = decode(tokens[begin:end])
        for stop in profile.stop:
            if text.count(stop) > before.count(stop):
                return end
    return None


def is_at_end(tokens: Sequence[int], *, profile: SamplingProfile, eos_id: int) -> bool:
    """Tell whether a saved response already ends with a token that ends it (it was broken off before it was told so)."""
    return bool(tokens) and tokens[-1] in (eos_id, *profile.stop_token_ids)
