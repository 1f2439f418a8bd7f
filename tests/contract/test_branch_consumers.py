"""A branch is made from one consumer's checkpoint: every other consumer goes on from a place that the line knows of.

On a line no consumer gets a prompt twice or not at all, and none is shown a checkpoint ahead of its position.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from strawflow.consumer import Batch, Consumer
from strawflow.flow import admit, rebuild
from strawflow.flow.backup import backup
from strawflow.flow.branch import NewBranch, create_branch, on_branch
from strawflow.flow.compact import compact
from strawflow.flow.restore import restore
from strawflow.flow.retain import policy_of, retain
from strawflow.flow.run import Run, open_run
from strawflow.flow.sweep import sweep
from strawflow.index import batches, branches, checkpoints, consumers, datasets, packs, units
from strawflow.packs.reader import PackReader
from strawflow.store import Store
from strawflow.testing.runs import SmallRun, small_run
from tests.contract.lost_index import essence_of, lose_index, on_sqlite
from tests.contract.stored import assert_sound, end_sessions, upkeep, with_storage

SETTINGS = {"lease.heartbeat_s": "3000", "lease.ttl_s": "3600", "rollout.prompts_per_step": "4"}
NUM_PROMPTS = 12

Prompt = tuple[int, int]
"""(epoch, place in the file)."""


@pytest.fixture
def small(tmp_path: Path, settings: dict[str, str]) -> Iterator[SmallRun]:
    """A run of twelve prompts, the first eight of them admitted and answered, and nobody at work."""
    with small_run(tmp_path, num_prompts=NUM_PROMPTS, settings={**settings, **SETTINGS}) as made:
        made.sample()
        end_sessions(made)
        yield made


def prompts_in(run: Run, batch: Batch) -> list[Prompt]:
    """Return which prompts a batch holds, whichever unit they were sampled for."""
    with run.index.read() as connection:
        found = [
            units.find(connection, unit_id) for unit_id in sorted(set(batch.rows["unit_id"].to_pylist()))
        ]
    return [(u.epoch, u.position) for u in found]


def commit(consumer: Consumer) -> None:
    (consumer.checkpoint_folder() / "state").write_text(str(consumer.position))
    consumer.commit_checkpoint()


def read(run: Run, name: str, *sizes: int, commits: bool = True, advances: bool = False) -> list[Prompt]:
    """Be a consumer for batches of these sizes; returns the prompts they held."""
    found: list[Prompt] = []
    with Store(run).consumer(name) as consumer:
        for size in sizes:
            batch = consumer.next_batch(size, at_least=1)
            assert batch is not None, f"nothing waits for {name}"
            found += prompts_in(run, batch)
            if commits:
                commit(consumer)
            elif advances:
                consumer.advance()
    return found


def read_all(run: Run, name: str) -> list[Prompt]:
    """Be a consumer until nothing waits for it."""
    found: list[Prompt] = []
    with Store(run).consumer(name) as consumer:
        while batch := consumer.next_batch(3, at_least=1):
            found += prompts_in(run, batch)
            consumer.advance()
    return found


def standing(run: Run, name: str) -> tuple[int, int | None]:
    """Return a consumer's position and the step of the newest checkpoint that it is shown."""
    with Store(run).consumer(name) as consumer:
        newest = consumer.newest_checkpoint()
        return consumer.position, None if newest is None else newest[0]


def fork(
    run: Run, checkpoint: str = "1", *, name: str = "alt", consumer: str = "trainer"
) -> tuple[Run, NewBranch]:
    made = create_branch(replace(run, consumer=consumer), checkpoint=checkpoint, name=name)
    return replace(run, branch=name), made


def answer_rest(run: Run) -> None:
    """Admit what is left of the prompts once and answer whatever is ready."""
    rest = SmallRun(run)
    with run.index.read() as connection:
        left = NUM_PROMPTS - datasets.cursor(connection, run.branch, admit.PROMPTS).num_admitted
    assert admit.admit_more(rest.session("admit"), count=left) == left
    while rest.sample():
        pass
    end_sessions(rest)


def answer_ready(run: Run) -> None:
    """Answer what is admitted."""
    ready = SmallRun(run)
    ready.sample()
    end_sessions(ready)


