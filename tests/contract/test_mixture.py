"""Prompt sets mixed by weight: shares, epochs of each set, and what the draws go on from after a kill, a branch, a rebuild."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import strawflow
from strawflow import Store
from strawflow.config import load_config
from strawflow.errors import ConfigError
from strawflow.flow import admit, inputs, rebuild
from strawflow.flow.branch import create_branch
from strawflow.flow.check import check
from strawflow.flow.mixer import draw
from strawflow.flow.run import Run, create_run
from strawflow.index import datasets, mixtures, units
from strawflow.testing.runs import SmallRun, prompt_lines, small_config
from tests.contract.lost_index import lose_index, on_sqlite
from tests.contract.test_sources import train_one

WEIGHTS = {"sums": 5.0, "words": 2.0, "rare": 1.0}
NUM_ROWS = {"sums": 7, "words": 3, "rare": 2}


def told(weights: dict[str, float]) -> str:
    return json.dumps([{"name": name, "weight": weight} for name, weight in weights.items()])


def rows(name: str, count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{name} {number}", "label": "1"} for number in range(count)]


@pytest.fixture
def store(tmp_path: Path, settings: dict[str, str]) -> Iterator[Store]:
    own = {"rollout.samples_per_prompt": "1", "data.prompts": told(WEIGHTS)}
    with strawflow.create(tmp_path / "run", settings={**settings, **own}) as made:
        for name, count in NUM_ROWS.items():
            made.enqueue(rows(name, count), dataset=name)
        yield made


def drawn(run: Run) -> list[tuple[str, int, int]]:
    """Return (set, epoch, row) of the units of the run's branch, in order of admission."""
    with run.index.read() as connection:
        found = units.listed(connection, run.branch, limit=10_000)
        dataset_of = datasets.of_segments(connection, (u.segment_id for u in found))
    return [(dataset_of[u.segment_id], u.epoch, u.position) for u in found]


def test_each_set_has_its_share_at_every_moment_and_each_row_comes_once_an_epoch(store: Store) -> None:
    for count in (1, 5, 13, 1, 20):
        assert store.admit(count) == count
    found = drawn(store.run)
    assert [name for name, _, _ in found] == draw(WEIGHTS, {}, 40)[0], "as one admission would have drawn"
    assert Counter(name for name, _, _ in found) == {"sums": 25, "words": 10, "rare": 5}
    of_epoch: dict[tuple[str, int], list[int]] = defaultdict(list)
    for name, epoch, row in found:
        of_epoch[name, epoch].append(row)
    for name, num_rows in NUM_ROWS.items():
        last = max(epoch for one, epoch in of_epoch if one == name)
        for epoch in range(last):
            assert sorted(of_epoch[name, epoch]) == list(range(num_rows))
        assert len(set(of_epoch[name, last])) == len(of_epoch[name, last])
    assert check(store.run).findings == []


def test_of_workers_that_admit_at_once_none_draws_what_another_drew(store: Store) -> None:
    def admit_some() -> int:
        with strawflow.open(store.run.root) as own:
            return sum(own.admit(3) for _ in range(4))

    with ThreadPoolExecutor(3) as pool:
        assert sum(pool.map(lambda _: admit_some(), range(3))) == 36
    found = drawn(store.run)
    assert [name for name, _, _ in found] == draw(WEIGHTS, {}, 36)[0]
    assert len(set(found)) == 36


@on_sqlite
def test_a_set_named_in_an_admission_leaves_the_draws_alone(store: Store) -> None:
    store.admit(8)
    store.admit(4, dataset="rare")
    store.admit(8)
    names = [name for name, _, _ in drawn(store.run)]
    assert names[:8] + names[12:] == draw(WEIGHTS, {}, 16)[0]
    assert names[8:12] == ["rare"] * 4


