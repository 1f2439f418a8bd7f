"""The exchange: everything a worker tells the index about its units and asks of it, many callers in one transaction.

    append ▸ sync ▸ [A] ▸ transaction ▸ [B] ▸ reply

A: bytes without a row are an orphan. B: the retry carries the same submission id and gets the same receipt.

1. Group commit: while one window (append, sync, transaction) is in flight, arrivals gather for the next and share it; a
   lone caller never waits. Completing units and claiming the next are one transaction.
2. A lost lease or a conflict is the answer of its own submission and touches no other. If the shared transaction fails
   otherwise, its submissions are run one by one.
3. Each submission has an id: a repetition gets the first receipt, other content under it is a ConflictError. When the
   answer to a commit is lost the exchange reads the receipts back; if it cannot, callers get CommitUnknownError and
   repeat with the same id.
4. Safe for any number of threads of the process that opened the session.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import xxhash

from strawflow import faults
from strawflow.config import RunConfig
from strawflow.errors import CommitUnknownError, ConflictError, InvalidInputError, LeaseLostError
from strawflow.flow import quota
from strawflow.flow.trajectory import UnitResult, to_record_batch
from strawflow.ids import Extent
from strawflow.index import consumers, events, leases, packs, receipts, sessions, units, weights
from strawflow.index.events import Event
from strawflow.index.leases import Failure, Key, Outcome, Wanted
from strawflow.index.prepared import Transaction
from strawflow.index.receipts import Receipt
from strawflow.index.units import Unit
from strawflow.states import UnitState

if TYPE_CHECKING:
    from strawflow.flow.session import WorkerSession

MAX_WINDOW_UNITS = 4096
"""Units settled in one window; the rest waits for the next, so that a transaction stays short."""


@dataclass(frozen=True)
class Submission:
    """What one caller hands in: results, progress to park with, failures, leases given back, and what it wants next."""

    submission_id: str
    results: Sequence[UnitResult] = ()
    parked: Sequence[UnitResult] = ()
    failures: Sequence[Failure] = ()
    released: Sequence[Key] = ()
    wanted: Wanted | None = None

    def unit_ids(self) -> list[int]:
        settled = [r.unit_id for r in self.results] + [p.unit_id for p in self.parked]
        return settled + [f.unit_id for f in self.failures] + [unit_id for unit_id, _ in self.released]

    def check(self) -> None:
        """Raise InvalidInputError when a member breaks promise P9 or P10, or a unit is handed in twice."""
        for result in (*self.results, *self.parked):
            result.check()
        settled = self.unit_ids()
        if len(set(settled)) != len(settled):
            raise InvalidInputError("one submission settles a unit twice", submission_id=self.submission_id)

    def content_digest(self) -> bytes:
        """Return an xxh3-128 of everything handed in."""
        state = xxhash.xxh3_128()
        for name, results in (("complete", self.results), ("park", self.parked)):
            for result in results:
                state.update(f"{name},{result.unit_id},{result.fence},{result.seq};".encode())
                for m in result.members:
                    state.update(f"{m.member},{m.status},{m.reward},{m.failure},{m.finish_reason};".encode())
                    state.update(m.token_array.data)
                    state.update(m.logprob_array.data)
        wanted = None if self.wanted is None else (self.wanted.limit, self.wanted.purposes)
        state.update(repr((list(self.failures), list(self.released), wanted)).encode())
        return state.digest()


@dataclass(frozen=True)
class Answer:
    """What became of a submission, by unit id."""

    accepted: tuple[int, ...] = ()
    parked: tuple[int, ...] = ()
    failed: dict[int, UnitState] = field(default_factory=dict)
    """New state of each unit whose attempt ended with an error."""
    released: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    """Units whose lease had been taken over: what was handed in for them is nobody's result."""
    granted: tuple[Unit, ...] = ()

    def receipt(self) -> dict[str, Any]:
        """Return it as the index keeps it: short, without what is empty."""
        whole = {
            "accepted": self.accepted,
            "parked": self.parked,
            "failed": [[unit_id, state.value] for unit_id, state in self.failed.items()],
            "released": self.released,
            "lost": self.lost,
            "granted": [[u.unit_id, u.fence] for u in self.granted],
        }
        return {name: value for name, value in whole.items() if value}


