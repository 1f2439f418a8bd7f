"""The journal: entries precede their transactions, those of refused ones are harmless, and a restore goes on from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strawflow import faults
from strawflow.errors import ConflictError, LeaseLostError
from strawflow.faults import InjectedFaultError
from strawflow.flow import admit, assemble, consume, history, journal, rebuild, rescue
from strawflow.flow import complete as completing
from strawflow.flow.backup import backup
from strawflow.flow.branch import create_branch
from strawflow.flow.check import check
from strawflow.flow.journal import Entry, EntryKind, StoredEntry
from strawflow.flow.restore import restore
from strawflow.flow.run import open_run
from strawflow.index import events, packs, sessions, units
from strawflow.index.consumers import Assignment
from strawflow.packs.places import open_place
from strawflow.packs.scan import list_packs, open_scan
from strawflow.store import Store
from strawflow.testing.invariants import batch_digests, check_batches_unchanged
from strawflow.testing.runs import SmallRun, made_up_plan, prompt_lines, small_run
from tests.contract.lost_index import all_ready_again, copied, die, essence_of, lose_index
from tests.contract.stored import end_sessions
from tests.contract.test_rebuild import finish, lost_sessions

NO_HEARTBEAT = {"lease.ttl_s": "3600", "lease.heartbeat_s": "3000"}
"""A heartbeat writes checksums into the journal: on a slow machine it would take the fault that is meant for the change
under test; and a zombie's would come to an index that is lost or half rebuilt."""


@pytest.fixture
def small(tmp_path: Path, settings: dict[str, str]) -> Iterator[SmallRun]:
    with small_run(tmp_path, num_prompts=24, settings={**settings, **NO_HEARTBEAT}) as made:
        yield made


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[SmallRun]:
    """A run on SQLite, for what does not depend on the database: which entries are believed."""
    with small_run(tmp_path, num_prompts=24, settings=NO_HEARTBEAT) as made:
        yield made


def entries_of(root: Path) -> list[StoredEntry]:
    """Return every journal entry under a run's folder."""
    place = open_place(root)
    found: list[StoredEntry] = []
    for path in list_packs(place):
        if path.startswith("packs/journal/"):
            for extent, rows in open_scan(place, path).messages():
                entries, num_damaged = journal.from_rows(rows, path=path, offset=extent.offset)
                assert num_damaged == 0
                found += entries
    return found


def kinds(root: Path) -> list[str]:
    return [entry.kind.value for entry in entries_of(root)]


def test_every_change_is_written_before_it_is_true_and_named_by_it(embedded: SmallRun) -> None:
    embedded.advance(1)
    with Store(embedded.run).consumer("export") as export:
        batch = export.next_batch(1)
        assert batch is not None
        export.advance()
    embedded.sample()
    first = assemble.offered(embedded.session("assemble"), purpose="train", limit=1)[0]
    assemble.drop(
        embedded.session("assemble"),
        embedded.assembler(),
        [Assignment(first.epoch, first.unit_id, "dropped", "why")],
    )
    end_sessions(embedded)
    create_branch(embedded.run, checkpoint="1", name="second")
    elsewhere = {EntryKind.VOID, EntryKind.INCARNATION, EntryKind.WITHDRAWN}
    elsewhere |= {
        EntryKind.REQUEUE,
        EntryKind.REOPEN,
        EntryKind.RETRY,
        EntryKind.RELEASE,
    }  # test_returned_units
    assert set(kinds(embedded.run.root)) == {kind.value for kind in set(EntryKind) - elsewhere}
    with embedded.run.index.read() as connection:
        named = sum(
            e.num_rows
            for p in packs.listed(connection)
            if p.kind == "journal"
            for e in packs.extents_of_pack(connection, p.pack_id)
        )
    assert named == len(entries_of(embedded.run.root))


def test_an_entry_that_was_changed_is_not_read() -> None:
    entry = Entry(EntryKind.STEP, "main", {"consumer": "trainer", "step": 1, "fence": 2, "metrics": {}})
    rows = journal.to_rows([entry], incarnation=3, at_ms=4)
    (found,), num_damaged = journal.from_rows(rows, path="p", offset=8)
    assert (found.kind, found.incarnation, found.body["fence"], num_damaged) == (EntryKind.STEP, 3, 2, 0)
    (row,) = rows.to_pylist()
    body = json.dumps({**json.loads(row["body"]), "step": 2}, sort_keys=True, separators=(",", ":"))
    for changed in (
        {"entry": "drop"},
        {"entry": "no such"},
        {"branch_id": "other"},
        {"incarnation": 4},
        {"at_ms": 5},
        {"body": body},
        {"body": row["body"][:-9]},
        {"body": "[]"},
    ):
        other = pa.RecordBatch.from_pylist([{**row, **changed}], schema=rows.schema)
        assert journal.from_rows(other, path="p", offset=8) == ([], 1), changed


