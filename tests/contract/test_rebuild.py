"""Rebuilding a lost index from the run's folder alone: what comes back, what is believed, what a rebuilt run goes on to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from strawflow.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptPackError,
    LeaseLostError,
    NotFoundError,
)
from strawflow.flow import admit, assemble, compact, consume, enqueue, history, rebuild, rescue, retain
from strawflow.flow import complete as completing
from strawflow.flow.branch import create_branch
from strawflow.flow.check import check
from strawflow.flow.index_place import SWEEP_BLOCKED
from strawflow.flow.run import CONFIG_FILE, INDEX_FILE, open_run, write_durably
from strawflow.flow.session import WorkerSession
from strawflow.index import leases, meta, units, weights
from strawflow.index import tables as t
from strawflow.index.consumers import Assignment
from strawflow.index.engine import now
from strawflow.prompts.source import PromptSource
from strawflow.states import UnitState, WeightState
from strawflow.store import Store
from strawflow.testing.damage import flip
from strawflow.testing.invariants import batch_digests, check_batches_unchanged, check_exactly_once
from strawflow.testing.runs import KEYS, SmallRun, made_up_result, prompt_lines, small_run
from strawflow.weights.verify import FORMAT, MANIFEST, describe_file
from tests.contract.backed_up import reopened
from tests.contract.backup_instants import Instants, chosen
from tests.contract.lost_index import all_ready_again, die, essence_of, lose_index, on_sqlite
from tests.contract.stored import end_sessions, kill_cli

WARM = {"warm_start.steps": "2", "warm_start.prompts_per_step": "4"}


@pytest.fixture
def small(tmp_path: Path, settings: dict[str, str]) -> Iterator[SmallRun]:
    with small_run(tmp_path, num_prompts=24, settings=settings) as made:
        yield made


def lost_and_rebuilt(small: SmallRun) -> SmallRun:
    """Kill everybody, lose the index, rebuild it, and return the run as its workers find it again."""
    die(small)
    root = lose_index(small.run)
    done = rebuild.rebuild(root)
    assert done.rebuilt.losses == []
    return SmallRun(open_run(root))


def finish(small: SmallRun, before: dict[int, str] | None = None) -> None:
    """Train what is left, check all that can be asked of a finished run, and that what was planned before stayed."""
    config = small.run.config
    small.trainer()
    assert small.resumption is not None
    for step in range(small.resumption.step + 1, config.total_steps + 1):
        small.sample()
        purpose = "demo" if step <= config.warm_start.steps else "train"
        batch = consume.batch_of_step(small.run, step) or small.plan(purpose=purpose)
        assert batch is not None
        assert batch.step == step
        small.train(step)
    small.sample()
    fates = check_exactly_once(small.run, finished=True)
    num_demos = config.warm_start.steps * config.warm_start.prompts_per_step
    wanted = num_demos + config.trainer.steps * config.rollout.prompts_per_step
    assert sum(outcome == "trained" for outcome in fates.values()) == wanted
    check_batches_unchanged(before or {}, small.run)
    assert check(small.run).findings == []


def test_priorities_keys_and_times_of_what_waits_come_back(small: SmallRun) -> None:
    small.sample()
    path = small.run.root.parent / "urgent.jsonl"
    path.write_text(prompt_lines(4, first=100), encoding="utf-8")
    request = enqueue.EnqueueRequest("urgent", "train", PromptSource(path), KEYS, priority=7)
    enqueue.enqueue(small.session("enqueue"), request)

    def more(count: int, *schedule: Any, of: SmallRun = small, dataset_id: str = admit.PROMPTS) -> None:
        planned = admit.Schedule(*schedule)
        admit.admit_more(of.session("rollout"), count=count, dataset_id=dataset_id, schedule=planned)

    more(2)
    more(1, 3, 2)
    more(1, 3, 1)
    more(1, None, 0, datetime.now(UTC) + timedelta(days=1))
    more(2, dataset_id="urgent")
    with small.run.index.read() as connection:
        first = units.listed(connection, small.run.branch, state=UnitState.READY)[0].unit_id
    with lost_and_rebuilt(small) as rebuilt:
        in_order = [first + 5, first + 6, first + 3, first + 2, first, first + 1]
        assert [grant.unit_id for grant in rebuilt.claim(100)] == in_order
        with rebuilt.run.index.read() as connection:
            waits_s = connection.execute(
                sa.select(t.units.c.not_before - now(connection)).where(t.units.c.unit_id == first + 4)
            ).scalar_one()
        assert 86_000 < waits_s <= 86_400
        more(1, of=rebuilt)
        more(1, of=rebuilt, dataset_id="urgent")
        assert [grant.unit_id for grant in rebuilt.claim(100)] == [first + 8, first + 7]


# ---- stages of a run: each is rebuilt, compared row by row, and taken to its end


def nothing_sampled(small: SmallRun) -> None:
    pass


def leases_out(small: SmallRun) -> None:
    small.advance(1)
    small.sample(2)
    small.claim(2)


def planned_ahead(small: SmallRun) -> None:
    small.advance(1)
    small.sample()
    small.plan()


def trained_without_checkpoint(small: SmallRun) -> None:
    small.advance(1)
    small.sample()
    small.plan()
    role, session = small.trainer(), small.session("train")
    consume.record_step(session, role, step=2, metrics={"loss": 0.25, "grad_norm": None})
    small.publish(2)


def a_group_dropped(small: SmallRun) -> None:
    small.sample(3)
    session, role = small.session("assemble"), small.assembler()
    first = assemble.offered(session, purpose="train", limit=1)[0]
    assemble.drop(session, role, [Assignment(first.epoch, first.unit_id, "dropped", "failed_members")])
    small.sample()
    small.plan()
    small.train(1)


def a_failed_group_dropped(small: SmallRun) -> None:
    for _ in range(small.run.config.rollout.max_attempts):
        (grant,) = small.claim(1)
        completing.fail(small.session("rollout"), grant.unit_id, fence=grant.fence, error="engine said no")
    assemble.drop_failed(small.session("assemble"), small.assembler(), purpose="train")
    small.advance(1)


def more_prompts(small: SmallRun) -> None:
    small.advance(1)
    path = small.run.root.parent / "more.jsonl"
    path.write_text(prompt_lines(5, first=100) + prompt_lines(2, first=0), encoding="utf-8")
    assert small.enqueue(path) == 5


def packs_recovered(small: SmallRun) -> None:
    small.advance(1)
    small.sample(2)
    die(small)
    with small.run.index.read() as connection:
        living = [s.session_id for s in rescue.sessions.listed(connection, live_only=True)]
    for session_id in living:
        rescue.declare_lost(small.run, session_id, reason="killed by the test")
    assert rescue.recover_packs(small.session("supervise")) > 0


STAGES = [
    nothing_sampled,
    leases_out,
    planned_ahead,
    trained_without_checkpoint,
    a_group_dropped,
    a_failed_group_dropped,
    more_prompts,
    packs_recovered,
]
ON_SERVER = [leases_out, a_group_dropped, packs_recovered]


@pytest.mark.parametrize(
    ("index_url", "stage"),
    [("sqlite", stage) for stage in STAGES] + [("postgresql", stage) for stage in ON_SERVER],
    indirect=["index_url"],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_rebuilt_index_is_the_lost_one_and_goes_on_to_the_end(
    small: SmallRun, stage: Callable[[SmallRun], None]
) -> None:
    stage(small)
    before, planned = all_ready_again(essence_of(small.run.index)), batch_digests(history.batches(small.run))
    with lost_and_rebuilt(small) as again:
        after = essence_of(again.run.index)
        assert {name for name in before if before[name] != after[name]} == set()
        assert check(again.run).findings == []
        finish(again, planned)


@on_sqlite
@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_run_in_its_warm_start_is_rebuilt(tmp_path: Path, settings: dict[str, str], num_steps: int) -> None:
    with small_run(tmp_path, settings={**settings, **WARM}) as small:
        path = tmp_path / "demonstrations.jsonl"
        path.write_text(prompt_lines(8, first=50), encoding="utf-8")
        small.enqueue(path, dataset="demonstrations", purpose="demo")
        small.publish(0, content="again")
        for step in range(1, num_steps + 1):
            small.sample()
            small.plan(purpose="demo" if step <= 2 else "train")
            small.train(step)
        small.sample(3)
        before = all_ready_again(essence_of(small.run.index))
        planned = batch_digests(history.batches(small.run))
        with lost_and_rebuilt(small) as again:
            after = essence_of(again.run.index)
            assert {name for name in before if before[name] != after[name]} == set()
            finish(again, planned)


def test_an_evaluation_under_way_is_rebuilt_and_bound_to_its_weights(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    with small_run(tmp_path, settings=settings) as small:
        path = tmp_path / "held_out.jsonl"
        path.write_text(prompt_lines(3, first=70), encoding="utf-8")
        small.enqueue(path, dataset="held_out", purpose="eval")
        small.advance(3)  # the last weights admit the evaluation
        assert small.sample(4, purposes=("eval",)) == 4
        before = all_ready_again(essence_of(small.run.index))
        assert sum(u[2] == "eval" for u in before["units"]) == 6
        with lost_and_rebuilt(small) as again:
            after = essence_of(again.run.index)
            assert {name for name in before if before[name] != after[name]} == set()
            assert again.sample(purposes=("eval",)) == 2
            check_exactly_once(again.run, finished=True)
            assert check(again.run).findings == []


@on_sqlite
def test_a_group_sent_back_is_offered_with_what_was_sampled_since_and_not_with_what_was_before(
    small: SmallRun,
) -> None:
    small.advance(1)
    small.sample()
    session, role = small.session("assemble"), small.assembler()
    stale = [u.unit_id for u in assemble.offered(session, purpose="train", limit=2)]
    assemble.requeue(session, role, stale, reason="stale")
    small.sample(1)
    with lost_and_rebuilt(small) as again:
        session = again.session("assemble")
        offered = {u.unit_id: u for u in assemble.offered(session, purpose="train", limit=100)}
        assert offered[stale[0]].fence == 2  # once, by its highest (fence, seq)
        assert stale[1] not in offered  # its old result is not taken again
        finish(again)


@on_sqlite
def test_parked_progress_is_taken_up_where_it_was_left(small: SmallRun) -> None:
    grants = small.claim(2)
    progress = [made_up_result(grant, small.serving() or "") for grant in grants]
    completing.park(small.session("rollout"), progress, submission_id="parked")
    with lost_and_rebuilt(small) as again:
        first, second, third = again.claim(3)
        assert [first.unit_id, second.unit_id] == [g.unit_id for g in grants]
        assert first.continuation is not None
        assert first.continuation.column("response_tokens").to_pylist() == [
            list(m.response_tokens) for m in progress[0].members
        ]
        assert third.continuation is None
        again.complete([first, second, third])
        finish(again)


# ---- trainers that died


def checkpoint_files(small: SmallRun, step: int) -> None:
    """Write a whole checkpoint as `SmallRun.train` does, and stop before anything tells the index of it."""
    role = small.trainer()
    folder = small.run.root / consume.checkpoint_path(role, step)
    folder.mkdir(parents=True)
    write_durably(folder / "state", str(step).encode())
    manifest = {
        "format": FORMAT,
        "files": {"state": describe_file(folder / "state")},
        "stands_for": {
            **consume.stands_for(small.run, role, step=step),
            "state_digest": f"{step:032x}",
        },
    }
    write_durably(folder / MANIFEST, json.dumps(manifest).encode())


@on_sqlite
def test_a_checkpoint_whose_transaction_never_came_is_believed_for_its_files(small: SmallRun) -> None:
    small.advance(1)
    small.sample()
    small.plan()
    checkpoint_files(small, 2)
    planned = batch_digests(history.batches(small.run))
    with lost_and_rebuilt(small) as again:
        again.trainer()
        assert again.resumption is not None
        assert again.resumption.step == 2
        finish(again, planned)


@on_sqlite
def test_a_checkpoint_of_a_trainer_that_a_later_one_did_not_go_on_from_is_not_believed(
    small: SmallRun,
) -> None:
    small.advance(1)
    small.sample()
    small.plan()
    checkpoint_files(small, 2)
    stranded = consume.checkpoint_path(small.trainer(), 2)
    die(small)
    lost_sessions(small)
    small.train(2)  # the next trainer goes on from step 1
    assert (small.run.root / stranded).is_dir()
    expected = consume.checkpoint_path(small.trainer(), 2)
    with lost_and_rebuilt(small) as again:
        again.trainer()
        assert again.resumption is not None
        assert again.resumption.checkpoint is not None
        assert again.resumption.checkpoint.path == expected
        finish(again)


def lost_sessions(small: SmallRun) -> None:
    with small.run.index.read() as connection:
        living = [s.session_id for s in rescue.sessions.listed(connection, live_only=True)]
    for session_id in living:
        rescue.declare_lost(small.run, session_id, reason="killed by the test")


@on_sqlite
@pytest.mark.parametrize("content", ["the same", "another"])
def test_weights_that_died_are_dead_again_unless_equal_ones_took_their_place(
    small: SmallRun, content: str
) -> None:
    small.advance(1)
    small.sample()
    small.plan()
    consume.record_step(small.session("train"), small.trainer(), step=2, metrics={})
    dead = small.publish(2, content="the same")
    die(small)
    lost_sessions(small)
    role = small.trainer()
    consume.record_step(small.session("train"), role, step=2, metrics={})
    alive = small.publish(2, content=content)
    before = all_ready_again(essence_of(small.run.index))
    with lost_and_rebuilt(small) as again, again.run.index.read() as connection:
        states = {v: found.state for v in (dead, alive) if (found := weights.find(connection, v)) is not None}
        assert states == {
            dead: WeightState.SUPERSEDED if content == "the same" else WeightState.DEAD,
            alive: WeightState.PUBLISHED,
        }
        assert essence_of(again.run.index)["weights"] == before["weights"]


@on_sqlite
def test_weights_whose_files_are_gone_have_a_row_without_files(small: SmallRun) -> None:
    small.advance(2)
    with small.run.index.read() as connection:
        newest = weights.newest(connection, small.run.branch)
    assert newest is not None
    shutil.rmtree(small.run.root / newest.path)
    die(small)
    root = lose_index(small.run)
    rebuild.rebuild(root)
    with reopened(root) as again:
        with again.run.index.read() as connection:
            assert not weights.has_files(connection, newest.version_id)
            older = weights.newest(connection, again.run.branch)
        assert older is not None
        assert older.step == newest.step - 1
        again.trainer()
        again.publish(newest.step, content="trained again")
        finish(again)


# ---- branches, consumers, retention, compaction


@pytest.mark.parametrize(
    ("index_url", "reuse"),
    [("sqlite", False), ("sqlite", True), ("postgresql", True)],
    indirect=["index_url"],
    ids=["pristine", "reusing", "reusing on PostgreSQL"],
)
def test_branches_are_rebuilt_with_what_they_took_up(
    tmp_path: Path, settings: dict[str, str], reuse: bool
) -> None:
    with small_run(tmp_path, num_prompts=40, settings={**settings, "trainer.steps": "5"}) as small:
        small.sample(1)
        first = assemble.offered(small.session("assemble"), purpose="train", limit=1)[0]
        assemble.drop(
            small.session("assemble"),
            small.assembler(),
            [Assignment(first.epoch, first.unit_id, "dropped", "failed_members")],
        )
        small.advance(2)
        small.sample()
        small.plan()
        end_sessions(small)
        create_branch(small.run, checkpoint="1", name="second", reuse_trajectories=reuse)
        root = small.run.root
        small.run.close()
        with SmallRun(open_run(root)) as second:
            second.trainer()
            second.publish(1, content="of the branch")
            second.advance(1)
            end_sessions(second)
            create_branch(second.run, checkpoint="2", name="third", reuse_trajectories=reuse)
            before = all_ready_again(essence_of(second.run.index))
            with lost_and_rebuilt(second) as again:
                assert again.run.branch == "third"
                after = essence_of(again.run.index)
                assert {name for name in before if before[name] != after[name]} == set()
                assert [b.branch_id for b in history.batches(again.run)] == ["main", "second"]
                again.trainer()
                again.publish(2, content="of the third")
                again.advance(1)
                check_exactly_once(again.run, finished=False)
                assert check(again.run).findings == []


def test_consumers_of_their_own_making_are_rebuilt_where_they_stood(small: SmallRun) -> None:
    small.sample()
    store = Store(small.run)
    with store.consumer("export") as export:
        first, second = export.next_batch(2), export.next_batch(3)
        assert first is not None
        assert second is not None
        export.advance(first.step)
        folder = export.checkpoint_folder(first.step)
        (folder / "mine").write_text("state of my own")
    with store.consumer("second", purposes=("demo", "train")) as mine:
        batch = mine.next_batch(2)
        assert batch is not None
        (mine.checkpoint_folder() / "mine").write_text("state of my own")
        mine.commit_checkpoint()
    store.close()
    small.run = open_run(small.run.root)
    before = all_ready_again(essence_of(small.run.index))
    with lost_and_rebuilt(small) as again:
        after = essence_of(again.run.index)
        assert {name for name in before if before[name] != after[name]} == set()
        with Store(again.run).consumer("export") as export:
            assert export.position == first.step
            repeated = export.next_batch(5)
            assert repeated is not None
            assert (repeated.step, repeated.digest) == (second.step, second.digest)
            assert repeated.rows.equals(second.rows)
        with Store(again.run).consumer("second") as mine:
            assert mine.position == batch.step
            assert mine.newest_checkpoint() is not None


@on_sqlite
def test_packs_that_were_compacted_are_found_by_their_checksums(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    with small_run(tmp_path, settings={**settings, "storage.sweep_grace_s": "0.001"}) as small:
        small.advance(2)
        end_sessions(small)
        with WorkerSession(small.run, "upkeep") as session:
            compact.compact(session, min_live=1.0)
        assert list(small.run.root.glob("packs/*/*compact*"))
        before = all_ready_again(essence_of(small.run.index))
        with lost_and_rebuilt(small) as again:
            after = essence_of(again.run.index)
            assert {name for name in before if before[name] != after[name]} == set()
            finish(again)


def test_what_had_left_for_the_history_stays_there(tmp_path: Path, settings: dict[str, str]) -> None:
    keeping = {"storage.keep_checkpoints": "1", "storage.keep_steps": "1", "trainer.steps": "4"}
    with small_run(tmp_path, num_prompts=24, settings={**settings, **keeping}) as small:
        small.advance(3)
        end_sessions(small)
        with WorkerSession(small.run, "upkeep") as session:
            retain.retain(session, retain.policy_of(small.run.config))
        before = all_ready_again(essence_of(small.run.index))
        assert any(t["name"].startswith("retired/") for t in before["tallies"])
        with lost_and_rebuilt(small) as again:
            after = essence_of(again.run.index)
            assert {name for name in before if before[name] != after[name]} == set()
            again.trainer()
            again.advance(1)
            assert check(again.run).findings == []


# ---- what is not believed


@on_sqlite
def test_results_that_do_not_match_their_checksums_are_generated_again(small: SmallRun) -> None:
    small.sample(3)
    end_sessions(small)  # the checksums are written down
    (pack,) = small.run.root.glob("packs/trajectory/*.arrow")
    with small.run.index.read() as connection:
        first = next(u for u in units.listed(connection, small.run.branch) if u.state == UnitState.COMPLETED)
        extent = assemble.packs.find_extents(connection, [first.extent_id or 0])[first.extent_id or 0]
    flip(pack, extent.offset + extent.length - 9)
    root = lose_index(small.run)
    done = rebuild.rebuild(root)
    assert [
        (loss.what, "checksum" in loss.message or "record batch" in loss.message)
        for loss in done.rebuilt.losses
    ] == [("extent", True)] or [loss.what for loss in done.rebuilt.losses] == ["message"]
    assert done.units == {"train ready": 8}
    with reopened(root) as again:
        finish(again)


@on_sqlite
@pytest.mark.parametrize("cut", [1, 100, 400])
def test_a_torn_pack_gives_all_before_the_tear(small: SmallRun, cut: int) -> None:
    small.sample(2)
    small.sample(2)
    die(small)
    (pack,) = small.run.root.glob("packs/trajectory/*.arrow")
    with pack.open("r+b") as file:
        file.truncate(pack.stat().st_size - cut)
    root = lose_index(small.run)
    done = rebuild.rebuild(root)
    assert done.units == {"train completed": 2, "train ready": 6}
    assert [loss.what for loss in done.rebuilt.losses] == ["message"]
    with reopened(root) as again:
        finish(again)


@on_sqlite
def test_packed_rows_that_are_damaged_are_quarantined_and_told(small: SmallRun) -> None:
    small.advance(1)
    end_sessions(small)
    (pack,) = small.run.root.glob("packs/batch/*.arrow")
    flip(pack, pack.stat().st_size // 2)
    whole = essence_of(small.run.index)
    root = lose_index(small.run)
    done = rebuild.rebuild(root)
    assert [loss.what for loss in done.rebuilt.losses if loss.what == "extent"] == ["extent"]
    with reopened(root) as again:
        assert essence_of(again.run.index)["fates"] == whole["fates"]
        (batch,) = history.batches(again.run)
        with pytest.raises(CorruptPackError, match="quarantine"):
            list(consume.read_batch(again.run, again.session("train").reader, batch))
        finish_without_reading(again)


def finish_without_reading(small: SmallRun) -> None:
    small.trainer()
    small.advance(2)


@on_sqlite
def test_a_hole_in_the_journal_is_refused_and_told_when_it_is_gone_over(small: SmallRun) -> None:
    small.advance(2)
    end_sessions(small)
    packs = sorted(small.run.root.glob("packs/journal/assemble-*.arrow"))
    assert len(packs) == 1
    packs[0].unlink()  # the plans
    root = lose_index(small.run)
    for verb in (rebuild.plan, rebuild.rebuild):
        with pytest.raises(CorruptPackError, match="no batches lead"):
            verb(root)
    assert small.run.index.dialect != "sqlite" or not (root / INDEX_FILE).exists()
    done = rebuild.rebuild(root, lossy=True)
    told = {(loss.what, loss.subject) for loss in done.rebuilt.losses}
    assert {what for what, _ in told} == {"journal", "checkpoint"}
    assert {subject for what, subject in told if what == "checkpoint"} == {
        f"checkpoints/c00000{step}-main.trainer-f1" for step in (1, 2)
    }
    assert done.rebuilt.positions == {"main/trainer": (0, 0)}
    assert done.units == {"train completed": 12}  # offered again, each once
    with reopened(root) as again:
        finish(again)


@on_sqlite
def test_a_damaged_entry_is_told(small: SmallRun) -> None:
    small.sample(1)
    end_sessions(small)
    (pack,) = small.run.root.glob("packs/journal/rollout-*.arrow")
    flip(pack, 0)
    root = lose_index(small.run)
    with pytest.raises(CorruptPackError, match=r"rollout-.*does not begin as an Arrow file.*--lossy"):
        rebuild.rebuild(root)
    done = rebuild.rebuild(root, lossy=True)
    assert [loss.what for loss in done.rebuilt.losses] == ["pack", "journal"]
    assert done.rebuilt.num_unverified == 1


# ---- how it is done


def test_a_plan_says_all_and_changes_nothing(small: SmallRun) -> None:
    small.advance(1)
    die(small)
    root = lose_index(small.run)
    before = sorted(root.rglob("*"))
    told = rebuild.plan(root)
    assert not told.done
    assert sorted(root.rglob("*")) == before
    done = rebuild.rebuild(root)
    assert (told.units, told.incarnation, told.rebuilt) == (done.units, done.incarnation, done.rebuilt)
    assert done.done


def test_rebuilding_twice_gives_equal_indexes(small: SmallRun) -> None:
    small.advance(2)
    small.sample(3)
    small.claim(1)
    die(small)
    essences, incarnations = [], []
    root = lose_index(small.run)
    for _ in range(3):
        incarnations.append(rebuild.rebuild(root).incarnation)
        run = open_run(root)
        essences.append(essence_of(run.index))
        lose_index(run)
    assert essences[0] == essences[1] == essences[2]
    assert incarnations == [1, 2, 3]


@on_sqlite
def test_an_index_that_is_there_is_not_rebuilt(small: SmallRun, tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match="still live"):
        rebuild.rebuild(small.run.root)
    end_sessions(small)
    for verb in (rebuild.plan, rebuild.rebuild):
        with pytest.raises(AlreadyExistsError, match="move it away first"):
            verb(small.run.root)
        with pytest.raises(NotFoundError, match="no run"):
            verb(tmp_path / "elsewhere")


@on_sqlite
def test_a_run_without_a_journal_is_refused(small: SmallRun) -> None:
    small.advance(1)
    end_sessions(small)
    shutil.rmtree(small.run.root / "packs" / "journal")
    root = lose_index(small.run)
    with pytest.raises(CorruptPackError, match="no journal"):
        rebuild.rebuild(root)


@on_sqlite
def test_a_worker_from_before_the_loss_is_refused_and_the_sweep_is_blocked(small: SmallRun) -> None:
    small.sample(2)
    old = [g.fence for g in small.claim(2)]
    assert max(old) < leases.FENCES_PER_INCARNATION
    zombie = small.sessions["rollout"].session_id
    with lost_and_rebuilt(small) as again:
        with again.run.index.begin() as connection, pytest.raises(LeaseLostError):
            rescue.sessions.require_live(connection, zombie)
        assert min(g.fence for g in again.claim(100)) > leases.FENCES_PER_INCARNATION
        assert again.trainer().fence > leases.FENCES_PER_INCARNATION
        with again.run.index.read() as connection:
            assert "rebuilt" in (meta.find(connection, SWEEP_BLOCKED) or "")


@pytest.mark.parametrize(
    "spread", [2, pytest.param(150, marks=[pytest.mark.long, pytest.mark.timeout(3600)], id="long")]
)
def test_a_rebuild_killed_at_any_instant_leaves_nothing_or_the_whole_index(
    small: SmallRun, instants: Instants, spread: int
) -> None:
    small.advance(1)
    small.sample(2)
    die(small)
    root = lose_index(small.run)
    words = ("index", "rebuild", root, "--yes")
    passed = instants.passed(*words)
    run = open_run(root)
    whole = essence_of(run.index)
    outcomes = set()
    for instant in chosen(passed, spread=spread):
        lose_index(run)
        for left in root.glob(".partial-*"):  # else clearing it up would be among the instants
            shutil.rmtree(left)
        instants.kill(*words, at=instant)
        try:
            run = open_run(root)
        except NotFoundError:
            outcomes.add("nothing")
            assert not list(root.glob(INDEX_FILE))
            continue
        outcomes.add("whole")
        assert essence_of(run.index) == whole
    assert outcomes == {"nothing", "whole"}
    lose_index(run)
    rebuild.rebuild(root)
    assert list(root.glob(".partial-*")) == []


def test_a_rebuild_killed_before_its_commit_leaves_no_index_and_the_next_one_is_whole(
    small: SmallRun,
) -> None:
    small.advance(1)
    small.sample(2)
    die(small)
    root = lose_index(small.run)
    kill_cli("index", "rebuild", root, "--yes", at="rebuild.before_commit")
    with pytest.raises(NotFoundError):
        open_run(root)
    rebuild.rebuild(root)
    with reopened(root) as again:
        assert check(again.run).findings == []


def test_a_damaged_index_file_is_kept_beside_the_rebuilt_one(tmp_path: Path) -> None:
    with small_run(tmp_path) as small:
        small.advance(1)
        root = small.run.root
    path = root / INDEX_FILE
    broken = b"\xff" * 5000
    path.write_bytes(broken)
    done = rebuild.rebuild(root)
    assert done.kept is not None
    assert done.kept.read_bytes() == broken
    with reopened(root) as again:
        finish(again)


def test_the_command_rehearses_and_rebuilds(tmp_path: Path, cli: Callable[..., Any]) -> None:
    with small_run(tmp_path) as small:
        small.advance(1)
        root = small.run.root
    (root / INDEX_FILE).unlink()
    assert "strawflow index rebuild" in cli("status", root).err
    told = cli("index", "rebuild", root)
    assert told.code == 0
    assert "would rebuild" in told.out
    assert not (root / INDEX_FILE).exists()
    done = cli("index", "rebuild", root, "--yes", "--json")
    assert (done.code, done.json["done"], done.json["incarnation"]) == (0, True, 1)
    assert done.json["rebuilt"]["num_batches"] == 1
    assert cli("index", "check", root).code == 0
    assert cli("index", "rebuild", root, "--yes").code == AlreadyExistsError.exit_code
    assert (root / CONFIG_FILE).exists()
