"""The exchange: everything a worker tells the index about its units and asks of it, many callers in one transaction.

    append ▸ sync ▸ [A] ▸ transaction ▸ [B] ▸ reply

A: bytes without a row are an orphan. B: the retry carries the same submission id and gets the same receipt.

1. Group commit: callers that come together share a window (flow.window): one append, one sync, one transaction.
   Completing units and claiming the next are one transaction too.
2. A lost lease or a conflict is the answer of its own submission and touches no other. If the shared transaction fails
   otherwise, its submissions are run one by one.
3. Each submission has an id: a repetition gets the first receipt, other content under it is a ConflictError. When the
   answer to a commit is lost the exchange reads the receipts back and does what was not done; if it cannot, callers get
   CommitUnknownError and repeat with the same id.
4. Safe for any number of threads of the process that opened the session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from strawflow import faults
from strawflow.config import RunConfig
from strawflow.errors import (
    CommitUnknownError,
    ConflictError,
    InvalidInputError,
    LeaseLostError,
    StorageError,
)
from strawflow.flow import quota
from strawflow.flow.run import Run
from strawflow.flow.submission import Answer, Submission
from strawflow.flow.trajectory import UnitResult, to_record_batch
from strawflow.flow.window import MAX_UNITS, Line, Part
from strawflow.ids import Extent
from strawflow.index import (
    consumers,
    continuations,
    events,
    leases,
    packs,
    receipts,
    sessions,
    units,
    weights,
)
from strawflow.index.events import Event
from strawflow.index.leases import Outcome, Wanted
from strawflow.index.prepared import Transaction
from strawflow.index.receipts import Receipt
from strawflow.index.units import Unit
from strawflow.states import UnitState

if TYPE_CHECKING:
    from strawflow.flow.session import WorkerSession


@dataclass(frozen=True)
class _Stored:
    """Where the rows of one window lie: the extent of each kind there is, and (start, count) of each unit."""

    extents: dict[str, Extent]
    rows: dict[int, tuple[int, int]]


class Exchange:
    """One per worker session; `submit` from any thread."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._config: RunConfig = session.run.config
        self._gauge = quota.gauge(session.run)
        self._line = Line(self._settle_window)
        self._steps: dict[str, int] = {}
        self._numbers = count()

    @property
    def num_windows(self) -> int:
        return self._line.num_windows

    @property
    def num_submissions(self) -> int:
        return self._line.num_submissions

    def submit(self, submission: Submission) -> Answer:
        """Settle a submission; durable at the run's level on return.

        Raises:
            InvalidInputError: a member's arrays are not parallel, a failed member carries a reward, or unknown weights.
            ConflictError: the submission id came with other content before.
            LeaseLostError: the whole session was declared lost.
            StorageError: nothing changed. CommitUnknownError: repeat with the same submission id.
        """
        self._session.packs.require_own_process()  # before any lock: another thread may have held it at a fork
        submission.check()
        self._gauge.watch()
        self._learn_versions(submission)
        part = self._part(submission)
        self._line.settle(part)
        if part.error is not None:
            raise part.error
        assert part.answer is not None
        return part.answer

    def _part(self, submission: Submission) -> Part:
        if submission.submission_id is None:
            return Part(submission, f"{self._session.session_id}-{next(self._numbers)}", b"")
        return Part(submission, submission.submission_id, submission.content_digest())

    def _settle_window(self, window: Sequence[Part]) -> None:
        try:
            self._settle(window)
        except LeaseLostError:
            self._tell_refused(window)
            raise
        except (CommitUnknownError, ConflictError):
            raise
        except Exception:
            # One member may be what the database refuses: each alone tells whose error it is.
            if len(window) == 1:
                raise
            for part in window:
                if not part.is_settled:
                    try:
                        self._settle([part])
                    except Exception as error:  # the error is this submission's answer
                        part.error = error

    def _tell_refused(self, window: Sequence[Part]) -> None:
        """Leave an event that names the units a lost session handed in too late; without one it is refused all the same."""
        if units_named := [unit_id for part in window for unit_id in part.submission.unit_ids]:
            refused = Event("units.refused", self._session.session_id, facts={"units": units_named})
            with suppress(StorageError, CommitUnknownError), self._session.run.index.direct() as transaction:
                events.record_many(transaction, [refused])

    def _settle(self, window: Sequence[Part]) -> None:
        stored = self._store(window)
        faults.at("commit.before")  # crash here: orphan bytes, named by nothing
        try:
            with self._session.run.index.direct() as transaction:
                answers = self._transact(transaction, window, stored)
        except CommitUnknownError:
            answers = self._settle_again(window, stored)
        # Before anything else can fail: from here on they are told what was committed.
        for part, answer in zip(window, answers, strict=True):
            if isinstance(answer, Answer):
                part.answer = answer
            else:
                part.error = answer
        self._session.checksums.add(stored.extents.values())
        faults.at("commit.after")

    def _settle_again(self, window: Sequence[Part], stored: _Stored) -> list[Answer | ConflictError]:
        """Learn from the receipts what a commit without an answer did; what it did not do is done now.

        Raises:
            CommitUnknownError: the index does not answer, or not this time either.
        """
        try:
            with self._session.run.index.direct() as transaction:
                # The first transaction shared this row: once it is held alone, that one has ended and what it did is seen.
                sessions.hold(transaction, self._session.session_id)
                return self._transact(transaction, window, stored, is_again=True)
        except (ConflictError, LeaseLostError):
            raise
        except Exception as error:  # any other failure leaves the outcome as unknown as it was
            raise CommitUnknownError(f"the outcome could not be read back: {error}") from error

    def _store(self, window: Sequence[Part]) -> _Stored:
        rows: dict[int, tuple[int, int]] = {}
        extents: dict[str, Extent] = {}
        submissions = [part.submission for part in window]
        for kind, results in (
            ("trajectory", [r for s in submissions for r in s.results]),
            ("continuation", [r for s in submissions for r in s.parked]),
            ("progress", [r for s in submissions for r in s.saved]),
        ):
            start = 0
            for result in results:
                num_rows = sum(1 + len(member.siblings) for member in result.members)
                rows[result.unit_id] = (start, num_rows)
                start += num_rows
            if results:
                extents[kind] = self._session.packs.append(kind, to_record_batch(results, kind=kind))
        return _Stored(extents, rows)

    def _transact(
        self, transaction: Transaction, window: Sequence[Part], stored: _Stored, *, is_again: bool = False
    ) -> list[Answer | ConflictError]:
        session_id = self._session.session_id
        # First: what was answered before is answered again, also to a session that was lost since.
        asked = [p.submission_id for p in window if is_again or not p.is_unnamed]
        known = _told_apart(receipts.find_many(transaction, asked))
        if all(p.submission_id in known for p in window):
            return [self._repeated(transaction, known[p.submission_id], p) for p in window]
        named = list(stored.extents.values())
        if named:  # holds the session's row as well
            named = packs.name_extents(transaction, named, session_id=session_id)
        else:
            sessions.require_live(transaction, session_id)
        fresh = [p for p in window if p.submission_id not in known]
        ids = {e.kind: e.extent_id for e in named}
        answers = self._answer(transaction, fresh, ids, stored)
        receipts.store(transaction, _receipts_of(window, answers))
        _record(transaction, session_id, list(answers.values()))
        return [
            answers[p.submission_id]
            if p.submission_id in answers
            else self._repeated(transaction, known[p.submission_id], p)
            for p in window
        ]

    def _answer(
        self,
        transaction: Transaction,
        parts: Sequence[Part],
        extent_ids: dict[str, int],
        stored: _Stored,
    ) -> dict[str, Answer]:
        session_id = self._session.session_id
        fresh = [part.submission for part in parts]
        completed = parked = saved = released = frozenset[int]()
        results = [r for s in fresh for r in s.results]
        if results:
            outcomes = [self._outcome(r, extent_ids["trajectory"], stored) for r in results]
            completed = frozenset(leases.complete(transaction, session_id, outcomes))
            offered = [r.unit_id for r in results if r.unit_id in completed]
            consumers.offer(transaction, offered)
        if to_park := [p for s in fresh for p in s.parked]:
            outcomes = [self._outcome(p, extent_ids["continuation"], stored) for p in to_park]
            parked = frozenset(leases.park(transaction, session_id, outcomes))
        continuations.end(transaction, completed | parked)
        if to_save := [p for s in fresh for p in s.saved]:
            placed = [(p.after, self._outcome(p, extent_ids["progress"], stored)) for p in to_save]
            first = [outcome for after, outcome in placed if after is None]
            further = [outcome for after, outcome in placed if after is not None]
            saved = frozenset(
                continuations.begin(transaction, session_id, first)
                | continuations.go_on(transaction, session_id, further)
            )
        failed = leases.fail(
            transaction,
            session_id,
            [f for s in fresh for f in s.failures],
            max_attempts=self._config.rollout.max_attempts,
        )
        if keys := [key for s in fresh for key in s.released]:
            released = frozenset(leases.release(transaction, session_id, keys))
        granted = self._grant(transaction, parts)
        settled = completed | parked | saved | released | failed.keys()
        return {
            part.submission_id: Answer(
                accepted=tuple(r.unit_id for r in s.results if r.unit_id in completed),
                parked=tuple(p.unit_id for p in s.parked if p.unit_id in parked),
                saved=tuple(p.unit_id for p in s.saved if p.unit_id in saved),
                failed={f.unit_id: failed[f.unit_id] for f in s.failures if f.unit_id in failed},
                released=tuple(unit_id for unit_id, _ in s.released if unit_id in released),
                lost=tuple(unit_id for unit_id in s.unit_ids if unit_id not in settled),
                granted=granted.get(part.submission_id, ()),
            )
            for part in parts
            for s in [part.submission]
        }

    def _outcome(self, result: UnitResult, extent_id: int, stored: _Stored) -> Outcome:
        start, count = stored.rows[result.unit_id]
        return Outcome(
            unit_id=result.unit_id,
            fence=result.fence,
            seq=result.seq,
            extent_id=extent_id,
            row_start=start,
            row_count=count,
            version_step=min((self._steps[v] for v in result.versions), default=0),
            mean_reward=result.mean_reward,
            num_tokens=result.num_tokens,
        )

    def _grant(self, transaction: Transaction, parts: Sequence[Part]) -> dict[str, tuple[Unit, ...]]:
        """Claim for all who want the same kind of units at once, and share out in the order they came."""
        granted: dict[str, tuple[Unit, ...]] = {}
        asking: dict[tuple[str | None, tuple[str, ...] | None], list[tuple[str, int]]] = {}
        for part in parts:
            wanted = part.submission.wanted
            if wanted is not None and wanted.limit > 0:
                key = (wanted.serving_version_id, wanted.purposes)
                asking.setdefault(key, []).append((part.submission_id, wanted.limit))
        run = self._session.run
        if asking and self._gauge.is_short():
            return {}
        for (version, purposes), askers in asking.items():
            limit = min(sum(n for _, n in askers), self._room(transaction, purposes))
            if limit <= 0:
                continue
            claimed = leases.claim(
                transaction,
                run.branch,
                self._session.session_id,
                Wanted(limit, version, purposes),
                incarnation=self._session.incarnation,
            )
            for submission_id, limit in askers:
                granted[submission_id], claimed = tuple(claimed[:limit]), claimed[limit:]
        return granted

    def _room(self, transaction: Transaction, purposes: tuple[str, ...] | None) -> int:
        """Return how many units of these purposes may be leased: evaluation is in no backlog."""
        if not self._config.rollout.max_backlog or (purposes is not None and "train" not in purposes):
            return MAX_UNITS
        run = self._session.run
        consumers.hold(transaction, run.branch, run.consumer)  # two claimers would both see the same room
        return backlog_room(transaction, run)

    def _learn_versions(self, submission: Submission) -> None:
        """Look up the step of every weight version not met before; a version keeps its step for ever."""
        new = {
            v for r in (*submission.results, *submission.parked, *submission.saved) for v in r.versions
        } - self._steps.keys()
        if not new:
            return
        with self._session.run.index.read() as connection:
            found = {v: weights.find(connection, v) for v in sorted(new)}
        for version_id, version in found.items():
            if version is None:
                raise InvalidInputError(
                    f"a result was sampled from unknown weights {version_id!r}; publish them first",
                    submission_id=submission.submission_id,
                )
            self._steps[version_id] = version.step

    def _repeated(self, transaction: Transaction, known: Receipt, part: Part) -> Answer | ConflictError:
        """Return the first answer; grants only as far as they are still held."""
        try:
            known.require_same(verb="exchange", content_digest=part.digest)
        except ConflictError as error:
            return error
        told = known.answer
        held = units.held(transaction, self._session.session_id, [tuple(k) for k in told.get("granted", ())])
        return Answer(
            accepted=tuple(told.get("accepted", ())),
            parked=tuple(told.get("parked", ())),
            saved=tuple(told.get("saved", ())),
            failed={unit_id: UnitState(state) for unit_id, state in told.get("failed", ())},
            released=tuple(told.get("released", ())),
            lost=tuple(told.get("lost", ())),
            granted=tuple(held),
        )