def test_a_refused_change_is_withdrawn(embedded: SmallRun) -> None:
    embedded.sample()
    session, role = embedded.session("assemble"), embedded.assembler()
    groups = assemble.offered(session, purpose="train", limit=4)
    rows = assemble.read_trajectories(session, groups)
    assemble.plan_batch(session, role, made_up_plan(1, groups, rows))
    with pytest.raises(ConflictError):
        assemble.plan_batch(session, role, made_up_plan(1, groups[:3], rows))  # the step is planned
    refused = [e for e in entries_of(embedded.run.root) if e.kind is EntryKind.PLAN][1]
    (withdrawn,) = [e for e in entries_of(embedded.run.root) if e.kind is EntryKind.WITHDRAWN]
    assert withdrawn.body["entries"] == [refused.entry_id]


def test_admissions_at_once_leave_one_line_of_cursors(small: SmallRun) -> None:
    with ThreadPoolExecutor(6) as threads:
        counts = list(
            threads.map(lambda n: admit.admit_more(small.session("train"), count=1 + n % 3), range(12))
        )
    assert sum(counts) == sum(1 + n % 3 for n in range(12))
    with small.run.index.read() as connection:
        ids = [u.unit_id for u in units.listed(connection, "main", limit=1000)]
    assert len(ids) == 8 + sum(counts)
    before = all_ready_again(essence_of(small.run.index))
    die(small)
    root = lose_index(small.run)
    rebuild.rebuild(root)
    run = open_run(root)
    after = essence_of(run.index)
    run.close()
    assert {name for name in before if before[name] != after[name]} == set()


# ---- entries whose transaction never came: killed after the entry was durable

KILL = "journal.after_entry"


def killed_in(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object], *, nth: int = 1) -> None:
    """Make a change that ends, as by a kill, when its journal entry is durable and before its transaction."""
    faults.reset()
    monkeypatch.setenv("STRAWFLOW_FAULT", f"{KILL}:{nth}:raise")
    with pytest.raises(InjectedFaultError):
        change()
    monkeypatch.delenv("STRAWFLOW_FAULT")


def admission(small: SmallRun) -> None:
    admit.admit_more(small.session("other"), count=3)


def segment(small: SmallRun) -> None:
    path = small.run.root.parent / "other.jsonl"
    path.write_text(prompt_lines(3, first=200), encoding="utf-8")
    small.enqueue(path)


def plan(small: SmallRun) -> None:
    small.sample()
    small.plan()


def drop(small: SmallRun) -> None:
    small.sample()
    session = small.session("assemble")
    first = assemble.offered(session, purpose="train", limit=1)[0]
    assemble.drop(
        session, small.assembler(), [Assignment(first.epoch, first.unit_id, "dropped", "failed_members")]
    )


def weights(small: SmallRun) -> None:
    small.publish(1, content="never published")


def checkpoint(small: SmallRun) -> None:
    small.sample()
    small.plan()
    small.train(2)


def branch(small: SmallRun) -> None:
    create_branch(small.run, checkpoint="1", name="other")


