"""Completing, parking, saving and failing: what a worker hands in for the units it holds (see flow.exchange for how)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strawflow import faults
from strawflow.errors import LeaseLostError
from strawflow.flow.claim import Grant
from strawflow.flow.session import WorkerSession
from strawflow.flow.submission import Submission
from strawflow.flow.trajectory import UnitResult
from strawflow.index.leases import Failure, Wanted
from strawflow.index.units import Unit
from strawflow.states import UnitState


@dataclass(frozen=True)
class Receipt:
    """What became of each unit of a submission."""

    accepted: tuple[int, ...]
    lost: tuple[int, ...]
    """Units whose lease had been taken over: their rows lie in the pack but are nobody's result."""
    granted: tuple[Unit, ...] = ()


def complete(
    session: WorkerSession,
    results: Sequence[UnitResult],
    *,
    submission_id: str,
    wanted: Wanted | None = None,
) -> Receipt:
    """Store the results of leased units, and lease what is `wanted` next in the same transaction.

    A lost lease of one does not touch the others. Idempotent: the same submission id with the same content returns the first
    receipt; what it granted only as far as it is still held.

    Raises:
        InvalidInputError: a member's arrays are not parallel, or a failed member carries a reward.
        ConflictError: the submission id came with other content before.
        LeaseLostError: the whole session was declared lost.
    """
    faults.at("rollout.before_complete")
    answer = session.exchange.submit(Submission(submission_id, results=results, wanted=wanted))
    if wanted is not None:
        faults.at("rollout.after_claim")
    return Receipt(answer.accepted, answer.lost, answer.granted)


def park(session: WorkerSession, progress: Sequence[UnitResult], *, submission_id: str) -> Receipt:
    """Store the progress of leased units and give them back: they are offered before fresh ones, to any worker, and the
    attempt is refunded. Idempotent, and raises, as `complete` does."""
    answer = session.exchange.submit(Submission(submission_id, parked=progress))
    return Receipt(answer.parked, answer.lost)


def save(
    session: WorkerSession, progress: Sequence[tuple[Grant, UnitResult]], *, submission_id: str
) -> Receipt:
    """Store how far leased units have come, and go on with them: whoever gets one after this worker's death goes on there.

    Each result holds the members begun so far, whole; only what is new since the last save is written. Idempotent, and
    raises, as `complete` does; units that had nothing new are in none of the receipt's lists.
    """
    records = [(grant, result, grant.chain.record(result)) for grant, result in progress]
    fresh = [record for _, _, record in records if record is not None]
    if not fresh:
        return Receipt((), ())
    answer = session.exchange.submit(Submission(submission_id, saved=fresh))
    faults.at("rollout.after_save")
    for grant, result, record in records:
        if record is not None and grant.unit_id in answer.saved:
            grant.chain.saved(record, result)
    return Receipt(answer.saved, answer.lost)


def fail(
    session: WorkerSession, unit_id: int, *, fence: int, error: str, retry_after_s: float = 0.0
) -> UnitState:
    """End an attempt with its error; after max_attempts the unit is set aside as failed. Returns its new state.

    Raises:
        LeaseLostError: the fence was superseded.
    """
    failure = Failure(unit_id, fence, error, retry_after_s)
    answer = session.exchange.submit(Submission(None, failures=[failure]))
    if unit_id in answer.lost:
        raise LeaseLostError(
            f"the lease of unit {unit_id} was taken over; its error is not recorded",
            fence=fence,
            session_id=session.session_id,
        )
    return answer.failed[unit_id]
