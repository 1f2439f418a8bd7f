"""Restores of the index: what a restored run does, what is refused, files that are gone or damaged, kills."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from strawflow.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptPackError,
    IncompatibleFormatError,
    LeaseLostError,
    NotFoundError,
)
from strawflow.flow import assemble, consume
from strawflow.flow import backup as backing_up
from strawflow.flow import complete as completing
from strawflow.flow.backup import MANIFEST, backup
from strawflow.flow.index_place import Found
from strawflow.flow.restore import plan, restore
from strawflow.flow.run import CONFIG_FILE, INDEX_FILE, open_run
from strawflow.flow.session import WorkerSession
from strawflow.index import events, meta, sessions, units, weights
from strawflow.index import tables as t
from strawflow.states import SessionState, UnitState
from strawflow.testing.postgres import PostgresServer
from strawflow.testing.runs import SmallRun, made_up_plan, made_up_result, small_run
from tests.conftest import CliResult
from tests.contract.backed_up import (
    PASSING,
    Rows,
    bare_run,
    claim_as,
    differing,
    give_files,
    go_on_to_the_end,
    lose_all,
    reopened,
    rows_at,
    rows_in,
    told_again,
)
from tests.contract.backup_instants import Instants, chosen


@pytest.fixture
def stopped(tmp_path: Path) -> tuple[Path, Path]:
    """A run whose workers ended, and a backup of it: (run folder, backup folder)."""
    with small_run(tmp_path) as small:
        small.advance(1)
    run = open_run(small.run.root)
    made = backup(run)
    run.close()
    return run.root, made.folder


# ---- what a restored run does


def test_a_backup_inside_the_run_is_named_by_its_name_or_number_and_others_are_refused_with_what_is_there(
    stopped: tuple[Path, Path], cli: Callable[..., CliResult]
) -> None:
    root, first = stopped
    run = open_run(root)
    made = [first, backup(run).folder]
    run.close()
    listed = cli("index", "backups", root, "--json").json
    assert [(b["number"], b["name"], b["problem"]) for b in listed] == [
        (1, made[0].name, None),
        (2, made[1].name, None),
    ]
    for given, meant in (("1", made[0]), ("2", made[1]), (made[1].name, made[1]), (made[0], made[0])):
        done = cli("index", "restore", root, "--from", given, "--replace", "--json")
        assert (done.code, done.json["folder"]) == (0, str(meant)), done.err
    for given in ("3", "0", "yesterday"):
        refused = cli("index", "restore", root, "--from", given)
        assert refused.code == NotFoundError.exit_code
        assert f"1: {made[0].name}, 2: {made[1].name}" in refused.err


def test_a_restored_run_goes_on_to_the_end(
    tmp_path: Path, settings: dict[str, str], opposite_url: str
) -> None:
    with small_run(tmp_path, settings=settings) as small:
        small.advance(1)
        small.sample(2)
        assert len(small.claim(1)) == 1
        made = backup(small.run)
        root = small.run.root
        small.advance(1)  # what only packs and files tell of
    twin = bare_run(tmp_path / "twin", small.run, opposite_url)
    give_files(twin, small.run)
    done = restore(twin, made.folder)
    assert (done.num_sessions_lost, done.num_units_ready) == (4, 1)
    with reopened(twin) as again:
        go_on_to_the_end(again)
    restore(root, made.folder, may_replace=True)
    with reopened(root) as again:
        go_on_to_the_end(again)


def test_the_folders_of_a_lost_future_are_never_met_again(small: SmallRun) -> None:
    small.advance(1)
    made = backup(small.run)
    lose_all(small.run)
    with reopened(small.run.root) as successor:
        successor.advance(
            1
        )  # the next trainer: its fence names weights and a checkpoint that the backup does not know
    restore(small.run.root, made.folder, may_replace=True)
    with reopened(small.run.root) as again:
        go_on_to_the_end(again)


def test_a_worker_from_before_the_restore_is_refused_everywhere(small: SmallRun) -> None:
    run = small.run
    small.sample(4)
    known = WorkerSession(run, "rollout")
    held = claim_as(known, 2)
    assembler = small.assembler()
    groups = assemble.offered(small.session("assemble"), purpose="train", limit=4)
    planned = made_up_plan(2, groups, assemble.read_trajectories(small.session("assemble"), groups))
    assert small.plan() is not None
    trainer = small.trainer()
    made = backup(run)
    unknown = WorkerSession(run, "rollout")
    claimed_after = claim_as(unknown, 2)
    lose_all(run)
    restore(run.root, made.folder, may_replace=True)
    assert held
    assert claimed_after
    before = rows_in(run.index)
    for session, grants in ((known, held), (unknown, claimed_after)):
        results = [made_up_result(grant, small.serving() or "") for grant in grants]
        grant = grants[0]
        refused: list[Callable[[], object]] = [
            lambda s=session, r=results: completing.complete(s, r, submission_id="late"),  # type: ignore[misc]
            lambda s=session, g=grant: completing.fail(s, g.unit_id, fence=g.fence, error="late"),  # type: ignore[misc]
            lambda s=session: claim_as(s, 1),  # type: ignore[misc]
            lambda s=session: assemble.take_role(s),  # type: ignore[misc]
            lambda s=session: consume.take_over(s),  # type: ignore[misc]
            lambda s=session: renewed(s),  # type: ignore[misc]
        ]
        for verb in refused:
            with pytest.raises(LeaseLostError):
                verb()
    for verb in (
        lambda: assemble.plan_batch(small.session("assemble"), assembler, planned),
        lambda: consume.record_step(small.session("train"), trainer, step=1, metrics={}),
        lambda: consume.commit_checkpoint(
            small.session("train"), trainer, step=1, previous_step=0, state_digest="x"
        ),
        lambda: small.publish(1, admit_due=False),
    ):
        with pytest.raises(LeaseLostError):
            verb()
    after = rows_in(run.index)
    assert differing(before, after) == {"events"}
    told = {event["name"] for event in after["events"] if event not in before["events"]}
    assert told == {"units.refused"}  # that it was refused is counted
    small.sessions.clear()
    with reopened(run.root) as again:
        grants = again.claim(100)
        assert {g.unit_id for g in held} <= {g.unit_id for g in grants}
        assert min(g.fence for g in grants) > max(g.fence for g in [*held, *claimed_after])


def renewed(session: WorkerSession) -> None:
    with session.run.index.begin() as connection:
        sessions.renew(connection, session.session_id, ttl_s=60)


def test_a_restore_sets_no_unit_aside_and_forgets_engines_and_sessions(small: SmallRun) -> None:
    run = small.run
    worker = WorkerSession(run, "rollout")
    for _ in range(run.config.rollout.max_attempts):
        (grant,) = claim_as(worker, 1)
        if grant.unit.attempts < run.config.rollout.max_attempts:
            completing.fail(worker, grant.unit_id, fence=grant.fence, error="engine said no")
    with run.index.begin() as connection:
        weights.report_engine(
            connection, "e-1", session_id=worker.session_id, url="http://e", build="b", version_id=None
        )
    made = backup(run)
    lose_all(run)
    done = restore(run.root, made.folder, may_replace=True)
    assert done.num_units_ready == 1
    with run.index.read() as connection:
        unit = units.find(connection, grant.unit_id)
        assert (unit.state, unit.session_id) == (UnitState.READY, None)
        assert weights.engines_listed(connection) == []
        states = {s.session_id: s.state for s in sessions.listed(connection)}
    assert states[worker.session_id] is SessionState.LOST
    assert SessionState.LIVE not in states.values()
    small.sessions.clear()


def test_every_restore_is_a_later_incarnation_than_the_backup_and_the_index_it_replaced(
    small: SmallRun,
) -> None:
    first = backup(small.run)
    lose_all(small.run)
    small.sessions.clear()
    for expected in (1, 2, 3):
        assert plan(small.run.root, first.folder, may_replace=True).incarnation == expected
        assert restore(small.run.root, first.folder, may_replace=True).incarnation == expected
    second = backup(small.run)
    assert second.manifest.incarnation == 3


# ---- refusals


def test_a_restore_is_refused_while_a_worker_lives_or_rows_would_be_replaced(small: SmallRun) -> None:
    made = backup(small.run)
    with pytest.raises(ConflictError, match="still live in the index"):
        restore(small.run.root, made.folder, may_replace=True)
    lose_all(small.run)
    small.sessions.clear()
    before = rows_in(small.run.index)
    with pytest.raises(AlreadyExistsError, match="--replace"):
        restore(small.run.root, made.folder)
    with pytest.raises(AlreadyExistsError, match="--replace"):
        plan(small.run.root, made.folder, may_replace=False)
    assert differing(before, rows_in(small.run.index)) == set()


def test_a_worker_that_died_does_not_stand_in_the_way(small: SmallRun) -> None:
    made = backup(small.run)
    lose_all(small.run)
    small.sessions.clear()
    with small.run.index.begin() as connection:
        connection.execute(sa.update(t.sessions).values(state=SessionState.LIVE, expires_at=0.0))
    assert restore(small.run.root, made.folder, may_replace=True).done


def test_a_changed_byte_in_any_file_is_found_before_anything_happens(stopped: tuple[Path, Path]) -> None:
    root, folder = stopped
    before = rows_at(root)
    files = sorted(folder.iterdir())
    assert len(files) == len(t.metadata.tables) + 1
    for path in files:
        whole = path.read_bytes()
        everywhere = path.name in (MANIFEST, "units.arrow")
        for at in (0, len(whole) // 2, len(whole) - 1) if everywhere else (len(whole) // 2,):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(CorruptPackError, match=path.name):
                restore(root, folder, may_replace=True)
        path.write_bytes(whole)
    assert differing(before, rows_at(root)) == set()
    assert restore(root, folder, may_replace=True).done


@pytest.mark.parametrize("change", ["missing", "shorter", "longer"])
def test_a_file_that_is_missing_or_of_another_length_is_found(
    stopped: tuple[Path, Path], change: str
) -> None:
    root, folder = stopped
    path = folder / "units.arrow"
    whole = path.read_bytes()
    if change == "missing":
        path.unlink()
    else:
        path.write_bytes(whole[:-1] if change == "shorter" else whole + b"\0")
    with pytest.raises(CorruptPackError, match=r"units\.arrow"):
        restore(root, folder, may_replace=True)


def rewrite_manifest(folder: Path, **changes: Any) -> None:
    content = {**json.loads((folder / MANIFEST).read_text())["content"], **changes}
    (folder / MANIFEST).write_bytes(backing_up.rendered(content))


def test_a_backup_of_another_revision_or_format_is_refused_with_the_way_to_restore_it(
    stopped: tuple[Path, Path],
) -> None:
    root, folder = stopped
    rewrite_manifest(folder, revision="0000", program="0.0.9")
    with pytest.raises(
        IncompatibleFormatError, match=r"strawflow 0\.0\.9, then run `strawflow index upgrade`"
    ):
        restore(root, folder, may_replace=True)
    rewrite_manifest(folder, format=99)
    with pytest.raises(IncompatibleFormatError, match="of format 99"):
        restore(root, folder, may_replace=True)


def test_an_index_of_another_revision_is_not_replaced(small: SmallRun) -> None:
    made = backup(small.run)
    lose_all(small.run)
    small.sessions.clear()
    with small.run.index.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '0000'"))
    with pytest.raises(IncompatibleFormatError, match="strawflow index upgrade"):
        restore(small.run.root, made.folder, may_replace=True)


def test_a_folder_that_is_no_backup_or_no_run_is_refused(stopped: tuple[Path, Path]) -> None:
    root, folder = stopped
    with pytest.raises(NotFoundError, match="no backup"):
        restore(root, root, may_replace=True)
    with pytest.raises(NotFoundError, match="no run"):
        restore(folder, folder, may_replace=True)


def test_a_text_that_the_other_database_cannot_hold_is_refused_and_nothing_changed(
    tmp_path: Path, postgres_server: PostgresServer
) -> None:
    with small_run(tmp_path) as small:
        with small.run.index.begin() as connection:
            connection.execute(sa.update(t.units).values(last_error="one\0two"))
        made = backup(small.run)
        twin = bare_run(tmp_path / "twin", small.run, postgres_server.new_url())
    with pytest.raises(CorruptPackError, match="does not take the rows of table units"):
        restore(twin, made.folder)
    with pytest.raises(NotFoundError, match="no strawflow index"):
        open_run(twin)


# ---- an SQLite file that is gone or damaged


def test_an_index_that_is_gone_is_restored_from_config_and_backup_alone(
    tmp_path: Path, stopped: tuple[Path, Path]
) -> None:
    root, folder = stopped
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(root / CONFIG_FILE, alone)
    assert plan(alone, folder, may_replace=False).found is Found.ABSENT
    assert {p.name for p in alone.iterdir()} == {CONFIG_FILE}
    assert restore(alone, folder).incarnation == 1
    assert {p.name for p in alone.iterdir()} == {CONFIG_FILE, INDEX_FILE}
    stored = rows_at(alone)
    assert differing(rows_at(root), stored) <= set(PASSING)
    (root / INDEX_FILE).unlink()
    restore(root, folder)
    with reopened(root) as again:
        go_on_to_the_end(again)


def test_the_log_of_a_lost_index_is_not_taken_for_that_of_the_restored_one(
    stopped: tuple[Path, Path],
) -> None:
    root, folder = stopped
    expected = rows_at(root)
    other = sa.create_engine(f"sqlite:///{root / INDEX_FILE}")
    held = other.connect()  # keeps the WAL from being folded in
    held.exec_driver_sql("INSERT INTO meta VALUES ('after', 'the backup')")
    held.commit()
    wal = (root / f"{INDEX_FILE}-wal").read_bytes()
    assert wal
    held.close()
    other.dispose()
    (root / INDEX_FILE).unlink()
    (root / f"{INDEX_FILE}-wal").write_bytes(wal)
    restore(root, folder)
    restored = rows_at(root)
    assert differing(expected, restored) <= set(PASSING)
    assert "after" not in {row["key"] for row in restored["meta"]}
    assert [p.read_bytes() for p in root.glob(f"{INDEX_FILE}.damaged-*-wal")] == [wal]


@pytest.mark.parametrize("damage", ["no database", "broken pages"])
def test_a_damaged_index_is_replaced_and_kept(stopped: tuple[Path, Path], damage: str) -> None:
    root, folder = stopped
    expected = rows_at(root)
    path = root / INDEX_FILE
    whole = path.read_bytes()
    start = 0 if damage == "no database" else 8192
    broken = whole[:start] + b"\xff" * 4096 + whole[start + 4096 :]
    path.write_bytes(broken)
    with pytest.raises(AlreadyExistsError, match="is damaged"):
        restore(root, folder)
    done = restore(root, folder, may_replace=True)
    assert (done.found, done.num_rows_replaced) == (Found.DAMAGED, None)
    assert done.kept is not None
    assert done.kept.read_bytes() == broken
    assert differing(expected, rows_at(root)) <= set(PASSING)


def test_a_lost_index_that_a_process_still_has_open_is_not_restored_beside_it(
    stopped: tuple[Path, Path],
) -> None:
    root, folder = stopped
    ghost = open_run(root)
    with ghost.index.read() as connection:
        assert meta.incarnation(connection) == 0
    (root / INDEX_FILE).unlink()
    with pytest.raises(ConflictError, match=f"process {os.getpid()} still has the old"):
        restore(root, folder)
    ghost.close()
    assert restore(root, folder).done


# ---- kills


LONG = (pytest.mark.long, pytest.mark.timeout(3600))


@pytest.mark.parametrize("spread", [1, pytest.param(60, marks=LONG)])
def test_a_restore_killed_at_any_instant_leaves_the_old_index_or_the_new_one(
    tmp_path: Path, small: SmallRun, instants: Instants, spread: int
) -> None:
    small.advance(1)
    made = backup(small.run)
    small.advance(1)
    lose_all(small.run)
    small.sessions.clear()
    words = ("index", "restore", small.run.root, "--from", made.folder, "--replace", "--yes")
    chosen_instants = chosen(instants.passed(*words), spread=spread)
    restored = rows_in(small.run.index)
    outcomes = set()
    for instant in chosen_instants:
        with small.run.index.begin() as connection:
            events.record(connection, "test.marked", instant=instant)  # tells this state from a restored one
        old = rows_in(small.run.index)
        instants.kill(*words, at=instant)
        new = rows_in(small.run.index)
        outcomes.add(bool(differing(old, new)))
        if differing(old, new):
            assert incarnation_in(new) > incarnation_in(old)
            check_is_restored(new, restored)
    assert outcomes == {False, True}


def check_is_restored(new: Rows, restored: Rows) -> None:
    assert differing(told_again(new), told_again(restored)) == set()
    assert {s["state"] for s in new["sessions"]} <= {"lost", "ended"}
    assert "index.restored" in {e["name"] for e in new["events"]}
    assert "test.marked" not in {e["name"] for e in new["events"]}


def incarnation_in(rows: Rows) -> int:
    return next((int(float(row["value"])) for row in rows["meta"] if row["key"] == "incarnation"), 0)


@pytest.mark.parametrize(
    "found, spread",
    [(Found.DAMAGED, 1), *(pytest.param(found, 60, marks=LONG) for found in (Found.DAMAGED, Found.ABSENT))],
)
def test_a_restore_of_a_lost_index_killed_at_any_instant_leaves_it_lost_or_restored(
    stopped: tuple[Path, Path], instants: Instants, found: Found, spread: int
) -> None:
    root, folder = stopped
    path = root / INDEX_FILE
    words = ("index", "restore", root, "--from", folder, "--replace", "--yes")
    outcomes = set()

    def lose_it() -> None:
        path.unlink(missing_ok=True)
        for left in root.glob(".partial-*"):  # every child is to pass the same instants
            shutil.rmtree(left)
        if found is Found.DAMAGED:
            path.write_bytes(b"\xff" * 10_000)

    lose_it()
    chosen_instants = chosen(instants.passed(*words), spread=spread)
    restored = rows_at(root)
    for instant in chosen_instants:
        lose_it()
        instants.kill(*words, at=instant)
        is_there = path.exists() and path.read_bytes()[:1] != b"\xff"
        outcomes.add(is_there)
        if is_there:
            check_is_restored(rows_at(root), restored)
        else:
            assert path.exists() is (found is Found.DAMAGED)
    assert outcomes == {False, True}
    path.unlink(missing_ok=True)
    instants.passed(*words)
    assert list(root.glob(".partial-*")) == []
