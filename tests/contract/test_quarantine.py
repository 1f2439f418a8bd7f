"""Damage: extents with flipped bytes are found, contained, and what they held is told, opened again or planned again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.dataset as ds
import pytest
import sqlalchemy as sa

from strawflow.errors import ConflictError, CorruptPackError, StorageError
from strawflow.flow import assemble, consume, history, rebuild, rescue
from strawflow.flow import complete as completing
from strawflow.flow.branch import create_branch
from strawflow.flow.check import check
from strawflow.flow.quarantine import QuarantineReport, quarantine_damage
from strawflow.flow.reconcile import reconcile
from strawflow.flow.run import open_run
from strawflow.index import batches, consumers, events, packs, quarantine, sessions, tables, units
from strawflow.packs.posix import PosixPlace, file_of
from strawflow.states import BatchState, UnitState
from strawflow.store import Store
from strawflow.testing.damage import flip
from strawflow.testing.invariants import batch_digests, check_exactly_once
from strawflow.testing.pack_rows import made_up_rows
from strawflow.testing.runs import SmallRun, made_up_result, small_run
from tests.contract.backed_up import reopened
from tests.contract.lost_index import die, lose_index, on_sqlite
from tests.contract.stored import damage, end_sessions, with_storage


@pytest.fixture
def small(tmp_path: Path, settings: dict[str, str]) -> Iterator[SmallRun]:
    with small_run(tmp_path, num_prompts=24, settings=settings) as made:
        yield made


def completed(small: SmallRun) -> list[units.Unit]:
    with small.run.index.read() as connection:
        return units.listed(connection, small.run.branch, state=UnitState.COMPLETED)


def sampled_apart(small: SmallRun, count: int) -> list[units.Unit]:
    """Complete groups one by one, so that each has an extent of its own."""
    for _ in range(count):
        assert small.sample(1) == 1
    return completed(small)


def finish(small: SmallRun) -> None:
    """Train what is left and check all that can be asked of a finished run."""
    small.trainer()
    assert small.resumption is not None
    for step in range(small.resumption.step + 1, small.run.config.total_steps + 1):
        small.sample()
        batch = consume.batch_of_step(small.run, step) or small.plan()
        assert batch is not None
        assert batch.step == step
        small.train(step)
    small.sample()
    fates = check_exactly_once(small.run, finished=True)
    wanted = small.run.config.total_steps * small.run.config.rollout.prompts_per_step
    assert sum(outcome == "trained" for outcome in fates.values()) == wanted
    assert check(small.run).findings == []


def repaired(small: SmallRun, **options: bool) -> QuarantineReport:
    """Rehearse and then do it: both tell the same."""
    told = quarantine_damage(small.run, do=False, **options)
    done = quarantine_damage(small.run, do=True, **options)
    assert (told.done, done.done) == (False, True)
    assert replace(told, done=True) == done
    return done


# ---- trajectories


def test_open_groups_whose_trajectories_are_damaged_are_generated_again_on_request(small: SmallRun) -> None:
    first, *others = sampled_apart(small, 5)
    end_sessions(small)
    assert first.extent_id is not None
    damage(small, first.extent_id)
    assert [f.check for f in check(small.run).findings] == ["extent"]
    done = repaired(small)
    assert (done.left_open, done.reopened) == ([first.unit_id], [])
    with pytest.raises(CorruptPackError, match="in quarantine") as refused:
        assemble.read_trajectories(small.session("assemble"), [first])
    assert refused.value.facts["extent_id"] == first.extent_id
    end_sessions(small)
    assert [f.check for f in check(small.run).findings] == ["extent"]  # it is still waited for
    done = quarantine_damage(small.run, do=True, reopen=True)
    assert (done.left_open, done.reopened) == ([], [first.unit_id])
    with small.run.index.read() as connection:
        again = units.find(connection, first.unit_id)
        offered = consumers.offered(connection, "main", "trainer", purpose="train", limit=100)
        (event,) = events.latest(connection, limit=1, name_prefix="unit.reopened")
    assert (again.state, again.extent_id, again.attempts) == (UnitState.READY, None, 0)
    assert [u.unit_id for u in offered] == [u.unit_id for u in others]
    assert (event["unit_id"], event["facts"]) == (first.unit_id, {"reason": "corrupt"})
    report = check(small.run)
    assert report.findings == []
    assert report.num_quarantined == 1
    finish(small)


@on_sqlite
def test_trained_groups_are_told_and_never_opened_again(small: SmallRun) -> None:
    first, *_ = sampled_apart(small, 4)
    small.plan()
    small.train(1)
    end_sessions(small)
    assert first.extent_id is not None
    damage(small, first.extent_id)
    done = repaired(small, reopen=True)
    assert (done.trained, done.reopened, done.left_open, done.stopped) == ([first.unit_id], [], [], [])
    finish(small)


def half_consumed(small: SmallRun) -> tuple[units.Unit, bytes]:
    """Damage one of four groups that `trainer` has trained and `export` has not reached."""
    first, *_ = sampled_apart(small, 4)
    with Store(small.run).consumer("export"):
        pass  # it is offered all four
    small.plan()
    small.train(1)
    end_sessions(small)
    assert first.extent_id is not None
    return first, damage(small, first.extent_id)


def offered_to(small: SmallRun, consumer: str) -> set[int]:
    with small.run.index.read() as connection:
        found = consumers.offered(connection, "main", consumer, purpose="train", limit=99)
    return {u.unit_id for u in found}


def fates_of(small: SmallRun, unit_id: int) -> set[tuple[str, str, str | None]]:
    with small.run.index.read() as connection:
        found = consumers.fates_of(connection, "main", unit_id)
    return {(consumer, fate.outcome, fate.reason) for consumer, fate, _ in found}


def test_a_group_that_one_consumer_has_is_dropped_for_those_it_still_waits_for(small: SmallRun) -> None:
    first, _ = half_consumed(small)
    told = repaired(small)
    assert (told.left_open, told.left_waiting) == ([], {"main/export": [first.unit_id]})
    (finding,) = check(small.run).findings  # `export` would stop at it
    assert finding.message.endswith(
        "(in quarantine, and needed); `strawflow index quarantine RUN` tells what it held and what can be done"
    )
    done = repaired(small, reopen=True)
    assert (done.dropped, done.reopened) == ({"main/export": [first.unit_id]}, [])
    assert fates_of(small, first.unit_id) == {("trainer", "trained", None), ("export", "dropped", "corrupt")}
    assert first.unit_id not in offered_to(small, "export")
    again = quarantine_damage(small.run, do=False, reopen=True)
    assert (again.dropped, again.trained, again.has_work) == ({}, [first.unit_id], False)
    assert check(small.run).findings == []
    finish(small)


def test_a_consumer_made_later_is_not_offered_what_is_in_quarantine_until_it_is_whole(
    small: SmallRun,
) -> None:
    first, whole = half_consumed(small)
    with small.run.index.read() as connection:
        (path,) = [p.path for p in packs.listed(connection) if p.kind == "trajectory"]
    quarantine_damage(small.run, do=True, reopen=True)
    with Store(small.run).consumer("late") as late:
        batch = late.next_batch(9, at_least=1)
        assert batch is not None
        assert batch.num_groups == 3
        assert first.unit_id not in batch.rows["unit_id"].to_pylist()
        late.advance()
    assert check(small.run).findings == []
    (small.run.root / path).write_bytes(whole)
    assert repaired(small).given_back == [first.extent_id]
    assert offered_to(small, "late") == {first.unit_id}
    assert first.unit_id not in offered_to(small, "export")  # it was dropped for it
    with Store(small.run).consumer("late") as late:
        batch = late.next_batch(9, at_least=1)
        assert batch is not None
        assert set(batch.rows["unit_id"].to_pylist()) == {first.unit_id}
    finish(small)


def test_a_glob_over_packs_misses_what_is_set_aside_and_everything_else_finds_it(small: SmallRun) -> None:
    first, *others = sampled_apart(small, 4)
    end_sessions(small)
    whole = damage(small, first.extent_id or 0)
    with small.run.index.read() as connection:
        (path,) = [p.path for p in packs.listed(connection) if p.kind == "trajectory"]
    folder, aside = small.run.root / "packs/trajectory", small.run.root / "packs/quarantine/trajectory"

    def seen() -> set[int]:
        by_glob = pl.scan_ipc(folder / "*.arrow").collect()["unit_id"].to_list()
        assert set(ds.dataset(folder, format="ipc").to_table()["unit_id"].to_pylist()) == set(by_glob)
        return set(by_glob)

    assert seen() == {u.unit_id for u in (first, *others)}
    quarantine_damage(with_storage(small.run, sweep_grace_s=0.0), do=True)
    assert seen() == {u.unit_id for u in others}  # what was whole beside it was copied out
    assert [p.name for p in aside.iterdir()] == [Path(path).name]
    assert [d.path for d in quarantine_damage(small.run, do=False).damaged] == [path]
    assert quarantine_damage(small.run, do=True).has_work is False
    assert [f.check for f in check(small.run).findings] == ["extent"]  # it is needed
    assert check(small.run).num_unnamed_files == 0
    assert reconcile(small.run).items == []
    (small.run.root / path).write_bytes(whole)
    assert quarantine_damage(small.run, do=True).given_back == [first.extent_id]
    assert check(small.run).findings == []
    assert list(aside.iterdir()) == []
    assert seen() == {u.unit_id for u in (first, *others)}


def test_a_damaged_pack_of_a_killed_worker_is_out_of_the_way_of_a_glob(small: SmallRun) -> None:
    first, second = sampled_apart(small, 2)
    die(small)
    damage(small, first.extent_id or 0)
    for session in sessions_left(small):
        rescue.declare_lost(small.run, session, reason="killed by the test")
    rescue.recover_packs(small.session("rescue"))
    end_sessions(small)
    rows = pl.scan_ipc(small.run.root / "packs/trajectory/*.arrow").collect()
    assert set(rows["unit_id"]) == {second.unit_id}
    (aside,) = (small.run.root / "packs/quarantine/trajectory").iterdir()
    assert [Path(d.path).name for d in quarantine_damage(small.run, do=False).damaged] == [aside.name]


def sessions_left(small: SmallRun) -> list[str]:
    with small.run.index.read() as connection:
        return [s.session_id for s in sessions.listed(connection, live_only=True)]


def test_a_pack_that_an_earlier_program_quarantined_in_its_place_is_set_aside_with_the_next_look(
    small: SmallRun,
) -> None:
    (first,) = sampled_apart(small, 1)
    end_sessions(small)
    damage(small, first.extent_id or 0)
    with small.run.index.begin() as connection:
        quarantine.add(connection, first.extent_id or 0, reason="by an earlier program")
        (length,) = (
            e.length
            for p in packs.listed(connection)
            for e in packs.extents_of_pack(connection, p.pack_id)
            if e.extent_id == first.extent_id
        )
    aside = small.run.root / "packs/quarantine/trajectory"
    (damaged,) = quarantine_damage(small.run, do=True).damaged
    assert damaged.was_known
    (file,) = aside.iterdir()
    flip(file, damaged.offset + length - 3)  # repaired where it lies
    assert quarantine_damage(small.run, do=True).given_back == [first.extent_id]
    assert (small.run.root / damaged.path).exists()
    assert check(small.run).findings == []


def test_a_group_in_quarantine_that_is_generated_again_reaches_a_consumer_made_meanwhile(
    small: SmallRun,
) -> None:
    first, *others = sampled_apart(small, 4)
    end_sessions(small)
    assert first.extent_id is not None
    damage(small, first.extent_id)
    repaired(small)
    with Store(small.run).consumer("late"):
        pass
    assert offered_to(small, "late") == {u.unit_id for u in others}
    assert [f.check for f in check(small.run).findings] == ["extent"]  # `trainer` would stop at it
    assert repaired(small, reopen=True).reopened == [first.unit_id]
    assert small.sample(1) == 1
    assert first.unit_id in offered_to(small, "late") & offered_to(small, "trainer")
    finish(small)


def test_parked_progress_that_is_damaged_is_given_up(small: SmallRun) -> None:
    (grant,) = small.claim(1)
    progress = made_up_result(grant, small.serving() or "")
    completing.park(small.session("rollout"), [progress], submission_id="parked")
    end_sessions(small)
    with small.run.index.read() as connection:
        extent_id = units.find(connection, grant.unit_id).extent_id
    assert extent_id is not None
    damage(small, extent_id)
    repaired(small)
    with pytest.raises(CorruptPackError, match="in quarantine"):
        small.claim(1)
    die(small)
    lose_all(small)
    done = quarantine_damage(small.run, do=True, reopen=True)
    assert done.reopened == [grant.unit_id]
    with small.run.index.read() as connection:
        again = units.find(connection, grant.unit_id)
    assert (again.state, again.extent_id) == (UnitState.READY, None)
    finish(small)


def lose_all(small: SmallRun) -> None:
    with small.run.index.read() as connection:
        living = sessions.listed(connection, live_only=True)
    for session in living:
        rescue.declare_lost(small.run, session.session_id, reason="killed by the test")


# ---- batches


def rows_of_batch(small: SmallRun, step: int) -> int:
    with small.run.index.read() as connection:
        batch = batches.require(connection, small.run.branch, small.run.consumer, step)
        return batches.places(connection, batch.batch_id)[0].extent_id


def plan_of_batch(small: SmallRun, step: int) -> int:
    with small.run.index.read() as connection:
        return batches.require(connection, small.run.branch, small.run.consumer, step).plan_extent_id


@on_sqlite
@pytest.mark.parametrize("part", [rows_of_batch, plan_of_batch])
def test_a_planned_batch_that_nobody_applied_is_taken_back_with_all_after_it(
    small: SmallRun, part: Callable[[SmallRun, int], int]
) -> None:
    small.advance(1)
    small.sample()
    old = [small.plan(), small.plan()]
    assert old[0] is not None
    assert old[1] is not None
    end_sessions(small)
    damage(small, part(small, 2))
    with small.run.index.read() as connection:
        given = {u for _, u, _, _ in batches.units_of(connection, [b.batch_id for b in old if b])}
    done = repaired(small)
    assert done.voided == {"main/trainer": [3, 2]}
    with small.run.index.read() as connection:
        standing = consumers.find(connection, "main", "trainer")
        offered = consumers.offered(connection, "main", "trainer", purpose="train", limit=100)
        told = events.latest(connection, limit=10, name_prefix="batch.voided")
    assert (standing.position, standing.planned) == (1, 1)
    assert {u.unit_id for u in offered} == given
    assert [e["facts"]["step"] for e in told] == [2, 3]
    again = [small.plan(), small.plan()]
    assert {b.batch_id for b in again if b}.isdisjoint({b.batch_id for b in old if b})
    assert [b.step for b in again if b] == [2, 3]
    finish(small)


def test_groups_of_a_batch_taken_back_that_are_damaged_too_wait_for_the_request(small: SmallRun) -> None:
    first, *_ = sampled_apart(small, 4)
    small.plan()
    end_sessions(small)
    assert first.extent_id is not None
    damage(small, first.extent_id)
    damage(small, rows_of_batch(small, 1))
    done = quarantine_damage(small.run, do=True)
    assert (done.voided, done.left_open) == ({"main/trainer": [1]}, [first.unit_id])
    done = quarantine_damage(small.run, do=True, reopen=True)
    assert (done.voided, done.reopened) == ({}, [first.unit_id])
    finish(small)


@on_sqlite
def test_a_batch_taken_back_stays_back_when_the_index_is_rebuilt(small: SmallRun) -> None:
    small.sample()
    small.plan()
    end_sessions(small)
    damage(small, rows_of_batch(small, 1))
    quarantine_damage(small.run, do=True)
    again = small.plan()
    assert again is not None
    die(small)
    root = lose_index(small.run)
    rebuild.rebuild(root)
    with reopened(root) as rebuilt:
        assert batch_digests(history.batches(rebuilt.run)) == {1: again.digest}
        finish(rebuilt)


@on_sqlite
def test_a_batch_needed_for_the_replay_stops_the_run_with_the_choice(small: SmallRun) -> None:
    small.advance(1)
    small.sample()
    small.plan()
    consume.record_step(small.session("train"), small.trainer(), step=2, metrics={"loss": 1.0})
    end_sessions(small)
    whole = damage(small, rows_of_batch(small, 2))
    before = batch_digests(history.batches(small.run))
    done = repaired(small, reopen=True)
    assert done.voided == {}
    (choice,) = done.stopped
    assert "restore its file from a copy, or branch" in choice
    assert batch_digests(history.batches(small.run)) == before
    batch = consume.batch_of_step(small.run, 2)
    assert batch is not None
    with pytest.raises(CorruptPackError, match=r"restore the file .* or branch from a checkpoint"):
        list(consume.read_batch(small.run, small.session("train").reader, batch))
    end_sessions(small)
    # One way: the file comes back.
    restored = replace(small)
    with small.run.index.read() as connection:
        path = next(
            p.path for p in packs.listed(connection) if p.kind == "batch" and p.path in str(done.damaged)
        )
    broken = file_of(small.run.root, path).read_bytes()
    (small.run.root / path).write_bytes(whole)
    assert repaired(restored).stopped == []
    assert [
        rows.num_rows for _, rows in consume.read_batch(small.run, small.session("train").reader, batch)
    ] == [8]
    end_sessions(small)
    # The other: a branch from before it.
    (small.run.root / path).write_bytes(broken)
    create_branch(small.run, checkpoint="1", name="second")
    root = small.run.root
    small.run.close()
    with SmallRun(open_run(root)) as second:
        second.trainer()
        second.publish(1, content="of the branch")
        second.advance(2)
        check_exactly_once(second.run, finished=True)


@on_sqlite
def test_a_batch_that_a_checkpoint_covers_is_only_told(small: SmallRun) -> None:
    small.advance(2)
    end_sessions(small)
    damage(small, rows_of_batch(small, 1))
    done = repaired(small)
    assert (done.voided, done.stopped) == ({}, [])
    ((held,),) = [d.batches for d in done.damaged]
    assert (held.step, held.state) == (1, BatchState.TRAINED)
    report = check(small.run)
    assert (report.findings, report.num_quarantined) == ([], 1)


def test_a_batch_by_reference_goes_back_with_its_trajectories(small: SmallRun) -> None:
    sampled_apart(small, 4)
    with Store(small.run).consumer("export") as export:
        first = export.next_batch(2)
        second = export.next_batch(2)
        assert first is not None
        assert second is not None
        export.advance(first.step)
    end_sessions(small)
    unit_id = second.rows.column("unit_id")[0].as_py()
    with small.run.index.read() as connection:
        extent_id = units.find(connection, unit_id).extent_id
    assert extent_id is not None
    damage(small, extent_id)
    done = quarantine_damage(small.run, do=True, reopen=True)
    assert done.voided == {"main/export": [second.step]}
    assert done.reopened == [unit_id]
    assert small.sample(1) == 1
    end_sessions(small)
    with Store(small.run).consumer("export") as export:
        again = export.next_batch(2)
        assert again is not None
        assert again.step == second.step
        assert set(again.rows.column("unit_id").to_pylist()) == set(second.rows.column("unit_id").to_pylist())
        export.advance()
    finish(small)


# ---- prompts, files, workers at work


def prompts_of(small: SmallRun) -> int:
    with small.run.index.read() as connection:
        (pack,) = [p for p in packs.listed(connection) if p.kind == "prompt"]
        (extent,) = packs.extents_of_pack(connection, pack.pack_id)
    return extent.extent_id


@on_sqlite
def test_damaged_prompts_stop_the_run_and_say_which_rows(small: SmallRun) -> None:
    small.sample(2)
    end_sessions(small)
    damage(small, prompts_of(small))
    done = repaired(small)
    (stopped,) = done.stopped
    assert "rows 0 to 23 of segment 0 of 'prompts'" in stopped
    with pytest.raises(CorruptPackError, match="in quarantine"):
        small.claim(1)


@on_sqlite
def test_what_is_whole_again_is_given_back(small: SmallRun) -> None:
    first, *_ = sampled_apart(small, 2)
    end_sessions(small)
    assert first.extent_id is not None
    whole = damage(small, first.extent_id)
    with small.run.index.read() as connection:
        (path,) = [p.path for p in packs.listed(connection) if p.kind == "trajectory"]
    repaired(small)
    (small.run.root / path).write_bytes(whole)
    assert [f.message for f in check(small.run).findings] == [
        "is in quarantine and whole again: `strawflow index quarantine RUN --yes` gives it back"
    ]
    done = repaired(small)
    assert (done.damaged, done.given_back) == ([], [first.extent_id])
    assert check(small.run).findings == []
    finish(small)


@on_sqlite
def test_a_missing_file_is_one_finding_and_a_missing_share_is_an_error(small: SmallRun) -> None:
    opened = sampled_apart(small, 3)
    end_sessions(small)
    (path,) = (small.run.root / "packs" / "trajectory").glob("*.arrow")
    path.unlink()
    (finding,) = check(small.run).findings
    assert (finding.check, "is missing, and 3 extents" in finding.message) == ("pack", True)
    done = repaired(small, reopen=True)
    assert done.reopened == [u.unit_id for u in opened]
    assert {d.reason for d in done.damaged} == {"its file is missing"}
    (small.run.root / "packs").rename(small.run.root / "elsewhere")
    with pytest.raises(StorageError, match="is the storage mounted"):
        quarantine_damage(small.run, do=True, reopen=True)
    (small.run.root / "elsewhere").rename(small.run.root / "packs")
    finish(small)


@on_sqlite
def test_batches_and_offers_are_left_to_live_workers_while_damage_is_contained(small: SmallRun) -> None:
    first, *_ = sampled_apart(small, 4)
    small.plan()
    assert first.extent_id is not None
    damage(small, rows_of_batch(small, 1))
    with pytest.raises(ConflictError) as refused:
        quarantine_damage(small.run, do=True)
    holder = small.session("assemble").session_id
    for told in (f"it is {holder} (process {os.getpid()} on", f"`strawflow worker fence RUN {holder}`"):
        assert told in refused.value.message
    with small.run.index.read() as connection:
        assert len(quarantine.listed(connection)) == 1
    assert len(history.batches(small.run)) == 1
    end_sessions(small)
    assert quarantine_damage(small.run, do=True).voided == {"main/trainer": [1]}


DIES_AS_CONSUMER = """
import os, sys, strawflow
store = strawflow.open(sys.argv[1])
export = store.consumer("export")
os._exit(0)  # as a kill: nothing is closed
"""


@on_sqlite
def test_a_session_whose_process_is_gone_does_not_stand_in_the_way_of_a_repair(small: SmallRun) -> None:
    first, _ = half_consumed(small)
    subprocess.run([sys.executable, "-c", DIES_AS_CONSUMER, str(small.run.root)], check=True)
    with small.run.index.read() as connection:
        (left,) = sessions.listed(connection, live_only=True)
    assert (left.kind, left.expires_in_s > 10) == ("consumer-export", True)
    assert repaired(small, reopen=True).dropped == {"main/export": [first.unit_id]}


@on_sqlite
def test_a_session_of_another_host_stands_in_the_way_until_its_lease_ends(small: SmallRun) -> None:
    half_consumed(small)
    subprocess.run([sys.executable, "-c", DIES_AS_CONSUMER, str(small.run.root)], check=True)
    with small.run.index.begin() as connection:
        connection.execute(sa.update(tables.sessions).values(machine="another", host="elsewhere"))
    with pytest.raises(
        ConflictError, match=r"on elsewhere\): stop it, or .*worker fence RUN consumer-export-"
    ):
        quarantine_damage(small.run, do=True, reopen=True)


@on_sqlite
def test_recovery_leaves_damage_behind_and_does_not_try_it_for_ever(small: SmallRun) -> None:
    first, *others = sampled_apart(small, 3)
    die(small)
    lose_all(small)
    assert first.extent_id is not None
    damage(small, first.extent_id)
    session = small.session("supervise")
    assert rescue.recover_packs(session) >= 1
    files = sorted((small.run.root / "packs").rglob("*.arrow"))
    for _ in range(2):
        assert rescue.recover_packs(session) == 0
    assert sorted((small.run.root / "packs").rglob("*.arrow")) == files
    with small.run.index.read() as connection:
        assert list(quarantine.listed(connection)) == [first.extent_id]
    assert assemble.read_trajectories(session, others).keys() == {u.unit_id for u in others}
    end_sessions(small)
    assert quarantine_damage(small.run, do=True, reopen=True).reopened == [first.unit_id]
    finish(small)


# ---- the check, and the command


@on_sqlite
def test_the_check_counts_what_nothing_names_and_finds_footers_that_no_reader_reads(small: SmallRun) -> None:
    small.sample(2)
    session = small.session("train")
    session.packs.append("plan", made_up_rows("plan", 3))  # named by nothing
    end_sessions(small)
    (small.run.root / "packs" / "plan" / "left-over.arrow").write_bytes(b"nobody's")
    report = check(small.run)
    assert report.findings == []
    assert (report.num_unnamed, report.num_unnamed_files, report.unnamed_file_bytes) == (1, 1, 8)
    assert report.unnamed_bytes > 0
    (path,) = (small.run.root / "packs" / "trajectory").glob("*.arrow")
    whole = path.read_bytes()
    path.write_bytes(
        whole[:-3]
    )  # the footer is torn: every extent is whole, and no other program can read the file
    (finding,) = check(small.run).findings
    assert (finding.check, finding.subject) == ("pack", str(path.relative_to(small.run.root)))
    assert "Arrow readers cannot open it" in finding.message


@on_sqlite
def test_the_check_lists_the_packs_once(small: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    small.sample(2)
    listed: list[str] = []
    sizes = PosixPlace.sizes

    def told(place: PosixPlace, folder: str) -> dict[str, int]:
        listed.append(folder)
        return sizes(place, folder)

    monkeypatch.setattr(PosixPlace, "sizes", told)
    assert check(small.run).is_sound
    assert listed == ["packs"]


def test_the_command_rehearses_repairs_and_says_when_the_run_cannot_go_on(
    tmp_path: Path, cli: Callable[..., Any]
) -> None:
    with small_run(tmp_path) as small:
        first, *_ = sampled_apart(small, 4)
        root = small.run.root
        assert cli("index", "quarantine", root).out.startswith("every extent that is named matches")
        assert first.extent_id is not None
        damage(small, first.extent_id)
        prompts = prompts_of(small)
    told = cli("index", "quarantine", root, "--reopen")
    assert told.code == 0
    assert f"1 unit would be generated again: {first.unit_id}" in told.out
    assert "nothing was changed" in told.out
    done = cli("index", "quarantine", root, "--reopen", "--yes", "--json")
    assert (done.code, done.json["reopened"]) == (0, [first.unit_id])
    assert cli("index", "check", root).code == 0
    nothing_left = cli("index", "quarantine", root, "--reopen").out
    assert "nothing was left to do" in nothing_left
    assert "--yes does it" not in nothing_left
    with reopened(root) as small:
        damage(small, prompts)
    checked = cli("index", "check", root)
    assert checked.code == CorruptPackError.exit_code
    assert "`strawflow index quarantine RUN` tells what it held" in " ".join(checked.out.split())
    stopped = cli("index", "quarantine", root, "--yes")
    assert stopped.code == CorruptPackError.exit_code
    assert "the run cannot go on without prompts, rows 0 to 15" in stopped.out
    assert "nothing was changed" not in cli("index", "quarantine", root).out


def test_the_command_tells_rehearsal_and_deed_alike_for_a_group_that_one_consumer_has(
    tmp_path: Path, cli: Callable[..., Any]
) -> None:
    with small_run(tmp_path) as small:
        first, _ = half_consumed(small)
        root = small.run.root
    why = f"main/export, being trained or dropped by another consumer: {first.unit_id}\n"
    assert f"1 unit would be dropped for {why}" in cli("index", "quarantine", root, "--reopen").out
    assert f"1 unit dropped for {why}" in cli("index", "quarantine", root, "--reopen", "--yes").out


def test_the_command_tells_what_becomes_of_extents_that_no_group_and_no_open_batch_needs(
    tmp_path: Path, cli: Callable[..., Any]
) -> None:
    with small_run(tmp_path) as small:
        small.advance(2)
        root = small.run.root
        with small.run.index.read() as connection:
            (journal,) = [p for p in packs.listed(connection) if p.kind == "journal" and "train" in p.path]
            entry, *_ = packs.extents_of_pack(connection, journal.pack_id)
        for extent_id in (plan_of_batch(small, 1), rows_of_batch(small, 2), entry.extent_id):
            damage(small, extent_id)
    told = cli("index", "quarantine", root).out
    assert "nothing was changed; --yes does it" in told
    for held in (
        "held the batch of step 1 of main/trainer, which is trained, with its plan: what became of each member",
        "held the batch of step 2 of main/trainer, which is trained, with its packed rows: it cannot be replayed",
        "held entries of the journal: no restore or rebuild can read them",
    ):
        assert held in told
    assert cli("index", "quarantine", root, "--yes").code == 0
    assert "nothing was left to do" in cli("index", "quarantine", root, "--yes").out
