"""Submissions and answers: what a worker hands in for its units in one call, and what became of each of them.

A submission with an id of the caller's may come again after a lost reply. What it says is then compared by a digest over
everything in it; two that say the same thing in other types (lists and arrays, one version for all and one for each token)
have equal digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from strawflow.errors import InvalidInputError
from strawflow.flow.trajectory import UnitResult
from strawflow.index.leases import Failure, Key, Wanted
from strawflow.index.units import Unit
from strawflow.states import UnitState


@dataclass(frozen=True)
class Submission:
    """What one caller hands in: results, progress to park with, failures, leases given back, and what it wants next."""

    submission_id: str | None
    """None: only the exchange itself will ever repeat it, and names it."""
    results: Sequence[UnitResult] = ()
    parked: Sequence[UnitResult] = ()
    failures: Sequence[Failure] = ()
    released: Sequence[Key] = ()
    wanted: Wanted | None = None

    def unit_ids(self) -> list[int]:
        settled = [r.unit_id for r in self.results] + [p.unit_id for p in self.parked]
        return settled + [f.unit_id for f in self.failures] + [unit_id for unit_id, _ in self.released]

    def check(self) -> None:
        """Raise InvalidInputError when a member breaks promise P9 or P10, or a unit is handed in twice."""
        for result in (*self.results, *self.parked):
            result.check()
        settled = self.unit_ids()
        if len(set(settled)) != len(settled):
            raise InvalidInputError("one submission settles a unit twice", submission_id=self.submission_id)

    def content_digest(self) -> bytes:
        """Return an xxh3-128 of everything handed in."""
        state = xxhash.xxh3_128()
        for name, results in (("complete", self.results), ("park", self.parked)):
            for r in results:
                _add_to(state, (name, r.unit_id, r.fence, r.seq, r.engine, *_settings(r), len(r.members)))
                _add_array(state, np.asarray(r.prompt_tokens, np.int32))
                for m in r.members:
                    of_member = (m.member, m.status, m.finish_reason, m.reward, m.score, m.failure)
                    _add_to(state, (*of_member, m.response_text, m.environment, m.versions))
                    for array in (m.token_array, m.logprob_array, m.version_places):
                        _add_array(state, array)
        wanted = None if self.wanted is None else (self.wanted.limit, self.wanted.purposes)
        state.update(repr((list(self.failures), list(self.released), wanted)).encode())
        return state.digest()


def _settings(result: UnitResult) -> tuple[Any, ...]:
    profile = result.profile
    return profile.purpose, profile.temperature, profile.top_p, profile.max_response_tokens


def _add_to(state: Any, values: tuple[Any, ...]) -> None:
    state.update(repr(values).encode())


def _add_array(state: Any, array: np.ndarray[Any, Any] | None) -> None:
    """Length first: where one array ends and the next begins is content too."""
    state.update(b"-" if array is None else len(array).to_bytes(8, "little"))
    if array is not None:
        state.update(array.data)


@dataclass(frozen=True)
class Answer:
    """What became of a submission, by unit id."""

    accepted: tuple[int, ...] = ()
    parked: tuple[int, ...] = ()
    failed: dict[int, UnitState] = field(default_factory=dict)
    """New state of each unit whose attempt ended with an error."""
    released: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    """Units whose lease had been taken over: what was handed in for them is nobody's result."""
    granted: tuple[Unit, ...] = ()

    def receipt(self) -> dict[str, Any]:
        """Return it as the index keeps it: short, without what is empty."""
        whole = {
            "accepted": self.accepted,
            "parked": self.parked,
            "failed": [[unit_id, state.value] for unit_id, state in self.failed.items()],
            "released": self.released,
            "lost": self.lost,
            "granted": [[u.unit_id, u.fence] for u in self.granted],
        }
        return {name: value for name, value in whole.items() if value}
