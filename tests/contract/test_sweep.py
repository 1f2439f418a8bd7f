"""Sweeping and pins: what nothing names goes, in steps that a kill cannot spoil; what anything names stays, whoever races."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import sqlalchemy as sa

from strawflow.errors import ConflictError, LeaseLostError, NotFoundError
from strawflow.flow import assemble, consume, pins, rescue
from strawflow.flow import claim as claiming
from strawflow.flow import complete as completing
from strawflow.flow import sweep as sweeping
from strawflow.flow.check import check
from strawflow.flow.claim import Grant, PromptShelf
from strawflow.flow.index_place import SWEEP_BLOCKED
from strawflow.flow.reconcile import MISSING, reconcile
from strawflow.flow.run import Run, open_run
from strawflow.flow.session import WorkerSession
from strawflow.flow.sweep import Item
from strawflow.flow.trajectory import Member, UnitResult, to_record_batch
from strawflow.ids import new_id
from strawflow.index import events, meta, packs, sessions, units
from strawflow.index import pins as index_pins
from strawflow.index import tables as t
from strawflow.index.pins import PinKind
from strawflow.packs.writer import PackWriter
from strawflow.states import PackState
from strawflow.testing.pack_rows import made_up_rows
from strawflow.testing.postgres import PostgresServer
from strawflow.testing.runs import SmallRun, prompt_lines, small_run
from tests.conftest import CliResult
from tests.contract.stored import (
    NO_GRACE,
    assert_sound,
    await_blocked,
    end_sessions,
    kill_cli,
    pack_files,
    packs_of,
    run_cli,
    upkeep,
    with_storage,
)


@pytest.fixture
def settings(settings: dict[str, str]) -> dict[str, str]:
    return {**NO_GRACE, **settings}


@pytest.fixture
def small(tmp_path: Path, settings: dict[str, str]) -> Iterator[SmallRun]:
    with small_run(tmp_path, settings=settings) as made:
        yield made
        assert_sound(made.run)


def requeue_all(small: SmallRun) -> None:
    """Send every offered unit back: nothing names their trajectories any more."""
    role, session = small.assembler(), small.session("assemble")
    offered = assemble.offered(session, purpose="train", limit=100)
    assemble.requeue(session, role, [u.unit_id for u in offered], reason="told to by the test")


def dead_trajectories(small: SmallRun) -> str:
    """Complete units and take their results back; returns the path of their pack, which nothing names and nobody writes."""
    small.sample(4)
    requeue_all(small)
    end_sessions(small, "rollout")
    (pack,) = packs_of(small.run, "trajectory")
    assert pack.state is PackState.SEALED
    return pack.path


def sweep(run: Run) -> list[Item]:
    with upkeep(run) as session:
        return sweeping.sweep(session).items


def state_of(run: Run, path: str) -> PackState | None:
    return next((p.state for p in packs_of(run) if p.path == path), None)


def sealed_empty_pack(run: Run, session: WorkerSession) -> int:
    """Make the row of a sealed pack in which nothing is named."""
    with run.index.begin() as connection:
        path = f"packs/plan/{new_id('empty')}.arrow"
        pack_id = packs.create(connection, kind="plan", path=path, session_id=session.session_id)
        packs.seal(connection, pack_id, path=path, num_bytes=1, num_rows=0)
    return pack_id


def test_a_writer_that_slept_through_a_restore_seals_no_pack_of_another(small: SmallRun) -> None:
    session = small.session("rollout")
    path = f"packs/plan/{new_id('now')}.arrow"
    with small.run.index.begin() as connection:
        pack_id = packs.create(connection, kind="plan", path=path, session_id=session.session_id)
        # Its own pack had this id in the index of before.
        assert not packs.seal(connection, pack_id, path="packs/plan/before.arrow", num_bytes=1, num_rows=0)
    assert state_of(small.run, path) is PackState.OPEN


def test_an_older_copy_of_the_index_collects_nothing_that_it_has_never_heard_of(small: SmallRun) -> None:
    """A snapshot put back by hand, a database rolled back in time: what was accepted since is no orphan."""
    unheard_of = {f"packs/plan/{new_id('later')}.arrow" for _ in range(2)}
    for path in unheard_of:
        later = PackWriter(small.run.root, pack_id=99, path=path, kind="plan", durability="process")
        later.append(made_up_rows("plan", 3))
        later.abandon("its writer was killed")
    for act in (sweeping.plan_sweep, sweep):
        with pytest.raises(ConflictError, match="and 1 more: rows that this index never named"):
            act(small.run)
    (finding,) = check(small.run).findings
    assert finding.subject == min(unheard_of)
    assert not reconcile(small.run).done, "a look accepts nothing"
    reconcile(small.run, accepts=True)
    assert check(small.run).is_sound
    assert {i.subject for i in sweep(small.run)} >= unheard_of


# ---- what goes


def test_a_dry_run_says_what_a_sweep_then_does_and_changes_nothing(small: SmallRun) -> None:
    path = dead_trajectories(small)
    orphan = small.run.root / "packs/plan/nobody-000000.arrow"
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(b"left by a kill")
    before = pack_files(small.run)
    planned = sweeping.plan_sweep(small.run)
    assert not planned.done
    assert (pack_files(small.run), state_of(small.run, path)) == (before, PackState.SEALED)
    assert [(i.what, i.subject) for i in planned.items] == [
        ("extents", path),
        ("pack", path),
        ("file", "packs/plan/nobody-000000.arrow"),
    ]
    done = sweep(small.run)
    assert done[:2] == planned.items[:2]
    assert {i.subject for i in done if i.what == "file"} == {path, "packs/plan/nobody-000000.arrow"}
    assert before - pack_files(small.run) == {path, "packs/plan/nobody-000000.arrow"}
    assert sweep(small.run) == []
    assert sweeping.plan_sweep(small.run).items == []
    with small.run.index.read() as connection:
        (told,) = events.latest(connection, limit=9, name_prefix="storage.")
    assert told["facts"]["num_bytes"] == sum(i.num_bytes for i in done) > 0


def test_named_packs_stay_and_units_sent_back_are_sampled_again(small: SmallRun) -> None:
    path = dead_trajectories(small)
    kept = pack_files(small.run) - {path}
    sweep(small.run)
    assert pack_files(small.run) == kept
    assert small.sample() == 8
    assert small.plan() is not None


def test_the_bytes_stay_for_the_grace_and_readers_of_before_go_on(small: SmallRun) -> None:
    small.sample(4)
    offered = assemble.offered(small.session("assemble"), purpose="train", limit=100)
    extent_id = offered[0].extent_id
    assert extent_id is not None
    with small.run.index.read() as connection:
        placed = packs.find_extents(connection, [extent_id])[extent_id]
    requeue_all(small)
    end_sessions(small, "rollout")
    patient = with_storage(small.run, sweep_grace_s=3600.0)
    assert [i.what for i in sweep(patient)] == ["extents", "pack"]
    assert state_of(small.run, placed.path) is PackState.CONDEMNED
    assert small.session("assemble").reader.read(placed).num_rows == 8
    assert sweep(patient) == []
    assert [(i.what, i.subject) for i in sweep(small.run)] == [("file", placed.path)]
    assert state_of(small.run, placed.path) is None


def test_a_file_without_a_row_is_left_alone_until_it_is_old(small: SmallRun) -> None:
    orphan = small.run.root / "packs/plan/nobody-000000.arrow"
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(b"left by a kill")
    patient = with_storage(small.run, sweep_grace_s=3600.0)
    assert sweep(patient) == []
    long_ago = time.time() - 3601
    os.utime(orphan, (long_ago, long_ago))
    assert [i.subject for i in sweep(patient)] == ["packs/plan/nobody-000000.arrow"]
    assert not orphan.exists()


def test_folders_that_no_row_names_go_unless_their_trainer_may_still_commit_them(small: SmallRun) -> None:
    role = small.trainer()
    names = {
        "mine": consume.checkpoint_path(role, 9),
        "my weights": f"weights/v000009-main-f{role.fence}-f12345678901",  # its digest looks like a fence
        "half": f"checkpoints/.c000009-main.trainer-f{role.fence + 7}.partial-0af3",
        "old": consume.checkpoint_path(replace(role, fence=role.fence + 7), 9),
        "of an earlier program": f"checkpoints/c000009-main-f{role.fence + 7}",
        "weights": f"weights/v000009-main-f{role.fence + 7}-0123456789ab",
        "theirs": "checkpoints/my own copy",
    }
    for name in names.values():
        (small.run.root / name).mkdir(parents=True)
        (small.run.root / name / "state").write_bytes(b"1234")
    swept = sweep(small.run)
    assert sorted((i.subject, i.num_bytes) for i in swept) == sorted(
        (names[n], 4) for n in ("half", "old", "of an earlier program", "weights")
    )
    left = {n for n, name in names.items() if (small.run.root / name).exists()}
    assert left == {"mine", "my weights", "theirs"}
    end_sessions(small, "train")
    assert [i.subject for i in sweep(small.run)] == [names["mine"], names["my weights"]]


# ---- what stays


def test_what_a_live_worker_may_still_name_is_not_taken_from_it(small: SmallRun) -> None:
    session = small.session("rollout")
    grants = small.claim(2)
    batch = rows_of(grants)
    extent = session.packs.append("trajectory", batch)
    session.packs.seal("trajectory")
    with upkeep(small.run) as own:
        assert [i for i in sweeping.sweep(own).items if i.subject == extent.path] == []
    with small.run.index.begin() as connection:  # its own naming comes late, and finds the pack as it was
        (named,) = packs.name_extents(connection, [extent], session_id=session.session_id)
    assert session.reader.read(named) == batch
    with small.run.index.begin() as connection:  # nothing else is to name it: the test's own doing
        connection.execute(sa.delete(t.extents).where(t.extents.c.extent_id == named.extent_id))


def rows_of(grants: list[Grant]) -> pa.RecordBatch:
    return to_record_batch([same_result(grant, "") for grant in grants])


def same_result(grant: Grant, version: str) -> UnitResult:
    """Return a result that is the same for every unit but for the unit's id."""
    members = [
        Member(
            member=m,
            status="finished",
            response_tokens=(5, 6, 7),
            logprobs=(-0.5, -0.5, -0.5),
            token_versions=version,
            finish_reason="stop",
            reward=1.0,
            response_text="byte for byte the same",
        )
        for m in range(grant.profile.num_samples)
    ]
    return UnitResult(grant.unit_id, grant.fence, 1, (1, 2), members, grant.profile, "fake/0")


