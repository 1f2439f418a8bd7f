"""Evaluation during a run: when, of what, what it comes to, and that a trainer never sees any of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from strawflow.config import load_config
from strawflow.errors import InvalidInputError
from strawflow.flow import admit, by_reference, eval_consumer, evaluation, rebuild, rescue
from strawflow.flow import complete as completing
from strawflow.flow.admit_evaluation import is_evaluated, segments_told
from strawflow.flow.branch import create_branch
from strawflow.flow.check import check
from strawflow.flow.claim import Grant, PromptShelf, claim
from strawflow.flow.enqueue import EnqueueRequest, enqueue
from strawflow.flow.evaluation import EVAL
from strawflow.flow.publish_weights import version_to_serve
from strawflow.flow.quarantine import quarantine_damage
from strawflow.flow.run import Run, create_run, open_run
from strawflow.ids import new_id
from strawflow.index import batches, checkpoints, consumers, datasets, units
from strawflow.index import tables as t
from strawflow.prompts.source import PromptSource
from strawflow.states import UnitState
from strawflow.store import Store
from strawflow.testing.invariants import check_exactly_once
from strawflow.testing.runs import KEYS, SmallRun, made_up_result, prompt_lines, small_config
from tests.contract.lost_index import die, essence_of, lose_index, on_sqlite
from tests.contract.stored import REPOSITORY, damage, end_sessions

YAML = """
defaults: {greedy: false}
datasets:
  - {name: sums, samples_per_prompt: 4, temperature: 0.5}
  - {name: easy, samples_per_prompt: 0, greedy: true}