CHANGES = {
    # what is killed, and at which of its entries
    "admission": (admission, 1),
    "segment": (segment, 1),
    "plan": (plan, 1),
    "drop": (drop, 1),
    "weights": (weights, 1),
    "step": (checkpoint, 2),
    "checkpoint": (checkpoint, 3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_entry_that_others_contradict_is_not_believed(
    embedded: SmallRun, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each worker is killed before its transaction; others then make changes that cannot stand beside it."""
    change, nth = CHANGES[name]
    embedded.advance(1)
    killed_in(monkeypatch, lambda: change(embedded), nth=nth)
    die(embedded)
    lost_sessions(embedded)
    # Whoever comes next goes another way from the same point.
    path = embedded.run.root.parent / "next.jsonl"
    path.write_text(prompt_lines(2, first=300), encoding="utf-8")
    embedded.enqueue(path)
    admit.admit_more(embedded.session("rollout"), count=2)
    embedded.sample()
    assert embedded.plan() is not None
    planned = history.batches(embedded.run)[-1].step
    embedded.trainer()
    if planned == 3:
        embedded.train(2)
    embedded.train(planned)
    before = all_ready_again(essence_of(embedded.run.index))
    die(embedded)
    root = lose_index(embedded.run)
    rebuild.rebuild(root)
    with SmallRun(open_run(root)) as again:
        after = essence_of(again.run.index)
        changed = {part for part in before if before[part] != after[part]}
        # A file that nobody was told of is enqueued behind all others; weights that never were are dead.
        # A step that was measured and measured again has both records, of which the newer trainer's counts.
        allowed = {"segment": {"segments", "prompts"}, "weights": {"weights"}, "step": {"steps"}}.get(
            name, set()
        )
        assert changed <= allowed
        assert check(again.run).findings == []


@pytest.mark.parametrize("name", [*CHANGES, "branch"])
def test_an_entry_that_nothing_contradicts_is_taken_for_true_and_does_no_harm(
    embedded: SmallRun, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    change, nth = CHANGES.get(name, (branch, 1))
    embedded.advance(1)
    planned = batch_digests(history.batches(embedded.run))
    if name == "branch":
        end_sessions(embedded)
    killed_in(monkeypatch, lambda: change(embedded), nth=nth)
    die(embedded)
    root = lose_index(embedded.run)
    rebuild.rebuild(root)
    with SmallRun(open_run(root)) as again:
        assert again.run.branch == ("other" if name == "branch" else "main")
        assert check(again.run).findings == []
        if name == "branch":
            again.trainer()
            again.publish(1, content="of the branch")
            again.advance(2)
        elif name == "admission":  # more was admitted than is trained: nobody can tell that nobody saw it
            again.trainer()
            again.advance(2)
        else:
            finish(again, planned)
        assert check(again.run).findings == []


def test_a_zombie_that_planned_is_outvoted_by_who_took_over(
    small: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.sample()
    killed_in(monkeypatch, small.plan)  # stopped, not dead: it goes on later
    zombie, role = small.sessions.pop("assemble"), small.roles.pop("assemble")
    rescue.declare_lost(small.run, zombie.session_id, reason="stopped by the test")
    session = small.session("assemble")
    groups = assemble.offered(session, purpose="train", limit=8)[2:6]
    rows = assemble.read_trajectories(session, groups)
    planned = assemble.plan_batch(session, small.assembler(), made_up_plan(1, groups, rows))
    with pytest.raises(LeaseLostError):
        assemble.plan_batch(zombie, role, made_up_plan(2, groups[:1], rows))
    die(small)
    root = lose_index(small.run)
    rebuild.rebuild(root)
    with SmallRun(open_run(root)) as again:
        assert batch_digests(history.batches(again.run)) == {1: planned.digest}
        finish(again)


# ---- random lives


STEPS = ("sample", "claim", "plan", "train", "admit", "drop", "requeue", "die", "enqueue")


def lived(small: SmallRun, steps: list[str], *, killed_at: int, kill: bool) -> None:
    """Go through steps as far as the run allows them; one of them may be killed after its journal entry."""
    for number, step in enumerate(steps):
        try:
            if kill and number == killed_at:
                faults.reset()
                with pytest.MonkeyPatch.context() as patch:
                    patch.setenv("STRAWFLOW_FAULT", f"{KILL}:1:raise")
                    one_step(small, step, number)
            else:
                one_step(small, step, number)
        except InjectedFaultError:
            die(small)
            lost_sessions(small)


def one_step(small: SmallRun, step: str, number: int) -> None:
    if step == "sample":
        small.sample(3)
    elif step == "claim":
        small.claim(1)
    elif step == "plan":
        small.plan()
    elif step == "train":
        small.trainer()
        assert small.resumption is not None
        done = max([small.resumption.step, *(c.step for c in history.checkpoints(small.run))])
        if consume.batch_of_step(small.run, done + 1) is not None:
            small.train(done + 1)
    elif step == "admit":
        admit.admit_due(small.session("train"))
    elif step == "drop":
        for unit in assemble.offered(small.session("assemble"), purpose="train", limit=1):
            dropped = [Assignment(unit.epoch, unit.unit_id, "dropped", "failed_members")]
            assemble.drop(small.session("assemble"), small.assembler(), dropped)
    elif step == "requeue":
        found = assemble.offered(small.session("assemble"), purpose="train", limit=1)
        assemble.requeue(
            small.session("assemble"), small.assembler(), [u.unit_id for u in found], reason="stale"
        )
    elif step == "die":
        die(small)
        lost_sessions(small)
    else:
        path = small.run.root.parent / f"more-{number}.jsonl"
        path.write_text(prompt_lines(2, first=1000 + 10 * number), encoding="utf-8")
        small.enqueue(path)


LIVES = given(
    steps=st.lists(st.sampled_from(STEPS), min_size=2, max_size=14),
    killed_at=st.integers(0, 13),
    kill=st.booleans(),
)


@settings(max_examples=5, deadline=None, derandomize=True)
@LIVES
def test_whatever_a_run_lived_through_it_is_rebuilt_and_ends_well(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str], killed_at: int, kill: bool
) -> None:
    live_lose_and_finish(tmp_path_factory.mktemp("life"), steps, killed_at=killed_at, kill=kill)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@LIVES
def test_whatever_many_runs_lived_through_they_are_rebuilt_and_end_well(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str], killed_at: int, kill: bool
) -> None:
    live_lose_and_finish(tmp_path_factory.mktemp("life"), steps, killed_at=killed_at, kill=kill)


def live_lose_and_finish(folder: Path, steps: list[str], *, killed_at: int, kill: bool) -> None:
    small = small_run(folder, num_prompts=24, settings=NO_HEARTBEAT)
    lived(small, steps, killed_at=killed_at, kill=kill)
    planned = batch_digests(history.batches(small.run))
    trained = [c.step for c in history.checkpoints(small.run)]
    die(small)
    root = lose_index(small.run)
    done = rebuild.rebuild(root)
    assert done.rebuilt.losses == []
    with SmallRun(open_run(root)) as again:
        check_batches_unchanged(planned, again.run)
        assert {c.step for c in history.checkpoints(again.run)} >= set(trained)
        finish(again, planned)


# ---- restores


def test_a_restore_brings_back_what_came_after_the_backup(small: SmallRun, tmp_path: Path) -> None:
    small.advance(1)
    small.claim(1)
    made = backup(small.run)
    small.sample(2)
    die(small)
    lost_sessions(small)
    rescue.recover_packs(small.session("supervise"))  # extents move, packs of before the backup are gone
    small.sample()
    small.plan()
    small.train(2)
    path = tmp_path / "later.jsonl"
    path.write_text(prompt_lines(3, first=500), encoding="utf-8")
    small.enqueue(path)
    small.sample(3)
    before = all_ready_again(essence_of(small.run.index))
    planned = batch_digests(history.batches(small.run))
    die(small)
    root = lose_index(small.run)
    done = restore(root, made.folder)
    assert done.replayed is not None
    assert done.replayed.losses == []
    assert (done.replayed.num_segments, done.replayed.num_batches) == (1, 1)
    assert done.replayed.num_moved > 0
    with SmallRun(open_run(root)) as again:
        after = essence_of(again.run.index)
        assert {name for name in before if before[name] != after[name]} == set()
        finish(again, planned)


def test_a_restore_keeps_what_no_pack_holds_and_is_the_same_when_repeated(small: SmallRun) -> None:
    (grant,) = small.claim(1)
    completing.fail(small.session("rollout"), grant.unit_id, fence=grant.fence, error="engine said no")
    made = backup(small.run)
    small.advance(1)
    die(small)
    lost_sessions(small)
    restore(small.run.root, made.folder, may_replace=True)
    first = essence_of(small.run.index)
    restore(small.run.root, made.folder, may_replace=True)
    assert essence_of(small.run.index) == first
    with small.run.index.read() as connection:
        names = events.count_by_name(connection)
        living = sessions.listed(connection, live_only=True)
    assert names["unit.attempt_failed"] == 1
    assert living == []
    small.sessions.clear()
    with SmallRun(open_run(small.run.root)) as again:
        finish(again)


def test_a_restored_copy_of_the_folder_goes_its_own_way(tmp_path: Path) -> None:
    with small_run(tmp_path) as small:
        small.advance(1)
        made = backup(small.run)
        small.advance(1)
        root = small.run.root
    twin = copied(root, tmp_path / "twin")
    restore(twin, twin / made.folder.relative_to(root), may_replace=True)
    for folder in (root, twin):
        with SmallRun(open_run(folder)) as again:
            finish(again)
