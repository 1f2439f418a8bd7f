"""Backups of the index: whole, exact, of one instant, and restored into either database."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from strawflow.errors import (
    AlreadyExistsError,
    CorruptPackError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)
from strawflow.flow import backup as backing_up
from strawflow.flow import complete as completing
from strawflow.flow import consume
from strawflow.flow.backup import MANIFEST, Backup, backup, backups_of, read_manifest, verify
from strawflow.flow.index_place import SWEEP_BLOCKED
from strawflow.flow.restore import restore
from strawflow.flow.run import CONFIG_FILE, Run, open_run
from strawflow.flow.session import WorkerSession
from strawflow.ids import new_id
from strawflow.index import dump, events, meta, units
from strawflow.index import tables as t
from strawflow.index.units import NewUnit
from strawflow.testing.invariants import check_exactly_once
from strawflow.testing.runs import SmallRun, made_up_result, small_run
from tests.conftest import CliResult
from tests.contract.backed_up import (
    bare_run,
    claim_as,
    differing,
    give_files,
    lose_all,
    reopened,
    rows_at,
    rows_in,
    trained,
)
from tests.contract.backup_instants import Instants, chosen
from tests.contract.stored import assert_sound

ROOT = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 64 * 1024
PROGRAM = """
import sys
from pathlib import Path
from strawflow.cli.main import main
try:
    main(sys.argv[1:])
finally:
    status = Path("/proc/self/status").read_text()
    print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