"""


@pytest.fixture
def settings(tmp_path: Path, settings: dict[str, str]) -> dict[str, str]:
    path = tmp_path / "evals.yaml"
    path.write_text(YAML)
    own = {"eval.datasets": str(path), "eval.interval": "2", "trainer.steps": "5", "eval.greedy": "false"}
    return {**settings, **own}


@pytest.fixture
def small(tmp_path: Path, settings: dict[str, str]) -> Iterator[SmallRun]:
    with evaluated_run(tmp_path, settings) as made:
        yield made


def evaluated_run(tmp_path: Path, settings: dict[str, str]) -> SmallRun:
    """Create a run with two held-out prompts, three sums and two easy ones, and publish the initial weights."""
    made = SmallRun(create_run(tmp_path / "evaluated", small_config(settings)))
    for number, (name, num_prompts) in enumerate(
        {"prompts": 32, "held_out": 2, "sums": 3, "easy": 2}.items()
    ):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(prompt_lines(num_prompts, first=100 * number), encoding="utf-8")
        made.enqueue(path, dataset=name, purpose="train" if name == "prompts" else EVAL)
    made.publish(0)
    return made


NUM_EVAL_UNITS = 2 + 3 + 2
SAMPLED, SUMS, EASY = "eval_sampled", "eval:sums", "eval:easy:greedy"


def eval_units(run: Run) -> list[units.Unit]:
    with run.index.read() as connection:
        return units.listed(connection, run.branch, purpose=EVAL, limit=1000)


def told(run: Run) -> list[tuple[int, str]]:
    return [(result.step, result.profile) for result in evaluation.recorded(run)]


# ---- when, and of what


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({}, [2, 9]),
        ({"eval.interval": "3"}, [2, 5, 8, 9]),
        ({"eval.interval": "7"}, [2, 9]),
        ({"eval.interval": "2", "eval.skip_first": "true"}, [4, 6, 8, 9]),
        ({"eval.skip_first": "true"}, [9]),
    ],
)
def test_evaluated_are_the_first_the_last_and_those_at_the_interval(
    given: dict[str, str], steps: list[int]
) -> None:
    config = load_config(flags={"warm_start.steps": "2", "trainer.steps": "7", **given})
    assert [step for step in range(12) if is_evaluated(config, step)] == steps


def test_every_dataset_is_asked_in_its_own_way_and_bound_to_the_weights(small: SmallRun) -> None:
    grants = small.claim(100, purposes=[EVAL])
    with small.run.index.read() as connection:
        version = units.oldest_required_version(connection, "main")
    asked = [(g.unit.profile, g.profile.num_samples, g.profile.temperature) for g in grants]
    assert asked == [(SAMPLED, 4, 1.0)] * 2 + [(SUMS, 4, 0.5)] * 3 + [(EASY, 1, 0.0)] * 2
    assert {g.unit.required_version_id for g in grants} == {version}


# ---- what it comes to


def test_results_are_recorded_once_an_evaluation_is_whole(small: SmallRun) -> None:
    assert eval_consumer.collect(small.run) == 0
    grants = small.claim(100, purposes=[EVAL])
    small.complete(grants[:-1])
    assert eval_consumer.collect(small.run) == 0, "one prompt is not answered yet"
    assert evaluation.results(small.run) == []
    small.complete(grants[-1:])
    measured = evaluation.results(small.run)
    assert evaluation.recorded(small.run) == []
    assert eval_consumer.collect(small.run) == 1
    assert eval_consumer.collect(small.run) == 0
    assert evaluation.recorded(small.run) == evaluation.results(small.run) == measured
    by_profile = {result.profile: result for result in measured}
    sums = by_profile[SUMS]
    # Members 0 to 3 of each prompt have score 0, 1, 0, 1 and 2, 3, 4, 5 tokens.
    assert (sums.step, sums.dataset, sums.is_greedy) == (0, "sums", False)
    assert (sums.num_prompts, sums.num_answers, sums.num_passed, sums.num_failed) == (3, 12, 6, 0)
    assert (sums.num_tokens, sums.mean_reward, sums.accuracy) == (3 * 14, 0.5, 0.5)
    assert sums.pass_at == pytest.approx({1: 1 / 2, 2: 5 / 6, 4: 1.0})
    easy = by_profile[EASY]
    assert (easy.num_answers, easy.num_passed, easy.pass_at, easy.is_greedy) == (2, 0, {1: 0.0}, True)
    with small.run.index.read() as connection:
        (batch,) = batches.listed(connection, "main", EVAL)
    assert (batch.num_units, batch.num_sequences) == (NUM_EVAL_UNITS, 2 * 4 + 3 * 4 + 2)


def test_the_rows_of_an_evaluation_are_those_that_the_consumer_eval_reads(small: SmallRun) -> None:
    small.sample(purposes=[EVAL])
    eval_consumer.collect(small.run)
    with Store(open_run(small.run.root)) as store, store.consumer(EVAL, purposes=(EVAL,)) as reader:
        assert (reader.position, reader.next_batch()) == (1, None)
    with small.run.index.read() as connection:
        batch = batches.require(connection, "main", EVAL, 1)
    rows = by_reference.rows_of(small.run, small.session("look").reader, batch)
    assert set(rows.column("purpose").to_pylist()) == {EVAL}
    assert rows.num_rows == batch.num_sequences


def test_failed_answers_and_prompts_that_were_given_up_pass_nothing_and_are_told(small: SmallRun) -> None:
    grants = small.claim(100, purposes=[EVAL])
    version = small.serving() or ""
    given_up = next(g for g in grants if g.unit.profile == SUMS)
    half = next(g for g in grants if g.unit.profile == SUMS and g is not given_up)
    whole = [g for g in grants if g not in (given_up, half)]
    small.complete(whole)
    result = made_up_result(half, version, failed=[1])  # one of the two that would have passed
    completing.complete(small.session("rollout"), [result], submission_id=new_id("submission"))
    for _ in range(small.run.config.rollout.max_attempts):
        fence = given_up.fence
        completing.fail(small.session("rollout"), given_up.unit_id, fence=fence, error="told to fail")
        make_claimable(small.run)
        given_up = next(iter(small.claim(1, purposes=[EVAL])), given_up)
    assert eval_consumer.collect(small.run) == 1
    sums = next(r for r in evaluation.recorded(small.run) if r.profile == SUMS)
    assert (sums.num_prompts, sums.num_answers, sums.num_passed, sums.num_failed) == (3, 12, 3, 5)
    assert sums.mean_reward == pytest.approx(3 / 7)
    assert sums.pass_at == pytest.approx({1: (0 + 1 / 4 + 1 / 2) / 3, 2: (0 + 1 / 2 + 5 / 6) / 3, 4: 2 / 3})
    with small.run.index.read() as connection:
        fates = consumers.count_outcomes(connection, "main", EVAL)
    assert fates == {("trained", None): NUM_EVAL_UNITS - 1, ("dropped", "unit_failed"): 1}


def make_claimable(run: Run) -> None:
    """End the delay before a failed unit is offered again."""
    with run.index.begin() as connection:
        connection.execute(sa.update(t.units).where(t.units.c.not_before.is_not(None)).values(not_before=0.0))


def test_each_evaluated_step_has_results_of_its_own(small: SmallRun) -> None:
    for _ in range(5):
        small.advance(1)
        eval_consumer.collect(small.run)
    small.sample()
    assert eval_consumer.collect(small.run) == 1
    assert told(small.run) == [(step, profile) for step in (0, 2, 4, 5) for profile in (SAMPLED, SUMS, EASY)]
    versions = {(r.step, r.version_id) for r in evaluation.recorded(small.run)}
    assert sorted(version[:7] for _, version in versions) == ["v000000", "v000002", "v000004", "v000005"]
    check_exactly_once(small.run, finished=True)
    assert check(small.run).findings == []


def test_evaluations_that_nobody_read_for_long_are_read_one_by_one(small: SmallRun) -> None:
    small.advance(4)
    small.sample()
    assert eval_consumer.collect(small.run) == 3
    assert sorted({step for step, _ in told(small.run)}) == [0, 2, 4]
    with small.run.index.read() as connection:
        assert [b.num_units for b in batches.listed(connection, "main", EVAL)] == [NUM_EVAL_UNITS] * 3


@on_sqlite
@pytest.mark.parametrize("point", ["eval.after_plan", "eval.after_record"])
def test_a_reader_killed_in_the_middle_counts_an_evaluation_once(small: SmallRun, point: str) -> None:
    small.sample(purposes=[EVAL])
    measured = evaluation.results(small.run)
    end_sessions(small)
    reader = "import sys; from pathlib import Path; from strawflow.flow import eval_consumer, run; "
    reader += "eval_consumer.collect(run.open_run(Path(sys.argv[1])))"
    killed = subprocess.run(
        [sys.executable, "-c", reader, str(small.run.root)],
        env={**os.environ, "STRAWFLOW_FAULT": point},
        cwd=REPOSITORY,
        timeout=60,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    rescue.declare_dead_processes_lost(small.run)
    assert eval_consumer.collect(small.run) == 1
    assert evaluation.recorded(small.run) == measured
    with small.run.index.read() as connection:
        assert consumers.find(connection, "main", EVAL).position == 1
        assert len(checkpoints.steps_recorded(connection, "main", EVAL)) == 1
    rescue.recover_packs(small.session("recover"))
    assert check(small.run).findings == []


# ---- never mixed into training


def offered_purposes(run: Run) -> dict[str, set[str]]:
    """Return what is offered to each consumer of the run's branch."""
    o, u = t.offers.c, t.units.c
    offers = sa.select(o.consumer, u.purpose).join(t.units, u.unit_id == o.unit_id)
    with run.index.read() as connection:
        found: dict[str, set[str]] = {c.consumer: set() for c in consumers.listed(connection, run.branch)}
        for consumer, purpose in connection.execute(offers.where(o.branch_id == run.branch)):
            found[consumer].add(purpose)
    return found