def test_a_branch_draws_on_as_its_checkpoint_did_and_a_rebuild_brings_it_back(store: Store) -> None:
    store.admit(5)
    train_one(store, 5)
    store.admit(9)
    before, root = drawn(store.run), store.run.root
    with store.run.index.read() as connection:
        stood = mixtures.find(connection, "main")
    store.close()
    lose_index(store.run)
    assert rebuild.rebuild(root).rebuilt.losses == []
    with strawflow.open(root) as again:
        assert drawn(again.run) == before
        with again.run.index.read() as connection:
            assert mixtures.find(connection, "main") == stood
        again.admit(3)
        assert [name for name, _, _ in drawn(again.run)] == draw(WEIGHTS, {}, 17)[0]
    with strawflow.open(root) as again:
        create_branch(again.run, checkpoint="1", name="second")
    with strawflow.open(root) as second:
        second.admit(9)
        assert drawn(second.run) == before[5:], (
            "the same prompts in the same order as the future that was left"
        )
        second_before = drawn(second.run)
    lose_index(second.run)
    assert rebuild.rebuild(root).rebuilt.losses == []
    with strawflow.open(root) as second:
        assert drawn(second.run) == second_before
        second.admit(4)
        assert [name for name, _, _ in drawn(second.run)] == draw(WEIGHTS, {}, 18)[0][5:]
        assert check(second.run).findings == []


def test_staleness_and_backlog_bound_all_sets_together(tmp_path: Path, settings: dict[str, str]) -> None:
    own = {
        "data.prompts": told({"prompts": 3.0, "words": 1.0}),
        "rollout.over_provision": "3",
        "rollout.max_backlog": "7",
    }
    with SmallRun(create_run(tmp_path / "run", small_config({**settings, **own}))) as small:
        for name, first in (("prompts", 0), ("words", 100)):
            path = tmp_path / f"{name}.jsonl"
            path.write_text(prompt_lines(16, first=first))
            small.enqueue(path, dataset=name)
        small.publish(0, admit_due=False)
        assert admit.admit_due(small.session("rollout")) == 2 * 4 + 3
        assert admit.admit_due(small.session("rollout")) == 0
        assert Counter(name for name, _, _ in drawn(small.run)) == {"prompts": 8, "words": 3}
        small.advance(1)
        assert Counter(name for name, _, _ in drawn(small.run)) == {"prompts": 9, "words": 3}
        # Three of the seven that were sampled wait for the trainer.
        assert [g.unit_id for g in small.claim(100)] == [8, 9, 10, 11]


@on_sqlite
def test_a_set_of_some_weight_without_prompts_is_refused_with_what_to_do(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    own = {"data.prompts": told({"sums": 1.0, "words": 1.0, "later": 0.0})}
    with strawflow.create(tmp_path / "run", settings={**settings, **own}) as store:
        store.enqueue(rows("sums", 3), dataset="sums")
        with pytest.raises(ConfigError, match=r"has no words yet: `strawflow enqueue .* --dataset words`"):
            inputs.require(store.run)
        with pytest.raises(ConfigError, match="prompt set 'words' has weight 1 and holds no prompts"):
            store.admit(2)
        assert drawn(store.run) == []
        store.enqueue(rows("words", 3), dataset="words")
        assert store.admit(4) == 4
        assert Counter(name for name, _, _ in drawn(store.run)) == {"sums": 2, "words": 2}


@on_sqlite
def test_one_set_is_admitted_as_ever(tmp_path: Path, settings: dict[str, str]) -> None:
    own = {**settings, "data.prompts": "sums.jsonl:3"}
    with strawflow.create(tmp_path / "run", settings=own) as store:
        store.enqueue(rows("sums", 5), dataset="sums")
        assert store.admit(7) == 7
        assert [epoch for _, epoch, _ in drawn(store.run)] == [0] * 5 + [1] * 2
        with store.run.index.read() as connection:
            assert mixtures.find(connection, "main") is None
    assert load_config(flags={"data.prompts": "sums.jsonl:3"}).prompt_sets()[0].name == "sums"
