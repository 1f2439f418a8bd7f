"""Windows: callers of many threads stand in a line, and one at a time settles what all who wait have handed in.

    caller ▸ line ▸ [its turn: gather ▸ take a window ▸ settle it for all] ▸ answer

1. While a window is in flight, arrivals gather for the next, which the first of them leads.
2. Whoever leads waits a moment for the callers that were just answered and are likely to come again: without it, threads
   that call again at once fall into two halves that take turns and never share a window. A wait in vain is not tried
   again for 1, 2, 4, ... windows. A lone caller never waits.
3. An interrupt of one caller is not the others': who waits takes its work back if nobody has begun on it, who leads hands
   the lead on and leaves the rest of its window with an unknown outcome.
4. Two submissions about one unit never share a window.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from strawflow.errors import CommitUnknownError
from strawflow.flow.submission import Answer, Submission

MAX_UNITS = 4096
"""Units settled in one window; the rest waits for the next, so that a transaction stays short."""

_PATIENCE = 0.5
"""For which share of the last window's time the next one waits for company."""
_MAX_PATIENCE_S = 0.05
_MAX_PAUSE = 64
"""Windows without a wait after waits in vain."""


def _held_lock() -> Any:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class Part:
    """One caller's share of a window; settled once it has an answer or an error."""

    submission: Submission
    submission_id: str
    digest: bytes
    answer: Answer | None = None
    error: BaseException | None = None
    wakeup: Any = field(default_factory=_held_lock)

    @property
    def unit_ids(self) -> list[int]:
        return self.submission.unit_ids

    @property
    def is_unnamed(self) -> bool:
        """Whether the exchange named it, so that nothing can have been answered under its id before it came."""
        return self.submission.submission_id is None

    @property
    def is_settled(self) -> bool:
        return self.answer is not None or self.error is not None


class Line:
    """Callers in the order they came; safe for any number of threads."""

    def __init__(self, settle: Callable[[Sequence[Part]], None]) -> None:
        """`settle` gives every part of a window its answer or its error; what it raises is the error of the rest."""
        self._settle = settle
        self._lock = threading.Lock()
        self._waiting: list[Part] = []
        self._leader: Part | None = None
        self._window: list[Part] = []
        self._company = _Company()
        self._is_gathering = False
        self.num_windows = self.num_submissions = 0

    def settle(self, part: Part) -> None:
        """Return once the part is settled, by this caller or by another."""
        try:
            if self._enter(part):
                self._lead(part)
        except BaseException as error:
            self._abandon(part, error)
            raise

    def _enter(self, part: Part) -> bool:
        """Queue up; True when this caller is to lead a window, False when another one settled the part."""
        with self._lock:
            self._waiting.append(part)
            if self._leader is None:
                self._leader = part
                return True
            if self._is_gathering and self._is_gathered():
                _wake(self._leader)
        part.wakeup.acquire()  # until a leader settles the part, or hands the lead on to it
        return self._leader is part

    def _lead(self, own: Part) -> None:
        self._gather(own)
        with self._lock:
            window = self._window = self._take_window()
        began_at = time.monotonic()
        has_failed = False
        try:
            self._settle(window)
        except Exception as error:  # it is the answer of all who have none
            has_failed = True
            for part in window:
                if not part.is_settled:
                    part.error = error
        self._finish(own, 0.0 if has_failed else time.monotonic() - began_at)

    def _finish(self, own: Part, took_s: float) -> None:
        """Wake all of the window and hand the lead on. Done again after an interrupt in the middle it does the rest."""
        with self._lock:
            if self._leader is own:
                for part in self._window:
                    _wake(part)
                self._company.were(len(self._window) + len(self._waiting), took_s=took_s)
                self._window = []
                self._leader = self._waiting[0] if self._waiting else None
            if self._leader is not None:
                _wake(self._leader)

    def _abandon(self, part: Part, error: BaseException) -> None:
        """Undo what an interrupted caller holds up."""
        with self._lock:
            if part in self._waiting:
                self._waiting.remove(part)
            if self._leader is part:
                self._is_gathering = False
                for other in self._window:
                    if not other.is_settled:
                        other.error = error if other is part else _unknown_after(error)
        self._finish(part, 0.0)

    def _gather(self, own: Part) -> None:
        """Wait for as many as were about a moment ago, as long as patience lasts."""
        with self._lock:
            if self._is_gathered() or not self._company.is_worth_waiting():
                return
            self._is_gathering = True
        # On a lock and not on a condition: an interrupted condition may come back without the line's lock.
        while (left_s := self._company.patience_left_s()) > 0:
            own.wakeup.acquire(timeout=left_s)
            with self._lock:
                if self._is_gathered():
                    break
        with self._lock:
            self._is_gathering = False
            self._company.learn(has_come=self._is_gathered())

    def _is_gathered(self) -> bool:
        num_waiting = len(self._waiting)
        return num_waiting >= self._company.size or sum(len(p.unit_ids) for p in self._waiting) >= MAX_UNITS

    def _take_window(self) -> list[Part]:
        window: list[Part] = []
        later: list[Part] = []
        units: set[int] = set()
        ids: set[str] = set()
        for part in self._waiting:
            fits = not window or len(units) + len(part.unit_ids) <= MAX_UNITS
            if fits and units.isdisjoint(part.unit_ids) and part.submission_id not in ids:
                window.append(part)
                units.update(part.unit_ids)
                ids.add(part.submission_id)
            else:
                later.append(part)
        self._waiting = later
        self.num_windows += 1
        self.num_submissions += len(window)
        return window


class _Company:
    """How many callers were about a moment ago, and whether it pays to wait for them; used under the line's lock."""

    def __init__(self) -> None:
        self.size = 1
        """Callers that the last window answered, and those who waited when it ended."""
        self._until = 0.0
        self._pause = self._num_passed = 0

    def were(self, size: int, *, took_s: float) -> None:
        """A window has ended with so many callers about; 0 seconds: it failed, and nobody knows how long they stay away."""
        self.size = size
        self._until = time.monotonic() + min(took_s * _PATIENCE, _MAX_PATIENCE_S)

    def patience_left_s(self) -> float:
        return self._until - time.monotonic()

    def is_worth_waiting(self) -> bool:
        if self.patience_left_s() <= 0:
            return False
        self._num_passed += 1
        return self._num_passed > self._pause

    def learn(self, *, has_come: bool) -> None:
        """Try again at once after a wait that paid, and later and later after others."""
        self._pause = 0 if has_come else min(max(1, 2 * self._pause), _MAX_PAUSE)
        self._num_passed = 0


def _wake(part: Part) -> None:
    # It may be locked while its caller does something else, which is then woken for nothing, or never asks.
    if part.wakeup.locked():
        part.wakeup.release()


def _unknown_after(error: BaseException) -> CommitUnknownError:
    return CommitUnknownError(
        f"the window was broken off by {type(error).__name__} in another thread; repeat with the same submission id"
    )