def test_a_pinned_pack_stays_until_the_pin_is_removed(small: SmallRun) -> None:
    path = dead_trajectories(small)
    made = pins.pin(small.run, PinKind.PACK, path, reason="an export reads it")
    sweep(small.run)
    assert path in pack_files(small.run)
    assert state_of(small.run, path) is PackState.SEALED
    pins.unpin(small.run, made.pin_id)
    sweep(small.run)
    assert path not in pack_files(small.run)


def test_a_pin_ends_with_the_session_that_owns_it(small: SmallRun) -> None:
    path = dead_trajectories(small)
    owner = WorkerSession(small.run, "export")
    pins.pin(small.run, PinKind.PACK, path, reason="an export reads it", session_id=owner.session_id)
    sweep(small.run)
    assert path in pack_files(small.run)
    rescue.declare_lost(small.run, owner.session_id, reason="killed by the test")
    assert [p.is_void for p in pins.listed(small.run)] == [True]
    assert [i.what for i in sweep(small.run)] == ["pins", "pack", "file"]
    assert pins.listed(small.run) == []
    assert path not in pack_files(small.run)
    small.advance(1)
    with pytest.raises(LeaseLostError):
        pins.pin(small.run, PinKind.CHECKPOINT, "1", reason="too late", session_id=owner.session_id)


