"""Evaluation results: what each dataset scored under one weight version.

1. A result is measured from stored trajectories once all of its prompts are answered or given up, by the consumer `eval`
   (flow.eval_consumer), and recorded as that consumer's step. An evaluation that nobody recorded is measured when it is
   asked for, with the same outcome.
2. Failed answers pass nothing, and are told; the mean reward is that of the answers which have one.
3. Reads only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from strawflow.flow.admit_evaluation import is_evaluated
from strawflow.flow.placed import read_extents
from strawflow.flow.run import Run
from strawflow.index import checkpoints, units, weights
from strawflow.index.engine import Connection
from strawflow.index.units import Unit
from strawflow.packs.reader import PackReader
from strawflow.pass_at_k import mean_pass_at_k
from strawflow.states import UnitState

EVAL = "eval"
"""The consumer that reads evaluations, and the purpose of their units."""
RESULTS = "results"
"""Where the metrics of its steps hold them."""


@dataclass(frozen=True)
class EvalResult:
    """One dataset, answered in one way, under one weight version."""

    step: int
    """Of the weights."""
    version_id: str
    dataset: str
    profile: str
    is_greedy: bool
    num_prompts: int
    num_answers: int
    num_passed: int
    """Answers whose score is at least the dataset's pass_score."""
    num_failed: int
    """Answers without a score: failed members, and all of the prompts that were given up."""
    num_tokens: int
    mean_reward: float | None
    pass_at: Mapping[int, float]
    """{k: mean of pass@k over prompts}, of the powers of two up to the number of answers to a prompt, and that number."""

    @property
    def accuracy(self) -> float:
        """Share of all answers that passed."""
        return self.num_passed / self.num_answers if self.num_answers else float("nan")

    def fields(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {**asdict(self), "pass_at": {str(k): value for k, value in self.pass_at.items()}}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> EvalResult:
        known = {name: fields[name] for name in cls.__dataclass_fields__}
        return cls(**{**known, "pass_at": {int(k): value for k, value in fields["pass_at"].items()}})


@dataclass
class _Counts:
    """What was counted of one profile."""

    version_id: str
    num_prompts: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    rewards: list[float] = field(default_factory=list)
    prompts_by_passed: Counter[int] = field(default_factory=Counter)


class Measurement:
    """Counts groups one by one, so that no more than one of them has to be in memory."""

    def __init__(self, run: Run, *, step: int) -> None:
        self._step = step
        self._profiles = {p.profile: p for p in run.config.eval_profiles()}
        self._num_samples = {name: p.num_samples for name, p in run.config.profiles().items()}
        self._counts: dict[str, _Counts] = {}

    def add(self, unit: Unit, rows: pa.RecordBatch | None) -> None:
        """Count a unit with its trajectories; without them it was given up."""
        counts = self._counts.setdefault(unit.profile, _Counts(unit.required_version_id or ""))
        counts.num_prompts += 1
        members = {} if rows is None else _by_member(rows)
        scored = [m for m in members.values() if m["status"] != "failed" and m["score"] is not None]
        counts.num_failed += self._num_samples[unit.profile] - len(scored)
        counts.num_tokens += unit.num_tokens or 0
        counts.rewards += [m["reward"] for m in scored if m["reward"] is not None]
        pass_score = self._profiles[unit.profile].pass_score
        counts.prompts_by_passed[sum(m["score"] >= pass_score for m in scored)] += 1

    def results(self) -> list[EvalResult]:
        """Return what was counted, in the order of the configuration."""
        return [self._result(name, self._counts[name]) for name in self._profiles if name in self._counts]

    def _result(self, name: str, counts: _Counts) -> EvalResult:
        profile, n = self._profiles[name], self._num_samples[name]
        return EvalResult(
            step=self._step,
            version_id=counts.version_id,
            dataset=profile.dataset,
            profile=name,
            is_greedy=profile.is_greedy,
            num_prompts=counts.num_prompts,
            num_answers=counts.num_prompts * n,
            num_passed=sum(c * count for c, count in counts.prompts_by_passed.items()),
            num_failed=counts.num_failed,
            num_tokens=counts.num_tokens,
            mean_reward=sum(counts.rewards) / len(counts.rewards) if counts.rewards else None,
            pass_at=mean_pass_at_k(counts.prompts_by_passed, n=n),
        )


def _by_member(rows: pa.RecordBatch) -> dict[int, dict[str, Any]]:
    """Return one row of each member: of several segments the first that failed, else the first with a score."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows.select(["member", "status", "score", "reward"]).to_pylist():
        known = found.get(row["member"])
        if known is None or row["status"] == "failed" or known["score"] is None:
            found[row["member"]] = row
    return found


def recorded(run: Run) -> list[EvalResult]:
    """Return the results that the consumer `eval` recorded on the branch's line, by step; no trajectory is read."""
    with run.index.read() as connection:
        return recorded_of(connection, run.branch)


def recorded_of(connection: Connection, branch_id: str) -> list[EvalResult]:
    """Return what `recorded` does, inside a transaction."""
    steps = checkpoints.steps_recorded(connection, branch_id, EVAL)
    found = [EvalResult.from_fields(fields) for step in steps for fields in step.get(RESULTS, ())]
    return sorted(found, key=lambda result: result.step)


def results(run: Run) -> list[EvalResult]:
    """Return the results of every evaluation that is whole, by step; one that was not recorded is measured."""
    known = recorded(run)
    steps = {result.step for result in known}
    missing = [step for step in _published_steps(run) if step not in steps]
    measured = [result for step in missing for result in _measured(run, step)]
    return sorted([*known, *measured], key=lambda result: result.step)


def _published_steps(run: Run) -> list[int]:
    with run.index.read() as connection:
        newest = weights.newest(connection, run.branch)
    return [] if newest is None else [s for s in range(newest.step + 1) if is_evaluated(run.config, s)]


def _measured(run: Run, step: int) -> list[EvalResult]:
    with run.index.read() as connection:
        found = [
            unit
            for profile in run.config.eval_profiles()
            for unit in units.of_profile(connection, run.branch, profile=profile.profile, epoch=step)
        ]
    if any(unit.state in (UnitState.READY, UnitState.LEASED) for unit in found):
        return []
    measurement = Measurement(run, step=step)
    for unit, rows in _with_rows(run, found):
        measurement.add(unit, rows)
    return measurement.results()


def _with_rows(run: Run, found: Iterable[Unit]) -> Iterator[tuple[Unit, pa.RecordBatch | None]]:
    by_extent: dict[int, list[Unit]] = {}
    for unit in found:
        if unit.state is UnitState.COMPLETED and unit.extent_id is not None:
            by_extent.setdefault(unit.extent_id, []).append(unit)
        else:
            yield unit, None
    reader = PackReader(run.root)
    try:
        for extent_id, rows in read_extents(run, reader, list(by_extent)):
            for unit in by_extent[extent_id]:
                yield unit, rows.slice(unit.row_start, unit.row_count)
    finally:
        reader.close()


def latest(found: Iterable[EvalResult]) -> list[EvalResult]:
    """Return the newest result of each profile, in their order."""
    newest: dict[str, EvalResult] = {}
    for result in found:
        newest[result.profile] = result
    return list(newest.values())