def backlog_room(transaction: Transaction, run: Run) -> int:
    """Return how many training units may be leased before the backlog of the run's consumer is full."""
    bound = run.config.rollout.max_backlog
    if not bound:
        return MAX_UNITS
    waiting = consumers.num_waiting(transaction, run.branch, run.consumer, purpose="train", at_most=bound)
    return bound - waiting - leases.num_out(transaction, run.branch, purpose="train")


_WINDOW = "window"
"""Verb of a receipt that holds the answers of several submissions, by the numbers that their ids end with."""


def _receipts_of(window: Sequence[Part], answers: Mapping[str, Answer]) -> list[Receipt]:
    """Return a receipt for each answer; those that only the exchange will ask for stand together in one."""
    told = [(p, answers[p.submission_id].receipt()) for p in window if p.submission_id in answers]
    alone = [Receipt(p.submission_id, "exchange", p.digest, answer) for p, answer in told if not p.is_unnamed]
    unnamed = {p.submission_id: answer for p, answer in told if p.is_unnamed}
    if not unnamed:
        return alone
    numbered = {submission_id.rpartition("-")[2]: answer for submission_id, answer in unnamed.items()}
    return [*alone, Receipt(next(iter(unnamed)), _WINDOW, b"", numbered)]


def _told_apart(known: Mapping[str, Receipt]) -> dict[str, Receipt]:
    """Return a receipt for each submission, those that stand together told apart."""
    expanded: dict[str, Receipt] = {}
    for submission_id, receipt in known.items():
        if receipt.verb != _WINDOW:
            expanded[submission_id] = receipt
            continue
        prefix = submission_id.rpartition("-")[0]
        for number, answer in receipt.answer.items():
            expanded[f"{prefix}-{number}"] = Receipt(f"{prefix}-{number}", "exchange", b"", answer)
    return expanded


def _record(transaction: Transaction, session_id: str, answers: Sequence[Answer]) -> None:
    """Write one event for each kind of thing that happened, naming all its units."""
    happened = [
        ("units.completed", [u for a in answers for u in a.accepted]),
        ("units.parked", [u for a in answers for u in a.parked]),
        ("units.saved", [u for a in answers for u in a.saved]),
        ("units.released", [u for a in answers for u in a.released]),
        ("units.refused", [u for a in answers for u in a.lost]),
        ("units.claimed", [u.unit_id for a in answers for u in a.granted]),
    ]
    events.record_many(
        transaction,
        [Event(name, session_id=session_id, facts={"units": ids}) for name, ids in happened if ids],
    )