def test_only_what_is_there_can_be_pinned(small: SmallRun) -> None:
    path = dead_trajectories(small)
    sweep(with_storage(small.run, sweep_grace_s=3600.0))
    for kind, subject in (
        (PinKind.PACK, "packs/plan/none.arrow"),
        (PinKind.PACK, "4711"),
        (PinKind.BATCH, "9"),
        (PinKind.BATCH, "first"),
        (PinKind.CHECKPOINT, "c000009-main.trainer-f1"),
        (PinKind.CHECKPOINT, "9"),
        (PinKind.WEIGHTS, "v9"),
    ):
        with pytest.raises(NotFoundError):
            pins.pin(small.run, kind, subject, reason="a slip")
    with pytest.raises(ConflictError, match="given up already"):
        pins.pin(small.run, PinKind.PACK, path, reason="too late")
    with pytest.raises(NotFoundError, match="no pin 99"):
        pins.unpin(small.run, 99)
    assert pins.listed(small.run) == []


# ---- races


def test_of_a_pin_and_a_condemn_that_race_one_wins_never_both(small: SmallRun) -> None:
    ended = WorkerSession(small.run, "export")
    ended.end()
    pack_ids = [sealed_empty_pack(small.run, ended) for _ in range(40)]
    gate = threading.Barrier(2)

    def pin_all() -> list[bool]:
        return [raced(lambda n=n: pin(n)) for n in pack_ids]  # type: ignore[misc]

    def condemn_all() -> list[bool]:
        return [raced(lambda n=n: condemn(n)) for n in pack_ids]  # type: ignore[misc]

    def raced(call: Callable[[], bool]) -> bool:
        gate.wait()
        return call()

    def pin(pack_id: int) -> bool:
        try:
            pins.pin(small.run, PinKind.PACK, str(pack_id), reason="raced")
        except ConflictError:
            return False
        return True

    def condemn(pack_id: int) -> bool:
        with small.run.index.begin() as connection:
            return packs.condemn(connection, pack_id)

    with ThreadPoolExecutor(2) as pool:
        pinned, condemned = (f.result() for f in (pool.submit(pin_all), pool.submit(condemn_all)))
    assert all(p != c for p, c in zip(pinned, condemned, strict=True)), list(
        zip(pinned, condemned, strict=True)
    )
    with small.run.index.begin() as connection:
        connection.execute(sa.delete(t.pins))
        connection.execute(sa.delete(t.packs).where(t.packs.c.pack_id.in_(pack_ids)))


