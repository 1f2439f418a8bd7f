"""Units that came back for another attempt are as they were after a rebuild or a restore: the journal tells of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from strawflow import faults
from strawflow.flow import assemble, rebuild
from strawflow.flow import complete as completing
from strawflow.flow.backup import backup
from strawflow.flow.fence import fence
from strawflow.flow.quarantine import quarantine_damage
from strawflow.flow.restore import restore
from strawflow.flow.retry import retry_failed, retry_unit
from strawflow.flow.run import Run, open_run
from strawflow.index import consumers, leases, packs, units
from strawflow.index.consumers import Assignment
from strawflow.testing.damage import flip
from strawflow.testing.runs import SmallRun, made_up_result, small_run
from tests.contract.lost_index import die, essence_of, lose_index, on_sqlite
from tests.contract.stored import assert_sound, end_sessions

SETTINGS = {"lease.heartbeat_s": "3000", "lease.ttl_s": "3600", "rollout.max_attempts": "2"}


@pytest.fixture
def small(tmp_path: Path, settings: dict[str, str]) -> Iterator[SmallRun]:
    with small_run(tmp_path, settings={**settings, **SETTINGS}) as made:
        yield made


def requeue(small: SmallRun, *unit_ids: int) -> None:
    assemble.requeue(small.session("assemble"), small.assembler(), unit_ids, reason="stale")


def fail(small: SmallRun, unit_id: int, *, times: int = 2) -> None:
    """Let a unit's attempts end with an error; others claimed on the way are given back."""
    for _ in range(times):
        grants = {g.unit_id: g for g in small.claim(100)}
        completing.fail(
            small.session("rollout"), unit_id, fence=grants.pop(unit_id).fence, error="engine said no"
        )
        with small.run.index.begin() as connection:
            keys = [(g.unit_id, g.fence) for g in grants.values()]
            leases.release(connection, small.session("rollout").session_id, keys)


def counts(run: Run) -> list[tuple[Any, ...]]:
    """Return how every unit stands, with what is counted of it."""
    with run.index.read() as connection:
        found = units.listed(connection, run.branch)
    return [(u.unit_id, u.state, u.attempts, u.crashes, u.parks, u.requeues) for u in found]


def offered(run: Run) -> dict[int, int]:
    """Return {unit: fence of its result} of what waits for the trainer."""
    with run.index.read() as connection:
        found = consumers.offered(connection, run.branch, "trainer", purpose="train", limit=100)
    return {u.unit_id: u.fence for u in found}


def rebuilt(small: SmallRun) -> SmallRun:
    """Kill everybody, lose the index, rebuild it, and return the run as its workers find it again."""
    die(small)
    root = lose_index(small.run)
    assert rebuild.rebuild(root).rebuilt.losses == []
    return SmallRun(open_run(root))


def test_a_rebuild_after_requeues_and_retries_gives_the_same_tables(small: SmallRun) -> None:
    made = backup(small.run)
    fail(small, 3)
    assert retry_unit(small.run, 3).attempts == 0
    grants = small.claim(2)
    progress = [made_up_result(grant, small.serving() or "") for grant in grants]
    completing.park(small.session("rollout"), progress, submission_id="parked")
    small.complete(small.claim(2))  # what was parked
    requeue(small, 1, 2)
    end_sessions(small)
    expected, standing = essence_of(small.run.index), counts(small.run)
    assert standing[:3] == [(1, "ready", 0, 0, 1, 1), (2, "ready", 0, 0, 1, 1), (3, "ready", 0, 0, 0, 0)]
    with rebuilt(small) as again:
        assert essence_of(again.run.index) == expected
        assert counts(again.run) == standing
        assert_sound(again.run)
        root = again.run.root
    restore(root, made.folder, may_replace=True)
    with SmallRun(open_run(root)) as again:
        assert essence_of(again.run.index) == expected
        assert counts(again.run) == standing
        (first, second) = again.claim(2)
        assert (first.continuation, second.continuation) == (None, None)
        again.complete([first, second])
        assert offered(again.run).keys() == {1, 2}