def assert_all_sound(run: Run) -> None:
    """Check every branch as every one of its consumers."""
    for branch_id in branch_ids(run):
        for name in consumers_of(on_branch(run, branch_id)):
            assert_sound(replace(run, branch=branch_id, consumer=name))


def branch_ids(run: Run) -> list[str]:
    with run.index.read() as connection:
        return [b.branch_id for b in branches.listed(connection)]


def consumers_of(run: Run) -> list[str]:
    with run.index.read() as connection:
        return [c.consumer for c in consumers.listed(connection, run.branch)]


def assert_each_prompt_once(*parts: list[Prompt]) -> None:
    everything = [prompt for part in parts for prompt in part]
    assert sorted(everything) == [(0, place) for place in range(NUM_PROMPTS)]


def test_a_consumer_ahead_of_the_fork_goes_on_from_its_own_newest_checkpoint_on_the_line(
    small: SmallRun,
) -> None:
    trained = read(small.run, "trainer", 4)
    kept = read(small.run, "second", 4)
    read(small.run, "second", 2, 2)
    read(small.run, "trainer", 4)
    assert standing(small.run, "second") == (3, 3)
    run, made = fork(small.run)
    assert (made.positions, made.num_pristine, made.num_again) == ({"second": 1, "trainer": 1}, 4, 0)
    assert standing(run, "second") == (1, 1)
    assert standing(on_branch(run, "main"), "second") == (3, 3)
    assert_all_sound(run)
    answer_rest(run)
    assert_each_prompt_once(kept, read(run, "second", 3, 5))
    assert standing(run, "second") == (3, 3)
    assert_each_prompt_once(trained, read_all(run, "trainer"))
    assert_all_sound(run)


def test_what_the_line_holds_and_a_consumer_read_only_later_is_offered_to_it_alone(small: SmallRun) -> None:
    trained = read(small.run, "trainer", 4)
    kept = read(small.run, "second", 3)
    read(small.run, "second", 3)  # one group of the line, two that are abandoned
    run, made = fork(small.run)
    assert (made.positions["second"], made.num_again) == (1, 1)
    again = read(run, "second", 4)
    assert again == [prompt for prompt in trained if prompt not in kept]
    answer_rest(run)
    assert_each_prompt_once(kept, again, read_all(run, "second"))
    assert_each_prompt_once(trained, read_all(run, "trainer"))
    assert_all_sound(run)


def test_a_consumer_behind_the_fork_and_one_that_read_nothing_miss_nothing(small: SmallRun) -> None:
    read(small.run, "late", 1, commits=False)  # handed out, and never committed
    trained = read(small.run, "trainer", 4)
    kept = read(small.run, "second", 2)
    run, made = fork(small.run)
    assert made.positions == {"late": 0, "second": 1, "trainer": 1}
    assert standing(run, "late") == (0, None)
    answer_rest(run)
    assert_each_prompt_once(kept, read_all(run, "second"))
    assert_each_prompt_once(read_all(run, "late"))
    assert_each_prompt_once(trained, read_all(run, "trainer"))
    assert_all_sound(run)


def test_a_consumer_without_checkpoints_goes_on_after_its_last_batch_on_the_line(small: SmallRun) -> None:
    trained = read(small.run, "trainer", 4)
    kept = read(small.run, "export", 2, 2, commits=False, advances=True)
    read(small.run, "export", 4, commits=False, advances=True)
    run, made = fork(small.run)
    assert made.positions["export"] == 2
    answer_rest(run)
    assert sorted(kept) == sorted(trained)
    assert_each_prompt_once(kept, read_all(run, "export"))
    assert_all_sound(run)


@on_sqlite
def test_no_position_lies_between_two_checkpoints(small: SmallRun) -> None:
    read(small.run, "trainer", 4)
    with Store(small.run).consumer("second") as second:
        for is_committed in (True, False, True):  # the third holds an abandoned group
            assert second.next_batch(2 if second.position == 0 else 1) is not None
            if is_committed:
                commit(second)
        assert second.next_batch(4) is not None
        commit(second)
    with Store(small.run).consumer("sparse") as sparse:
        assert sparse.next_batch(2) is not None
        assert sparse.next_batch(4) is not None
        commit(sparse)
    run, made = fork(small.run)
    assert made.positions == {"second": 3, "sparse": 0, "trainer": 1}
    assert standing(run, "second") == (3, 3)
    assert standing(run, "sparse") == (0, None)
    assert_all_sound(run)


