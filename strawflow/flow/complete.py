"""Completing: store trajectories and, in one transaction, make them the result of their units.

    append ▸ sync ▸ [A] ▸ transaction ▸ [B] ▸ reply

A: bytes without a row are an orphan. B: the retry carries the same submission id and gets the same receipt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from strawflow import faults
from strawflow.errors import InvalidInputError, LeaseLostError
from strawflow.flow.session import WorkerSession
from strawflow.flow.trajectory import UnitResult, to_record_batch
from strawflow.index import consumers, packs, receipts, units, weights
from strawflow.index.engine import Connection
from strawflow.index.units import Completion
from strawflow.states import UnitState


@dataclass(frozen=True)
class Receipt:
    """What became of each unit of a submission."""

    accepted: tuple[int, ...]
    lost: tuple[int, ...]
    """Units whose lease had been taken over: their rows lie in the pack but are nobody's result."""


def complete(session: WorkerSession, results: Sequence[UnitResult], *, submission_id: str) -> Receipt:
    """Store the results of leased units; a lost lease of one does not touch the others.

    Idempotent: the same submission id with the same units and fences returns the first receipt.

    Raises:
        InvalidInputError: a member's arrays are not parallel, or a failed member carries a reward.
        ConflictError: the submission id came with other content before.
        LeaseLostError: the whole session was declared lost.
    """
    run = session.run
    digest = hashlib.sha256(repr([(r.unit_id, r.fence, r.seq) for r in results]).encode()).hexdigest()
    with run.index.read() as connection:
        known = receipts.find(connection, submission_id, verb="complete", content_digest=digest)
    if known is not None:
        return Receipt(tuple(known["accepted"]), tuple(known["lost"]))
    faults.at("rollout.before_complete")
    extent = session.packs.append("trajectory", to_record_batch(results))
    faults.at("commit.before")  # crash here: orphan bytes, named by nothing
    accepted: list[int] = []
    lost: list[int] = []
    with run.index.begin() as connection:
        known = receipts.find(connection, submission_id, verb="complete", content_digest=digest)
        if known is not None:
            return Receipt(tuple(known["accepted"]), tuple(known["lost"]))
        packs.name_extents(connection, [extent], session_id=session.session_id)
        row = 0
        for result in results:
            completion = Completion(
                unit_id=result.unit_id,
                fence=result.fence,
                seq=result.seq,
                extent_id=extent.extent_id,
                row_start=row,
                row_count=len(result.members),
                version_step=_oldest_step(connection, result),
                mean_reward=result.mean_reward,
                num_tokens=result.num_tokens,
            )
            row += len(result.members)
            try:
                units.complete(connection, session.session_id, completion)
            except LeaseLostError:  # a value for this row; the others stand
                lost.append(result.unit_id)
                continue
            accepted.append(result.unit_id)
        offered = [r.unit_id for r in results if r.unit_id in set(accepted) and r.profile.purpose != "eval"]
        if offered:
            consumers.offer(connection, run.branch, run.consumer, offered)
        receipts.store(
            connection,
            submission_id,
            verb="complete",
            content_digest=digest,
            receipt={"accepted": accepted, "lost": lost},
        )
    faults.at("commit.after")
    return Receipt(tuple(accepted), tuple(lost))


def fail(session: WorkerSession, unit_id: int, *, fence: int, error: str) -> UnitState:
    """End an attempt with its error; after max_attempts the unit is set aside as failed."""
    run = session.run
    with run.index.begin() as connection:
        return units.fail(
            connection,
            session.session_id,
            unit_id,
            fence=fence,
            error=error,
            max_attempts=run.config.rollout.max_attempts,
        )


def _oldest_step(connection: Connection, result: UnitResult) -> int:
    """Return the step of the oldest weights among the sampled tokens; 0 for demonstrations.

    Raises:
        InvalidInputError: the index knows no such weights.
    """
    steps = []
    for version_id in sorted(result.versions()):
        version = weights.find(connection, version_id)
        if version is None:
            raise InvalidInputError(f"unit {result.unit_id} was sampled from unknown weights {version_id!r}")
        steps.append(version.step)
    return min(steps, default=0)
