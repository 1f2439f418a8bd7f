"""Submissions and answers: what a worker hands in for its units in one call, and what became of each of them.

A submission with an id of the caller's may come again after a lost reply. What it says is then compared by a digest over
everything in it; two that say the same thing in other types (lists and arrays, one version for all and one for each token)
have equal digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
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
    """What one caller hands in: results, progress to park with or to save, failures, leases given back, and what it wants next."""

    submission_id: str | None
    """None: only the exchange itself will ever repeat it, and names it."""
    results: Sequence[UnitResult] = ()
    parked: Sequence[UnitResult] = ()
    saved: Sequence[UnitResult] = ()
    """Records of progress (`flow.chain`); their units stay leased."""
    failures: Sequence[Failure] = ()
    released: Sequence[Key] = ()
    wanted: Wanted | None = None

    @cached_property
    def unit_ids(self) -> list[int]:
        """Every unit it is about, in the order results, parked, saved, failures, released."""
        told = [r.unit_id for of in (self.results, self.parked, self.saved) for r in of]
        return told + [f.unit_id for f in self.failures] + [unit_id for unit_id, _ in self.released]

    def check(self) -> None:
        """Raise InvalidInputError when a member breaks promise P9 or P10, or a unit is handed in twice."""
        for result in self.results:
            result.check()
        for progress in (*self.parked, *self.saved):
            progress.check(is_parked=True)
        told = self.unit_ids
        if len(set(told)) != len(told):
            raise InvalidInputError("one submission is about a unit twice", submission_id=self.submission_id)

    def content_digest(self) -> bytes:
        """Return an xxh3-128 of everything handed in."""
        state = xxhash.xxh3_128()
        for name, results in (("complete", self.results), ("park", self.parked), ("save", self.saved)):
            for r in results:
                _add(
                    state,
                    name,
                    int(r.unit_id),
                    int(r.fence),
                    int(r.seq),
                    r.engine,
                    *_settings(r),
                    len(r.members),
                )
                if r.after is not None:
                    _add(state, "after", *r.after)
                _add_array(state, np.asarray(r.prompt_tokens, np.int32))
                for m in r.rows:
                    _add(state, int(m.member), m.status, m.finish_reason, _number(m.reward), _number(m.score))
                    _add(state, m.failure, m.response_text, m.environment, *m.versions)
                    if m.start:
                        _add(state, "start", int(m.start))
                    for array in (m.token_array, m.logprob_array, m.version_places):
                        _add_array(state, array)
                    if m.mask_array is not None or m.prompt_tokens is not None:
                        _add_array(state, m.mask_array)
                        _add_array(
                            state, None if m.prompt_tokens is None else np.asarray(m.prompt_tokens, np.int32)
                        )
                    for tensor, array in sorted((m.tensors or {}).items()):
                        _add(state, "tensor", tensor, array.dtype.str, *array.shape)
                        _add(state, array.tobytes())
        for f in self.failures:
            _add(state, "fail", int(f.unit_id), int(f.fence), f.error, float(f.retry_after_s))
        for unit_id, fence in self.released:
            _add(state, "release", int(unit_id), int(fence))
        if self.wanted is not None:
            purposes = ("any",) if self.wanted.purposes is None else ("of", *self.wanted.purposes)
            _add(state, "claim", int(self.wanted.limit), self.wanted.serving_version_id, *purposes)
        return state.digest()


def _settings(result: UnitResult) -> tuple[str, float, float, int]:
    p = result.profile
    return p.purpose, float(p.temperature), float(p.top_p), int(p.max_response_tokens)


def _number(value: float | None) -> float | None:
    return None if value is None else float(value) + 0.0  # -0.0 is the same number as 0.0


def _add(state: Any, *values: str | bytes | float | None) -> None:
    """Add values so that neither their borders nor the Python type of a text or a piece of memory matters."""
    for value in values:
        if value is None:
            told = b""
        elif isinstance(value, str):
            told = value.encode()
        elif isinstance(value, int | float):
            told = repr(value).encode()
        else:
            told = bytes(value)
        state.update(f"{'-' if value is None else len(told)},".encode())
        state.update(told)
    state.update(b";")


def _add_array(state: Any, array: np.ndarray[Any, Any] | None) -> None:
    _add(state, None if array is None else len(array))
    if array is not None:
        state.update(np.ascontiguousarray(array).data)


@dataclass(frozen=True)
class Answer:
    """What became of a submission, by unit id."""

    accepted: tuple[int, ...] = ()
    parked: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()
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
            "saved": self.saved,
            "failed": [[unit_id, state.value] for unit_id, state in self.failed.items()],
            "released": self.released,
            "lost": self.lost,
            "granted": [[u.unit_id, u.fence] for u in self.granted],
        }
        return {name: value for name, value in whole.items() if value}