def test_no_evaluation_is_ever_offered_to_a_trainer(small: SmallRun) -> None:
    small.advance(2)
    small.sample()
    assert offered_purposes(small.run) == {"trainer": {"train"}}
    eval_consumer.collect(small.run)
    assert offered_purposes(small.run) == {"trainer": {"train"}, EVAL: set()}
    assert all(u.state is UnitState.COMPLETED for u in eval_units(small.run))
    # A trainer that is made later is offered all that there is of its purposes.
    with Store(open_run(small.run.root)) as store, store.consumer("second"):
        assert offered_purposes(small.run)["second"] == {"train"}


def test_nor_is_it_after_a_rebuild_which_brings_results_and_counts_back(small: SmallRun) -> None:
    small.advance(2)
    small.sample()
    assert eval_consumer.collect(small.run) == 2
    before, results = essence_of(small.run.index), evaluation.recorded(small.run)
    die(small)
    root = lose_index(small.run)
    assert rebuild.rebuild(root).rebuilt.losses == []
    with SmallRun(open_run(root)) as again:
        after = essence_of(again.run.index)
        assert {name for name in before if before[name] != after[name]} == set()
        assert evaluation.recorded(again.run) == results
        assert eval_consumer.collect(again.run) == 0
        assert all(
            EVAL not in purposes for name, purposes in offered_purposes(again.run).items() if name != EVAL
        )
        assert check(again.run).findings == []


def test_nor_is_it_on_a_branch_which_goes_on_with_what_its_line_evaluated(small: SmallRun) -> None:
    for _ in range(4):
        small.advance(1)
        eval_consumer.collect(small.run)
    small.sample()
    eval_consumer.collect(small.run)
    assert sorted({step for step, _ in told(small.run)}) == [0, 2, 4]
    end_sessions(small)
    create_branch(small.run, checkpoint="3", name="second", reuse_trajectories=True)
    with SmallRun(open_run(small.run.root)) as second:
        assert sorted({step for step, _ in told(second.run)}) == [0, 2]
        assert all(EVAL not in p for name, p in offered_purposes(second.run).items() if name != EVAL)
        second.trainer()
        second.advance(2)
        second.sample()
        eval_consumer.collect(second.run)
        assert sorted({step for step, _ in told(second.run)}) == [0, 2, 4, 5]
        versions = {r.version_id.split("-")[1] for r in evaluation.recorded(second.run) if r.step > 3}
        assert versions == {"second"}
        assert all(EVAL not in p for name, p in offered_purposes(second.run).items() if name != EVAL)
        check_exactly_once(second.run, finished=False)
        assert check(second.run).findings == []
    assert sorted({step for step, _ in told(small.run)}) == [0, 2, 4]


