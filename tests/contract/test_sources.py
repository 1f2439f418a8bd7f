"""Sources of prompts with a state of their own: the state and the work it led to are committed together, or neither is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import strawflow
from strawflow import ConflictError, Member, Store
from strawflow.errors import InvalidInputError
from strawflow.flow import rebuild
from strawflow.flow.branch import create_branch
from strawflow.index import units
from tests.contract.lost_index import lose_index


@pytest.fixture
def store(tmp_path: Path, settings: dict[str, str]) -> Iterator[Store]:
    made = strawflow.create(tmp_path / "run", settings={**settings, "rollout.samples_per_prompt": "1"})
    with made:
        yield made


def made(numbers: range) -> list[dict[str, Any]]:
    """Prompts of a generator whose state is the next number."""
    return [{"prompt": f"add {number} and 1", "label": str(number + 1)} for number in numbers]


def num_units(store: Store) -> int:
    with store.run.index.read() as connection:
        return len(units.listed(connection, store.run.branch, limit=1000))


def answered() -> list[Member]:
    return [
        Member(
            member=0,
            status="finished",
            response_tokens=[5],
            logprobs=[-0.5],
            token_versions="",
            finish_reason="stop",
            reward=1.0,
        )
    ]


def train_one(store: Store, count: int) -> None:
    """Complete `count` groups and train them in one step with its checkpoint."""
    with store.worker() as worker, store.consumer("trainer") as trainer:
        grants = worker.claim(count)
        worker.complete([grant.result(answered()) for grant in grants])
        assert trainer.next_batch(count) is not None
        (trainer.checkpoint_folder() / "state").write_text("weights")
        trainer.commit_checkpoint()


def test_the_state_comes_with_the_work_and_is_there_after_a_restart(store: Store) -> None:
    source = store.source()
    assert source.state is None
    assert source.admit(made(range(3)), state={"next": 3}) == 3
    assert source.state == {"next": 3}
    store.close()
    with strawflow.open(store.run.root) as again:
        source = again.source()
        assert source.state == {"next": 3}
        assert source.admit(made(range(3, 5)), state={"next": 5}) == 2
        assert num_units(again) == 5


def test_a_kill_between_prompts_and_state_makes_the_same_prompts_once(store: Store) -> None:
    store.source().admit(made(range(2)), state=2)
    store.enqueue(made(range(2, 4)))  # and killed before they were admitted
    source = store.source()
    assert source.state == 2
    assert source.admit(made(range(2, 4)), state=4) == 2
    assert (store.source().state, num_units(store)) == (4, 4)
    assert source.admit(made(range(2, 4)), state=99) == 0, "they are known"
    assert store.source().state == 4


def test_of_two_the_first_goes_on_and_the_other_is_told(store: Store) -> None:
    first, second = store.source(), store.source()
    first.admit(made(range(2)), state=2)
    with pytest.raises(ConflictError, match="read it again"):
        second.admit(made(range(100, 103)), state=103)
    assert (num_units(store), store.source().state) == (2, 2)
    second.read_again()
    assert second.state == 2
    assert second.admit(made(range(2, 3)), state=3) == 4  # and what the refused one had enqueued


@pytest.mark.parametrize("state", [object(), float("nan"), "x" * (1 << 20)])
def test_a_state_that_cannot_be_kept_is_refused_before_anything_is_stored(store: Store, state: Any) -> None:
    with pytest.raises(InvalidInputError, match="the state of a source"):
        store.source().admit(made(range(2)), state=state)
    assert num_units(store) == 0
    assert store.enqueue(made(range(2))) == 2


def test_a_branch_goes_on_with_the_state_of_its_checkpoint_and_a_rebuild_brings_states_back(
    store: Store,
) -> None:
    store.source().admit(made(range(2)), state={"difficulty": 1})
    train_one(store, 2)
    store.source().admit(made(range(2, 4)), state={"difficulty": 2})
    root = store.run.root
    store.close()
    lose_index(store.run)
    assert rebuild.rebuild(root).rebuilt.losses == []
    with strawflow.open(root) as again:
        assert again.source().state == {"difficulty": 2}
        create_branch(again.run, checkpoint="1", name="second")
    with strawflow.open(root) as second:
        assert second.run.branch == "second"
        source = second.source()
        assert source.state == {"difficulty": 1}
        source.admit(made(range(10, 12)), state={"difficulty": 7})
    lose_index(second.run)
    assert rebuild.rebuild(root).rebuilt.losses == []
    with strawflow.open(root) as again:
        assert again.source().state == {"difficulty": 7}
