"""Restores and rebuilds from what is damaged, missing or another run's: refused with its name, or told, never a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from strawflow import clock
from strawflow.errors import ConflictError, CorruptPackError, InvalidInputError
from strawflow.flow import journal, rebuild
from strawflow.flow.backup import MANIFEST, backup, rendered
from strawflow.flow.branch import create_branch
from strawflow.flow.journal import EntryKind
from strawflow.flow.reconcile import MISSING, reconcile
from strawflow.flow.restore import plan, restore
from strawflow.flow.run import IDENTITY_FILE, open_run
from strawflow.flow.sweep import KEPT, plan_sweep, sweep
from strawflow.index import branches
from strawflow.packs.places import open_place
from strawflow.packs.scan import open_scan
from strawflow.testing.damage import flip
from strawflow.testing.runs import SmallRun, small_run
from tests.contract.backed_up import reopened, rows_at
from tests.contract.lost_index import die, essence_of, lose_index, on_sqlite
from tests.contract.stored import end_sessions, packs_of, upkeep, with_storage


def messages_of(root: Path, path: Path) -> Iterator[tuple[int, int, set[EntryKind]]]:
    """Yield (offset, length, kinds of its entries) of a journal pack's messages."""
    name = str(path.relative_to(root))
    for extent, rows in open_scan(open_place(root), name).messages():
        entries, _ = journal.from_rows(rows, path=name, offset=extent.offset)
        yield extent.offset, extent.length, {entry.kind for entry in entries}


def damage_entries(root: Path, kind: EntryKind) -> tuple[Path, int]:
    """Flip a byte in the first message with a kind's entry that is whole; returns its pack and where it begins."""
    path, offset, length = next(
        (path, offset, length)
        for path in sorted(root.glob("packs/journal/*.arrow"))
        for offset, length, kinds in messages_of(root, path)
        if kind in kinds
    )
    flip(path, offset + length - 40)
    return path, offset


# ---- another run's backup


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """The backup of another run of the same settings."""
    (tmp_path / "elsewhere").mkdir()
    with small_run(tmp_path / "elsewhere") as other:
        other.advance(1)
        return backup(other.run).folder


def forget_identity(backup_folder: Path) -> None:
    """Make a backup like one of a program that knew no identities."""
    path = backup_folder / MANIFEST
    content = json.loads(path.read_bytes())["content"]
    del content["run_id"]
    path.write_bytes(rendered(content))


@pytest.mark.parametrize("known", ["both", "the run", "the backup", "neither"])
def test_the_backup_of_another_run_is_refused_and_nothing_changed(
    small: SmallRun, foreign: Path, known: str
) -> None:
    small.advance(1)
    root = small.run.root
    end_sessions(small)
    own = backup(small.run).folder
    if known in ("the backup", "neither"):
        (root / IDENTITY_FILE).unlink()
    if known in ("the run", "neither"):
        forget_identity(foreign)
        forget_identity(own)
    before = rows_at(root)
    for verb in (plan, restore):
        for lossy in (False, True):
            with pytest.raises(InvalidInputError, match="backup of another run"):
                verb(root, foreign, may_replace=True, lossy=lossy)
    assert repr(rows_at(root)) == repr(before)
    assert restore(root, own, may_replace=True).done
    lose_index(small.run)
    with pytest.raises(InvalidInputError, match="backup of another run"):
        restore(root, foreign)
    assert restore(root, own).done


def test_a_run_on_a_branch_is_restored_from_each_of_its_own_backups(tmp_path: Path) -> None:
    with small_run(tmp_path, num_prompts=40, settings={"trainer.steps": "5"}) as small:
        small.advance(1)
        made = [backup(small.run).folder]
        small.advance(1)
        end_sessions(small)
        create_branch(small.run, checkpoint="1", name="second", reuse_trajectories=True)
        root = small.run.root
    with reopened(root) as second:
        made.append(backup(second.run).folder)
        second.trainer()
        second.publish(1, content="of the branch")
        second.advance(1)
        whole = essence_of(second.run.index)
    for folder in made:
        assert restore(root, folder, may_replace=True).replayed is not None
        run = open_run(root)
        assert essence_of(run.index) == {**whole, "consumers": essence_of(run.index)["consumers"]}
        run.close()


