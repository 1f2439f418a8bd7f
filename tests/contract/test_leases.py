"""Leases in bulk: order of claims, delays, bounds, fences across incarnations, shared windows, lost replies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import strawflow
from strawflow.errors import CommitUnknownError, ConflictError, InvalidInputError
from strawflow.flow import admit
from strawflow.flow.claim import Grant
from strawflow.flow.run import open_run
from strawflow.flow.session import WorkerSession
from strawflow.flow.submission import Submission
from strawflow.ids import new_id
from strawflow.index import datasets, leases, meta, units
from strawflow.index.leases import Wanted
from strawflow.index.units import NewUnit
from strawflow.states import UnitState
from strawflow.testing.runs import SmallRun, made_up_result, small_run

Make = Callable[..., SmallRun]


@pytest.fixture
def make(tmp_path: Path, settings: dict[str, str]) -> Iterator[Make]:
    made: list[SmallRun] = []

    def one(**own: str) -> SmallRun:
        made.append(small_run(tmp_path, num_prompts=1200, settings={**settings, **own}))
        return made[-1]

    yield one
    for small in made:
        small.close()


def admit_units(small: SmallRun, *new: NewUnit) -> list[int]:
    with small.run.index.begin() as connection:
        first = units.take_ids(connection, len(new))
        units.admit(connection, small.run.branch, new, ids=range(first, first + len(new)))
    return list(range(first, first + len(new)))


def unit(small: SmallRun, position: int, **changes: Any) -> NewUnit:
    with small.run.index.read() as connection:
        segment = datasets.segments_of(connection, admit.PROMPTS)[0]
    return NewUnit("train", "train", segment.segment_id, 7, position, **changes)


def claimed(small: SmallRun, limit: int = 100, session: WorkerSession | None = None) -> list[int]:
    asked = Submission(new_id("claim"), wanted=Wanted(limit))
    answer = (session or small.session("rollout")).exchange.submit(asked)
    return [u.unit_id for u in answer.granted]


def drained(small: SmallRun) -> None:
    """Take the units that the small run admitted out of the way."""
    small.sample()


def test_claims_go_by_priority_then_scheduling_key_then_first_in(make: Make) -> None:
    small = make()
    drained(small)
    ids = admit_units(
        small,
        unit(small, 0),
        unit(small, 1, priority=5, scheduling_key=2),
        unit(small, 2, priority=5, scheduling_key=1),
        unit(small, 3, priority=-1),
        unit(small, 4, priority=5, scheduling_key=1),
    )
    assert claimed(small) == [ids[2], ids[4], ids[1], ids[0], ids[3]]


def test_what_a_store_admits_is_granted_by_priority_then_key_and_nothing_before_its_time(
    make: Make, tmp_path: Path
) -> None:
    small = make()
    drained(small)
    more = [{"prompt": f"urgent {n}"} for n in range(2)]
    with strawflow.open(small.run.root) as store:
        with small.run.index.read() as connection:
            first = (units.listed(connection, small.run.branch, newest_first=True, limit=1))[0].unit_id + 1
        due = datetime.now(UTC) + timedelta(seconds=1)
        assert store.admit(2) == 2
        store.admit(1, scheduling_key=-1)
        store.admit(1, priority=-1)
        store.admit(1, priority=9, not_before=due)
        store.admit(1, priority=5)
        assert store.enqueue(more, dataset="urgent", priority=7) == 2
        assert store.admit(2, dataset="urgent") == 2
        assert store.admit(1, dataset="urgent", priority=0, scheduling_key=3) == 1
        late, in_order = (
            first + 4,
            [first + 6, first + 7, first + 5, first + 2, first, first + 1, first + 8, first + 3],
        )
        assert claimed(small) == in_order
        pause = threading.Event()
        while not (found := claimed(small)):
            pause.wait(0.05)
        assert found == [late]
        assert datetime.now(UTC) >= due
        with pytest.raises(InvalidInputError, match="no time zone"):
            store.admit(1, not_before=datetime(2030, 1, 1))
        with pytest.raises(InvalidInputError, match="priority 4294967296 is out of range"):
            store.admit(1, priority=1 << 32)
        with pytest.raises(InvalidInputError, match="scheduling key"):
            store.admit(1, scheduling_key=1 << 63)


def test_parked_units_go_before_fresh_ones_those_of_the_oldest_weights_first(make: Make) -> None:
    small = make()
    version0 = small.serving() or ""
    first, second, third = small.claim(3)
    version5 = small.publish(5, admit_due=False)
    session = small.session("rollout")
    session.exchange.submit(Submission("p1", parked=[made_up_result(first, version5)]))
    session.exchange.submit(Submission("p2", parked=[made_up_result(third, version0)]))
    order = [g.unit_id for g in small.claim(3)]
    assert order[:2] == [third.unit_id, first.unit_id]
    assert order[2] not in {first.unit_id, second.unit_id, third.unit_id}


def test_a_unit_with_a_delay_is_not_offered_before_it_has_passed(make: Make) -> None:
    small = make()
    drained(small)
    later, now = admit_units(small, unit(small, 0, priority=9, delay_s=0.5), unit(small, 1))
    assert claimed(small) == [now]
    assert claimed(small) == []
    gone = threading.Event()
    for _ in range(600):
        if (found := claimed(small)) or gone.wait(0.05):
            break
    assert found == [later]


@pytest.mark.parametrize("bound", [5, 8])
def test_the_backlog_is_bounded_also_among_many_claimers(make: Make, bound: int) -> None:
    small = make(**{"rollout.max_backlog": str(bound), "rollout.prompts_per_step": "40"})
    others = [small.session("rollout"), WorkerSession(open_run(small.run.root), "rollout")]
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(
                others[n % 2].exchange.submit, Submission(f"c{n}", wanted=Wanted(3, purposes=("train",)))
            )
            for n in range(8)
        ]
        granted = [u.unit_id for future in asked for u in future.result().granted]
    assert len(granted) == len(set(granted)) == bound
    others[1].end()
    others[1].run.close()
    claimed(small)  # what the ended session held may be leased again
    with small.run.index.read() as connection:
        assert leases.num_out(connection, small.run.branch, purpose="train") <= bound


def test_fences_of_a_new_incarnation_are_above_all_of_before(make: Make) -> None:
    small = make()
    (old,) = small.claim(1)
    assert old.fence == 1
    with small.run.index.begin() as connection:
        assert meta.raise_incarnation(connection) == 1
    session = small.sessions.pop("rollout")
    session.end()
    (new,) = small.claim(1)
    assert new.unit_id == old.unit_id
    assert new.fence == leases.FENCES_PER_INCARNATION + 1


def test_completing_a_thousand_units_takes_a_handful_of_statements(make: Make, index_url: str) -> None:
    small = make(**{"rollout.prompts_per_step": "500"})
    grants = small.claim(1000)
    assert len(grants) == 1000
    results = [made_up_result(g, small.serving() or "") for g in grants]
    statements: list[str] = []
    index = small.run.index
    driver = index._take_driver()
    index._idle.append(driver)
    if index_url:
        real = driver.execute
        driver.execute = lambda text, *rest, **more: (statements.append(text), real(text, *rest, **more))[1]
    else:
        driver.set_trace_callback(statements.append)
    small.session("rollout").exchange.submit(Submission("all", results=results, wanted=Wanted(10)))
    assert 0 < len([s for s in statements if s]) <= 16
    with index.read() as connection:
        assert units.count_by_state(connection, small.run.branch)[("train", "completed")] == 1000


def test_many_threads_share_one_transaction_and_each_gets_its_own_answer(make: Make) -> None:
    small = make(**{"rollout.prompts_per_step": "100"})
    session = small.session("rollout")
    grants = small.claim(64)
    version = small.serving() or ""
    gate = threading.Barrier(16)

    def hand_in(mine: list[Grant]) -> list[int]:
        gate.wait()
        told: list[int] = []
        for g in mine:
            submission = Submission(f"s{g.unit_id}", results=[made_up_result(g, version)], wanted=Wanted(1))
            answer = session.exchange.submit(submission)
            assert answer.accepted == (g.unit_id,)
            told += [u.unit_id for u in answer.granted]
        return told

    before = session.exchange.num_windows
    with ThreadPoolExecutor(16) as pool:
        granted = [u for told in pool.map(hand_in, [grants[n::16] for n in range(16)]) for u in told]
    assert session.exchange.num_windows - before < 64
    assert len(granted) == len(set(granted)) == 64


def test_a_bad_submission_fails_alone_in_a_shared_window(make: Make) -> None:
    small = make(**{"rollout.prompts_per_step": "40"})
    session, version = small.session("rollout"), small.serving() or ""
    grants = small.claim(40)
    session.exchange.submit(Submission("taken", results=[made_up_result(grants[0], version)]))

    def hand_in(number: int) -> object:
        name = "taken" if number == 7 else f"s{number}"
        result = made_up_result(grants[number], "v9" if number == 5 else version)
        try:
            return session.exchange.submit(Submission(name, results=[result])).accepted
        except (ConflictError, InvalidInputError) as error:
            return type(error)

    with ThreadPoolExecutor(16) as pool:
        told = list(pool.map(hand_in, range(1, 40)))
    assert told[4] is InvalidInputError
    assert told[6] is ConflictError
    assert all(told[n - 1] == (grants[n].unit_id,) for n in range(1, 40) if n not in (5, 7))


@pytest.mark.parametrize("took_place", [True, False])
def test_a_commit_without_an_answer_is_read_back_and_done_where_it_was_not(
    make: Make, monkeypatch: pytest.MonkeyPatch, took_place: bool
) -> None:
    small = make()
    session, index = small.session("rollout"), small.run.index
    (grant,) = small.claim(1)
    submission = Submission("once", results=[made_up_result(grant, small.serving() or "")])
    real, lost = index._drive, []

    def without_answer(driver: Any, statement: str) -> None:
        if statement != "COMMIT" or lost:
            return real(driver, statement)
        lost.append(statement)
        real(driver, "COMMIT" if took_place else "ROLLBACK")
        raise sa.exc.OperationalError(statement, {}, Exception("connection lost"))

    monkeypatch.setattr(index, "_drive", without_answer)
    answer = session.exchange.submit(submission)
    assert answer.accepted == (grant.unit_id,)
    assert session.exchange.submit(submission) == answer
    with index.read() as connection:
        assert units.find(connection, grant.unit_id).state is UnitState.COMPLETED


def test_a_commit_whose_outcome_cannot_be_read_back_is_unknown_and_its_repetition_is_answered(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = make()
    session, index = small.session("rollout"), small.run.index
    (grant,) = small.claim(1)
    submission = Submission("once", results=[made_up_result(grant, small.serving() or "")])
    real = index._drive

    def goes_away(driver: Any, statement: str) -> None:
        real(driver, statement)
        if statement == "COMMIT":
            monkeypatch.setattr(index, "_take_driver", unreachable)
            raise sa.exc.OperationalError(statement, {}, Exception("connection lost"))

    def unreachable() -> Any:
        raise sa.exc.OperationalError("connect", {}, Exception("no server"))

    with monkeypatch.context() as patch:
        patch.setattr(index, "_drive", goes_away)
        taken = index._take_driver
        with pytest.raises(CommitUnknownError, match="could not be read back"):
            session.exchange.submit(submission)
    monkeypatch.setattr(index, "_take_driver", taken)
    assert session.exchange.submit(submission).accepted == (grant.unit_id,)


def test_calls_without_an_id_that_share_a_window_are_told_apart_when_it_is_read_back(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = make()
    session, index, version = small.session("rollout"), small.run.index, small.serving() or ""
    grants = small.claim(4)
    commits: list[str] = []
    real_drive, real_store = index._drive, session.exchange._store

    def without_answer(driver: Any, statement: str) -> None:
        real_drive(driver, statement)
        if statement == "COMMIT":
            commits.append(statement)
            # The window of the one that leads, and that of all who waited for it; between them, what is read back.
            if len(commits) in (1, 3):
                raise sa.exc.OperationalError(statement, {}, Exception("connection lost"))

    def when_all_wait(window: Any) -> Any:
        while not commits and len(session.exchange._line._waiting) < 3:
            time.sleep(0.001)
        return real_store(window)

    monkeypatch.setattr(index, "_drive", without_answer)
    monkeypatch.setattr(session.exchange, "_store", when_all_wait)
    with ThreadPoolExecutor(4) as pool:
        submissions = [
            Submission(None, results=[made_up_result(g, version)], wanted=Wanted(1)) for g in grants
        ]
        answers = list(pool.map(session.exchange.submit, submissions))
    assert len(commits) == 4
    assert [a.accepted for a in answers] == [(g.unit_id,) for g in grants]
    granted = [u.unit_id for a in answers for u in a.granted]
    assert len(set(granted)) == len(granted)


def test_an_interrupted_leader_leaves_the_others_a_way_to_ask_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = make()
    session, version = small.session("rollout"), small.serving() or ""
    first, second = small.claim(2)
    inside, go_on = threading.Event(), threading.Event()
    real = session.exchange._store

    def interrupted(window: Any) -> Any:
        monkeypatch.setattr(session.exchange, "_store", real)
        inside.set()
        go_on.wait(20)
        raise KeyboardInterrupt

    monkeypatch.setattr(session.exchange, "_store", interrupted)
    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(
            session.exchange.submit, Submission("a", results=[made_up_result(first, version)])
        )
        assert inside.wait(20)
        waiting = pool.submit(
            session.exchange.submit, Submission("b", results=[made_up_result(second, version)])
        )
        go_on.set()
        with pytest.raises(KeyboardInterrupt):
            leader.result(20)
        assert waiting.result(20).accepted == (second.unit_id,)
    again = session.exchange.submit(Submission("a", results=[made_up_result(first, version)]))
    assert again.accepted == (first.unit_id,)
