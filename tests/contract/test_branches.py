"""Branches: a new line from an older checkpoint reads none of the abandoned future, and loses and repeats no prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from strawflow.errors import AlreadyExistsError, ConflictError, InvalidInputError, NotFoundError
from strawflow.flow import admit, consume, history, rebuild
from strawflow.flow.branch import branches_of, create_branch, on_branch
from strawflow.flow.check import check
from strawflow.flow.quarantine import quarantine_damage
from strawflow.flow.run import open_run
from strawflow.index import tables as t
from strawflow.index import units
from strawflow.index.engine import now
from strawflow.states import UnitState
from strawflow.testing.invariants import batch_digests, check_exactly_once
from strawflow.testing.runs import SmallRun, small_run
from tests.contract.lost_index import lose_index
from tests.contract.stored import damage, end_sessions


@pytest.fixture
def small(tmp_path: Path, settings: dict[str, str]) -> Iterator[SmallRun]:
    with small_run(tmp_path, settings={**settings, "trainer.steps": "5"}) as made:
        yield made


def branched(small: SmallRun, checkpoint: str = "1", **options: bool) -> SmallRun:
    """Stop everybody, branch off, and return the run as its workers find it again."""
    end_sessions(small)
    create_branch(small.run, checkpoint=checkpoint, name="second", **options)
    return SmallRun(open_run(small.run.root))


def prompts_of(small: SmallRun) -> list[tuple[int, int, int]]:
    """(segment, epoch, position) of the branch's training units in order of admission."""
    with small.run.index.read() as connection:
        found = units.listed(connection, small.run.branch, limit=1000)
    return [(u.segment_id, u.epoch, u.position) for u in found if u.purpose == "train"]


def test_a_branch_reads_no_batch_checkpoint_or_weights_of_the_abandoned_future(small: SmallRun) -> None:
    small.advance(3)
    abandoned = batch_digests(history.batches(small.run))
    with branched(small) as second:
        assert second.run.branch == "second"
        assert batch_digests(history.batches(second.run)) == {1: abandoned[1]}
        assert [c.step for c in history.checkpoints(second.run)] == [1]
        assert (second.serving() or "").startswith("v000001-main")
        assert consume.batch_of_step(second.run, 2) is None
        old = on_branch(second.run, "main")
        assert batch_digests(history.batches(old)) == abandoned
        assert [(b.branch_id, b.parent_id, position) for b, position, _ in branches_of(second.run)] == [
            ("main", None, 3),
            ("second", "main", 1),
        ]
        assert check(second.run).findings == []
        assert check(old).findings == []


def test_a_branch_trains_every_prompt_of_its_line_once_and_goes_on_to_the_end(small: SmallRun) -> None:
    small.advance(3)
    before = prompts_of(small)
    with branched(small) as second:
        trained_before = 4  # one step of four groups is the parent's
        assert prompts_of(second) == before[trained_before : len(prompts_of(second)) + trained_before]
        assert second.trainer().role == "consume:trainer"
        assert second.resumption is not None
        assert second.resumption.checkpoint is not None
        assert second.resumption.checkpoint.branch_id == "main"
        second.advance(4)
        assert [b.step for b in history.batches(second.run)] == [1, 2, 3, 4, 5]
        assert [b.branch_id for b in history.batches(second.run)] == ["main"] + ["second"] * 4
        fates = check_exactly_once(second.run, finished=False)
        assert len(fates) == 16
        assert check(second.run).findings == []


def test_a_branch_starts_pristine_unless_told_to_reuse_what_was_sampled(small: SmallRun) -> None:
    small.advance(1)
    small.sample()  # eight groups, of which the first four were admitted by the checkpoint of step 1
    small.plan()
    small.train(2)
    with branched(small) as second, second.run.index.read() as connection:
        assert units.count_by_state(connection, "second") == {("train", "ready"): 4}


def test_a_branch_that_reuses_trajectories_offers_them_and_trains_each_once(small: SmallRun) -> None:
    small.advance(1)
    small.sample()
    end_sessions(small)
    made = create_branch(small.run, checkpoint="1", name="second", reuse_trajectories=True)
    assert (made.num_pristine, made.num_reused) == (0, 4)
    with SmallRun(open_run(small.run.root)) as second:
        second.trainer()
        batch = second.plan()
        assert batch is not None
        second.train(2)
        second.advance(1)
        check_exactly_once(second.run, finished=False)
        assert check(second.run).findings == []