def test_a_journal_of_two_runs_is_refused_not_a_traceback(tmp_path: Path, settings: dict[str, str]) -> None:
    (tmp_path / "elsewhere").mkdir()
    with small_run(tmp_path / "elsewhere") as other:
        other.advance(1)
        end_sessions(other)
        create_branch(other.run, checkpoint="1", name="second")
    with small_run(tmp_path, num_prompts=40, settings={**settings, "trainer.steps": "6"}) as small:
        small.advance(4)
        end_sessions(small)
        own = backup(small.run).folder
        root = small.run.root
    (stray,) = other.run.root.glob("packs/journal/branch-*.arrow")
    shutil.copy(stray, root / "packs" / "journal")  # its units have the numbers of others here
    before = rows_at(root)
    for lossy in (False, True):
        with pytest.raises(CorruptPackError, match="cannot all be true"):
            restore(root, own, may_replace=True, lossy=lossy)
    assert repr(rows_at(root)) == repr(before)
    lose_index(small.run)
    with pytest.raises(CorruptPackError, match="cannot all be true"):
        rebuild.rebuild(root)


# ---- damaged journal


@pytest.mark.parametrize("every", [pytest.param(2, marks=pytest.mark.long), 7])
@on_sqlite
def test_damage_anywhere_in_the_journal_is_refused_and_gone_over_only_when_told_to(
    small: SmallRun, every: int
) -> None:
    small.advance(2)
    small.sample(2)
    end_sessions(small)
    root = lose_index(small.run)
    whole = rebuild.plan(root)
    for path in sorted(root.glob("packs/journal/*.arrow")):
        for offset, length, _ in list(messages_of(root, path))[::every]:
            for at in (offset, offset + 4, offset + length - 40):
                flip(path, at)
                with pytest.raises(
                    CorruptPackError, match=rf"{path.name} is damaged at byte {offset}.*--lossy"
                ):
                    rebuild.plan(root)
                told = rebuild.plan(root, lossy=True)
                assert {"message", "journal"} <= {loss.what for loss in told.rebuilt.losses} | {"message"}
                assert told.rebuilt.num_entries < whole.rebuilt.num_entries
                flip(path, at)
    assert rebuild.plan(root).rebuilt == whole.rebuilt


@on_sqlite
def test_a_kill_amid_an_append_to_the_journal_is_no_hole(small: SmallRun) -> None:
    small.advance(1)
    die(small)
    root = lose_index(small.run)
    whole = rebuild.plan(root).rebuilt
    (path,) = root.glob("packs/journal/train-*.arrow")
    *_, (offset, length, _) = messages_of(root, path)
    written = path.read_bytes()
    for torn in (written[offset : offset + 100], written[offset : offset + length - 8], bytes(4096)):
        path.write_bytes(written + torn)
        told = rebuild.plan(root).rebuilt
        assert [loss.what for loss in told.losses] == ["message"]
        assert (told.num_entries, told.positions) == (whole.num_entries, whole.positions)
    path.write_bytes(written)
    for size in (0, 5, 100):
        (path.parent / "train-torn-000001.arrow").write_bytes(written[:size])
        assert rebuild.plan(root).rebuilt.num_entries == whole.num_entries


@on_sqlite
def test_checkpoints_whose_entries_are_lost_come_back_from_their_own_files(small: SmallRun) -> None:
    small.advance(3)
    end_sessions(small)
    before = essence_of(small.run.index)
    root = lose_index(small.run)
    for _ in range(3):
        damage_entries(root, EntryKind.CHECKPOINT)
    with pytest.raises(CorruptPackError, match="--lossy"):
        rebuild.rebuild(root)
    done = rebuild.rebuild(root, lossy=True)
    assert done.rebuilt.num_checkpoints == 3
    assert done.rebuilt.positions == {"main/trainer": (3, 3)}
    run = open_run(root)
    assert [c[:-1] for c in essence_of(run.index)["checkpoints"]] == [c[:-1] for c in before["checkpoints"]]
    run.close()


@on_sqlite
def test_what_no_batches_lead_to_is_told_and_its_checkpoint_is_never_swept(small: SmallRun) -> None:
    small.advance(2)
    end_sessions(small)
    root = lose_index(small.run)
    damage_entries(root, EntryKind.PLAN)
    done = rebuild.rebuild(root, lossy=True)
    assert done.rebuilt.positions == {"main/trainer": (0, 0)}
    told = {(loss.what, loss.subject) for loss in done.rebuilt.losses}
    folders = sorted(str(p.relative_to(root)) for p in root.glob("checkpoints/c*"))
    assert {("batch", "step 2"), *(("checkpoint", folder) for folder in folders)} <= told
    with reopened(root) as again:
        run = with_storage(again.run, sweep_grace_s=0)
        matched = reconcile(run, accepts=True)
        assert [i.subject for i in matched.items if i.what == KEPT] == folders
        assert matched.done
        assert [i.subject for i in plan_sweep(run).items if i.what == KEPT] == folders
        with upkeep(run) as session:
            assert [i.subject for i in sweep(session).items if i.what == KEPT] == folders
    assert sorted(str(p.relative_to(root)) for p in root.glob("checkpoints/c*")) == folders