def own_units(run: Run) -> list[Any]:
    """Return the units of the run's branch without the ids of what may differ after a rebuild."""
    return [unit for unit in essence_of(run.index)["units"] if unit[1] == run.branch]


def give_up(small: SmallRun, grant: Grant) -> UnitState:
    session = small.session("rollout")
    return completing.fail(session, grant.unit_id, fence=grant.fence, error="no answer")


def test_an_evaluation_that_is_not_whole_goes_on_on_a_branch_and_comes_back_with_a_rebuild(
    small: SmallRun,
) -> None:
    for _ in range(2):
        small.advance(1)
        eval_consumer.collect(small.run)
    version = small.serving()
    for _ in range(2):
        small.sample(1, purposes=[EVAL])
    first = small.claim(1, purposes=[EVAL])[0]
    state = give_up(small, first)
    while state is UnitState.READY:
        state = give_up(small, small.claim(1, purposes=[EVAL])[0])
    small.sample(100, purposes=["train"])
    small.plan()
    small.train(3)
    damaged, whole = [u for u in eval_units(small.run) if (u.epoch, u.state) == (2, UnitState.COMPLETED)]
    end_sessions(small)
    assert damaged.extent_id is not None
    damage(small, damaged.extent_id)
    quarantine_damage(small.run, do=True)
    create_branch(small.run, checkpoint="3", name="second")
    with closing(open_run(small.run.root)) as run:
        expected = own_units(run)
        own = [u for u in eval_units(run) if u.epoch == 2]
        places = {(u.profile, u.position): u.state for u in own}
        assert len(places) == NUM_EVAL_UNITS
        assert places.pop((whole.profile, whole.position)) is UnitState.COMPLETED
        assert set(places.values()) == {UnitState.READY}
        assert {u.required_version_id for u in own} == {version}
    root = lose_index(small.run)
    rebuild.rebuild(root)
    with SmallRun(open_run(root)) as second:
        assert own_units(second.run) == expected
        serving = version_to_serve(second.run)
        assert serving is not None
        assert serving.version_id == version
        session = second.session("rollout")
        shelf = PromptShelf(session)
        grants = claim(session, shelf, limit=100, serving_version_id=serving.version_id, purposes=[EVAL])
        answers = [made_up_result(grant, serving.version_id) for grant in grants]
        completing.complete(session, answers, submission_id=new_id("submission"))
        assert eval_consumer.collect(second.run) == 1
        results = [r for r in evaluation.recorded(second.run) if r.step == 2]
        assert sum(r.num_prompts for r in results) == NUM_EVAL_UNITS
        assert {r.version_id for r in results} == {version}
        assert check(second.run).findings == []


def test_prompts_for_evaluation_cannot_be_enqueued_or_admitted_for_training(
    small: SmallRun, tmp_path: Path
) -> None:
    source = PromptSource(tmp_path / "sums.jsonl")
    with pytest.raises(InvalidInputError, match="dataset 'sums' of this run is for 'eval', not 'train'"):
        enqueue(small.session("enqueue"), EnqueueRequest("sums", "train", source, KEYS))
    for name in ("sums", "held_out"):
        with pytest.raises(InvalidInputError, match=f"dataset '{name}' is for evaluation"):
            admit.admit_more(small.session("rollout"), count=1, dataset_id=name)
    with Store(open_run(small.run.root)) as store:
        assert store.enqueue([{"prompt": "1 + 2 ="}], dataset="sums") == 1
    with small.run.index.read() as connection:
        assert datasets.purpose_of(connection, "sums") == EVAL


def test_a_dataset_that_grew_is_evaluated_whole_from_the_next_weights_on(
    small: SmallRun, tmp_path: Path
) -> None:
    path = tmp_path / "more.jsonl"
    path.write_text(prompt_lines(5, first=900), encoding="utf-8")
    small.enqueue(path, dataset="sums", purpose=EVAL)
    small.advance(2)
    small.sample()
    eval_consumer.collect(small.run)
    sizes = [(r.step, r.num_prompts) for r in evaluation.recorded(small.run) if r.profile == SUMS]
    assert sizes == [(0, 3), (2, 8)]


def test_evaluation_runs_for_earlier_programs_journal_only_held_out(small: SmallRun) -> None:
    fields = {"first_unit_id": 1, "count": 2, "num_segments": 1}
    with small.run.index.read() as connection:
        told_by_it = segments_told(connection, fields)
    assert {name: [s.num_rows for s in found] for name, found in told_by_it.items()} == {"held_out": [2]}