def test_a_branch_from_another_consumers_checkpoint_holds_the_weights_of_where_the_trainer_goes_on(
    small: SmallRun,
) -> None:
    trained = read(small.run, "trainer", 2)
    kept = read(small.run, "second", 4)
    with Store(small.run).consumer("trainer") as trainer:
        publish(small.run, trainer, 1)
        for step in (2, 3):
            assert trainer.next_batch(3) is not None
            commit(trainer)
            publish(small.run, trainer, step)
    run, made = fork(small.run, consumer="second")
    assert made.positions == {"second": 1, "trainer": 1}
    assert (SmallRun(run).serving() or "").startswith("v000001-main")
    answer_rest(run)
    assert_each_prompt_once(trained, read_all(run, "trainer"))
    assert_each_prompt_once(kept, read_all(run, "second"))
    assert_all_sound(run)


def publish(run: Run, trainer: Consumer, step: int) -> None:
    file = run.root / "made.safetensors"
    save_file({"made_up": np.array([step], np.uint8)}, file)
    trainer.publish_weights(step, file)


def test_a_branch_of_a_branch_loses_and_repeats_no_prompt_for_anybody(small: SmallRun) -> None:
    trained = read(small.run, "trainer", 4)
    kept = read(small.run, "second", 3)
    read(small.run, "second", 3)
    run, _ = fork(small.run)
    kept_there = read(run, "second", 1)  # the group that the branch took up for it alone
    run_of_second, made = fork(run, "2", name="deeper", consumer="second")
    assert made.positions == {"second": 2, "trainer": 1}
    answer_rest(run_of_second)
    assert_each_prompt_once(kept, kept_there, read_all(run_of_second, "second"))
    assert_each_prompt_once(trained, read_all(run_of_second, "trainer"))
    back, made = fork(run, "1", name="beside", consumer="second")
    assert (made.parent_id, made.positions) == ("main", {"second": 1, "trainer": 0})
    answer_rest(back)
    assert_each_prompt_once(kept, read_all(back, "second"))
    assert_each_prompt_once(read_all(back, "trainer"))
    assert_all_sound(run)


def test_a_rebuilt_index_knows_where_every_consumer_goes_on(small: SmallRun) -> None:
    read(small.run, "trainer", 4)
    read(small.run, "second", 3)
    read(small.run, "second", 3)
    run, _ = fork(small.run)
    read(run, "second", 1)
    expected = essence_of(run.index)
    root = lose_index(run)
    assert rebuild.rebuild(root).rebuilt.losses == []
    with closing(open_run(root)) as again:
        assert essence_of(again.index) == expected
        assert standing(again, "second") == (2, 2)
        assert_all_sound(again)


@on_sqlite
def test_a_backup_from_before_a_branch_is_brought_on_to_where_everybody_was_on_it(small: SmallRun) -> None:
    read(small.run, "trainer", 4)
    read(small.run, "second", 3)
    made = backup(small.run)
    read(small.run, "second", 3)
    run, _ = fork(small.run)
    read(run, "second", 1)
    expected = essence_of(run.index)
    run.close()
    restore(run.root, made.folder, may_replace=True)
    with closing(open_run(run.root)) as again:
        assert essence_of(again.index) == expected
        assert standing(again, "second") == (2, 2)
        assert_all_sound(again)


def test_retention_keeps_the_checkpoint_that_another_consumer_goes_on_from(small: SmallRun) -> None:
    read(small.run, "trainer", 4)
    read(small.run, "second", 4)
    run, made = fork(small.run)
    assert made.positions["second"] == 1
    main = on_branch(run, "main")
    read(main, "second", 2, 2)
    with upkeep(with_storage(run, keep_checkpoints=1, keep_steps=0)) as session:
        retain(session, policy_of(session.run.config))
    with run.index.read() as connection:
        made_there = checkpoints.listed(connection, "main", "second")
    assert [(c.step, c.files_removed) for c in made_there] == [(1, False), (2, True), (3, False)]
    assert standing(run, "second") == (1, 1)