@dataclass(eq=False)
class _Part:
    """One caller's share of a window."""

    submission: Submission
    digest: bytes
    wakeup: Any = field(default_factory=threading.Lock)
    answer: Answer | None = None
    error: BaseException | None = None
    leads: bool = False

    @property
    def is_settled(self) -> bool:
        return self.answer is not None or self.error is not None


@dataclass(frozen=True)
class _Stored:
    """Where the rows of one window lie: extent of each kind, and (start, count) of each unit."""

    results: Extent | None
    parked: Extent | None
    rows: dict[int, tuple[int, int]]


class Exchange:
    """One per worker session; `submit` from any thread."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._config: RunConfig = session.run.config
        self._gauge = quota.gauge(session.run)
        self._lock = threading.Lock()
        self._queue: list[_Part] = []
        self._is_busy = False
        self._steps: dict[str, int] = {}
        self.num_windows = self.num_submissions = 0

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
        part = _Part(submission, submission.content_digest())
        if self._enter(part):
            self._lead(part)
        if part.error is not None:
            raise part.error
        assert part.answer is not None
        return part.answer

    def _enter(self, part: _Part) -> bool:
        """Queue up; True when this caller is to run a window, False when another one settled the part."""
        with self._lock:
            self._queue.append(part)
            if not self._is_busy:
                self._is_busy = True
                return True
            part.wakeup.acquire()
        try:
            part.wakeup.acquire()  # until a leader settles the part, or makes it the next leader
        except BaseException:
            self._leave(part)
            raise
        return not part.is_settled

    def _leave(self, part: _Part) -> None:
        """An interrupted waiter takes its work back if nobody has begun on it."""
        with self._lock:
            if part in self._queue:
                self._queue.remove(part)
                if part.leads:
                    self._pass_on()

    def _pass_on(self) -> None:
        if self._queue:
            self._queue[0].leads = True
            self._queue[0].wakeup.release()
        else:
            self._is_busy = False

    def _lead(self, own: _Part) -> None:
        with self._lock:
            window = self._take_window()
        try:
            self._run(window)
        except BaseException as error:
            for part in window:
                if not part.is_settled:
                    part.error = _told(error, is_own=part is own)
            if not isinstance(error, Exception):
                raise
        finally:
            with self._lock:
                for part in window:
                    if part is not own:
                        part.wakeup.release()
                self._pass_on()

    def _take_window(self) -> list[_Part]:
        """Take what waits, up to the size of a window; two submissions about one unit never share one."""
        window: list[_Part] = []
        later: list[_Part] = []
        seen: set[int] = set()
        ids: set[str] = set()
        for part in self._queue:
            unit_ids = part.submission.unit_ids()
            fits = not window or len(seen) + len(unit_ids) <= MAX_WINDOW_UNITS
            if fits and seen.isdisjoint(unit_ids) and part.submission.submission_id not in ids:
                window.append(part)
                seen.update(unit_ids)
                ids.add(part.submission.submission_id)
            else:
                later.append(part)
        self._queue = later
        return window

    def _run(self, window: list[_Part]) -> None:
        self.num_windows += 1
        self.num_submissions += len(window)
        try:
            self._settle(window)
        except (CommitUnknownError, ConflictError, LeaseLostError):
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

    def _settle(self, window: list[_Part]) -> None:
        stored = self._store(window)
        faults.at("commit.before")  # crash here: orphan bytes, named by nothing
        try:
            with self._session.run.index.direct() as transaction:
                answers = self._transact(transaction, window, stored)
        except CommitUnknownError:
            answers = self._read_back(window)
        self._session.checksums.add(e for e in (stored.results, stored.parked) if e is not None)
        faults.at("commit.after")
        for part, answer in zip(window, answers, strict=True):
            if isinstance(answer, Answer):
                part.answer = answer
            else:
                part.error = answer

    def _store(self, window: list[_Part]) -> _Stored:
        rows: dict[int, tuple[int, int]] = {}
        extents: list[Extent | None] = []
        for kind, of in (("trajectory", "results"), ("continuation", "parked")):
            results: list[UnitResult] = [r for part in window for r in getattr(part.submission, of)]
            start = 0
            for result in results:
                rows[result.unit_id] = (start, len(result.members))
                start += len(result.members)
            batch = to_record_batch(results, kind=kind) if results else None
            extents.append(None if batch is None else self._session.packs.append(kind, batch))
        return _Stored(extents[0], extents[1], rows)

    def _transact(
        self, transaction: Transaction, window: list[_Part], stored: _Stored
    ) -> list[Answer | ConflictError]:
        session_id = self._session.session_id
        # First: what was answered before is answered again, also to a session that was lost since.
        known = receipts.find_many(transaction, [p.submission.submission_id for p in window])
        if len(known) == len(window):
            return [self._repeated(transaction, known[p.submission.submission_id], p) for p in window]
        named = [e for e in (stored.results, stored.parked) if e is not None]
        if named:  # holds the session's row as well
            named = packs.name_extents(transaction, named, session_id=session_id)
        else:
            sessions.require_live(transaction, session_id)
        fresh = [p.submission for p in window if p.submission.submission_id not in known]
        ids = {e.kind: e.extent_id for e in named}
        answers = self._answer(transaction, fresh, ids, stored)
        receipts.store(
            transaction,
            [
                Receipt(p.submission.submission_id, "exchange", p.digest, answers[i].receipt())
                for p in window
                if (i := p.submission.submission_id) in answers
            ],
        )
        _record(transaction, session_id, list(answers.values()))
        return [
            answers[p.submission.submission_id]
            if p.submission.submission_id in answers
            else self._repeated(transaction, known[p.submission.submission_id], p)
            for p in window
        ]

    def _answer(
        self,
        transaction: Transaction,
        fresh: Sequence[Submission],
        extent_ids: dict[str, int],
        stored: _Stored,
    ) -> dict[str, Answer]:
        session_id = self._session.session_id
        completed = parked = released = frozenset[int]()
        results = [r for s in fresh for r in s.results]
        if results:
            outcomes = [self._outcome(r, extent_ids["trajectory"], stored) for r in results]
            completed = frozenset(leases.complete(transaction, session_id, outcomes))
            offered = [r.unit_id for r in results if r.unit_id in completed]
            consumers.offer(transaction, offered)
        if to_park := [p for s in fresh for p in s.parked]:
            outcomes = [self._outcome(p, extent_ids["continuation"], stored) for p in to_park]
            parked = frozenset(leases.park(transaction, session_id, outcomes))
        failed = leases.fail(
            transaction,
            session_id,
            [f for s in fresh for f in s.failures],
            max_attempts=self._config.rollout.max_attempts,
        )
        if keys := [key for s in fresh for key in s.released]:
            released = frozenset(leases.release(transaction, session_id, keys))
        granted = self._grant(transaction, fresh)
        settled = completed | parked | released | failed.keys()
        return {
            s.submission_id: Answer(
                accepted=tuple(r.unit_id for r in s.results if r.unit_id in completed),
                parked=tuple(p.unit_id for p in s.parked if p.unit_id in parked),
                failed={f.unit_id: failed[f.unit_id] for f in s.failures if f.unit_id in failed},
                released=tuple(unit_id for unit_id, _ in s.released if unit_id in released),
                lost=tuple(unit_id for unit_id in s.unit_ids() if unit_id not in settled),
                granted=granted.get(s.submission_id, ()),
            )
            for s in fresh
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
            version_step=min((self._steps[v] for v in result.versions()), default=0),
            mean_reward=result.mean_reward,
            num_tokens=result.num_tokens,
        )

    def _grant(self, transaction: Transaction, fresh: Sequence[Submission]) -> dict[str, tuple[Unit, ...]]:
        """Claim for all who want the same kind of units at once, and share out in the order they came."""
        granted: dict[str, tuple[Unit, ...]] = {}
        asking: dict[tuple[str | None, tuple[str, ...] | None], list[tuple[str, int]]] = {}
        for s in fresh:
            if s.wanted is not None and s.wanted.limit > 0:
                key = (s.wanted.serving_version_id, s.wanted.purposes)
                asking.setdefault(key, []).append((s.submission_id, s.wanted.limit))
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
            for submission_id, count in askers:
                granted[submission_id], claimed = tuple(claimed[:count]), claimed[count:]
        return granted

    def _room(self, transaction: Transaction, purposes: tuple[str, ...] | None) -> int:
        """Return how many training units may be leased before the backlog of the run's consumer is full."""
        bound = self._config.rollout.max_backlog
        if not bound or (purposes is not None and "train" not in purposes):
            return MAX_WINDOW_UNITS
        run = self._session.run
        consumers.hold(transaction, run.branch, run.consumer)  # two claimers would both see the same room
        waiting = consumers.num_waiting(transaction, run.branch, run.consumer, purpose="train", at_most=bound)
        return bound - waiting - leases.num_out(transaction, run.branch, purpose="train")

    def _learn_versions(self, submission: Submission) -> None:
        """Look up the step of every weight version not met before; a version keeps its step for ever."""
        new = {
            v for r in (*submission.results, *submission.parked) for v in r.versions()
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

    def _repeated(self, transaction: Transaction, known: Receipt, part: _Part) -> Answer | ConflictError:
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
            failed={unit_id: UnitState(state) for unit_id, state in told.get("failed", ())},
            released=tuple(told.get("released", ())),
            lost=tuple(told.get("lost", ())),
            granted=tuple(held),
        )

    def _read_back(self, window: list[_Part]) -> list[Answer | ConflictError]:
        """Learn what a commit without an answer did; what it did not do is done now.

        Raises:
            CommitUnknownError: the index does not answer; the callers repeat with the same submission ids.
        """
        try:
            with self._session.run.index.direct() as transaction:
                known = receipts.find_many(transaction, [p.submission.submission_id for p in window])
                if len(known) == len(window):
                    return [self._repeated(transaction, known[p.submission.submission_id], p) for p in window]
        except Exception as error:  # any failure here leaves the outcome as unknown as it was
            raise CommitUnknownError(f"the outcome could not be read back: {error}") from error
        raise CommitUnknownError("the commit did not take place; repeat with the same submission id")


def _record(transaction: Transaction, session_id: str, answers: Sequence[Answer]) -> None:
    """Write one event for each kind of thing that happened, naming all its units."""
    happened = [
        ("units.completed", [u for a in answers for u in a.accepted]),
        ("units.parked", [u for a in answers for u in a.parked]),
        ("units.released", [u for a in answers for u in a.released]),
        ("units.refused", [u for a in answers for u in a.lost]),
        ("units.claimed", [u.unit_id for a in answers for u in a.granted]),
    ]
    events.record_many(
        transaction,
        [Event(name, session_id=session_id, facts={"units": ids}) for name, ids in happened if ids],
    )


def _told(error: BaseException, *, is_own: bool) -> BaseException:
    """An interrupt of the leading thread is not the others' interrupt: they only do not know what became of theirs."""
    if is_own or isinstance(error, Exception):
        return error
    return CommitUnknownError(
        f"the window was broken off by {type(error).__name__} in another thread; repeat with the same submission id"
    )
