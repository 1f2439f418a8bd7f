"""Retrying: an operator offers failed units again, with fresh attempts.

A unit that was already recorded as dropped was replaced by another: offering it again would give it a second fate.
"""

from __future__ import annotations

from strawflow.errors import IllegalTransitionError
from strawflow.flow.run import Run
from strawflow.index import consumers, units, weights
from strawflow.index.engine import Connection
from strawflow.index.units import Unit
from strawflow.states import UnitState


def retry_unit(run: Run, unit_id: int) -> Unit:
    """Make a failed unit ready again; returns it.

    Raises:
        NotFoundError: no such unit.
        IllegalTransitionError: it is not failed, or it was recorded as dropped and replaced.
    """
    with run.index.begin() as connection:
        units.retry(connection, unit_id)
        unit = units.find(connection, unit_id)
        if consumers.fates_of(connection, unit.branch_id, unit_id):
            raise IllegalTransitionError(
                f"unit {unit_id} was recorded as dropped and another was admitted for it; it cannot be retried"
            )
        _refuse_without_weights(connection, unit)
        return unit


def retry_failed(run: Run) -> list[int]:
    """Make every failed unit that has no fate yet ready again; returns their ids."""
    with run.index.begin() as connection:
        retried = []
        for unit in units.listed(connection, run.branch, state=UnitState.FAILED, limit=1_000_000):
            if not consumers.fates_of(connection, unit.branch_id, unit.unit_id) and _has_weights(
                connection, unit
            ):
                units.retry(connection, unit.unit_id)
                retried.append(unit.unit_id)
        return retried


def _has_weights(connection: Connection, unit: Unit) -> bool:
    """Tell whether the weights a unit is bound to, if any, can still be served."""
    return unit.required_version_id is None or weights.has_files(connection, unit.required_version_id)


def _refuse_without_weights(connection: Connection, unit: Unit) -> None:
    if not _has_weights(connection, unit):
        raise IllegalTransitionError(
            f"unit {unit.unit_id} is bound to weights {unit.required_version_id}, whose files are gone; it cannot be retried"
        )
