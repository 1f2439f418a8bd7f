"""Groups leased ahead of their turn, so that one begins the moment another has its responses, not after the store of them.

1. Only fresh groups wait here: evaluation, and groups with saved progress, begin as soon as they are leased.
2. Nothing is leased ahead while other workers may lack work. What is left is given back at a claim that got less than it
   asked for, and by the owner once nothing is left to lease (`give_up`); nothing waits here within `AFTER_S` of that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from strawflow.flow.claim import Grant

AFTER_S = 0.3
"""Seconds of plenty before anything is leased ahead: every worker of a run has filled its engine by then."""


class Reserve:
    """At most `size` leased groups that have not begun; belongs to one event loop."""

    def __init__(self, size: int, now: Callable[[], float] = time.monotonic) -> None:
        self._size, self._now = size, now
        self._grants: deque[Grant] = deque()
        self._given_up_at = now()

    def __len__(self) -> int:
        return len(self._grants)

    @property
    def room(self) -> int:
        """How many more to lease ahead."""
        if self._now() - self._given_up_at < AFTER_S:
            return 0
        return self._size - len(self._grants)

    def sort(self, grants: Sequence[Grant], *, asked: int, room: int) -> tuple[list[Grant], list[Grant]]:
        """Keep what of newly leased groups can wait; returns those to begin now, at least `room`, and those to give back.

        `asked` is how many the claim asked for.
        """
        begin = [g for g in grants if g.profile.purpose != "train" or g.continuation is not None]
        begun = {g.unit_id for g in begin}
        self._grants.extend(g for g in grants if g.unit_id not in begun)
        while self._grants and len(begin) < room:
            begin.append(self._grants.popleft())
        return begin, [] if len(grants) >= asked else self.give_up()

    def take(self) -> Grant | None:
        """Return the group whose turn it is."""
        return self._grants.popleft() if self._grants else None

    def give_up(self) -> list[Grant]:
        """Return all of them; the reserve is empty then, and stays so for a while."""
        self._given_up_at = self._now()
        grants = list(self._grants)
        self._grants.clear()
        return grants
