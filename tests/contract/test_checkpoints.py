"""Checkpoints: each consumer has its own, told by branch, consumer, fence and step; none is lost to a repetition or a race."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from strawflow import faults
from strawflow.errors import ConflictError, InvalidInputError, NotFoundError
from strawflow.flow import consume, history, rebuild
from strawflow.flow.branch import branches_of, create_branch
from strawflow.flow.check import check
from strawflow.flow.checkpoint_folder import seal_folder
from strawflow.flow.run import open_run
from strawflow.flow.sweep import sweep
from strawflow.ids import checkpoint_id
from strawflow.index import branches, checkpoints, consumers, retention, sessions
from strawflow.index.consumers import Role
from strawflow.store import Store
from strawflow.testing.postgres import PostgresServer
from strawflow.testing.runs import SmallRun, small_run
from strawflow.weights.verify import verify_checkpoint
from tests.contract.lost_index import all_ready_again, die, essence_of, lose_index
from tests.contract.stored import NO_GRACE, REPOSITORY, await_blocked, end_sessions, upkeep
from tests.contract.test_retention import retain

NAMES = ("export", "mine")


@pytest.fixture
def settings(index_url: str) -> dict[str, str]:
    return {
        **NO_GRACE,
        "lease.ttl_s": "3600",
        "lease.heartbeat_s": "3000",
        "trainer.steps": "5",
        **({"run.index_url": index_url} if index_url else {}),
    }


@pytest.fixture
def small(tmp_path: Path, settings: dict[str, str]) -> Iterator[SmallRun]:
    with small_run(tmp_path, settings=settings) as made:
        yield made


def committed_of(small: SmallRun, states: dict[str, str]) -> dict[str, str]:
    """Let each consumer commit a checkpoint of its step 1 with this state; returns their ids."""
    small.sample()
    made = {}
    with ExitStack() as opened:
        consumers_open = {name: opened.enter_context(Store(small.run).consumer(name)) for name in states}
        for name, consumer in consumers_open.items():
            assert consumer.next_batch(1) is not None
            (consumer.checkpoint_folder() / "state").write_text(states[name])
        for name, consumer in consumers_open.items():
            made[name] = consumer.commit_checkpoint()
    return made


def assert_each_has_its_own(small: SmallRun, states: dict[str, str]) -> None:
    for name, state in states.items():
        run = replace(small.run, consumer=name)
        (found,) = history.checkpoints(run)
        assert (found.consumer, found.step, found.fence) == (name, 1, 1)
        assert (run.root / found.path / "state").read_text() == state
        verify_checkpoint(run.root / found.path)
        with run.index.read() as connection:
            assert consumers.find(connection, run.branch, name).position == 1


@pytest.mark.parametrize("second", ["equal", "different"])
def test_two_consumers_commit_the_same_step_under_the_same_fence(small: SmallRun, second: str) -> None:
    states = {"export": "equal", "mine": second}
    made = committed_of(small, states)
    assert len(set(made.values())) == 2
    assert_each_has_its_own(small, states)
    with Store(small.run).consumer("mine") as mine:
        assert mine.position == 1
        newest = mine.newest_checkpoint()
        assert newest is not None
        assert newest[1].name == made["mine"]
    assert check(small.run).findings == []


@pytest.mark.parametrize("second", ["equal", "different"])
def test_a_rebuild_finds_the_checkpoints_of_all_consumers(small: SmallRun, second: str) -> None:
    states = {"export": "equal", "mine": second}
    committed_of(small, states)
    before = all_ready_again(essence_of(small.run.index))
    die(small)
    root = lose_index(small.run)
    assert rebuild.rebuild(root).rebuilt.losses == []
    with SmallRun(open_run(root)) as again:
        after = essence_of(again.run.index)
        assert {name for name in before if before[name] != after[name]} == set()
        assert_each_has_its_own(again, states)


def test_a_sweep_and_a_retention_leave_every_consumer_its_newest_checkpoint(small: SmallRun) -> None:
    states = {"export": "a", "mine": "b"}
    committed_of(small, states)
    end_sessions(small)
    retain(small.run, keep_checkpoints=1)
    with upkeep(small.run) as session:
        assert [i for i in sweep(session).items if i.what == "folder"] == []
    assert_each_has_its_own(small, states)


def test_a_checkpoint_repeated_after_a_lost_reply_is_the_same_one(small: SmallRun) -> None:
    small.sample()
    small.plan()
    session, role = small.session("train"), small.trainer()
    digest = small.write_checkpoint(1)
    made = consume.commit_checkpoint(session, role, step=1, previous_step=0, state_digest=digest)
    assert consume.commit_checkpoint(session, role, step=1, previous_step=0, state_digest=digest) == made
    with pytest.raises(ConflictError, match="other content"):
        consume.commit_checkpoint(session, role, step=1, previous_step=0, state_digest="another")
    assert history.checkpoints(small.run) == [made]


def test_what_one_consumer_committed_is_not_told_to_another_as_its_own(small: SmallRun) -> None:
    committed_of(small, {"export": "equal"})
    with Store(small.run).consumer("mine") as mine:
        assert mine.next_batch(1) is not None
        (mine.checkpoint_folder() / "state").write_text("equal")
        mine.commit_checkpoint()
        assert mine.position == 1
    with small.run.index.read() as connection:
        assert consumers.find(connection, "main", "mine").position == 1


def folders(small: SmallRun) -> list[str]:
    return sorted(p.name for p in (small.run.root / "checkpoints").iterdir())


def test_a_step_that_has_its_checkpoint_is_not_written_again(small: SmallRun) -> None:
    small.sample()
    with Store(small.run).consumer("mine") as mine:
        assert mine.next_batch(1) is not None
        (mine.checkpoint_folder() / "state").write_text("first")
        made = mine.commit_checkpoint()
        with pytest.raises(ConflictError, match=f"{made} already"):
            mine.checkpoint_folder()
        assert mine.commit_checkpoint() == made
    with Store(small.run).consumer("mine") as mine:
        with pytest.raises(ConflictError, match=f"{made} already"):
            mine.checkpoint_folder(1)
        assert folders(small) == [made]
    assert_each_has_its_own(small, {"mine": "first"})


def test_files_of_a_step_that_an_earlier_session_committed_are_not_committed(small: SmallRun) -> None:
    (made,) = committed_of(small, {"mine": "first"}).values()
    with Store(small.run).consumer("mine") as mine:
        # As one wrote them that was handed the folder before the other's commit.
        folder = small.run.root / "checkpoints" / checkpoint_id("main", "mine", fence=2, step=1)
        folder.mkdir()
        (folder / "state").write_text("second")
        with pytest.raises(ConflictError, match="earlier session"):
            mine.commit_checkpoint(1)
        assert folders(small) == sorted([made, folder.name])
    assert_each_has_its_own(small, {"mine": "first"})


# ---- names


def test_a_name_that_cannot_be_part_of_a_folder_name_is_refused_and_leaves_no_session(
    small: SmallRun,
) -> None:
    end_sessions(small)
    for name in ("", ".", "..", "a/b", "../up", "Export", "a b", "a.b", "-f1", "x" * 41):
        with pytest.raises(InvalidInputError, match="consumer name"):
            Store(small.run).consumer(name)
    with small.run.index.read() as connection:
        assert sessions.listed(connection, live_only=True) == []
        assert [c.consumer for c in consumers.listed(connection, "main")] == ["trainer"]


def test_a_consumer_that_an_earlier_program_let_be_called_anything_goes_on(small: SmallRun) -> None:
    name = "My Export.1"
    with small.run.index.begin() as connection:
        consumers.ensure(connection, "main", name)
    committed_of(small, {name: "state"})
    assert_each_has_its_own(small, {name: "state"})
    assert [p.parent for p in small.run.root.glob("checkpoints/*")] == [small.run.root / "checkpoints"]


def test_no_two_lines_share_an_id() -> None:
    names = ["a", "a-b", "b", "b-f1", "a-f1", "a.b", "a/b", "a%2Fb", "f1"]
    made = [
        checkpoint_id(branch, consumer, fence=fence, step=1)
        for branch in ("a", "a-b", "a-f1", "f1")
        for consumer in names
        for fence in (1, 11)
    ]
    assert len(set(made)) == len(made)
    assert not any("/" in name for name in made)


# ---- checkpoints that an earlier program made


def committed_by_an_earlier_program(small: SmallRun, step: int) -> str:
    """Go through a step as a program did whose ids named no consumer; returns the id."""

    def without_consumer(role: Role, step: int) -> str:
        return f"c{step:06d}-{role.branch_id}-f{role.fence}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consume, "_checkpoint_id", without_consumer)
        small.advance(1)
        return without_consumer(small.trainer(), step)


def test_a_checkpoint_of_an_earlier_program_is_resumed_from_kept_and_rebuilt(small: SmallRun) -> None:
    old = committed_by_an_earlier_program(small, 1)
    end_sessions(small)
    with upkeep(small.run) as session:
        assert [i for i in sweep(session).items if i.what == "folder"] == []
    before = all_ready_again(essence_of(small.run.index))
    root = lose_index(small.run)
    assert rebuild.rebuild(root).rebuilt.losses == []
    with SmallRun(open_run(root)) as again:
        after = essence_of(again.run.index)
        assert {name for name in before if before[name] != after[name]} == set()
        again.trainer()
        assert again.resumption is not None
        assert again.resumption.checkpoint is not None
        assert again.resumption.checkpoint.checkpoint_id == old
        again.advance(2)
        ids = [c.checkpoint_id for c in history.checkpoints(again.run)]
        assert ids[0] == old
        assert [i.partition("-f")[0] for i in ids[1:]] == ["c000002-main.trainer", "c000003-main.trainer"]
        end_sessions(again)
        create_branch(again.run, checkpoint=old, name="second")
        retain(again.run, keep_checkpoints=1)
        kept = {p.name for p in root.glob("checkpoints/*")}
        assert kept == {old, ids[2]}
        assert check(again.run).findings == []


def test_files_of_an_earlier_program_whose_transaction_never_came_are_believed_under_their_name(
    small: SmallRun,
) -> None:
    small.advance(1)
    small.sample()
    small.plan()
    role = small.trainer()
    old = f"c000002-main-f{role.fence}"
    folder = small.run.root / "checkpoints" / old
    folder.mkdir()
    (folder / "state").write_bytes(b"2")
    seal_folder(folder, stands_for=consume.stands_for(small.run, role, step=2))
    die(small)
    root = lose_index(small.run)
    rebuild.rebuild(root)
    with SmallRun(open_run(root)) as again:
        assert [(c.checkpoint_id, c.step) for c in history.checkpoints(again.run)][1:] == [(old, 2)]


def test_a_checkpoint_whose_folder_was_put_back_as_a_copy_keeps_its_id(small: SmallRun) -> None:
    small.advance(1)
    (made,) = history.checkpoints(small.run)
    (small.run.root / made.path).rename(small.run.root / "checkpoints/from the tape")
    die(small)
    root = lose_index(small.run)
    rebuild.rebuild(root)
    with SmallRun(open_run(root)) as again:
        assert history.checkpoints(again.run) == [replace(made, path="checkpoints/from the tape")]
        create_branch(again.run, checkpoint=made.checkpoint_id, name="second")


# ---- branches


def test_a_branch_does_not_start_from_another_consumers_checkpoint(small: SmallRun) -> None:
    (made,) = committed_of(small, {"export": "state"}).values()
    end_sessions(small)
    with pytest.raises(InvalidInputError, match="consumer 'export'"):
        create_branch(small.run, checkpoint=made, name="second")
    assert open_run(small.run.root).branch == "main"


def test_a_branch_that_finds_its_checkpoint_given_up_meanwhile_is_not_made(small: SmallRun) -> None:
    small.advance(2)
    end_sessions(small)
    (first, _) = history.checkpoints(small.run)
    words = [sys.executable, "-m", "strawflow.cli.main", "branch", "create", small.run.root, "--from", "1"]
    starting = subprocess.Popen(
        [*map(str, words), "second"],
        cwd=REPOSITORY,
        env={**os.environ, faults.VARIABLE: "journal.after_entry:1:stop"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert os.WIFSTOPPED(os.waitpid(starting.pid, os.WUNTRACED)[1])  # before its transaction
        retain(small.run, keep_checkpoints=1)
        assert not (small.run.root / first.path).exists()
        starting.send_signal(signal.SIGCONT)
        _, told = starting.communicate(timeout=60)
    finally:
        starting.kill()
        starting.wait()
    assert "were removed by retention" in told
    assert starting.returncode not in (0, -signal.SIGKILL)
    assert [b.branch_id for b, _, _ in branches_of(small.run)] == ["main"]
    assert check(small.run).findings == []


@pytest.mark.parametrize("first", ["branch", "retention"])
def test_of_a_branch_and_a_retention_the_second_waits_and_loses_on_postgresql(
    tmp_path: Path, postgres_server: PostgresServer, first: str
) -> None:
    settings = {**NO_GRACE, "run.index_url": postgres_server.new_url()}
    with small_run(tmp_path, settings=settings) as small:
        small.advance(2)
        run, (start, _) = small.run, history.checkpoints(small.run)

        end_sessions(small)

        def remove() -> bool:
            with run.index.begin() as connection:
                return retention.mark_checkpoint_removed(connection, start.checkpoint_id)

        def start_branch() -> bool:
            return bool(create_branch(run, checkpoint=start.checkpoint_id, name="second"))

        with ThreadPoolExecutor(1) as pool:
            with run.index.begin() as connection:
                if first == "branch":
                    assert checkpoints.hold_files(connection, start.checkpoint_id)
                    branches.create(
                        connection,
                        "second",
                        parent_id="main",
                        from_checkpoint_id=start.checkpoint_id,
                        from_step=start.step,
                    )
                else:
                    assert retention.mark_checkpoint_removed(connection, start.checkpoint_id)
                second = pool.submit(remove if first == "branch" else start_branch)
                await_blocked(postgres_server, run)
                assert not second.done()
            if first == "branch":
                assert second.result(timeout=30) is False
            else:
                with pytest.raises(NotFoundError, match="removed by retention"):
                    second.result(timeout=30)
