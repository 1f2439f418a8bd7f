"""Retrying: an operator offers failed units again, with fresh attempts.

A unit that was already recorded as dropped was replaced by another: offering it again would give it a second fate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from strawflow.errors import ConflictError, IllegalTransitionError
from strawflow.flow import journal, returned
from strawflow.flow.journal import EntryKind
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.index import consumers, units, weights
from strawflow.index.engine import Connection
from strawflow.index.units import Unit
from strawflow.states import UnitState


def retry_unit(run: Run, unit_id: int) -> Unit:
    """Make a failed unit ready again; returns it.

    Raises:
        NotFoundError: no such unit.
        IllegalTransitionError: it is not failed, or it was recorded as dropped and replaced.
        ConflictError: it changed just now; look at it again.
    """
    with run.index.read() as connection:
        unit = _retryable(connection, unit_id)
    with _retrying(run, [unit]) as connection:
        if _retryable(connection, unit_id) != unit:
            raise ConflictError(f"unit {unit_id} changed while it was to be retried; look at it again")
        units.retry(connection, unit_id)
        return units.find(connection, unit_id)


def retry_failed(run: Run) -> list[int]:
    """Make every failed unit that has no fate yet ready again; returns their ids."""
    while True:
        with run.index.read() as connection:
            found = _all_retryable(connection, run)
        if not found:
            return []
        try:
            with _retrying(run, found) as connection:
                if _all_retryable(connection, run) != found:
                    raise ConflictError("the failed units changed while they were to be retried")
                for unit in found:
                    units.retry(connection, unit.unit_id)
            return [unit.unit_id for unit in found]
        except ConflictError:
            continue  # one more failed, or one was dropped, just now


@contextmanager
def _retrying(run: Run, found: Sequence[Unit]) -> Iterator[Connection]:
    """Open the transaction in which failed units are offered again, once the journal has them."""
    after = [replace(unit, attempts=0, crashes=0) for unit in found]
    session = WorkerSession(run, "retry")
    try:
        with (
            journal.recorded(session, returned.entries(EntryKind.RETRY, after)) as record,
            run.index.begin() as connection,
        ):
            record.name(connection)
            units.hold(connection, [unit.unit_id for unit in found])
            yield connection
    finally:
        session.end()  # also after a refusal


def _retryable(connection: Connection, unit_id: int) -> Unit:
    unit = units.find(connection, unit_id)
    if unit.state is not UnitState.FAILED:
        raise IllegalTransitionError(f"unit {unit_id} is {unit.state}, only a failed unit can be retried")
    if consumers.fates_of(connection, unit.branch_id, unit_id):
        raise IllegalTransitionError(
            f"unit {unit_id} was recorded as dropped and another was admitted for it; it cannot be retried"
        )
    _refuse_without_weights(connection, unit)
    return unit


def _all_retryable(connection: Connection, run: Run) -> list[Unit]:
    return [
        unit
        for unit in units.listed(connection, run.branch, state=UnitState.FAILED, limit=1_000_000)
        if not consumers.fates_of(connection, unit.branch_id, unit.unit_id) and _has_weights(connection, unit)
    ]


def _has_weights(connection: Connection, unit: Unit) -> bool:
    """Tell whether the weights a unit is bound to, if any, can still be served."""
    return unit.required_version_id is None or weights.has_files(connection, unit.required_version_id)


def _refuse_without_weights(connection: Connection, unit: Unit) -> None:
    if not _has_weights(connection, unit):
        raise IllegalTransitionError(
            f"unit {unit.unit_id} is bound to weights {unit.required_version_id}, whose files are gone; it cannot be retried"
        )
