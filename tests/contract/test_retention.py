"""Retention: what grew old leaves and is still counted, told and opened; what a resume, a branch or a consumer needs stays."""

from __future__ import annotations

import json
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import sqlalchemy as sa

from strawflow import clock, faults
from strawflow.errors import ConflictError, NotFoundError
from strawflow.flow import (
    assemble,
    branch,
    by_reference,
    complete,
    consume,
    history,
    pins,
    publish_weights,
    rescue,
)
from strawflow.flow import retain as retaining
from strawflow.flow import sweep as sweeping
from strawflow.flow.check import check
from strawflow.flow.claim import Grant
from strawflow.flow.compact import compact
from strawflow.flow.retain import Policy, missing_part
from strawflow.flow.retire import find_retired
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.flow.status import batch_detail, snapshot, unit_detail
from strawflow.flow.sweep import Item
from strawflow.index import checkpoints, consumers, events, retention, units, weights
from strawflow.index import tables as t
from strawflow.index.consumers import Assignment
from strawflow.index.pins import PinKind
from strawflow.states import BatchState, UnitState
from strawflow.testing.invariants import batch_digests, check_exactly_once
from strawflow.testing.runs import SmallRun, small_run
from strawflow.weights.verify import MANIFEST
from tests.conftest import CliResult
from tests.contract.stored import (
    NO_GRACE,
    assert_sound,
    end_sessions,
    kill_cli,
    pack_files,
    upkeep,
)

STEPS = 8


@pytest.fixture
def settings(settings: dict[str, str]) -> dict[str, str]:
    return {**NO_GRACE, "trainer.steps": "20", **settings}


@pytest.fixture
def small(tmp_path: Path, settings: dict[str, str]) -> Iterator[SmallRun]:
    with small_run(tmp_path, num_prompts=64, settings=settings) as made:
        yield made
        assert_sound(made.run)


def policy(run: Run, **fields: Any) -> Policy:
    """Return the policy of the run's configuration with other values; nothing is old enough for it by default."""
    return replace(retaining.policy_of(run.config), **{"event_age_s": 0.0, **fields})


def retain(run: Run, **fields: Any) -> list[Item]:
    with upkeep(run) as session:
        return retaining.retain(session, policy(run, **fields)).items


def tidy(run: Run) -> None:
    """Sweep, compact and sweep: only what is named is left on the disk."""
    with upkeep(run) as session:
        sweeping.sweep(session)
        compact(session)
        sweeping.sweep(session)


def steps_with_files(small: SmallRun) -> list[int]:
    """Return the steps of checkpoints whose row has files, which are there."""
    with small.run.index.read() as connection:
        listed = checkpoints.listed(connection, small.run.branch, "trainer")
    for c in listed:
        assert (small.run.root / c.path).exists() != c.files_removed
    return [c.step for c in listed if not c.files_removed]


def counts(run: Run) -> tuple[Any, ...]:
    """Return every count of units that anyone is shown."""
    with run.index.read() as connection:
        return (
            units.count_by_state(connection, run.branch),
            consumers.count_outcomes(connection, run.branch, "trainer"),
            consumers.count_outcomes_by_purpose(connection, run.branch, "trainer"),
            consumers.num_dropped(connection, run.branch, "trainer", purpose="train"),
            history.tokens_generated(run),
            [(o.outcome, o.reason, o.num_units) for o in snapshot(run).outcomes],
        )


def unit_ids(run: Run) -> list[int]:
    with run.index.read() as connection:
        return [u.unit_id for u in units.listed(connection, run.branch, limit=1000)]


# ---- checkpoints


