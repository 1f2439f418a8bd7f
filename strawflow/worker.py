"""Worker: the producer's side of a store. It leases prompt groups, and hands in what became of them.

1. What it holds is leased to its session; a thread of its own sends the heartbeat, so a claim needs no renewal by hand.
   A worker that stops for longer than the lease loses what it holds, and its late results are refused.
2. Every call is durable at the run's level when it returns, and may be made from many threads at once: they share one
   append, one sync and one transaction.
3. From asyncio: `await asyncio.to_thread(worker.complete, ...)`. A forked process opens the store again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from strawflow import clock
from strawflow.errors import InvalidInputError
from strawflow.flow import claim as claiming
from strawflow.flow import complete as completing
from strawflow.flow.claim import Grant, PromptShelf, grants_of
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.flow.submission import Answer, Submission
from strawflow.flow.trajectory import UnitResult
from strawflow.ids import SESSION_KIND_RULE, is_session_kind, new_id
from strawflow.index.leases import Failure, Wanted
from strawflow.states import UnitState


@dataclass(frozen=True)
class Settled:
    """What became of results handed in, by unit id, and what was claimed in the same transaction."""

    accepted: tuple[int, ...]
    lost: tuple[int, ...]
    """Units that were given to another worker meanwhile: what was handed in for them counts for nothing."""
    grants: list[Grant]


class Worker:
    """Leases and completes prompt groups; made by `Store.worker`. Use as a context manager."""

    def __init__(self, run: Run, name: str) -> None:
        if not is_session_kind(name):  # before the session has a row
            raise InvalidInputError(f"worker name {name!r}: {SESSION_KIND_RULE}")
        self._session = WorkerSession(run, name)
        self._shelf = PromptShelf(self._session)

    @property
    def session_id(self) -> str:
        return self._session.session_id

    def claim(
        self, limit: int = 1, *, serving_version_id: str | None = None, wait_s: float = 0.0
    ) -> list[Grant]:
        """Lease up to `limit` groups, parked ones first; waits up to `wait_s` seconds for the first of them.

        Raises:
            LeaseLostError: this worker's session was declared lost; open a new worker.
            StorageError: the index did not answer; nothing changed.
        """

        def look() -> list[Grant]:
            self._session.mark_progress()
            return claiming.claim(
                self._session, self._shelf, limit=limit, serving_version_id=serving_version_id
            )

        return clock.look_until_found(look, wait_s=wait_s)

    def complete(
        self,
        results: Sequence[UnitResult],
        *,
        claim: int = 0,
        serving_version_id: str | None = None,
        submission_id: str | None = None,
    ) -> Settled:
        """Store the results of leased groups and, in the same transaction, lease up to `claim` further ones.

        Give a `submission_id` of your own to be able to repeat the call after a lost reply: the same id with the same
        content gets the same answer.

        Raises:
            InvalidInputError: a member's arrays are not parallel, or it was sampled from unknown weights.
            ConflictError: the submission id came with other content before.
            LeaseLostError: this worker's session was declared lost; open a new worker.
            CommitUnknownError: repeat with the same submission id.
        """
        wanted = Wanted(claim, serving_version_id) if claim else None
        answer = self._submit(Submission(submission_id, results=results, wanted=wanted))
        return Settled(answer.accepted, answer.lost, grants_of(self._session, self._shelf, answer.granted))

    def park(self, progress: Sequence[UnitResult], *, submission_id: str | None = None) -> Settled:
        """Store what was generated so far and give the groups back: any worker goes on with them, before fresh ones.

        Raises as `complete` does.
        """
        answer = self._submit(Submission(submission_id, parked=progress))
        return Settled(answer.parked, answer.lost, [])

    def save(
        self, progress: Sequence[tuple[Grant, UnitResult]], *, submission_id: str | None = None
    ) -> Settled:
        """Store how far groups have come and keep them: after this worker's death another goes on from there.

        Each result (`grant.result(...)`) holds the members begun so far, unfinished ones with status "partial"; only what is
        new since the last save is written. Not for one group from two threads at once.

        Raises as `complete` does.
        """
        self._session.mark_progress()
        receipt = completing.save(self._session, progress, submission_id=submission_id or new_id("save"))
        return Settled(receipt.accepted, receipt.lost, [])

    def fail(self, grant: Grant, error: str, *, retry_after_s: float = 0.0) -> UnitState | None:
        """End an attempt with its error: ready again (after a while), or failed once the attempts are used up.

        Returns the group's new state; None when it was given to another worker meanwhile.
        """
        failure = Failure(grant.unit_id, grant.fence, error, retry_after_s)
        return self._submit(Submission(None, failures=[failure])).failed.get(grant.unit_id)

    def release(self, grants: Sequence[Grant]) -> int:
        """Give groups back unworked, the attempt refunded; returns how many were still held."""
        self._session.mark_progress()
        return claiming.release(self._session, grants)

    def mark_progress(self) -> None:
        """Tell the heartbeat that the work goes on; needed only when no call is made for ten minutes."""
        self._session.mark_progress()

    def close(self) -> None:
        """End the session: packs are sealed, whatever is still held is given back."""
        self._session.end()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.__exit__(kind, error, trace)

    def _submit(self, submission: Submission) -> Answer:
        self._session.mark_progress()
        return self._session.exchange.submit(submission)
