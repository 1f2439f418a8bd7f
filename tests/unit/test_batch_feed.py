"""The feed of batches: order and content are those of reading each when it is wanted."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from strawflow.errors import CorruptPackError
from strawflow.index.batches import Batch
from strawflow.states import BatchState
from strawflow_workers.trainer.feed import BatchFeed


def batch(step: int, *, batch_id: int | None = None, digest: str = "d") -> Batch:
    counts: dict[str, Any] = {"num_units": 1, "num_sequences": 1, "num_tokens": 1, "max_staleness": 0}
    return Batch(
        batch_id=step if batch_id is None else batch_id,
        branch_id="main",
        consumer="trainer",
        step=step,
        objective="grpo",
        state=BatchState.PLANNED,
        mean_reward=None,
        denominators=(1.0,),
        digest=digest,
        plan_extent_id=1,
        fence=1,
        planned_at="",
        **counts,
    )


class Store:
    """Batches by step, and a record of what was read by whom."""

    def __init__(self, *steps: int) -> None:
        self.planned = {step: batch(step) for step in steps}
        self.broken: set[int] = set()
        self.reads: list[tuple[int, str]] = []
        self.was_read = threading.Condition()

    def find(self, step: int) -> Batch | None:
        return self.planned.get(step)

    def read(self, wanted: Batch) -> str:
        thread = "main" if threading.current_thread() is threading.main_thread() else "ahead"
        with self.was_read:
            self.reads.append((wanted.step, thread))
            self.was_read.notify_all()
        if wanted.step in self.broken:
            raise CorruptPackError(f"step {wanted.step} is damaged")
        return f"content of {wanted.batch_id}"

    def wait_for(self, step: int) -> None:
        with self.was_read:
            assert self.was_read.wait_for(lambda: (step, "ahead") in self.reads, timeout=10)


def test_each_batch_after_the_first_is_read_once_and_ahead() -> None:
    store = Store(1, 2, 3)
    found = []
    with BatchFeed(store.find, store.read) as feed:
        for step in (1, 2, 3):
            served = feed.content_of(store.planned[step])
            found.append((served.content, served.was_ahead))
            if step < 3:
                feed.read_ahead(step + 1)
                store.wait_for(step + 1)
    assert found == [("content of 1", False), ("content of 2", True), ("content of 3", True)]
    assert store.reads == [(1, "main"), (2, "ahead"), (3, "ahead")]


def test_a_batch_that_is_planned_later_is_read_as_soon_as_it_is() -> None:
    store = Store(1)
    with BatchFeed(store.find, store.read) as feed:
        feed.read_ahead(2)
        store.planned[2] = batch(2)
        store.wait_for(2)
        assert feed.content_of(store.planned[2]).was_ahead


def test_a_batch_that_was_planned_again_meanwhile_is_read_again() -> None:
    store = Store(1, 2)
    with BatchFeed(store.find, store.read) as feed:
        for other in (batch(2, batch_id=9), batch(2, digest="e")):
            feed.read_ahead(2)
            store.wait_for(2)
            served = feed.content_of(other)
            assert (served.content, served.was_ahead) == (f"content of {other.batch_id}", False)
            store.reads.clear()


def test_damage_found_ahead_is_raised_at_its_own_step_and_not_if_it_was_mended() -> None:
    store = Store(1, 2, 3)
    store.broken = {2, 3}
    with BatchFeed(store.find, store.read) as feed:
        feed.read_ahead(2)
        store.wait_for(2)
        assert feed.content_of(store.planned[1]).content == "content of 1"
        with pytest.raises(CorruptPackError, match="step 2 is damaged"):
            feed.content_of(store.planned[2])
        feed.read_ahead(3)
        store.wait_for(3)
        store.broken.clear()
        assert feed.content_of(store.planned[3]).content == "content of 3"


def test_a_feed_ends_while_it_still_waits_for_a_plan() -> None:
    store = Store(1)
    with BatchFeed(store.find, store.read) as feed:
        feed.read_ahead(2)
    assert store.reads == []
    assert not [t for t in threading.enumerate() if t.name.startswith("batch-feed")]


def test_without_reading_ahead_every_batch_is_read_when_it_is_wanted() -> None:
    store = Store(1, 2)
    with BatchFeed(store.find, store.read, ahead=False) as feed:
        feed.read_ahead(2)
        served = feed.content_of(store.planned[2])
    assert (served.was_ahead, store.reads) == (False, [(2, "main")])
