"""Counts of what left the index: retired units and their fates, kept as tallies so that every count stays exact.

1. They are added to in the transaction that removes the rows.
2. Whoever counts units or fates adds what stands here to the rows that are left.
3. It knows numbers; the rows themselves lie in packs of kind `history`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from strawflow.index import tallies
from strawflow.index.prepared import Transaction

_UNITS = "retired/units/"
_TOKENS = "retired/tokens/"
_FATES = "retired/fates/"
_DROPPED = "retired/dropped/"
PASSED = "passed/"
"""Of a tally: with a dataset's name, how many rows its cursor passed that are no units of the branch in the index."""


@dataclass(frozen=True)
class Fate:
    """What became of a unit for one consumer."""

    consumer: str
    outcome: str
    reason: str | None
    at_step: int
    batch_id: int | None


@dataclass(frozen=True)
class Retired:
    """One unit that leaves, as far as it is counted."""

    purpose: str
    state: str
    dataset_id: str
    num_tokens: int | None
    fates: tuple[Fate, ...]


def add(transaction: Transaction, branch_id: str, leaving: Iterable[Retired]) -> None:
    """Count units whose rows are removed in this transaction."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for unit in leaving:
        counts[_UNITS, unit.purpose, unit.state] += 1
        counts[PASSED, unit.dataset_id] += 1
        counts[_TOKENS, unit.purpose] += unit.num_tokens or 0
        for fate in unit.fates:
            counts[_FATES, fate.consumer, unit.purpose, fate.outcome, fate.reason] += 1
            if fate.batch_id is None:
                counts[_DROPPED, fate.consumer, unit.purpose, fate.at_step] += 1
    named = {_name(prefix, key): amount for (prefix, *key), amount in counts.items()}
    for name in sorted(named):  # one order for all who count at once
        tallies.add(transaction, branch_id, name, named[name])


def units(transaction: Transaction, branch_id: str) -> dict[tuple[str, str], int]:
    """Return {(purpose, state): number of retired units}."""
    found = tallies.starting_with(transaction, branch_id, _UNITS)
    return {_key(name, _UNITS): count for name, count in found.items()}


def fates(transaction: Transaction, branch_id: str, consumer: str) -> dict[tuple[str, str, str | None], int]:
    """Return {(purpose, outcome, reason): number of retired units} for one consumer."""
    found = tallies.starting_with(transaction, branch_id, _FATES)
    keys = ((_key(name, _FATES), count) for name, count in found.items())
    return {(purpose, outcome, reason): n for (name, purpose, outcome, reason), n in keys if name == consumer}


def dropped_after(transaction: Transaction, branch_id: str, consumer: str, *, purpose: str, step: int) -> int:
    """Return how many retired units were dropped outside any batch while a step after `step` was planned."""
    found = tallies.starting_with(transaction, branch_id, _DROPPED)
    keys = ((_key(name, _DROPPED), count) for name, count in found.items())
    return sum(n for (name, of, at_step), n in keys if (name, of) == (consumer, purpose) and at_step > step)


def num_tokens(transaction: Transaction, branch_id: str, *, without: str) -> int:
    """Return the response tokens of retired units of every purpose but one."""
    found = tallies.starting_with(transaction, branch_id, _TOKENS)
    return sum(count for name, count in found.items() if name != _TOKENS + without)


def num_in_batches(transaction: Transaction, branch_id: str, consumer: str) -> int:
    """Return how many retired units lay in a batch of one consumer."""
    in_all = sum(fates(transaction, branch_id, consumer).values())
    dropped = tallies.starting_with(transaction, branch_id, _DROPPED)
    return in_all - sum(count for name, count in dropped.items() if _key(name, _DROPPED)[0] == consumer)


def _name(prefix: str, key: list[Any]) -> str:
    """Return a tally's name: what is counted by one word ends with it, other keys are JSON."""
    return prefix + (key[0] if len(key) == 1 else json.dumps(key))


def _key(name: str, prefix: str) -> Any:
    return tuple(json.loads(name.removeprefix(prefix)))