@on_sqlite
def test_what_left_the_index_is_looked_up_in_the_history(tmp_path: Path, settings: dict[str, str]) -> None:
    with small_run(tmp_path, num_prompts=NUM_PROMPTS, settings={**settings, **SETTINGS}) as small:
        early, late = [small.claim(4) for _ in range(2)]
        small.complete(early)
        end_sessions(small, "enqueue", "train")
        read(small.run, "trainer", 4)
        kept = read(small.run, "second", 4)
        answer_rest(small.run)  # the next four, while the second four are still worked on
        read(small.run, "trainer", 4)
        read(small.run, "second", 4)
        small.complete(late)
        read(small.run, "trainer", 4)
        read(small.run, "second", 4)
        end_sessions(small)
        stored = with_storage(small.run, keep_checkpoints=1, keep_checkpoints_every=1, keep_steps=1)
        with upkeep(stored) as session:
            retain(session, policy_of(stored.config))
        with small.run.index.read() as connection:
            assert [u.unit_id for u in units.listed(connection, "main")] == [5, 6, 7, 8]
        run, made = fork(small.run)
        assert (made.positions["second"], made.num_lost) == (1, 0)
        answer_rest(run)
        with Store(run).consumer("second") as second:
            batch = second.next_batch(8)
            assert batch is not None
            assert sorted(prompts_in(run, batch)) == sorted(
                {(0, place) for place in range(NUM_PROMPTS)} - set(kept)
            )


@pytest.mark.parametrize("gone", ["from the index", "swept", "compacted away"])
def test_a_consumer_that_is_set_back_reads_again_what_is_in_the_history_while_its_trajectories_lie_in_packs(
    tmp_path: Path, settings: dict[str, str], gone: str
) -> None:
    with small_run(tmp_path, num_prompts=NUM_PROMPTS, settings={**settings, **SETTINGS}) as small:
        small.sample(4)
        small.sample()
        end_sessions(small)
        read(small.run, "trainer", 4, 4)
        # The last group of step 2 is abandoned.
        kept = read(small.run, "second", 2, 3, 3, commits=False, advances=True)[:2]
        answer_rest(small.run)
        read(small.run, "trainer", 4)
        read(small.run, "second", 4, commits=False, advances=True)
        before = backup(small.run)
        stored = with_storage(
            small.run, keep_checkpoints=1, keep_checkpoints_every=1, keep_steps=1, sweep_grace_s=0
        )
        with upkeep(stored) as session:
            retain(session, policy_of(stored.config))
        after = backup(small.run)
        with upkeep(stored) as session:
            if gone != "from the index":
                sweep(session)
            if gone == "compacted away":
                compact(session, min_live=1.0)
                sweep(session)
        with small.run.index.read() as connection:
            assert units.listed(connection, "main")[0].unit_id == 5
        run, made = fork(small.run)
        are_lost = gone == "compacted away"
        assert (made.positions["second"], made.num_again, made.num_lost) == (
            (1, 0, 2) if are_lost else (1, 2, 0)
        )
        if are_lost:
            return
        answer_rest(run)
        read(run, "second", 1, commits=False, advances=True)
        expected = but_for_batches(run)
        root = lose_index(run)
        assert rebuild.rebuild(root).rebuilt.losses == []
        for made_before in (None, before, after):
            if made_before is not None:
                restore(root, made_before.folder, may_replace=True)
            with closing(open_run(root)) as again:
                assert but_for_batches(again) == expected
        with closing(open_run(root)) as again:
            with Store(again).consumer("second") as second:
                while second.next_batch(3, at_least=1):
                    second.advance()
            assert_each_prompt_once(kept, planned_on(again, "second"))
            assert_all_sound(again)


def but_for_batches(run: Run) -> dict[str, Any]:
    """Return the essence of an index but for the states of batches: one given up whose units stay is trained in a rebuild."""
    return {name: value for name, value in essence_of(run.index).items() if name != "batches"}


def planned_on(run: Run, name: str) -> list[Prompt]:
    """Return which prompts a consumer's batches on the branch itself hold."""
    with run.index.read() as connection:
        own = [b for b in batches.listed(connection, run.branch, name) if b.branch_id == run.branch]
        found = [u for b in own for u in units.of_batch(connection, b.batch_id)]
    return [(u.epoch, u.position) for u in found]


