"""The consumer `eval`: reads each evaluation once it is whole, and records what it came to.

    plan (the groups of one evaluation) ▸ given-up groups dropped ▸ results recorded ▸ position advanced

1. One batch by reference for each evaluation, so its steps count evaluations; which weights it tested is in its results.
2. Every stage can be repeated: a crash between two of them goes on with the batch that is planned, and nothing counts twice.
3. It is made when the first evaluation is whole, and wants nothing else: no trainer is ever offered what it reads.
4. Any worker may call it, at any time; the role keeps all but one out.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from strawflow import faults
from strawflow.errors import ConflictError, LeaseLostError
from strawflow.flow import assemble, by_reference, consume
from strawflow.flow.evaluation import EVAL, RESULTS, EvalResult, Measurement
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.index import batches, checkpoints, consumers, units
from strawflow.index.batches import Batch
from strawflow.index.consumers import Role
from strawflow.index.engine import Connection
from strawflow.index.units import Unit
from strawflow.states import UnitState

log = logging.getLogger(__name__)


def collect(run: Run) -> int:
    """Read every evaluation that is whole and was not read yet; returns how many.

    Almost always there is none, which one look at the index tells. While another process is at it, 0.

    Raises:
        CorruptPackError: stored bytes do not match their checksum.
    """
    run = replace(run, consumer=EVAL)
    with run.index.read() as connection:
        if not _is_any_due(connection, run):
            return 0
    session = WorkerSession(run, EVAL)
    try:
        return _collect(session)
    except (ConflictError, LeaseLostError) as error:
        log.warning("the evaluation is looked at again: %s", error)
        return 0
    finally:
        session.end()  # also after an error: the role must not wait for the lease to end


def _is_any_due(connection: Connection, run: Run) -> bool:
    known = next((c for c in consumers.listed(connection, run.branch) if c.consumer == EVAL), None)
    if known is None:
        found = units.listed(connection, run.branch, purpose=EVAL, state=UnitState.COMPLETED, limit=1)
        return bool(found) and not units.is_epoch_open(connection, run.branch, epoch=found[0].epoch)
    return known.planned > known.position or _due(connection, run) is not None


def _due(connection: Connection, run: Run) -> int | None:
    """Return the step of the oldest weights whose evaluation is whole and was not read."""
    step = consumers.first_offered_epoch(connection, run.branch, EVAL, purpose=EVAL)
    return None if step is None or units.is_epoch_open(connection, run.branch, epoch=step) else step


def _collect(session: WorkerSession) -> int:
    run = session.run
    consume.ensure_consumer(session, purposes=(EVAL,))
    with run.index.begin() as connection:
        taken = [
            consumers.take_role(connection, run.branch, f"{what}:{EVAL}", session.session_id)
            for what in ("assemble", "consume")
        ]
    assembler, role = taken
    if assembler is None or role is None:
        return 0
    num_read = 0
    while True:
        if _finish(session, assembler, role):
            num_read += 1
        elif not _plan(session, assembler):
            return num_read


def _plan(session: WorkerSession, assembler: Role) -> bool:
    """Plan the batch of the next evaluation; False when none is whole."""
    run = session.run
    with run.index.read() as connection:
        step = _due(connection, run)
        found = [] if step is None else consumers.offered_of_epoch(connection, run.branch, EVAL, epoch=step)
    if not found:
        return False
    by_reference.plan_groups(session, assembler, found, is_training=False)
    faults.at("eval.after_plan")  # crash here: the batch is finished by whoever comes next
    return True


def _finish(session: WorkerSession, assembler: Role, role: Role) -> bool:
    """Record the results of the batch that is planned and not read yet, and pass it; False when there is none."""
    run = session.run
    with run.index.read() as connection:
        known = consumers.find(connection, run.branch, EVAL)
        batch = batches.find(connection, run.branch, EVAL, known.position + 1)
        is_recorded = any(
            s["step"] == known.position + 1 for s in checkpoints.steps_recorded(connection, run.branch, EVAL)
        )
    if batch is None:
        return False
    if not is_recorded:
        results = _measured(session, assembler, batch)
        metrics = {RESULTS: [result.fields() for result in results]}
        consume.record_step(session, role, step=batch.step, metrics=metrics)
        _log(results)
    faults.at("eval.after_record")  # crash here: the position is advanced by whoever comes next
    by_reference.advance(session, role, expected=batch.step - 1, step=batch.step)
    return True


def _measured(session: WorkerSession, assembler: Role, batch: Batch) -> list[EvalResult]:
    run = session.run
    measurement: Measurement | None = None
    step = 0
    for unit, rows in by_reference.groups_of(run, session.reader, batch):
        step = unit.epoch
        measurement = measurement or Measurement(run, step=step)
        measurement.add(unit, rows)
        session.mark_progress()
    if measurement is None:
        return []
    assemble.drop_failed(session, assembler, purpose=EVAL, epoch=step)
    for unit in _given_up(run, step):
        measurement.add(unit, None)
    return measurement.results()


def _given_up(run: Run, step: int) -> list[Unit]:
    with run.index.read() as connection:
        return [
            unit
            for profile in run.config.eval_profiles()
            for unit in units.of_profile(connection, run.branch, profile=profile.profile, epoch=step)
            if unit.state is UnitState.FAILED
        ]


def _log(results: list[EvalResult]) -> None:
    for result in results:
        log.info(
            "evaluation of step %d on %s%s: %d of %d answers passed, %d failed",
            result.step,
            result.dataset,
            ", greedy" if result.is_greedy else "",
            result.num_passed,
            result.num_answers,
            result.num_failed,
        )