@pytest.mark.parametrize("kind", [EntryKind.SEGMENT, EntryKind.ADMISSION])
def test_a_rebuild_without_its_first_entries_is_refused_or_told(small: SmallRun, kind: EntryKind) -> None:
    small.advance(2)
    small.sample(2)
    end_sessions(small)
    root = lose_index(small.run)
    path, offset = damage_entries(root, kind)
    with pytest.raises(CorruptPackError, match=rf"{path.name} is damaged at byte {offset}"):
        rebuild.rebuild(root)
    done = rebuild.rebuild(root, lossy=True)
    told = " ".join(loss.message for loss in done.rebuilt.losses)
    assert "units that nothing admitted" in told
    assert done.rebuilt.positions == {"main/trainer": (2, 2)}
    run = open_run(root)
    run.close()


def test_a_branch_whose_beginning_is_lost_is_told(tmp_path: Path) -> None:
    with small_run(tmp_path, num_prompts=40, settings={"trainer.steps": "5"}) as small:
        small.advance(2)
        end_sessions(small)
        create_branch(small.run, checkpoint="1", name="second")
        root = small.run.root
    with reopened(root) as second:
        second.trainer()
        second.publish(1, content="of the branch")
        second.advance(1)
    lose_index(second.run)
    damage_entries(root, EntryKind.BRANCH)
    done = rebuild.rebuild(root, lossy=True)
    told = [loss for loss in done.rebuilt.losses if "how this branch began" in loss.message]
    assert {(loss.what, loss.subject) for loss in told} == {
        ("batch", "step 2"),
        ("checkpoint", "checkpoints/c000002-second.trainer-f1"),
    }


@on_sqlite
def test_a_restore_needs_no_journal_for_what_its_backup_knows(small: SmallRun) -> None:
    small.advance(1)
    end_sessions(small)
    own = backup(small.run).folder
    root = lose_index(small.run)
    path, _ = damage_entries(root, EntryKind.PLAN)
    done = restore(root, own)
    assert done.replayed is not None
    assert [loss.subject.endswith(path.name) for loss in done.replayed.losses] == [True]


# ---- missing packs, and what the commands say


def test_a_restore_tells_which_packs_are_missing_and_what_to_do(
    small: SmallRun, cli: Callable[..., Any]
) -> None:
    small.sample(4)
    end_sessions(small)
    own = backup(small.run).folder
    root = small.run.root
    (pack,) = packs_of(small.run, "trajectory")
    whole = (root / pack.path).read_bytes()
    small.run.close()
    words = ("index", "restore", root, "--from", own, "--replace", "--yes")
    done = cli(*words)
    assert (done.code, "nothing that should be there is missing" in done.out) == (0, True)
    assert f"next: strawflow storage reconcile {root}" in done.out
    for left in (None, whole[: len(whole) // 2]):
        (root / pack.path).unlink(missing_ok=True)
        if left is not None:
            (root / pack.path).write_bytes(left)
        told = cli(*words, "--json")
        assert told.code == CorruptPackError.exit_code
        assert pack.path in {loss["subject"] for loss in told.json["replayed"]["losses"]}
        shown = cli(*words)
        assert "nothing that should be there is missing" not in shown.out
        assert f"strawflow index quarantine {root} --yes" in shown.out
    matched = cli("storage", "reconcile", root)
    assert "--accept-missing --yes" in matched.out
    assert "bytes" not in matched.out.splitlines()[0]
    assert cli("storage", "reconcile", root, "--yes").code == ConflictError.exit_code
    run = open_run(root)
    assert [(i.what, i.subject) for i in reconcile(run).items] == [(MISSING, pack.path)]
    run.close()
    (root / pack.path).write_bytes(whole)
    assert cli("storage", "reconcile", root, "--yes").code == 0


def test_a_rebuild_names_the_next_command(tmp_path: Path, cli: Callable[..., Any]) -> None:
    with small_run(tmp_path) as small:
        small.advance(1)
    root = lose_index(small.run)
    done = cli("index", "rebuild", root, "--yes")
    assert done.code == 0
    assert f"next: strawflow storage reconcile {root}" in done.out
    assert "--yes allows sweeping again" in cli("storage", "reconcile", root).out


def test_branches_keep_the_time_they_were_made_at(tmp_path: Path) -> None:
    with small_run(tmp_path, num_prompts=40) as small:
        small.advance(1)
        end_sessions(small)
        create_branch(small.run, checkpoint="1", name="second")
        ended = clock.wall_time()
    root = lose_index(small.run)
    rebuild.rebuild(root)
    run = open_run(root)
    with run.index.read() as connection:
        made = branches.listed(connection)
    run.close()
    assert [b.branch_id for b in made] == ["main", "second"]
    assert made[0].created_at < made[1].created_at <= ended