@pytest.mark.parametrize(
    "kept, left",
    [
        ({"keep_checkpoints": 0}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"keep_checkpoints": 2}, [7, 8]),
        ({"keep_checkpoints": 1, "keep_checkpoints_every": 3}, [3, 6, 8]),
        ({"keep_checkpoints": 9}, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
    ids=str,
)
def test_the_newest_checkpoints_and_those_of_an_interval_stay(
    small: SmallRun, kept: dict[str, int], left: list[int]
) -> None:
    small.advance(STEPS)
    planned = retaining.plan_retention(small.run, policy(small.run, **kept))
    assert steps_with_files(small) == list(range(1, STEPS + 1))
    assert retain(small.run, **kept) == planned.items
    assert steps_with_files(small) == left
    assert {i.subject for i in planned.items if i.what == "checkpoint"} == {
        f"checkpoints/c{step:06d}-main.trainer-f1" for step in range(1, STEPS + 1) if step not in left
    }
    end_sessions(small, "train")
    small.trainer()
    assert small.resumption is not None
    assert small.resumption.step == STEPS
    small.advance(1)


def test_a_pinned_checkpoint_stays_until_the_pin_is_gone(small: SmallRun) -> None:
    small.advance(4)
    made = pins.pin(small.run, PinKind.CHECKPOINT, "2", reason="the one of the paper")
    retain(small.run, keep_checkpoints=1)
    assert steps_with_files(small) == [2, 4]
    pins.unpin(small.run, made.pin_id)
    retain(small.run, keep_checkpoints=1)
    assert steps_with_files(small) == [4]
    with pytest.raises(ConflictError, match="given up already"):
        pins.pin(small.run, PinKind.CHECKPOINT, "2", reason="too late")


def test_a_pin_that_comes_between_looking_and_removing_wins(small: SmallRun) -> None:
    small.advance(3)
    pins.pin(small.run, PinKind.BATCH, "1", reason="in time")
    first, second, _ = (b.batch_id for b in history.batches(small.run))
    with small.run.index.begin() as connection:
        assert retention.retire_batches(connection, [first, second]) == {second}
        assert retention.retire_batches(connection, [first, second]) == set()
    looked = retaining.plan_retention(small.run, policy(small.run, keep_checkpoints=1))
    assert len([i for i in looked.items if i.what == "checkpoint"]) == 2
    pins.pin(small.run, PinKind.CHECKPOINT, "1", reason="in time")
    with small.run.index.begin() as connection:
        assert not retention.mark_checkpoint_removed(connection, "c000001-main.trainer-f1")
        assert not retention.mark_checkpoint_removed(connection, "c000003-main.trainer-f1"), (
            "the newest was removed"
        )
        assert retention.mark_checkpoint_removed(connection, "c000002-main.trainer-f1")
        assert not retention.mark_checkpoint_removed(connection, "c000002-main.trainer-f1")
    shutil.rmtree(small.run.root / "checkpoints/c000002-main.trainer-f1")


def test_the_checkpoint_a_branch_starts_from_stays(small: SmallRun) -> None:
    small.advance(4)
    end_sessions(small)
    branch.create_branch(small.run, checkpoint="2", name="other")
    with small.run.index.begin() as connection:
        assert not retention.mark_checkpoint_removed(connection, "c000002-main.trainer-f1")
    retain(small.run, keep_checkpoints=1)
    assert steps_with_files(small) == [2, 4]


@pytest.mark.parametrize("lacks", ["a file", "the manifest", "bytes", "everything"])
def test_no_older_checkpoint_goes_while_the_newest_lacks_a_part(small: SmallRun, lacks: str) -> None:
    small.advance(3)
    folder = small.run.root / "checkpoints/c000003-main.trainer-f1"
    copy = shutil.copytree(folder, small.run.root / "copy")
    if lacks == "a file":
        (folder / "state").unlink()
    elif lacks == "the manifest":
        (folder / MANIFEST).unlink()
    elif lacks == "bytes":
        (folder / "state").write_bytes(b"")
    else:
        shutil.rmtree(folder)
    assert missing_part(folder) == (MANIFEST if lacks in ("the manifest", "everything") else "state")
    (item,) = [i for i in retain(small.run, keep_checkpoints=1) if i.what != "weights"]
    assert (item.what, item.subject) == ("damaged", "checkpoints/c000003-main.trainer-f1")
    for step in (1, 2):
        assert missing_part(small.run.root / f"checkpoints/c{step:06d}-main.trainer-f1") is None
    shutil.rmtree(folder, ignore_errors=True)
    copy.rename(folder)
    retain(small.run, keep_checkpoints=1)
    assert steps_with_files(small) == [3]


def test_a_checkpoint_whose_write_breaks_off_moves_nothing_and_retention_keeps_the_last_good_one(
    small: SmallRun,
) -> None:
    small.advance(2)
    small.sample()
    planned = small.plan()
    assert planned is not None
    role = small.trainer()
    partial = small.run.root / consume.checkpoint_path(role, 3)
    partial.mkdir()
    (partial / "state").write_bytes(b"half of i")  # the disk was full: no manifest, no row
    retain(small.run, keep_checkpoints=1)
    assert [k.checkpoint.step for k in kept(small)] == [2]
    end_sessions(small, "train")
    small.trainer()
    assert small.resumption is not None
    assert small.resumption.step == 2
    assert missing_part(small.run.root / (small.resumption.checkpoint or pytest.fail("none")).path) is None
    assert [i.subject for i in sweep(small.run)] == ["checkpoints/c000003-main.trainer-f1"]
    small.train(3)


def kept(small: SmallRun) -> list[retention.KeptCheckpoint]:
    with small.run.index.read() as connection:
        return retention.checkpoints_with_files(connection)


def sweep(run: Run) -> list[Item]:
    with upkeep(run) as session:
        return sweeping.sweep(session).items


def test_a_retention_killed_between_row_and_files_is_finished_by_a_sweep(tmp_path: Path) -> None:
    with small_run(tmp_path, num_prompts=64, settings={**NO_GRACE, "trainer.steps": "20"}) as small:
        small.advance(3)
        kill_cli(
            "storage", "retain", small.run.root, "--keep-checkpoints", 1, "--yes", at="retain.before_files:2"
        )
        assert [k.checkpoint.step for k in kept(small)] == [3]
        assert [
            s for s in (1, 2, 3) if (small.run.root / f"checkpoints/c{s:06d}-main.trainer-f1").exists()
        ] == [2, 3]
        rescue.declare_dead_processes_lost(small.run)
        assert [i.subject for i in sweep(small.run)] == ["checkpoints/c000002-main.trainer-f1"]
        assert steps_with_files(small) == [3]
        assert_sound(small.run)
        small.advance(1)


# ---- weights


def test_weights_of_an_interval_and_pinned_ones_stay_beside_the_newest(small: SmallRun) -> None:
    small.advance(6)
    pins.pin(small.run, PinKind.WEIGHTS, "1", reason="served to a friend")
    retain(small.run, keep_weights=2, keep_weights_every=3)
    with small.run.index.read() as connection:
        there = {step for step in range(7) if weights.of_step(connection, "main", step) is not None}
    assert there == {0, 1, 3, 5, 6}
    folders = sorted(path.name[:7] for path in (small.run.root / "weights").iterdir())
    assert folders == [f"v{step:06d}" for step in sorted(there)]


def test_the_trainer_itself_keeps_the_same_weights(tmp_path: Path, settings: dict[str, str]) -> None:
    own = {**settings, "trainer.keep_weights": "1", "storage.keep_weights_every": "2"}
    with small_run(tmp_path, num_prompts=64, settings=own) as small:
        small.advance(5)
        pins.pin(small.run, PinKind.WEIGHTS, "3", reason="under test")
        assert publish_weights.remove_unneeded_weights(small.session("train"), small.trainer()) == 1
        with small.run.index.read() as connection:
            there = [step for step in range(6) if weights.of_step(connection, "main", step) is not None]
        assert there == [0, 2, 3, 4, 5]


# ---- batches, trajectories and units


def test_old_steps_leave_and_every_count_stays_exact(small: SmallRun) -> None:
    small.advance(STEPS)
    before, digests = counts(small.run), batch_digests(history.batches(small.run))
    fates = check_exactly_once(small.run, finished=False)
    size = sum((small.run.root / p).stat().st_size for p in pack_files(small.run, "trajectory"))
    planned = retaining.plan_retention(small.run, policy(small.run, keep_checkpoints=2, keep_steps=3))
    end_sessions(small, "assemble", "rollout")
    done = retain(small.run, keep_checkpoints=2, keep_steps=3)
    assert done == planned.items
    assert ("units", "20 rows of the index") in [(i.what, i.why) for i in done]
    assert unit_ids(small.run) == list(range(21, 41))
    states = [b.state for b in history.batches(small.run)]
    assert states == [BatchState.RETIRED] * 5 + [BatchState.TRAINED] * 3
    tidy(small.run)
    assert counts(small.run) == before
    assert batch_digests(history.batches(small.run)) == digests
    assert check_exactly_once(small.run, finished=False) == fates
    assert_sound(small.run)
    assert sum((small.run.root / p).stat().st_size for p in pack_files(small.run, "trajectory")) < size
    assert retain(small.run, keep_checkpoints=2, keep_steps=3) == []
    small.advance(2)
    check_exactly_once(small.run, finished=False)


@pytest.mark.parametrize("tally", ["retired/fates/", "passed/"])
def test_a_count_of_retired_units_that_does_not_add_up_is_found(small: SmallRun, tally: str) -> None:
    small.advance(3)
    retain(small.run, keep_checkpoints=1, keep_steps=1)

    def add(amount: int) -> None:
        with small.run.index.begin() as connection:
            counted = sa.update(t.tallies).where(t.tallies.c.name.startswith(tally))
            assert connection.execute(counted.values(value=t.tallies.c.value + amount)).rowcount == 1

    assert_sound(small.run)
    add(1)
    assert [f.check for f in check(small.run).findings] == ["batch" if "fates" in tally else "cursor"]
    add(-1)


def test_nothing_that_a_resume_may_go_back_to_leaves(small: SmallRun) -> None:
    small.advance(STEPS)
    pins.pin(small.run, PinKind.CHECKPOINT, "3", reason="to go back to")
    for fields, first_kept in (
        ({"keep_steps": 0, "keep_checkpoints": 0}, 1),
        ({"keep_steps": 1, "keep_checkpoints": 0}, 2),  # every checkpoint stays, the first one is step 1
        ({"keep_steps": 0, "keep_checkpoints": 1}, 2),
        ({"keep_steps": 100, "keep_checkpoints": 1}, 2),
        ({"keep_steps": 1, "keep_checkpoints": 1}, 4),
    ):
        retain(small.run, **fields)
        states = {b.step for b in history.batches(small.run) if b.state is BatchState.TRAINED}
        assert min(states) == first_kept, fields
    reader = small.session("train").reader
    for step in range(4, STEPS + 1):
        batch = consume.batch_of_step(small.run, step)
        assert batch is not None
        assert len(list(consume.read_batch(small.run, reader, batch))) == 1


def test_a_retired_batch_tells_its_plan_and_says_that_its_rows_are_gone(
    small: SmallRun, cli: Callable[..., CliResult]
) -> None:
    small.advance(4)
    full = batch_detail(small.run, 1)
    retain(small.run, keep_checkpoints=1, keep_steps=1)
    batch = consume.batch_of_step(small.run, 1)
    assert batch is not None
    with pytest.raises(NotFoundError, match=r"step 1 were given up by retention \(storage.keep_steps\)"):
        list(consume.read_batch(small.run, small.session("train").reader, batch))
    left = batch_detail(small.run, 1)
    assert (left.batch.state, left.micro_batches) == (BatchState.RETIRED, ())
    told = [(m["unit_id"], m["member"], m["outcome"], m["reward"]) for m in left.members]
    assert told == [(m["unit_id"], m["member"], m["outcome"], m["reward"]) for m in full.members]
    assert "retired" in cli("batch", "list", small.run.root).out
    assert cli("batch", "show", small.run.root, 1).code == 0


def test_a_pinned_batch_keeps_its_rows_and_its_units(small: SmallRun) -> None:
    small.advance(4)
    made = pins.pin(small.run, PinKind.BATCH, "2", reason="shown in a talk")
    retain(small.run, keep_checkpoints=1, keep_steps=1)
    states = [b.state for b in history.batches(small.run)]
    assert states == [BatchState.RETIRED, BatchState.TRAINED, BatchState.RETIRED, BatchState.TRAINED]
    assert set(range(5, 9)) <= set(unit_ids(small.run))
    assert_sound(small.run)
    check_exactly_once(small.run, finished=False)
    with pytest.raises(ConflictError, match="given up already"):
        pins.pin(small.run, PinKind.BATCH, "1", reason="too late")
    pins.unpin(small.run, made.pin_id)
    retain(small.run, keep_checkpoints=1, keep_steps=1)
    assert not set(range(5, 9)) & set(unit_ids(small.run))


def test_a_consumer_that_lags_behind_holds_the_units_back(small: SmallRun) -> None:
    with small.run.index.begin() as connection:
        consumers.ensure(connection, "main", "export", purposes=["train"])
    small.advance(4)
    retain(small.run, keep_checkpoints=1, keep_steps=1)
    assert unit_ids(small.run)[0] == 1
    exporter = replace(small.run, consumer="export")
    # It drops the units of three steps, those of the last one only just now, and is at step 5 itself.
    with small.run.index.begin() as connection:
        for units_of, at_step in ((range(1, 9), 1), (range(9, 13), 5)):
            dropped = [Assignment(0, unit_id, "dropped", "not wanted") for unit_id in units_of]
            consumers.withdraw(connection, "main", "export", units_of)
            consumers.assign(connection, "main", "export", dropped, batch_id=None, at_step=at_step)
        for step in range(1, 6):
            consumers.advance_planned(connection, "main", "export", step=step)
        consumers.advance_position(connection, "main", "export", expected=0, new=5)
    retain(small.run, keep_checkpoints=1, keep_steps=1)
    assert unit_ids(small.run)[0] == 9
    assert history.outcomes(exporter) == {("train", "dropped", "not wanted"): 12}
    assert (find_retired(small.run, 8) or {})["consumers"] == ["export", "trainer"]
    with small.run.index.begin() as connection:  # its steps have no batches: the test made them up
        connection.execute(
            sa.update(t.consumers).where(t.consumers.c.consumer == "export").values(position=0, planned=0)
        )


def test_a_consumer_that_is_created_while_units_are_on_their_way_keeps_them(
    small: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.advance(3)
    real = faults.at

    def create_in_between(point: str) -> None:
        real(point)
        if point == "retain.before_commit":
            with small.run.index.begin() as connection:
                consumers.ensure(connection, "main", "export", purposes=["train"])

    with monkeypatch.context() as patched:
        patched.setattr(faults, "at", create_in_between)
        retain(small.run, keep_checkpoints=1, keep_steps=1)
    assert unit_ids(small.run)[0] == 1
    with small.run.index.read() as connection:
        assert consumers.num_offered(connection, "main", "export") == {"train": 16}
    check_exactly_once(small.run, finished=False)


def test_a_retired_unit_is_shown_from_the_history_and_opens_in_polars(
    small: SmallRun, cli: Callable[..., CliResult]
) -> None:
    small.advance(3)
    before = unit_detail(small.run, 3)
    retain(small.run, keep_checkpoints=1, keep_steps=1)
    after = unit_detail(small.run, 3)
    assert (after.is_retired, after.members) == (True, ())
    assert (after.prompt, after.fates) == (before.prompt, before.fates)
    gone = {"extent_id": None, "row_start": None, "row_count": None}
    assert after.unit == replace(before.unit, **gone)
    assert "retired: it left the index" in cli("unit", "show", small.run.root, 3).out
    assert cli("unit", "show", small.run.root, 3, "--json").json["is_retired"]
    assert cli("unit", "show", small.run.root, 4711).code == NotFoundError.exit_code
    assert cli("unit", "retry", small.run.root, 3).code == NotFoundError.exit_code
    (path,) = pack_files(small.run, "history")
    rows = pl.read_ipc(small.run.root / path)
    assert rows["unit_id"].to_list() == list(range(1, 9))
    trained = rows.explode("outcomes", "steps").group_by("outcomes", "steps").len().sort("steps")
    assert trained.rows() == [("trained", 1, 4), ("trained", 2, 4)]


def test_dropped_units_leave_too_and_stay_replaced(small: SmallRun) -> None:
    role, session = small.assembler(), small.session("assemble")
    small.sample(2)
    dropped = [Assignment(u.epoch, u.unit_id, "dropped", "stale") for u in offered(small)]
    assemble.drop(session, role, dropped)
    for _ in range(small.run.config.rollout.max_attempts):
        (failing,) = small.claim(1)
        fail(small, failing)
    assemble.drop_failed(session, role, purpose="train")
    small.advance(5)
    before = counts(small.run)
    assert before[1] == {("dropped", "stale"): 2, ("dropped", "unit_failed"): 1, ("trained", None): 20}
    retain(small.run, keep_checkpoints=2, keep_steps=1)
    assert counts(small.run) == before
    assert {1, 2, failing.unit_id}.isdisjoint(unit_ids(small.run))
    assert (find_retired(small.run, failing.unit_id) or {})["last_error"] == "told to fail"
    small.advance(2)
    assert_sound(small.run)


def offered(small: SmallRun) -> list[units.Unit]:
    return assemble.offered(small.session("assemble"), purpose="train", limit=100)


def fail(small: SmallRun, grant: Grant) -> None:
    complete.fail(small.session("rollout"), grant.unit_id, fence=grant.fence, error="told to fail")


def test_a_branch_from_a_checkpoint_kept_for_its_interval_finds_all_that_it_takes_over(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    def branched(folder: Path, *, retains: bool) -> tuple[Any, ...]:
        folder.mkdir()
        url = {"run.index_url": ""} if retains else {}
        with small_run(folder, num_prompts=64, settings={**settings, **url}) as small:
            small.sample(2)
            first = [Assignment(u.epoch, u.unit_id, "dropped", "stale") for u in offered(small)[:1]]
            assemble.drop(small.session("assemble"), small.assembler(), first)
            small.advance(4)
            for _ in range(2):  # some that the branch takes over, and some admitted after its checkpoint
                small.sample()
                late = [Assignment(u.epoch, u.unit_id, "dropped", "stale") for u in offered(small)[:2]]
                assemble.drop(small.session("assemble"), small.assembler(), late)
                small.advance(2)
            small.advance(1)
            end_sessions(small)
            if retains:
                retain(small.run, keep_checkpoints=1, keep_checkpoints_every=4, keep_steps=1)
                assert steps_with_files(small) == [4, 8, 9]
                assert len(unit_ids(small.run)) < 20
            made = branch.create_branch(small.run, checkpoint="4", name="other")
            there = branch.on_branch(small.run, "other")
            with small.run.index.read() as connection:
                again = units.listed(connection, "other", limit=1000)
                owed = consumers.num_dropped(connection, "other", "trainer", purpose="train")
            assert_sound(there)
            return made.num_pristine, owed, [(u.segment_id, u.epoch, u.position) for u in again]

    with_all = branched(tmp_path / "all", retains=False)
    assert with_all[0] > 0
    assert branched(tmp_path / "retained", retains=True) == with_all


def test_a_retention_killed_before_its_commit_loses_and_doubles_nothing(tmp_path: Path) -> None:
    with small_run(tmp_path, num_prompts=64, settings={**NO_GRACE, "trainer.steps": "20"}) as small:
        small.advance(4)
        before = counts(small.run)
        words = ("storage", "retain", small.run.root, "--keep-checkpoints", 1, "--keep-steps", 1, "--yes")
        kill_cli(*words, at="retain.before_commit")
        assert unit_ids(small.run)[0] == 1
        assert find_retired(small.run, 1) is None
        assert counts(small.run) == before
        rescue.declare_dead_processes_lost(small.run)
        retain(small.run, keep_checkpoints=1, keep_steps=1)
        rescue.recover_packs(small.session("supervise"))
        tidy(small.run)
        assert counts(small.run) == before
        (path,) = pack_files(small.run, "history")
        assert pl.read_ipc(small.run.root / path)["unit_id"].to_list() == list(range(1, 13))
        check_exactly_once(small.run, finished=False)
        assert_sound(small.run)


def test_two_retentions_at_once_take_every_unit_once(small: SmallRun) -> None:
    small.advance(6)
    before = counts(small.run)
    gate = threading.Barrier(2)
    own = policy(small.run, keep_checkpoints=1, keep_steps=1)
    with upkeep(small.run) as one, upkeep(small.run) as other, ThreadPoolExecutor(2) as pool:

        def at_once(session: WorkerSession) -> list[Item]:
            gate.wait()
            return retaining.retain(session, own).items

        list(pool.map(at_once, (one, other)))
    assert counts(small.run) == before
    assert unit_ids(small.run) == list(range(21, 33))
    assert len(check_exactly_once(small.run, finished=False)) == 24
    tidy(small.run)


def test_a_batch_by_reference_leaves_once_its_consumer_has_advanced_past_it(small: SmallRun) -> None:
    role, session = small.assembler(), small.session("assemble")
    small.sample()
    for _ in range(2):
        assert by_reference.plan_next(session, role, purpose="train", num_groups=4, at_least=4) is not None
    first, second = history.batches(small.run)
    reader = small.session("train").reader
    assert by_reference.rows_of(small.run, reader, first).num_rows == 8
    for step in (1, 2):
        by_reference.advance(small.session("train"), small.trainer(), expected=step - 1, step=step)
    retain(small.run, keep_steps=1)
    tidy(small.run)
    with pytest.raises(NotFoundError, match="step 1 were given up by retention"):
        by_reference.rows_of(small.run, reader, first)
    assert by_reference.rows_of(small.run, reader, second).num_rows == 8
    assert unit_ids(small.run) == [5, 6, 7, 8]


# ---- receipts, events and the file of the index


def test_receipts_leave_once_no_delivery_can_be_that_late(small: SmallRun) -> None:
    grants = small.claim(2)
    first = small.complete(grants, submission_id="kept")
    old = {"receipt_age_s": 3600.0}
    assert not [i for i in retain(small.run, **old) if i.what == "receipts"]
    assert small.complete(grants, submission_id="kept") == first
    with small.run.index.begin() as connection:
        aged = sa.update(t.receipts).values(at_ms=t.receipts.c.at_ms - 3_600_001)
        number = connection.execute(aged).rowcount
    (item,) = [i for i in retain(small.run, **old) if i.what == "receipts"]
    assert item.why == f"{number} rows of the index"
    assert small.complete(grants, submission_id="kept").lost == (
        1,
        2,
    )  # what it says now: they are held no more


def age_events(run: Run, number: int) -> list[dict[str, Any]]:
    """Make the first events of the index two hours older; returns their rows."""
    with run.index.begin() as connection:
        cut = connection.execute(
            sa.select(t.events.c.event_id).order_by(t.events.c.event_id).limit(1).offset(number - 1)
        ).scalar_one()
        connection.execute(
            sa.update(t.events).where(t.events.c.event_id <= cut).values(at_ms=t.events.c.at_ms - 7_200_000)
        )
        return retention.oldest_events(connection, before_ms=clock.wall_ms() - 3_600_000, limit=number)


def test_old_events_move_to_packs_in_their_order(small: SmallRun) -> None:
    small.advance(2)
    with small.run.index.read() as connection:
        before = events.latest(connection, limit=1000)[::-1]
    age_events(small.run, 10)
    with upkeep(small.run) as session:
        own = replace(policy(small.run), event_age_s=3600.0)
        assert ("events", "10 rows of the index") in [
            (i.what, i.why) for i in retaining.retain(session, own).items
        ]
        (path,) = pack_files(small.run, "event")
        moved = pl.read_ipc(small.run.root / path)  # sealed, though the session goes on
    with small.run.index.read() as connection:
        left = events.latest(connection, limit=1000)[::-1]
    assert left[: len(before) - 10] == before[10:]
    told = [(row["event_id"], row["name"], json.loads(row["facts"])) for row in moved.to_dicts()]
    assert told == [(e["event_id"], e["name"], e["facts"]) for e in before[:10]]


def test_events_are_told_behind_those_of_the_index_once_they_were_moved_and_none_twice(
    small: SmallRun, cli: Callable[..., CliResult]
) -> None:
    small.advance(2)
    moved: list[dict[str, Any]] = []
    for _ in range(2):  # two pieces of the log, the older one first
        moved += age_events(small.run, 10)
        assert ("events", "10 rows of the index") in [
            (item.what, item.why) for item in retain(small.run, event_age_s=3600.0)
        ]
    with small.run.index.read() as connection:
        kept = events.latest(connection, limit=1000)
    ids = [event["event_id"] for event in kept] + [row["event_id"] for row in reversed(moved)]

    def told(*words: object) -> list[dict[str, Any]]:
        return list(cli("events", small.run.root, *words, "--json").json)

    whole = told("--limit", 1000)
    assert [event["event_id"] for event in whole] == ids
    assert whole[: len(kept)] == kept
    first = moved[0]
    assert whole[-1] == {
        **{name: first[name] for name in ("event_id", "name", "session_id", "unit_id")},
        "at": clock.shown(first["at_ms"]),
        "facts": json.loads(first["facts"]),
    }
    assert told("--limit", len(kept) + 13) == whole[: len(kept) + 13]
    assert told("--limit", 1) == whole[:1]
    assert told("--name", "units.") == [event for event in whole if event["name"].startswith("units.")]
    with (
        small.run.index.begin() as connection
    ):  # as a restore from a backup of before the move brings them back
        connection.execute(sa.insert(t.events), moved[-3:])
    assert [event["event_id"] for event in told("--limit", 1000)] == ids


def test_an_sqlite_index_that_is_mostly_free_pages_is_shrunk_while_others_have_it_open(
    tmp_path: Path,
) -> None:
    with small_run(tmp_path, num_prompts=64, settings={**NO_GRACE, "trainer.steps": "20"}) as small:
        small.advance(4)
        file = small.run.root / "index.sqlite"
        with sqlite3.connect(file) as connection:
            connection.execute(
                "INSERT INTO receipts SELECT hex(randomblob(16)), 'x', zeroblob(16), hex(randomblob(400)), 1 "
                "FROM extents, extents AS e, extents AS f LIMIT 3000"
            )
        connection.close()
        full = file.stat().st_size + (file.with_name("index.sqlite-wal")).stat().st_size
        before = counts(small.run)
        (item,) = [i for i in retain(small.run) if i.what == "index"]
        assert item.num_bytes > 2_000_000
        assert file.stat().st_size < full / 4
        assert counts(small.run) == before
        assert not [i for i in retain(small.run) if i.what == "index"]
        small.advance(1)
        assert_sound(small.run)


# ---- the command line


def test_the_command_says_what_it_then_does(small: SmallRun, cli: Callable[..., CliResult]) -> None:
    small.advance(4)
    root = small.run.root
    words = ("storage", "retain", root, "--keep-checkpoints", 1, "--keep-steps", 2, "--event-age-s", 0)
    dry = cli(*words, "--json").json
    assert not dry["done"]
    assert {i["what"] for i in dry["items"]} == {"checkpoint", "weights", "batches", "units"}
    assert steps_with_files(small) == [1, 2, 3, 4]
    done = cli(*words, "--yes", "--json").json
    assert (done["done"], done["items"]) == (True, dry["items"])
    assert steps_with_files(small) == [4]
    assert cli(*words, "--yes").out.strip() == "nothing is old enough to leave"
    assert cli("storage", "retain", root).out.strip() == "nothing is old enough to leave"


def test_a_finished_run_keeps_its_last_checkpoint_whatever_is_asked(tmp_path: Path) -> None:
    with small_run(tmp_path, num_prompts=64, settings={**NO_GRACE, "trainer.steps": "4"}) as small:
        small.advance(4)
        retain(small.run, keep_checkpoints=1, keep_steps=1, keep_weights=1)
        tidy(small.run)
        fates = check_exactly_once(small.run, finished=True)
        assert len(fates) == 16
        assert {u.state for u in left_over(small)} == {UnitState.COMPLETED}
        assert steps_with_files(small) == [4]
        assert_sound(small.run)


def left_over(small: SmallRun) -> list[units.Unit]:
    with small.run.index.read() as connection:
        return units.listed(connection, "main", limit=1000)