"""


# ---- what a backup holds


def test_every_row_comes_back_exactly_in_the_other_database(
    tmp_path: Path, small: SmallRun, opposite_url: str
) -> None:
    small.advance(2)
    with small.run.index.begin() as connection:
        extremes = {"mean_reward": 5e-324, "version_step": 2**63 - 1, "last_error": "ä\n\t'\"\\N \\. ✓"}
        connection.execute(sa.update(t.units).where(t.units.c.unit_id == 1).values(**extremes))
        connection.execute(sa.update(t.units).where(t.units.c.unit_id == 2).values(mean_reward=0.1 + 0.2))
        connection.execute(sa.update(t.weight_versions).values(files_removed=True))
        connection.execute(sa.update(t.packs).values(num_bytes=None))
    before = rows_in(small.run.index)
    made = backup(small.run)
    twin = bare_run(tmp_path / "twin", small.run, opposite_url)
    done = restore(twin, made.folder)
    after = rows_at(twin)
    assert differing(before, after) <= {"meta", "events", "sessions"}
    assert after["events"][: len(before["events"])] == before["events"]
    assert after["units"][0]["mean_reward"] == 5e-324
    assert (done.done, done.incarnation, done.manifest.dialect) == (True, 1, small.run.index.dialect)
    assert done.manifest.num_rows == sum(len(rows) for rows in before.values())


@pytest.mark.parametrize("index_url", ["sqlite"], indirect=True)
def test_a_backup_is_ordinary_arrow_with_a_manifest_that_counts_it(small: SmallRun) -> None:
    import pyarrow as pa

    small.advance(1)
    made = backup(small.run)
    assert made.folder.parent == small.run.root / "backups"
    assert read_manifest(made.folder) == made.manifest
    verify(made.folder, made.manifest)
    for stored in made.manifest.tables:
        path = made.folder / f"{stored.table}.arrow"
        with pa.ipc.open_file(path) as file:
            assert file.read_all().num_rows == stored.num_rows
        assert path.stat().st_size == stored.num_bytes
    assert {p.name for p in made.folder.iterdir()} == {
        MANIFEST,
        *(f"{name}.arrow" for name in t.metadata.tables),
    }


def test_backups_and_restores_are_told_in_the_event_log(small: SmallRun) -> None:
    made = backup(small.run)
    with small.run.index.read() as connection:
        (told,) = events.latest(connection, limit=9, name_prefix="index.")
    assert (told["name"], told["facts"]) == (
        "index.backed_up",
        {"incarnation": 0, "folder": str(made.folder)},
    )
    lose_all(small.run)
    restore(small.run.root, made.folder, may_replace=True)
    with small.run.index.read() as connection:
        (told,) = events.latest(connection, limit=9, name_prefix="index.")
        assert "restored from" in (meta.find(connection, SWEEP_BLOCKED) or "")
    assert (told["name"], told["facts"]["incarnation"]) == ("index.restored", 1)


def test_backups_under_concurrent_writers_are_points_in_time(
    tmp_path: Path, settings: dict[str, str], opposite_url: str
) -> None:
    busy = {**settings, "trainer.steps": "50", "rollout.max_staleness": "2"}
    with small_run(tmp_path, num_prompts=40, settings=busy) as small:
        stop, failures = threading.Event(), []

        def guarded(work: Callable[[], None]) -> threading.Thread:
            def body() -> None:
                try:
                    work()
                except BaseException as error:  # the test looks at it after the join
                    failures.append(error)
                    stop.set()

            thread = threading.Thread(target=body)
            thread.start()
            return thread

        def roll_out() -> None:
            with WorkerSession(small.run, "rollout") as session:
                while not stop.is_set():
                    grants = claim_as(session, 2)
                    results = [made_up_result(grant, small.serving() or "") for grant in grants]
                    if results:
                        completing.complete(session, results, submission_id=new_id("s"))
                    else:
                        stop.wait(0.01)

        def train() -> None:
            step = 1
            while not stop.is_set():
                if small.plan() is None and consume.batch_of_step(small.run, step) is None:
                    stop.wait(0.01)
                    continue
                small.train(step)
                step += 1

        threads = [guarded(roll_out), guarded(roll_out), guarded(train)]
        made: list[Backup] = []
        for step in (1, 2, 3):
            while trained(small.run) < step:
                assert not stop.wait(0.01), failures
            made.append(backup(small.run))
        stop.set()
        for thread in threads:
            thread.join()
        assert failures == []
        positions = []
        for number, each in enumerate(made):
            twin = bare_run(tmp_path / f"twin-{number}", small.run, opposite_url)
            restore(twin, each.folder, may_replace=number > 0)
            give_files(twin, small.run)
            with reopened(twin) as again:
                assert_sound(again.run)
                check_exactly_once(again.run, finished=False)
                positions.append(trained(again.run))
        assert positions == sorted(positions)
        assert positions[0] < positions[-1] <= trained(small.run)


# ---- kills


LONG = (pytest.mark.long, pytest.mark.timeout(1800))


@pytest.mark.parametrize(
    "index_url, spread",
    [("sqlite", 1), *(pytest.param(url, 60, marks=LONG) for url in ("sqlite", "postgresql"))],
    indirect=["index_url"],
)
def test_a_backup_killed_at_any_instant_leaves_no_half_of_one(
    tmp_path: Path, settings: dict[str, str], instants: Instants, spread: int
) -> None:
    with small_run(tmp_path, settings=settings) as small:
        small.advance(1)
    root = small.run.root
    words = ("index", "backup", root)
    at = chosen(instants.passed(*words), spread=spread)
    known = len(backups_of(root))
    for instant in at:
        for left in (root / "backups").glob(".partial-*"):  # every child is to pass the same instants
            shutil.rmtree(left)
        instants.kill(*words, at=instant)
        found = backups_of(root)
        assert known <= len(found) <= known + 1
        assert set(found) == {p for p in (root / "backups").iterdir() if not p.name.startswith(".")}
        verify(found[-1], read_manifest(found[-1]))
        known = len(found)
    instants.passed(*words)
    assert [p for p in (root / "backups").iterdir() if p.name.startswith(".")] == []


# ---- room and memory


def run_program(*words: object, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-c", PROGRAM, *(str(w) for w in words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """A folder with no room for a backup, and the command prefix under which that holds.

    A file system of 64 KiB; where this user may not mount one, no file of the process may become larger.
    """
    place = tmp_path / "tiny"
    place.mkdir()
    size = f"size={LIMIT_BYTES}"
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(place)], capture_output=True
    ).returncode:
        yield place, ("prlimit", f"--fsize={LIMIT_BYTES}")
        return
    yield place, ()
    subprocess.run(["umount", str(place)], check=True)


def fill(run: Run, num_units: int) -> None:
    """Admit many units straight into the index: rows for their number alone."""
    made = [NewUnit("train", "train", 1, 1000 + n // 10_000, n % 10_000) for n in range(num_units)]
    with run.index.begin() as connection:
        first_id = units.take_ids(connection, num_units)
        units.admit(connection, run.branch, made, ids=range(first_id, first_id + num_units))


@pytest.mark.parametrize("index_url", ["sqlite"], indirect=True)
def test_a_full_disk_leaves_nothing_of_a_backup_behind(
    small: SmallRun, tiny_disk: tuple[Path, tuple[str, ...]]
) -> None:
    place, prefix = tiny_disk
    fill(small.run, 20_000)
    words = ("index", "backup", small.run.root, "--to", place / "b", "--json")
    done = run_program(*words, prefix=prefix)
    assert done.returncode == StorageError.exit_code
    assert json.loads(done.stderr)["error"]["message"].startswith(
        f"the backup {place / 'b'} could not be written"
    )
    assert list(place.iterdir()) == []
    assert len(backup(small.run).manifest.tables) == len(t.metadata.tables)


def test_a_full_disk_leaves_nothing_of_a_restored_file_behind(
    tmp_path: Path, tiny_disk: tuple[Path, tuple[str, ...]]
) -> None:
    place, prefix = tiny_disk
    with small_run(tmp_path) as small:
        fill(small.run, 20_000)
        made = backup(small.run)
    shutil.copy(small.run.root / CONFIG_FILE, place)
    done = run_program("index", "restore", place, "--from", made.folder, "--yes", "--json", prefix=prefix)
    assert done.returncode == StorageError.exit_code, done.stderr
    assert {p.name for p in place.iterdir()} == {CONFIG_FILE}


@pytest.mark.parametrize("index_url", ["sqlite", pytest.param("postgresql", marks=LONG)], indirect=True)
def test_a_hundred_thousand_units_are_backed_up_and_restored_in_little_memory(
    tmp_path: Path, small: SmallRun, opposite_url: str
) -> None:
    fill(small.run, 100_000)
    twin = bare_run(tmp_path / "twin", small.run, opposite_url)
    without_packs = CorruptPackError.exit_code  # the twin has none of those that the index names
    for code, *words in (
        (0, "backup", small.run.root, "--to", tmp_path / "b"),
        (without_packs, "restore", twin, "--from", tmp_path / "b", "--yes"),
    ):
        done = run_program("index", *words)
        assert done.returncode == code, done.stderr
        peak_bytes = int(done.stdout.split()[-1]) * 1024
        print(f"{words[0]}: {peak_bytes / 1e6:.0f} MB")
        assert peak_bytes < 150_000_000
    restored = open_run(twin)
    with restored.index.read() as connection:
        assert dump.count_rows(connection)["units"] == 100_000 + 8
    restored.close()


# ---- where backups lie and how long


@pytest.mark.parametrize("index_url", ["sqlite"], indirect=True)
def test_only_the_newest_backups_inside_the_run_are_kept_on_request(small: SmallRun, tmp_path: Path) -> None:
    outside = backup(small.run, to=tmp_path / "outside").folder
    made = [backup(small.run).folder for _ in range(3)]
    (small.run.root / "backups" / "my-notes").mkdir()
    newest = backup(small.run, keep=2)
    assert newest.removed == tuple(made[:2])
    assert backups_of(small.run.root) == [made[2], newest.folder]
    assert {p.name for p in (small.run.root / "backups").iterdir()} == {
        "my-notes",
        made[2].name,
        newest.folder.name,
    }
    assert outside.is_dir()
    with pytest.raises(InvalidInputError, match="--keep"):
        backup(small.run, keep=0)
    with pytest.raises(InvalidInputError, match="--keep"):
        backup(small.run, to=tmp_path / "b", keep=1)


@pytest.mark.parametrize("index_url", ["sqlite"], indirect=True)
def test_a_backup_goes_into_a_new_or_empty_folder_only(small: SmallRun, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert backup(small.run, to=tmp_path / "empty").folder == tmp_path / "empty"
    with pytest.raises(AlreadyExistsError, match="exists"):
        backup(small.run, to=tmp_path / "empty")
    with pytest.raises(NotFoundError, match="does not exist"):
        backup(small.run, to=tmp_path / "nowhere" / "b")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("index_url", ["sqlite"], indirect=True)
def test_a_backup_in_the_making_is_not_taken_for_one_that_was_left(small: SmallRun) -> None:
    parent = small.run.root / "backups"
    parent.mkdir()
    with backing_up.partial_folder(parent) as first:
        (first / "units.arrow").write_bytes(b"half")
        made = backup(small.run)
        assert first.is_dir()
    assert [p.name for p in parent.iterdir()] == [made.folder.name]


# ---- the command line


def test_the_commands_back_up_and_restore(small: SmallRun, cli: Callable[..., CliResult]) -> None:
    small.advance(1)
    root = small.run.root
    made = cli("index", "backup", root, "--json").json
    assert made["folder"].startswith(str(root / "backups"))
    small.advance(1)
    lose_all(small.run)
    small.sessions.clear()
    words = ("index", "restore", root, "--from", made["folder"])
    assert cli(*words, "--json").code == AlreadyExistsError.exit_code
    before = rows_in(small.run.index)
    told = cli(*words, "--replace")
    assert "would restore" in told.out
    assert "--yes does it" in told.out
    assert differing(before, rows_in(small.run.index)) == set()
    done = cli(*words, "--replace", "--yes", "--json").json
    assert (done["done"], done["incarnation"], done["found"]) == (True, 1, "filled")
    assert trained(small.run) == 2  # the step after the backup is told by the packs
    assert "rows of" in cli("index", "backup", root, "--keep", "1").out
    assert len(backups_of(root)) == 1
