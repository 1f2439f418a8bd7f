"""Invariants of a run, checked from outside: what the promises say must hold at any instant and at the end.

Each function raises AssertionError with what it found; tests call them after every kill.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from strawflow.flow import by_reference, consume, history, retire
from strawflow.flow.placed import read_extents
from strawflow.flow.run import Run
from strawflow.index import carry, consumers, units
from strawflow.index.batches import Batch
from strawflow.packs.reader import PackReader
from strawflow.states import BatchState, UnitState


def check_exactly_once(run: Run, *, finished: bool) -> dict[int, str]:
    """Promise P1: no unit has two fates; at the end every admitted unit of a planned step has one.

    Returns {unit id: outcome} over all batches and drops. The primary key forbids two assignments; this also reads the
    packed rows themselves and finds each trained (unit, member) in exactly one place.
    """
    fates: dict[int, str] = {}
    with run.index.read() as connection:
        assigned = consumers.assignments_of(connection, run.branch, run.consumer)
        open_units = [
            u
            for u in units.listed(connection, run.branch, limit=1_000_000)
            if u.purpose != "eval" and u.unit_id not in {a.unit_id for a in assigned}
        ]
    for assignment in assigned:
        assert assignment.unit_id not in fates, f"unit {assignment.unit_id} has two fates"
        fates[assignment.unit_id] = assignment.outcome
    for unit_id, outcome in retire.fates_in_history(run, run.branch, run.consumer):
        assert unit_id not in fates, f"unit {unit_id} is retired and has another fate beside that"
        fates[unit_id] = outcome
    check_packed_once(run, fates)
    check_counts(run, fates)
    if finished:
        waiting = [u.unit_id for u in open_units if u.state is not UnitState.FAILED]
        assert not waiting, f"the run is finished, yet units {waiting[:10]} were neither trained nor dropped"
    return fates


def check_packed_once(run: Run, fates: dict[int, str]) -> None:
    """Every member of the packed rows belongs to a unit assigned as trained and lies in one batch only.

    Batches of ancestors have their units there. Rows of a unit that the branch took over carry the ancestor's unit id.
    """
    reader = PackReader(run.root)
    seen: dict[tuple[int, int, int], int] = {}
    with run.index.read() as connection:
        taken_over = carry.taken_over(connection, run.branch)
    for batch in history.batches(run):
        if batch.branch_id != run.branch:
            continue
        for rows in _members(run, reader, batch):
            for row in rows.select(["unit_id", "fence", "member", "segment"]).to_pylist():
                unit_id = taken_over.get((row["unit_id"], row["fence"]), row["unit_id"])
                key = (unit_id, row["member"], row["segment"])
                assert key not in seen, (
                    f"member {key} lies in the batches of steps {seen[key]} and {batch.step}"
                )
                seen[key] = batch.step
                assert fates.get(unit_id) == "trained", f"packed unit {unit_id} is not assigned"
    reader.close()
    missing = {u for u, outcome in fates.items() if outcome == "trained"} - {key[0] for key in seen}
    assert not missing, f"units {sorted(missing)[:10]} are assigned as trained but lie in no batch"


def _members(run: Run, reader: PackReader, batch: Batch) -> Iterator[pa.RecordBatch]:
    """Yield rows that name the trained members of a batch: the packed ones, those it refers to, or those of its plan once
    they are given up."""
    if batch.state is not BatchState.RETIRED and batch.objective == by_reference.OBJECTIVE:
        yield from by_reference.rows_of(run, reader, batch).to_batches()
        return
    if batch.state is not BatchState.RETIRED:
        yield from (rows for _, rows in consume.read_batch(run, reader, batch))
        return
    for _, plan in read_extents(run, reader, [batch.plan_extent_id]):
        yield plan.filter(pc.equal(plan.column("outcome"), "trained"))


def check_counts(run: Run, fates: dict[int, str]) -> None:
    """The counts that everyone is shown equal what there is, retired units included."""
    counted = Counter[str]()
    for (_, outcome, _), number in history.outcomes(run).items():
        counted[outcome] += number
    assert counted == Counter(fates.values()), f"counted {dict(counted)}, there are {Counter(fates.values())}"


def check_batches_unchanged(before: dict[int, str], run: Run) -> dict[int, str]:
    """Promise P2: a planned batch keeps its step and its digest for ever; returns {step: digest} now."""
    now = batch_digests(history.batches(run))
    changed = {step for step, digest in before.items() if now.get(step) != digest}
    assert not changed, f"the batches of steps {sorted(changed)} were replaced"
    steps = sorted(now)
    assert steps == list(range(1, len(steps) + 1)), f"steps are not contiguous: {steps}"
    return now


def batch_digests(batches: list[Batch]) -> dict[int, str]:
    return {batch.step: batch.digest for batch in batches}
