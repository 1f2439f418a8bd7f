"""What every index must keep: the flow's verbs on SQLite and on a real PostgreSQL, by the same tests."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from strawflow.errors import (
    AlreadyExistsError,
    ConflictError,
    IllegalTransitionError,
    InvalidInputError,
    LeaseLostError,
    NotFoundError,
)
from strawflow.flow import admit, assemble, consume, publish_weights, rescue
from strawflow.flow import claim as claiming
from strawflow.flow import complete as completing
from strawflow.flow.claim import Grant, PromptShelf
from strawflow.flow.retry import retry_failed, retry_unit
from strawflow.flow.run import create_run, open_run
from strawflow.flow.session import WorkerSession
from strawflow.index import batches, checkpoints, consumers, events, sessions, units, weights
from strawflow.index.consumers import Assignment
from strawflow.states import BatchState, SessionState, UnitState, WeightState
from strawflow.testing.runs import (
    SmallRun,
    made_up_plan,
    made_up_result,
    prompt_lines,
    small_config,
    small_run,
)
from tests.contract.backed_up import claim_as
from tests.contract.stored import assert_sound

T = TypeVar("T")


@pytest.fixture
def small(tmp_path: Path, settings: dict[str, str]) -> Iterator[SmallRun]:
    with small_run(tmp_path, settings=settings) as made:
        yield made
        assert_sound(made.run)


def unit_of(small: SmallRun, unit_id: int) -> units.Unit:
    with small.run.index.read() as connection:
        return units.find(connection, unit_id)


def lose(small: SmallRun, session: WorkerSession, reason: str = "killed by the test") -> int:
    return rescue.declare_lost(small.run, session.session_id, reason=reason)


def at_once(calls: list[Callable[[], T]]) -> list[T | Exception]:
    """Make calls in as many threads, released together; returns their results or exceptions in order."""
    gate = threading.Barrier(len(calls))

    def one(call: Callable[[], T]) -> T | Exception:
        gate.wait()
        try:
            return call()
        except Exception as error:  # the test looks at every outcome
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


# ---- claiming


def test_a_claim_leases_in_order_of_admission_and_brings_the_prompt(small: SmallRun) -> None:
    grants = small.claim(3)
    assert [g.unit_id for g in grants] == [1, 2, 3]
    for grant in grants:
        assert (grant.unit.state, grant.fence, grant.unit.attempts) == (UnitState.LEASED, 1, 1)
        number = int(grant.prompt.prompt.split()[2])
        assert grant.prompt.label == str(2 * number)
        assert grant.profile.purpose == "train"


def test_no_unit_is_claimed_twice_by_many_sessions_at_once(small: SmallRun) -> None:
    workers = [WorkerSession(small.run, "rollout") for _ in range(6)]
    claimed = at_once([lambda w=w: claim_as(w, 2) for w in workers])  # type: ignore[misc]
    assert not [c for c in claimed if isinstance(c, Exception)]
    ids = [g.unit_id for c in claimed if not isinstance(c, Exception) for g in c]
    rest = [g.unit_id for w in workers for g in claim_as(w, 10)]
    assert sorted(ids + rest) == list(range(1, 9))
    for worker in workers:
        lose(small, worker)


def test_nothing_to_claim_is_an_empty_list(small: SmallRun) -> None:
    assert len(small.claim(100)) == 8
    assert small.claim(1) == []


def test_a_unit_bound_to_a_version_is_granted_to_no_other(tmp_path: Path, settings: dict[str, str]) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(prompt_lines(2), encoding="utf-8")
    bound = {**settings, "data.held_out": str(held_out), "trainer.steps": "1", "eval.greedy": "false"}
    with SmallRun(create_run(tmp_path / "bound", small_config(bound))) as small:
        small.enqueue(held_out, dataset="held_out", purpose="eval")
        version = small.publish(0, admit_due=False)
        session = small.session("rollout")
        shelf = PromptShelf(session)
        assert claiming.claim(session, shelf, limit=9, serving_version_id="v-other") == []
        assert claiming.claim(session, shelf, limit=9, serving_version_id=None) == []
        grants = claiming.claim(session, shelf, limit=9, serving_version_id=version)
        assert [g.profile.purpose for g in grants] == ["eval", "eval"]
        small.complete(grants)
        with small.run.index.read() as connection:
            assert (
                consumers.num_offered(connection, "main", "trainer") == {}
            )  # evaluations are nobody's batch


# ---- completing


def test_a_completed_unit_is_offered_with_its_rows(small: SmallRun) -> None:
    grants = small.claim(2)
    receipt = small.complete(grants)
    assert receipt.accepted == (1, 2)
    offered = assemble.offered(small.session("rollout"), purpose="train", limit=9)
    assert [u.unit_id for u in offered] == [1, 2]
    rows = assemble.read_trajectories(small.session("rollout"), offered)
    for unit in offered:
        assert unit.version_step == 0
        assert rows[unit.unit_id].column("unit_id").to_pylist() == [unit.unit_id] * 2
        assert rows[unit.unit_id].column("response_text").to_pylist() == [
            f"answer 0 of unit {unit.unit_id}",
            f"answer 1 of unit {unit.unit_id}",
        ]


def test_the_same_submission_gets_the_same_receipt_and_has_one_effect(small: SmallRun) -> None:
    grants = small.claim(2)
    first = small.complete(grants, submission_id="s-1")
    assert small.complete(grants, submission_id="s-1") == first
    with small.run.index.read() as connection:
        assert events.count_by_name(connection)["units.completed"] == 1


def test_the_same_submission_sent_twice_at_once_has_one_effect(small: SmallRun) -> None:
    grants = small.claim(2)
    receipts = at_once([lambda: small.complete(grants, submission_id="s-1")] * 2)
    good = [r for r in receipts if not isinstance(r, Exception)]
    assert good
    assert all(r.accepted == (1, 2) for r in good)
    assert small.complete(grants, submission_id="s-1").accepted == (1, 2)
    with small.run.index.read() as connection:
        assert events.count_by_name(connection)["units.completed"] == 1


def test_another_content_under_a_used_submission_id_is_a_conflict(small: SmallRun) -> None:
    first, second = small.claim(2)
    small.complete([first], submission_id="s-1")
    with pytest.raises(ConflictError, match="already used"):
        small.complete([second], submission_id="s-1")
    assert unit_of(small, second.unit_id).state is UnitState.LEASED


def test_a_lost_lease_in_a_submission_does_not_touch_the_others(small: SmallRun) -> None:
    grants = small.claim(2)
    stale = Grant(
        unit=grants[0].unit.__class__(**{**grants[0].unit.__dict__, "fence": 0}),
        prompt=grants[0].prompt,
        profile=grants[0].profile,
    )
    receipt = small.complete([stale, grants[1]])
    assert receipt == completing.Receipt(accepted=(2,), lost=(1,))
    assert unit_of(small, 1).state is UnitState.LEASED
    assert unit_of(small, 2).state is UnitState.COMPLETED


def test_a_worker_declared_lost_can_complete_nothing(small: SmallRun) -> None:
    worker = WorkerSession(small.run, "rollout")
    (grant,) = claim_as(worker, 1)
    assert lose(small, worker) == 1
    with pytest.raises(LeaseLostError):
        completing.complete(worker, [made_up_result(grant, "")], submission_id="late")
    unit = unit_of(small, grant.unit_id)
    assert (unit.state, unit.fence) == (UnitState.READY, 1)
    (again,) = small.claim(1)
    assert (again.unit_id, again.fence) == (grant.unit_id, 2)


def test_a_late_completion_under_an_unsuperseded_fence_is_accepted(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    short = {**settings, "lease.ttl_s": "0.05", "lease.margin_s": "0", "lease.heartbeat_s": "3600"}
    with small_run(tmp_path, settings=short) as small:
        grants = small.claim(1)
        wait_until(lambda: bool(expired_sessions(small)))
        assert small.complete(grants).accepted == (1,)


def test_a_second_write_of_the_same_lease_is_refused(small: SmallRun) -> None:
    grants = small.claim(1)
    small.complete(grants)
    assert small.complete(grants).lost == (1,)
    assert unit_of(small, 1).state is UnitState.COMPLETED


def test_rows_that_are_not_parallel_are_refused_before_anything_is_written(small: SmallRun) -> None:
    (grant,) = small.claim(1)
    good = made_up_result(grant, small.serving() or "")
    short = good.members[0].__class__(**{**good.members[0].__dict__, "logprobs": (0.0,)})
    bad = good.__class__(**{**good.__dict__, "members": [short]})
    with pytest.raises(InvalidInputError, match="equally many"):
        completing.complete(small.session("rollout"), [bad], submission_id="s-1")
    assert unit_of(small, 1).state is UnitState.LEASED


# ---- failing, releasing, rescuing


def test_a_unit_fails_for_good_after_its_attempts_and_keeps_the_last_error(small: SmallRun) -> None:
    for attempt in (1, 2, 3):
        (grant,) = [g for g in small.claim(1) if g.unit_id == 1]
        assert grant.unit.attempts == attempt
        state = completing.fail(
            small.session("rollout"), 1, fence=grant.fence, error=f"engine said no, time {attempt}"
        )
        assert state is (UnitState.FAILED if attempt == 3 else UnitState.READY)
    unit = unit_of(small, 1)
    assert unit.last_error == "engine said no, time 3"
    assert 1 not in {g.unit_id for g in small.claim(100)}


def test_a_failure_under_an_old_fence_is_refused(small: SmallRun) -> None:
    (grant,) = small.claim(1)
    with pytest.raises(LeaseLostError):
        completing.fail(small.session("rollout"), 1, fence=grant.fence - 1, error="late")
    assert unit_of(small, 1).state is UnitState.LEASED


def test_a_release_refunds_the_attempt(small: SmallRun) -> None:
    grants = small.claim(3)
    assert claiming.release(small.session("rollout"), grants) == 3
    assert claiming.release(small.session("rollout"), grants) == 0
    assert [unit_of(small, g.unit_id).attempts for g in grants] == [0, 0, 0]
    assert [g.fence for g in small.claim(3)] == [2, 2, 2]


def test_units_lost_together_get_their_attempt_back_and_count_a_crash(small: SmallRun) -> None:
    worker = WorkerSession(small.run, "rollout")
    claim_as(worker, 3)
    assert lose(small, worker) == 3
    assert lose(small, worker) == 0
    for unit_id in (1, 2, 3):
        unit = unit_of(small, unit_id)
        assert (unit.state, unit.attempts, unit.crashes) == (UnitState.READY, 0, 1)


def test_a_unit_that_kills_its_worker_again_and_again_is_set_aside_and_its_neighbours_are_not(
    small: SmallRun,
) -> None:
    done: set[int] = set()
    for _ in range(40):
        worker = WorkerSession(small.run, "rollout")
        grants = claim_as(worker, 3)
        if not grants:
            worker.end()
            break
        if any(g.unit_id == 2 for g in grants):  # the culprit: whoever holds it dies
            lose(small, worker)
            continue
        results = [made_up_result(g, small.serving() or "") for g in grants]
        done |= set(completing.complete(worker, results, submission_id=f"s-{worker.session_id}").accepted)
        worker.end()
    assert done == {1, 3, 4, 5, 6, 7, 8}
    culprit = unit_of(small, 2)
    assert (culprit.state, culprit.last_error) == (UnitState.FAILED, "killed by the test")


def expired_sessions(small: SmallRun) -> list[str]:
    with small.run.index.read() as connection:
        return sessions.expired(connection, grace_s=0)


def wait_until(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    pause = threading.Event()
    for _ in range(int(timeout_s / 0.02)):
        if holds():
            return
        pause.wait(0.02)
    pytest.fail("what was waited for did not happen")


def test_an_expired_session_is_declared_lost_and_its_units_come_back(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    short = {**settings, "lease.ttl_s": "0.05", "lease.grace_s": "0", "lease.heartbeat_s": "3600"}
    with small_run(tmp_path, settings=short) as small:
        small.claim(2)
        session_id = small.session("rollout").session_id
        wait_until(lambda: session_id in expired_sessions(small))
        assert rescue.rescue_expired(small.run) == 2
        assert rescue.rescue_expired(small.run) == 0
        with small.run.index.read() as connection:
            states = {s.session_id: s.state for s in sessions.listed(connection)}
        assert states[session_id] is SessionState.LOST
        assert unit_of(small, 1).state is UnitState.READY


def test_a_heartbeat_keeps_a_session_that_would_have_expired(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    beating = {**settings, "lease.ttl_s": "3", "lease.margin_s": "0.1", "lease.heartbeat_s": "0.05"}
    with small_run(tmp_path, settings=beating) as small:
        session = small.session("rollout")

        def expires_in() -> float:
            with small.run.index.read() as connection:
                return next(
                    s.expires_in_s for s in sessions.listed(connection) if s.session_id == session.session_id
                )

        pause = threading.Event()
        for _ in range(4):
            pause.wait(0.3)
            assert expires_in() > 2.0
        session.require_live()


def test_packs_of_a_lost_writer_are_recovered_with_every_named_row(small: SmallRun) -> None:
    worker = WorkerSession(small.run, "rollout")
    grants = claim_as(worker, 2)
    results = [made_up_result(g, small.serving() or "") for g in grants]
    completing.complete(worker, results, submission_id="s-1")
    before = assemble.read_trajectories(worker, assemble.offered(worker, purpose="train", limit=9))
    lose(small, worker)
    rescuer = small.session("supervise")
    assert rescue.recover_packs(rescuer) == 1
    assert rescue.recover_packs(rescuer) == 0
    after = assemble.read_trajectories(rescuer, assemble.offered(rescuer, purpose="train", limit=9))
    assert {u: rows.to_pylist() for u, rows in after.items()} == {
        u: rows.to_pylist() for u, rows in before.items()
    }


# ---- retry


def fail_for_good(small: SmallRun, unit_id: int) -> None:
    while unit_of(small, unit_id).state is not UnitState.FAILED:
        for grant in small.claim(100):
            if grant.unit_id == unit_id:
                completing.fail(small.session("rollout"), unit_id, fence=grant.fence, error="no")
            else:
                claiming.release(small.session("rollout"), [grant])


def test_an_operator_offers_a_failed_unit_again(small: SmallRun) -> None:
    fail_for_good(small, 1)
    assert retry_unit(small.run, 1).state is UnitState.READY
    with pytest.raises(IllegalTransitionError, match="only a failed unit"):
        retry_unit(small.run, 1)
    with pytest.raises(NotFoundError):
        retry_unit(small.run, 999)
    assert small.sample() == 8


def test_a_failed_unit_that_was_recorded_as_dropped_is_not_retried(small: SmallRun) -> None:
    fail_for_good(small, 1)
    assembler = small.assembler()
    assert assemble.drop_failed(small.session("assemble"), assembler, purpose="train") == 1
    assert assemble.drop_failed(small.session("assemble"), assembler, purpose="train") == 0
    with pytest.raises(IllegalTransitionError, match="recorded as dropped"):
        retry_unit(small.run, 1)
    assert retry_failed(small.run) == []
    assert unit_of(small, 1).state is UnitState.FAILED


def test_a_dropped_unit_is_owed_a_replacement(small: SmallRun) -> None:
    fail_for_good(small, 1)
    assemble.drop_failed(small.session("assemble"), small.assembler(), purpose="train")
    assert admit.admit_due(small.session("train")) == 1
    assert admit.admit_due(small.session("train")) == 0


# ---- admission


def test_admission_is_bounded_by_staleness_and_runs_into_the_next_epoch(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    with small_run(tmp_path, num_prompts=6, settings=settings) as small:
        with small.run.index.read() as connection:
            listed = units.listed(connection, "main")
        # weights of step 0 allow steps 1 and 2 (lag 1): 8 groups of 6 prompts
        assert [u.epoch for u in listed] == [0] * 6 + [1] * 2
        assert {u.position for u in listed[:6]} == set(range(6))
        small.sample()
        small.plan()
        small.train(1)
        with small.run.index.read() as connection:
            assert len(units.listed(connection, "main")) == 12


def test_admission_by_many_at_once_admits_each_row_once(tmp_path: Path, settings: dict[str, str]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(prompt_lines(16), encoding="utf-8")
    with SmallRun(create_run(tmp_path / "many", small_config(settings))) as small:
        small.enqueue(path)
        small.publish(0, admit_due=False)
        outcomes = at_once([lambda: admit.admit_due(small.session("train"))] * 4)
        assert sorted(outcomes, key=str) == [0, 0, 0, 8]
        with small.run.index.read() as connection:
            admitted = units.listed(connection, "main")
        assert len({u.position for u in admitted}) == len(admitted) == 8


def test_admission_before_anything_is_enqueued_admits_nothing(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    with SmallRun(create_run(tmp_path / "empty", small_config(settings))) as small:
        small.publish(0, admit_due=False)
        assert admit.admit_due(small.session("train")) == 0


def test_enqueuing_the_same_file_twice_adds_nothing(tmp_path: Path, small: SmallRun) -> None:
    path = tmp_path / "more.jsonl"
    path.write_text(prompt_lines(4, first=100), encoding="utf-8")
    assert small.enqueue(path) == 4
    assert small.enqueue(path) == 0
    path.write_text(prompt_lines(6, first=100), encoding="utf-8")
    assert small.enqueue(path) == 2


# ---- assembling


def test_there_is_one_assembler_and_one_trainer_at_a_time(small: SmallRun) -> None:
    small.assembler()
    small.trainer()
    other = small.session("other")
    assert assemble.take_role(other) is None
    assert consume.take_over(other) is None


def test_a_role_passes_on_as_soon_as_its_holder_is_declared_lost_and_the_old_fence_is_refused(
    small: SmallRun,
) -> None:
    small.sample()
    old_session = WorkerSession(small.run, "assemble")
    old = assemble.take_role(old_session)
    assert old is not None
    groups = assemble.offered(old_session, purpose="train", limit=4)
    plan = made_up_plan(1, groups, assemble.read_trajectories(old_session, groups))
    lose(small, old_session)
    assert small.assembler().fence == old.fence + 1
    with pytest.raises(LeaseLostError):
        assemble.plan_batch(old_session, old, plan)
    batch = small.plan()
    assert batch is not None
    assert batch.fence == old.fence + 1


def test_a_batch_is_stored_whole_and_its_units_are_no_longer_offered(small: SmallRun) -> None:
    small.sample()
    batch = small.plan()
    assert batch is not None
    assert (batch.step, batch.state, batch.num_units, batch.num_sequences) == (1, BatchState.PLANNED, 4, 8)
    session = small.session("train")
    rows = [packed for _, packed in consume.read_batch(small.run, session.reader, batch)]
    assert sum(r.num_rows for r in rows) == 8
    assert [u.unit_id for u in assemble.offered(session, purpose="train", limit=99)] == [5, 6, 7, 8]
    with small.run.index.read() as connection:
        assert [u[1:] for u in batches.units_of(connection, [batch.batch_id])] == [
            (unit_id, "trained", None) for unit_id in (1, 2, 3, 4)
        ]


def test_a_unit_is_given_away_once(small: SmallRun) -> None:
    small.sample()
    role, session = small.assembler(), small.session("assemble")
    groups = assemble.offered(session, purpose="train", limit=4)
    rows = assemble.read_trajectories(session, groups)
    assemble.plan_batch(session, role, made_up_plan(1, groups, rows))
    with pytest.raises(ConflictError, match="not offered"):
        assemble.plan_batch(session, role, made_up_plan(2, groups, rows))
    assert assemble.last_planned(session) == 1


def test_a_step_is_planned_once_and_none_is_passed_over(small: SmallRun) -> None:
    small.sample()
    role, session = small.assembler(), small.session("assemble")
    groups = assemble.offered(session, purpose="train", limit=8)
    rows = assemble.read_trajectories(session, groups)
    with pytest.raises(ConflictError):
        assemble.plan_batch(session, role, made_up_plan(2, groups[:4], rows))
    assemble.plan_batch(session, role, made_up_plan(1, groups[:4], rows))
    with pytest.raises(ConflictError):
        assemble.plan_batch(session, role, made_up_plan(1, groups[4:], rows))
    assert [b.step for b in listed_batches(small)] == [1]


def listed_batches(small: SmallRun) -> list[batches.Batch]:
    with small.run.index.read() as connection:
        return batches.listed(connection, "main", "trainer")


def test_a_requeued_unit_comes_back_pristine_and_is_trained_once(small: SmallRun) -> None:
    small.sample(4)
    assemble.requeue(small.session("assemble"), small.assembler(), [1, 2], reason="stale")
    unit = unit_of(small, 1)
    assert (unit.state, unit.extent_id, unit.attempts, unit.version_step) == (UnitState.READY, None, 0, None)
    small.sample()
    assert unit_of(small, 1).fence == 2
    small.plan()
    small.plan()
    fates = Counter(u[1] for b in listed_batches(small) for u in units_of_batch(small, b))
    assert fates == Counter(range(1, 9))


def units_of_batch(small: SmallRun, batch: batches.Batch) -> list[tuple[int, int, str, str | None]]:
    with small.run.index.read() as connection:
        return batches.units_of(connection, [batch.batch_id])


def test_a_unit_that_was_given_away_cannot_be_dropped_too(small: SmallRun) -> None:
    small.sample()
    small.plan()
    with pytest.raises(ConflictError):
        assemble.drop(
            small.session("assemble"), small.assembler(), [Assignment(0, 1, "dropped", "failed_members")]
        )


# ---- training


def test_a_checkpoint_and_the_position_it_stands_for_commit_together(small: SmallRun) -> None:
    small.advance(1)
    with small.run.index.read() as connection:
        standing = consumers.find(connection, "main", "trainer")
        newest = checkpoints.newest(connection, "main", "trainer")
    assert newest is not None
    assert (standing.position, newest.step) == (1, 1)
    assert listed_batches(small)[0].state is BatchState.TRAINED


def test_a_checkpoint_of_a_passed_position_changes_nothing(small: SmallRun) -> None:
    small.advance(2)
    small.sample()
    assert small.plan() is not None
    small.write_checkpoint(3)
    with pytest.raises(ConflictError, match="position 2, not 1"):
        consume.commit_checkpoint(
            small.session("train"), small.trainer(), step=3, previous_step=1, state_digest="x"
        )
    with small.run.index.read() as connection:
        assert consumers.find(connection, "main", "trainer").position == 2
        assert [c.step for c in checkpoints.listed(connection, "main", "trainer")] == [1, 2]


def test_an_old_trainer_can_neither_record_nor_checkpoint_nor_publish(small: SmallRun) -> None:
    small.sample()
    small.plan()
    old_role, old_session = small.trainer(), small.session("train")
    lose(small, old_session)
    del small.roles["train"], small.sessions["train"]
    assert small.trainer().fence == old_role.fence + 1
    with pytest.raises(LeaseLostError):
        consume.record_step(old_session, old_role, step=1, metrics={})
    with pytest.raises(LeaseLostError):
        consume.commit_checkpoint(old_session, old_role, step=1, previous_step=0, state_digest="x")
    with small.run.index.read() as connection:
        assert checkpoints.listed(connection, "main", "trainer") == []
        assert consumers.find(connection, "main", "trainer").position == 0


def test_weights_after_the_checkpoint_die_with_the_trainer_and_equal_ones_supersede_them(
    small: SmallRun,
) -> None:
    small.sample()
    small.plan()
    uncovered = small.publish(1, content="equal")
    lose(small, small.session("train"))
    del small.roles["train"], small.sessions["train"]
    small.trainer()
    with small.run.index.read() as connection:
        assert weights.dead_ids(connection, "main") == {uncovered: 1}
        newest = weights.newest(connection, "main")
    assert newest is not None
    assert newest.step == 0
    again = small.publish(1, content="equal")
    with small.run.index.read() as connection:
        old = weights.find(connection, uncovered)
    assert old is not None
    assert (old.state, old.superseded_by) == (WeightState.SUPERSEDED, again)


def test_the_batches_after_the_checkpoint_are_replayed_in_order_with_the_same_bytes(small: SmallRun) -> None:
    small.advance(1)
    small.sample()
    batch = small.plan()
    assert batch is not None
    reader = small.session("train").reader
    first = [rows.to_pylist() for _, rows in consume.read_batch(small.run, reader, batch)]
    lose(small, small.session("train"))
    del small.roles["train"], small.sessions["train"]
    small.trainer()
    assert small.resumption is not None
    assert small.resumption.step == 1
    again = consume.batch_of_step(small.run, 2)
    assert again == batch
    reader = small.session("train").reader
    assert [rows.to_pylist() for _, rows in consume.read_batch(small.run, reader, batch)] == first
    assert consume.batch_of_step(small.run, 3) is None


def test_every_admitted_prompt_is_trained_exactly_once_over_a_whole_run(small: SmallRun) -> None:
    small.advance(3)
    assigned = [u[1] for b in listed_batches(small) for u in units_of_batch(small, b)]
    assert Counter(assigned) == Counter(range(1, 13))
    with small.run.index.read() as connection:
        assert consumers.count_outcomes(connection, "main", "trainer") == {("trained", None): 12}
        assert consumers.num_offered(connection, "main", "trainer") == {}


# ---- runs


def test_a_run_that_exists_is_refused_and_fresh_replaces_it(small: SmallRun) -> None:
    with pytest.raises(AlreadyExistsError, match="strawflow resume"):
        create_run(small.run.root, small.run.config)


def test_a_run_is_opened_again_with_all_it_held(small: SmallRun) -> None:
    small.advance(1)
    again = open_run(small.run.root)
    with again.index.read() as connection:
        assert [b.step for b in batches.listed(connection, "main", "trainer")] == [1]
    again.close()


# ---- repeating after a lost reply


def test_a_repeated_checkpoint_plan_or_publication_changes_nothing_and_other_content_is_a_conflict(
    small: SmallRun,
) -> None:
    small.sample()
    batch = small.plan()
    assert batch is not None
    groups = [unit_of(small, u) for u in (1, 2, 3, 4)]
    plan = made_up_plan(1, groups, assemble.read_trajectories(small.session("assemble"), groups))
    again = assemble.plan_batch(small.session("assemble"), small.assembler(), plan)
    assert (again.batch_id, again.digest) == (batch.batch_id, batch.digest)
    small.train(1)
    session, role = small.session("train"), small.trainer()
    with small.run.index.read() as connection:
        (made,) = checkpoints.listed(connection, "main", "trainer")
        newest = weights.newest(connection, "main")
    assert newest is not None
    repeated = consume.commit_checkpoint(
        session, role, step=1, previous_step=0, state_digest=made.state_digest
    )
    assert repeated == made
    with pytest.raises(ConflictError, match="other content"):
        consume.commit_checkpoint(session, role, step=1, previous_step=0, state_digest="other")
    version_id = newest.version_id
    publish_weights.publish_weights(session, role, step=1, version_id=version_id, digest=newest.digest)
    with pytest.raises(ConflictError, match="other content"):
        publish_weights.publish_weights(session, role, step=1, version_id=version_id, digest="other")
    with small.run.index.read() as connection:
        assert consumers.find(connection, "main", "trainer").position == 1
        assert events.count_by_name(connection)["batch.planned"] == 1


def test_a_version_or_checkpoint_whose_files_are_missing_is_not_committed(small: SmallRun) -> None:
    small.sample()
    small.plan()
    session, role, before = small.session("train"), small.trainer(), small.serving()
    with pytest.raises(NotFoundError, match="not complete"):
        consume.commit_checkpoint(session, role, step=1, previous_step=0, state_digest="x")
    with pytest.raises(NotFoundError, match="no safetensors file"):
        publish_weights.publish_weights(session, role, step=1, version_id="v1", digest="x")
    assert small.serving() == before
    with small.run.index.read() as connection:
        assert checkpoints.listed(connection, "main", "trainer") == []