def test_trajectories_in_quarantine_are_not_reused_their_groups_are_sampled_again(small: SmallRun) -> None:
    while small.sample(1):  # each has an extent of its own
        pass
    small.plan()
    small.train(1)
    with small.run.index.read() as connection:
        untrained = units.listed(connection, "main", state=UnitState.COMPLETED)[4]
    assert untrained.extent_id is not None
    damage(small, untrained.extent_id)
    end_sessions(small)
    quarantine_damage(small.run, do=True)
    made = create_branch(small.run, checkpoint="1", name="second", reuse_trajectories=True)
    assert (made.num_pristine, made.num_reused) == (1, 3)
    with SmallRun(open_run(small.run.root)) as second:
        assert second.sample(1) == 1
        second.trainer()
        assert second.plan() is not None
        second.train(2)
        check_exactly_once(second.run, finished=False)
        (finding,) = check(second.run).findings  # the group is open on the branch that was left
        assert finding.subject == str(untrained.extent_id)


def test_what_a_branch_takes_up_is_granted_in_the_order_and_not_before_the_time_it_was_admitted_for(
    small: SmallRun,
) -> None:
    small.sample()
    small.plan()
    due = datetime.now(UTC) + timedelta(days=1)
    for schedule in ((), (None, -3), (5, 2), (5, 1), (9, 0, due)):
        admit.admit_more(
            small.session("rollout"), count=1, dataset_id=admit.PROMPTS, schedule=admit.Schedule(*schedule)
        )
    small.train(1)
    with small.run.index.read() as connection:
        waiting = units.listed(connection, "main", state=UnitState.READY)
    plain, keyed, second, first, late = [(u.epoch, u.position) for u in waiting[-5:]]
    with branched(small) as again:
        granted = [(g.unit.epoch, g.unit.position) for g in again.claim(100)]
        assert granted[:3] == [first, second, keyed]
        assert plain in granted[3:]
        assert late not in granted
        with again.run.index.read() as connection:
            (left,) = units.listed(connection, "second", state=UnitState.READY)
            ready_in_s = connection.execute(
                sa.select(t.units.c.not_before - now(connection)).where(t.units.c.unit_id == left.unit_id)
            ).scalar_one()
    assert (left.epoch, left.position) == late
    assert 86_000 < ready_in_s <= 86_400
    small.run.close()
    root = lose_index(open_run(small.run.root))
    assert rebuild.rebuild(root).rebuilt.losses == []
    with SmallRun(open_run(root)) as rebuilt:
        found = [(g.unit.epoch, g.unit.position) for g in rebuilt.claim(100)]
        assert found == granted


def test_the_old_branch_can_be_branched_from_again_and_a_branch_from_a_branch(small: SmallRun) -> None:
    small.advance(3)
    with branched(small) as second:
        second.trainer()
        second.advance(2)
        end_sessions(second)
        create_branch(second.run, checkpoint="2", name="third")
        with SmallRun(open_run(small.run.root)) as third:
            assert [b.branch_id for b in history.batches(third.run)] == ["main", "second"]
            third.trainer()
            admit.admit_due(third.session("train"))
            third.advance(1)
            assert [b.branch_id for b in history.batches(third.run)] == ["main", "second", "third"]
            check_exactly_once(third.run, finished=False)
            assert check(third.run).findings == []


def test_a_branch_is_refused_with_what_to_do(small: SmallRun) -> None:
    small.advance(2)
    with pytest.raises(ConflictError, match="workers are at work"):
        create_branch(small.run, checkpoint="1", name="second")
    end_sessions(small)
    with pytest.raises(NotFoundError, match="no checkpoint of step 9"):
        create_branch(small.run, checkpoint="9", name="second")
    with pytest.raises(NotFoundError, match="no checkpoint 'c9'"):
        create_branch(small.run, checkpoint="c9", name="second")
    with pytest.raises(InvalidInputError, match="branch name"):
        create_branch(small.run, checkpoint="1", name="../up")
    with pytest.raises(AlreadyExistsError, match="'main'"):
        create_branch(small.run, checkpoint="1", name="main")
    with pytest.raises(NotFoundError, match="no branch"):
        on_branch(small.run, "nowhere")
    assert open_run(small.run.root).branch == "main"
    assert replace(small.run, branch="main") == small.run