@pytest.mark.parametrize("first", ["pin", "condemn", "name"])
def test_who_comes_second_waits_for_the_first_and_loses_on_postgresql(
    tmp_path: Path, postgres_server: PostgresServer, first: str
) -> None:
    settings = {**NO_GRACE, "run.index_url": postgres_server.new_url()}
    with small_run(tmp_path, settings=settings) as small:
        run, session = small.run, small.session("rollout")
        extent = session.packs.append("trajectory", rows_of(small.claim(1)))
        session.packs.seal("trajectory")
        pack_id = extent.pack_id

        def condemn(connection: sa.Connection) -> bool:
            return packs.condemn(connection, pack_id)

        def pin(connection: sa.Connection) -> bool:
            index_pins.pin(connection, PinKind.PACK, str(pack_id), reason="raced")
            return True

        def name(connection: sa.Connection) -> bool:
            return bool(packs.name_extents(connection, [extent], session_id=session.session_id))

        def in_transaction(call: Callable[[sa.Connection], bool]) -> bool:
            try:
                with run.index.begin() as connection:
                    return call(connection)
            except (ConflictError, LeaseLostError):
                return False

        second = pin if first == "condemn" else condemn
        with ThreadPoolExecutor(1) as pool:
            with run.index.begin() as connection:
                assert {"pin": pin, "condemn": condemn, "name": name}[first](connection)
                other = pool.submit(in_transaction, second)
                await_blocked(postgres_server, run)
                assert not other.done()
            assert other.result(timeout=30) is False
        assert state_of(run, extent.path) is (PackState.CONDEMNED if first == "condemn" else PackState.SEALED)


def test_two_sweeps_at_once_remove_everything_once(small: SmallRun) -> None:
    path = dead_trajectories(small)
    with upkeep(small.run) as one, upkeep(small.run) as other, ThreadPoolExecutor(2) as pool:
        gate = threading.Barrier(2)

        def swept(session: WorkerSession) -> list[Item]:
            gate.wait()
            return sweeping.sweep(session).items

        found = [item for part in pool.map(swept, (one, other)) for item in part]
    assert [i.subject for i in found if i.what == "pack"] == [path]
    assert path not in pack_files(small.run)
    assert state_of(small.run, path) is None