# ---- a consumer first made on a branch


def test_a_consumer_first_made_on_a_branch_gets_its_whole_line_once_in_the_usual_order(
    small: SmallRun,
) -> None:
    trained = read(small.run, "trainer", 4)
    kept = read(small.run, "second", 3)
    read(small.run, "second", 3)
    run, _ = fork(small.run)  # takes one settled group up for the second
    answer_rest(run)
    with Store(run).consumer("late") as late:
        first, rest = late.next_batch(2), late.next_batch(10)
        assert first is not None
        assert rest is not None
        assert late.next_batch(1) is None
    with run.index.read() as connection:
        own = [units.find(connection, u) for u in units_planned(run, "late")]
    assert [(u.version_step, u.unit_id) for u in own] == sorted((u.version_step, u.unit_id) for u in own)
    assert_each_prompt_once(prompts_in(run, first), prompts_in(run, rest))
    assert set(trained) <= {*prompts_in(run, first), *prompts_in(run, rest)}
    assert_each_prompt_once(kept, read_all(run, "second"))
    assert_each_prompt_once(trained, read_all(run, "trainer"))
    assert_each_prompt_once(read_all(run, "later"))
    assert_all_sound(run)


def units_planned(run: Run, name: str) -> list[int]:
    """Return the units of a consumer's batches in the order of their plans."""
    with run.index.read() as connection:
        found = batches.listed(connection, run.branch, name)
        plans = packs.find_extents(connection, [b.plan_extent_id for b in found])
    with closing(PackReader(run.root)) as reader:
        rows = [reader.read(plans[b.plan_extent_id]).column("unit_id").to_pylist() for b in found]
    return list(dict.fromkeys(unit_id for own in rows for unit_id in own))


def test_a_late_consumer_of_a_branch_of_a_branch_gets_what_every_ancestor_settled(small: SmallRun) -> None:
    trained = read(small.run, "trainer", 3)
    run, _ = fork(small.run)
    assert read(run, "early", 2, commits=False, advances=True) == trained[:2]
    answer_ready(run)
    more = read(run, "trainer", 2)
    read(run, "trainer", 1)  # abandoned by the next branch
    deeper, made = fork(run, "2", name="deeper")
    assert made.positions == {"early": 1, "trainer": 2}
    answer_rest(deeper)
    assert_each_prompt_once(read_all(deeper, "late"))
    assert_each_prompt_once(trained[:2], read_all(deeper, "early"))
    assert_each_prompt_once(trained, more, read_all(deeper, "trainer"))
    beside, _ = fork(
        deeper, "1", name="beside"
    )  # a checkpoint from before the early one's groups were taken up
    answer_rest(beside)
    assert_each_prompt_once(read_all(beside, "early"))
    assert_all_sound(beside)


def test_a_branch_from_before_a_late_consumer_was_made_loses_nothing_for_it(small: SmallRun) -> None:
    trained = read(small.run, "trainer", 4)
    run, _ = fork(small.run)
    answer_rest(run)
    more = read(run, "trainer", 2)
    kept = read(run, "late", 2)
    assert kept == more
    deeper, made = fork(run, "2", name="deeper")
    assert made.positions == {"late": 1, "trainer": 2}
    assert made.num_again == len(trained)
    answer_rest(deeper)
    assert_each_prompt_once(kept, read_all(deeper, "late"))
    assert_each_prompt_once(trained, more, read_all(deeper, "trainer"))
    assert_all_sound(deeper)


def test_a_rebuilt_index_knows_what_a_late_consumer_was_given(small: SmallRun) -> None:
    read(small.run, "trainer", 4)
    made = backup(small.run)
    run, _ = fork(small.run)
    answer_rest(run)
    kept = read(run, "late", 3)
    assert read(run, "export", 1, commits=False, advances=True) == kept[:1]
    expected = essence_of(run.index)
    root = lose_index(run)
    assert rebuild.rebuild(root).rebuilt.losses == []
    with closing(open_run(root)) as again:
        assert essence_of(again.index) == expected
        assert_all_sound(again)
    restore(root, made.folder, may_replace=True)
    with closing(open_run(root)) as again:
        assert essence_of(again.index) == expected
        assert_each_prompt_once(kept, read_all(again, "late"))
        assert_all_sound(again)
