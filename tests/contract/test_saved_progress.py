"""Progress saved while a group is worked on: as differences, under the fence, folded for whoever goes on; nothing of it lost
or believed too long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from strawflow.errors import ConflictError
from strawflow.flow import assemble, rebuild, rescue, retain
from strawflow.flow import complete as completing
from strawflow.flow.chain import saved_members
from strawflow.flow.claim import Grant
from strawflow.flow.complete import Receipt
from strawflow.flow.fence import fence
from strawflow.flow.quarantine import quarantine_damage
from strawflow.flow.run import open_run
from strawflow.flow.status import unit_detail
from strawflow.flow.trajectory import UnitResult
from strawflow.index import continuations, packs, units
from strawflow.index.continuations import SavedRecord
from strawflow.packs.reader import PackReader
from strawflow.states import UnitState
from strawflow.testing.damage import flip
from strawflow.testing.runs import SmallRun, made_up_progress, made_up_result, small_run
from tests.contract.lost_index import die, essence_of, lose_index, on_sqlite
from tests.contract.stored import assert_sound, end_sessions


@pytest.fixture
def small(tmp_path: Path, settings: dict[str, str]) -> Iterator[SmallRun]:
    with small_run(tmp_path, settings=settings) as made:
        yield made


def save(small: SmallRun, grant: Grant, *num_tokens: int, submission_id: str = "") -> Receipt:
    """Save that member m has come to `num_tokens[m]` tokens."""
    so_far = made_up_progress(grant, small.serving() or "", *num_tokens)
    submission_id = submission_id or f"save-{grant.unit_id}-{grant.fence}-{so_far.seq}"
    return completing.save(small.session("rollout"), [(grant, so_far)], submission_id=submission_id)


def die_and_claim(small: SmallRun) -> Grant:
    """Let the worker die and another get its unit, which goes before fresh ones."""
    session_id = small.session("rollout").session_id
    die(small)
    rescue.declare_lost(small.run, session_id, reason="killed by the test")
    (grant,) = small.claim(1)
    return grant


def chain_of(small: SmallRun, unit_id: int) -> list[SavedRecord]:
    with small.run.index.read() as connection:
        return continuations.find(connection, [unit_id]).get(unit_id, [])


def rows_of(small: SmallRun, record: SavedRecord) -> pa.RecordBatch:
    with small.run.index.read() as connection:
        extent = packs.find_extents(connection, [record.extent_id])[record.extent_id]
    return PackReader(small.run.root).read(extent).slice(record.row_start, record.row_count)


def lengths(grant: Grant) -> dict[int, int]:
    return {n: len(m.response_tokens) for n, m in saved_members(grant.continuation).items()}


def test_who_goes_on_has_all_that_was_saved_and_each_save_wrote_only_what_was_new(small: SmallRun) -> None:
    (grant,) = small.claim(1)
    for num_tokens in ((3, 0), (5, 2), (5, 4), (5, 4)):
        save(small, grant, *num_tokens)
    shown = unit_detail(small.run, grant.unit_id).members
    assert [(m["status"], m["num_response_tokens"]) for m in shown] == [("partial", 5), ("partial", 4)]
    records = chain_of(small, grant.unit_id)
    assert [(r.fence, r.seq) for r in records] == [(grant.fence, 2), (grant.fence, 3)]
    told = [
        [(row["member"], row["start"], row["response_tokens"]) for row in rows_of(small, r).to_pylist()]
        for r in records
    ]
    assert told == [[(0, 3, [3, 4]), (1, 0, [100, 101])], [(1, 2, [102, 103])]]

    next_grant = die_and_claim(small)
    assert next_grant.unit_id == grant.unit_id
    members = saved_members(next_grant.continuation)
    expected = made_up_progress(grant, small.serving() or "", 5, 4)
    for member in expected.members:
        found = members[member.member]
        assert list(found.response_tokens) == list(member.response_tokens)
        assert list(found.logprobs) == list(member.logprobs)
        assert list(found.token_versions) == list(member.token_versions)
        assert found.status == "partial"
    assert_sound(small.run)


def test_another_worker_adds_to_the_same_chain(small: SmallRun) -> None:
    (grant,) = small.claim(1)
    save(small, grant, 3, 1)
    save(small, grant, 4, 1)
    second = die_and_claim(small)
    save(small, second, 6, 1)
    assert [(r.fence, r.seq) for r in chain_of(small, grant.unit_id)] == [(grant.fence, 2), (second.fence, 1)]
    third = die_and_claim(small)
    assert lengths(third) == {0: 6, 1: 1}
    assert third.unit.num_tokens == 7
    assert_sound(small.run)


def test_a_finished_member_is_kept_with_its_reward_and_one_that_began_anew_takes_its_own_place(
    small: SmallRun,
) -> None:
    (grant,) = small.claim(1)
    save(small, grant, 3, 2)
    whole = made_up_result(grant, small.serving() or "")
    other = made_up_progress(grant, small.serving() or "", 3, 3)
    so_far = replace(other, members=[other.members[0], whole.members[1]])
    completing.save(small.session("rollout"), [(grant, so_far)], submission_id="finished")
    members = saved_members(die_and_claim(small).continuation)
    assert members[1].status == "finished"
    assert members[1].reward == 1.0
    assert list(members[1].response_tokens) == [10, 11, 12]
    assert list(members[0].response_tokens) == [0, 1, 2]


def test_arrays_that_a_later_save_replaced_stay_with_the_members_that_shared_them(small: SmallRun) -> None:
    (grant,) = small.claim(1)
    pixels, others = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, np.uint8)

    def save_with(*tensors: dict[str, np.ndarray[Any, Any]] | None, num_tokens: tuple[int, int]) -> None:
        so_far = made_up_progress(grant, small.serving() or "", *num_tokens)
        members = [replace(m, tensors=t) for m, t in zip(so_far.members, tensors, strict=True)]
        progress = [(grant, replace(so_far, members=members))]
        completing.save(small.session("rollout"), progress, submission_id=f"save-{so_far.seq}")

    save_with({"pixels": pixels}, {"pixels": pixels}, num_tokens=(3, 3))
    save_with({"pixels": others}, {"pixels": pixels}, num_tokens=(4, 3))
    members = saved_members(die_and_claim(small).continuation)
    for number, expected in ((0, others), (1, pixels)):
        found = (members[number].tensors or {})["pixels"]
        assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())


def test_completing_after_saves_ends_the_chain_and_a_requeue_starts_from_the_prompt(small: SmallRun) -> None:
    (grant,) = small.claim(1)
    save(small, grant, 3, 1)
    save(small, grant, 5, 1)
    assert small.complete([grant]).accepted == (grant.unit_id,)
    assert chain_of(small, grant.unit_id) == []
    assemble.requeue(small.session("assemble"), small.assembler(), [grant.unit_id], reason="stale")
    with small.run.index.read() as connection:
        assert units.find(connection, grant.unit_id).extent_id is None
    assert_sound(small.run)


def test_parking_after_saves_stores_the_progress_whole(small: SmallRun) -> None:
    (grant,) = small.claim(1)
    save(small, grant, 3, 1)
    save(small, grant, 5, 1)
    so_far = made_up_progress(grant, small.serving() or "", 7, 2)
    receipt = completing.park(small.session("rollout"), [so_far], submission_id="park")
    assert receipt.accepted == (grant.unit_id,)
    assert chain_of(small, grant.unit_id) == []
    (again,) = small.claim(1)
    assert lengths(again) == {0: 7, 1: 2}
    save(small, again, 8, 2)
    assert lengths(die_and_claim(small)) == {0: 8, 1: 2}


def test_saving_from_the_prompt_again_takes_the_place_of_what_was_saved(small: SmallRun) -> None:
    (grant,) = small.claim(1)
    save(small, grant, 3, 1)
    save(small, grant, 5, 1)
    second = die_and_claim(small)
    pristine = replace(second, continuation=None)
    save(small, pristine, 1, 0)
    assert chain_of(small, grant.unit_id) == []
    assert lengths(die_and_claim(small)) == {0: 1, 1: 0}


def test_a_worker_that_lost_its_lease_saves_nothing(small: SmallRun) -> None:
    (grant,) = small.claim(1)
    save(small, grant, 3, 1)
    with small.run.index.begin() as connection:
        released = units.find(connection, grant.unit_id)
        assert released.seq == 1
    fence(small.run, small.session("rollout").session_id, force=True)
    die(small)
    (second,) = small.claim(1)
    stale = replace(second, unit=replace(second.unit, fence=grant.fence))
    stale.chain.last, stale.chain.members = grant.chain.last, grant.chain.members
    receipt = save(small, stale, 9, 9)
    assert receipt.lost == (grant.unit_id,)
    assert lengths(die_and_claim(small)) == {0: 3, 1: 1}


def test_a_save_that_is_repeated_is_one_and_other_content_under_its_id_is_refused(small: SmallRun) -> None:
    (grant,) = small.claim(1)
    save(small, grant, 3, 1)
    before = replace(grant.chain, members=dict(grant.chain.members))
    assert save(small, grant, 5, 1, submission_id="twice").accepted == (grant.unit_id,)
    for attribute in ("last", "members"):  # as if the answer had been lost
        setattr(grant.chain, attribute, getattr(before, attribute))
    assert save(small, grant, 5, 1, submission_id="twice").accepted == (grant.unit_id,)
    assert len(chain_of(small, grant.unit_id)) == 1
    with pytest.raises(ConflictError):
        save(small, grant, 6, 1, submission_id="twice")
    assert grant.chain.next_seq == 3


def test_a_rebuilt_index_goes_on_from_the_saves(small: SmallRun) -> None:
    grants = small.claim(3)
    for num_tokens in ((3, 1), (5, 1), (6, 2)):
        for grant in grants[:2]:
            save(small, grant, *num_tokens)
    save(small, grants[2], 4, 0)
    small.complete([grants[1]])
    expected = [chain_of(small, g.unit_id) for g in grants]
    assert [len(chain) for chain in expected] == [2, 0, 0]
    die(small)
    before = essence_of(small.run.index)
    root = lose_index(small.run)
    assert rebuild.rebuild(root).rebuilt.losses == []
    with SmallRun(open_run(root)) as again:
        after = essence_of(again.run.index)
        assert after["units"] == [
            (*u[:-2], "ready" if u[-2] == "leased" else u[-2], u[-1]) for u in before["units"]
        ]
        found = {g.unit_id: lengths(g) for g in again.claim(2)}
        assert found == {grants[0].unit_id: {0: 6, 1: 2}, grants[2].unit_id: {0: 4, 1: 0}}
        assert_sound(again.run)


@on_sqlite
def test_a_rebuild_goes_on_from_before_a_record_that_is_damaged(small: SmallRun) -> None:
    (grant,) = small.claim(1)
    for num_tokens in ((3, 1), (5, 1), (7, 1)):
        save(small, grant, *num_tokens)
    middle, _ = chain_of(small, grant.unit_id)
    with small.run.index.read() as connection:
        extent = packs.find_extents(connection, [middle.extent_id])[middle.extent_id]
    die(small)
    root = lose_index(small.run)
    flip(root / extent.path, extent.offset + extent.length - 3)
    rebuild.rebuild(root)
    with SmallRun(open_run(root)) as again:
        (found,) = again.claim(1)
        assert found.unit_id == grant.unit_id
        assert lengths(found) in ({0: 3, 1: 1}, {0: 7, 1: 1})


@on_sqlite
def test_a_damaged_save_is_told_and_its_unit_starts_from_the_prompt(small: SmallRun) -> None:
    (grant,) = small.claim(1)
    for num_tokens in ((3, 1), (5, 1)):
        save(small, grant, *num_tokens)
    (record,) = chain_of(small, grant.unit_id)
    end_sessions(small)
    with small.run.index.read() as connection:
        extent = packs.find_extents(connection, [record.extent_id])[record.extent_id]
        assert units.find(connection, grant.unit_id).state is UnitState.READY
    flip(small.run.root / extent.path, extent.offset + extent.length - 3)
    report = quarantine_damage(small.run, do=True, reopen=True)
    assert [u.unit_id for e in report.damaged for u in e.units] == [grant.unit_id]
    assert chain_of(small, grant.unit_id) == []
    again = {g.unit_id: g for g in small.claim(10)}
    assert again[grant.unit_id].continuation is None


def test_saves_of_a_unit_that_failed_for_good_leave_with_it(small: SmallRun) -> None:
    (grant,) = small.claim(1)
    for attempt in range(small.run.config.rollout.max_attempts):
        if attempt:
            (grant,) = small.claim(1)
        save(small, grant, 2 * attempt + 1, 1)
        completing.fail(small.session("rollout"), grant.unit_id, fence=grant.fence, error="engine said no")
    assert chain_of(small, grant.unit_id)
    assemble.drop_failed(small.session("assemble"), small.assembler(), purpose="train")
    small.advance(3)
    policy = replace(retain.policy_of(small.run.config), keep_checkpoints=1, keep_steps=1)
    retain.retain(small.session("storage"), policy)
    with small.run.index.read() as connection:
        assert not units.is_there(connection, grant.unit_id)
    assert chain_of(small, grant.unit_id) == []


def test_a_result_is_made_after_the_last_save(small: SmallRun) -> None:
    (grant,) = small.claim(1)
    save(small, grant, 3, 1)
    early: UnitResult = made_up_result(grant, small.serving() or "")
    save(small, grant, 5, 1)
    receipt = completing.complete(small.session("rollout"), [early], submission_id="early")
    assert receipt.lost == (grant.unit_id,)
    assert small.complete([grant]).accepted == (grant.unit_id,)