@on_sqlite
def test_a_group_sampled_again_keeps_its_new_result_and_how_often_it_was_sent_back(small: SmallRun) -> None:
    small.sample(2)
    requeue(small, 1)
    small.sample(1)
    end_sessions(small)
    expected = essence_of(small.run.index)
    with rebuilt(small) as again:
        assert essence_of(again.run.index) == expected
        assert offered(again.run) == {1: 2, 2: 1}
        assert [(c[1], c[5]) for c in counts(again.run)][:2] == [("completed", 1), ("completed", 0)]


@on_sqlite
def test_a_group_that_failed_after_it_was_sent_back_is_dropped_and_not_trained(small: SmallRun) -> None:
    small.sample(2)
    requeue(small, 1)
    fail(small, 1)
    assert assemble.drop_failed(small.session("assemble"), small.assembler(), purpose="train") == 1
    end_sessions(small)
    expected = essence_of(small.run.index)
    with rebuilt(small) as again:
        assert essence_of(again.run.index) == expected
        assert offered(again.run) == {2: 1}
        assert_sound(again.run)


@on_sqlite
@pytest.mark.parametrize("goes_on", ["plans", "drops", "nothing"])
def test_a_group_whose_requeue_was_killed_before_it_was_true_keeps_the_fate_it_got(
    small: SmallRun, monkeypatch: pytest.MonkeyPatch, goes_on: str
) -> None:
    small.sample(4)
    role, session = small.assembler(), small.session("assemble")
    faults.reset()
    with monkeypatch.context() as patch:
        patch.setenv("STRAWFLOW_FAULT", "journal.after_entry:1:raise")
        with pytest.raises(faults.InjectedFaultError):
            requeue(small, 1)
    if goes_on == "plans":
        assert small.plan() is not None
    elif goes_on == "drops":
        assemble.drop(session, role, [Assignment(0, 1, "dropped", "failed_members")])
    end_sessions(small)
    expected = essence_of(small.run.index)
    with rebuilt(small) as again:
        if goes_on == "nothing":  # nobody had seen the result: it is sampled again, as was meant
            assert again.claim(1)[0].unit_id == 1
        else:
            assert essence_of(again.run.index) == expected
        assert_sound(again.run)


def test_a_restore_retries_what_was_retried_after_the_backup(small: SmallRun) -> None:
    fail(small, 1)
    fail(small, 2)
    end_sessions(small)
    made = backup(small.run)
    assert retry_unit(small.run, 1).state == "ready"
    small.run.close()
    restore(small.run.root, made.folder, may_replace=True)
    with closing(open_run(small.run.root)) as again:
        assert [c[1:3] for c in counts(again)][:2] == [("ready", 0), ("failed", 2)]
        assert retry_failed(again) == [2]


@on_sqlite
def test_what_was_released_by_hand_keeps_its_counts(small: SmallRun) -> None:
    small.claim(3)
    session = small.session("rollout")
    assert fence(small.run, session.session_id, force=True) == 3
    small.sessions.pop("rollout").__exit__(RuntimeError, RuntimeError(), None)
    end_sessions(small)
    standing = counts(small.run)
    assert standing[:2] == [(1, "ready", 0, 1, 0, 0), (2, "ready", 0, 1, 0, 0)]
    with rebuilt(small) as again:
        assert counts(again.run) == standing


@on_sqlite
def test_what_was_opened_again_stays_open_when_its_pack_is_restored_later(small: SmallRun) -> None:
    small.sample(2)
    end_sessions(small)
    with small.run.index.read() as connection:
        extent_id = units.find(connection, 1).extent_id
        assert extent_id is not None
        extent = packs.find_extents(connection, [extent_id])[extent_id]
    path = small.run.root / extent.path
    whole = path.read_bytes()
    flip(path, extent.offset + extent.length - 3)
    assert quarantine_damage(small.run, do=True, reopen=True).reopened == [1, 2]
    expected, standing = essence_of(small.run.index), counts(small.run)
    path.write_bytes(whole)
    with rebuilt(small) as again:
        assert essence_of(again.run.index) == expected
        assert counts(again.run) == standing