def test_of_two_units_with_the_same_bytes_the_second_reads_while_the_first_is_swept(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    wide = {**settings, "rollout.prompts_per_step": "40", "rollout.samples_per_prompt": "1"}
    with small_run(tmp_path, num_prompts=40, settings=wide) as small, upkeep(small.run) as own:
        stop, swept = threading.Event(), list[Item]()

        def sweep_on() -> None:
            while not stop.is_set():
                swept.extend(sweeping.sweep(own).items)

        thread = threading.Thread(target=sweep_on)
        thread.start()
        try:
            for number in range(8):
                read_beside_the_sweep(small, tmp_path / f"again-{number}.jsonl")
        finally:
            stop.set()
            thread.join()
        assert sum(i.what == "file" for i in swept) >= 6, (
            "the sweep removed hardly anything: this tests nothing"
        )


def read_beside_the_sweep(small: SmallRun, path: Path) -> None:
    """Finish one unit, let its result go, and meanwhile enqueue and finish another with the same bytes."""
    version = small.serving() or ""
    with WorkerSession(small.run, "rollout") as first:
        (done,) = claiming.claim(first, PromptShelf(first), limit=1, serving_version_id=version)
        completing.complete(first, [same_result(done, version)], submission_id=new_id("s"))
    path.write_text(prompt_lines(4), encoding="utf-8")  # the rows of the first dataset once more
    with WorkerSession(small.run, "rollout") as second:
        (other,) = claiming.claim(second, PromptShelf(second), limit=1, serving_version_id=version)
        assemble.requeue(small.session("assemble"), small.assembler(), [done.unit_id], reason="finished")
        assert small.enqueue(path, dataset=path.stem) == 4
        completing.complete(second, [same_result(other, version)], submission_id=new_id("s"))
        with small.run.index.read() as connection:
            unit = units.find(connection, other.unit_id)
        rows = assemble.read_trajectories(second, [unit])[other.unit_id]
        assert rows.column("response_text").to_pylist() == ["byte for byte the same"]
        assert PromptShelf(second).read(other.unit.segment_id, other.unit.position) == other.prompt


# ---- kills


@pytest.mark.parametrize("point", ["sweep.before_unlink", "sweep.after_unlink"])
def test_a_sweep_killed_on_its_way_is_finished_by_the_next(tmp_path: Path, point: str) -> None:
    with small_run(tmp_path, settings=NO_GRACE) as small:
        path, root = dead_trajectories(small), small.run.root
        kill_cli("storage", "sweep", root, "--yes", at=point)
        assert state_of(small.run, path) is PackState.CONDEMNED
        assert (path in pack_files(small.run)) == (point == "sweep.before_unlink")
        assert_sound(small.run)
        sweep(small.run)
        assert state_of(small.run, path) is None
        assert path not in pack_files(small.run)
        rescue.declare_dead_processes_lost(small.run)
        small.advance(2)
        assert_sound(small.run)


# ---- after a restore


def test_nothing_is_swept_before_packs_were_matched_against_a_restored_index(small: SmallRun) -> None:
    path = dead_trajectories(small)
    with small.run.index.begin() as connection:
        meta.put(connection, SWEEP_BLOCKED, "restored by the test")
    for attempt in (lambda: sweeping.plan_sweep(small.run), lambda: sweep(small.run)):
        with pytest.raises(ConflictError, match=r"restored by the test.*strawflow storage reconcile"):
            attempt()
    assert path in pack_files(small.run)
    assert reconcile(small.run).items == []
    assert not reconcile(small.run).done
    assert reconcile(small.run, accepts=True).done
    assert [i.what for i in sweep(small.run)] == ["extents", "pack", "file"]


def test_sweeping_stays_blocked_while_named_bytes_are_missing(small: SmallRun) -> None:
    small.sample(4)
    (pack,) = packs_of(small.run, "trajectory")
    place, away = small.run.root / pack.path, small.run.root / "away"
    with small.run.index.begin() as connection:
        meta.put(connection, SWEEP_BLOCKED, "restored by the test")
    place.rename(away)
    matched = reconcile(small.run, accepts=True)
    assert [(i.what, i.subject) for i in matched.items] == [(MISSING, pack.path)]
    assert not matched.done
    assert run_cli("storage", "reconcile", small.run.root, "--yes") == ConflictError.exit_code
    with pytest.raises(ConflictError):
        sweep(small.run)
    away.rename(place)
    assert reconcile(small.run, accepts=True).done
    sweep(small.run)


def test_missing_bytes_may_be_accepted_by_who_knows_them_to_be_lost(small: SmallRun) -> None:
    small.sample(4)
    (pack,) = packs_of(small.run, "trajectory")
    place, away = small.run.root / pack.path, small.run.root / "away"
    with small.run.index.begin() as connection:
        meta.put(connection, SWEEP_BLOCKED, "restored by the test")
    place.rename(away)
    assert reconcile(small.run, accepts=True, accepts_missing=True).done
    sweep(small.run)
    away.rename(place)  # the fixture checks every extent


# ---- the command line


def test_the_commands_pin_sweep_and_tell(small: SmallRun, cli: Callable[..., CliResult]) -> None:
    path, root = dead_trajectories(small), small.run.root
    small.advance(1)
    pinned = cli("storage", "pin", root, "pack", path, "--reason", "an export", "--json").json
    assert (pinned["subject_kind"], pinned["reason"]) == ("pack", "an export")
    for kind in ("batch", "checkpoint", "weights"):
        assert cli("storage", "pin", root, kind, 1, "--reason", "shown in a talk").code == 0
    assert [p["subject_kind"] for p in cli("storage", "pins", root, "--json").json] == [
        "pack",
        "batch",
        "checkpoint",
        "weights",
    ]
    assert "shown in a talk" in cli("storage", "pins", root).out
    assert cli("storage", "unpin", root, pinned["pin_id"]).code == 0
    dry = cli("storage", "sweep", root)
    assert path in dry.out
    assert "nothing was changed, --yes does it" in dry.out
    assert path in pack_files(small.run)
    swept = cli("storage", "sweep", root, "--yes", "--json").json
    assert swept["done"]
    assert swept["num_bytes"] > 0
    assert path not in pack_files(small.run)
    assert cli("storage", "sweep", root, "--yes").out.strip() == "nothing to sweep"
    assert cli("storage", "unpin", root, 99, "--json").code == NotFoundError.exit_code


def test_usage_adds_up(small: SmallRun, cli: Callable[..., CliResult]) -> None:
    path = dead_trajectories(small)
    seen = cli("storage", "usage", small.run.root, "--json").json
    of_kind = {kind["kind"]: kind for kind in seen["kinds"]}
    assert of_kind["trajectory"]["named_bytes"] == 0
    assert of_kind["prompt"]["named_bytes"] > 0
    on_disk = {p: (small.run.root / p).stat().st_size for p in pack_files(small.run)}
    assert (
        sum(kind["num_bytes"] for kind in seen["kinds"])
        == sum(on_disk.values())
        == seen["disk_bytes"]["packs"]
    )
    assert sum(kind["num_files"] for kind in seen["kinds"]) == len(on_disk)
    assert (seen["room"]["quota_bytes"], seen["shortage"]) == (0, None)
    assert seen["room"]["used_bytes"] == sum(seen["disk_bytes"].values())
    sweep(with_storage(small.run, sweep_grace_s=3600.0))
    seen = cli("storage", "usage", small.run.root, "--json").json
    assert seen["condemned_bytes"] == on_disk[path]
    shown = cli("storage", "usage", small.run.root).out
    assert "trajectory" in shown
    assert "quota none" in shown
    sweep(small.run)


def test_a_session_that_was_declared_lost_sweeps_nothing(small: SmallRun) -> None:
    path = dead_trajectories(small)
    zombie = WorkerSession(small.run, "storage")
    rescue.declare_lost(small.run, zombie.session_id, reason="killed by the test")
    with pytest.raises(LeaseLostError):
        sweeping.sweep(zombie)
    assert path in pack_files(small.run)


def test_a_run_left_with_condemned_packs_opens_and_goes_on(tmp_path: Path, settings: dict[str, str]) -> None:
    with small_run(tmp_path, settings=settings) as small:
        dead_trajectories(small)
        sweep(with_storage(small.run, sweep_grace_s=3600.0))
    with SmallRun(open_run(tmp_path / "small")) as again:
        again.advance(1)
        assert consume.batch_of_step(again.run, 1) is not None
        with again.run.index.read() as connection:
            assert sessions.listed(connection, live_only=True)
        assert_sound(again.run)
