"""How far the answers of an engine are to be believed, by what they were so far.

1. An answer is garbage when its log-probabilities or weights cannot be true (`GarbageAnswerError`); the engine is blamed once
   the answers in a row to several units were: a single prompt that no engine can answer costs that prompt alone.
2. One sound answer ends the row.
It knows no index; who asks decides what follows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

SOUND_AFTER_QUARANTINE = 64
"""Sound answers after which earlier quarantines are forgotten."""


@dataclass(frozen=True)
class Seen:
    """What was seen since the last look."""

    num_garbage: int
    tokens_per_s: float
    last_error: str | None
    serves_well: bool


@dataclass
class EngineTrust:
    """Counts answers; `limit` is how many units may get garbage in a row (0: any number)."""

    limit: int
    _blamed_by: set[str] = field(default_factory=set)
    _num_sound: int = 0
    _num_garbage: int = 0
    _num_tokens: int = 0
    _last_error: str | None = None
    _since: float = field(default_factory=time.monotonic)

    def sound(self, *, num_tokens: int) -> None:
        """Count an answer that can be used."""
        self._blamed_by.clear()
        self._num_sound += 1
        self._num_tokens += num_tokens

    def garbage(self, request_name: str | None, reason: str) -> str | None:
        """Count an answer that cannot; returns why the engine is not to be asked any more, if that is so.

        request_name: as given to the engine; what stands before its first dot is the unit's.
        """
        self._num_garbage += 1
        self._last_error = reason
        self._blamed_by.add((request_name or str(self._num_garbage)).partition(".")[0])
        if not self.limit or len(self._blamed_by) < self.limit:
            return None
        return f"garbage in answers to {len(self._blamed_by)} groups in a row, the last: {reason}"

    def error(self, text: str) -> None:
        """Remember an error that is no answer."""
        self._last_error = text

    def seen(self) -> Seen:
        """Return what was seen since the last call."""
        now = time.monotonic()
        found = Seen(
            self._num_garbage,
            self._num_tokens / max(now - self._since, 1e-9),
            self._last_error,
            self._num_sound >= SOUND_AFTER_QUARANTINE,
        )
        self._num_garbage, self._num_tokens, self._last_error, self._since = 0, 0, None, now
        return found
