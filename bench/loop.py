"""strawflow's side of the durable loop: groups claimed, completed with made-up trajectories, read back in batches.

1. Everything goes through the public calls of the package, as a program of one's own would use them.
2. Payload is random, so that compression gains nothing that a peer with random bytes would not have.
3. What is stored of a sample beyond the payload counted (loss mask, versions, prompt, ids) is strawflow's own business.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from rows import timed

import strawflow
from strawflow import Grant, Member, Store

SAMPLE_BYTES = 8
"""Payload of a token: the token itself and its log-probability, 4 bytes each."""
DISTINCT = 64


def create(
    folder: Path,
    *,
    samples: int = 1,
    durability: str = "host",
    index_url: str = "",
    prompts: int = 4096,
) -> Store:
    """Create a store whose groups have `samples` samples; its prompts come again epoch after epoch."""
    settings: dict[str, Any] = {"run.durability": durability, "rollout.samples_per_prompt": samples}
    if index_url:
        settings["run.index_url"] = index_url
    rows = [{"prompt": f"prompt {number}"} for number in range(prompts)]
    return strawflow.create(folder, prompts=rows, settings=settings)


class Loop:
    """A worker of a store, which this closes; `samples` of `tokens` tokens make one group."""

    def __init__(self, store: Store, *, tokens: int, samples: int = 1) -> None:
        self.store = store
        self.worker = store.worker("bench")
        self._sets = itertools.cycle(made_up(tokens, samples))
        self._held: list[Grant] = []
        self._num_ready = 0

    def __enter__(self) -> Loop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.worker.release(self._held)
            self.worker.close()
        self.store.close()

    def admit(self, count: int) -> None:
        """Have at least `count` groups ready; not measured."""
        if self._num_ready < count:
            self._num_ready += self.store.admit(count - self._num_ready)

    def cycles(self, count: int) -> float:
        """Complete one and claim the next in one call, `count` times over; returns cycles per second."""
        self._take(1, ahead=count)
        started = time.perf_counter()
        for _ in range(count):
            self._held = self._settle(self._held, claim=1)
        seconds = time.perf_counter() - started
        self._num_ready -= count
        return count / seconds

    def cycles_in_threads(self, count: int, *, threads: int) -> float:
        """The same in many threads of one worker, `count` cycles each; returns cycles per second."""
        self._take(threads, ahead=count * threads)
        held, self._held = self._held, []

        def cycle(grant: Grant) -> None:
            mine = [grant]
            for _ in range(count):
                mine = self._settle(mine, claim=1)
            self._held += mine

        seconds = together([partial(cycle, grant) for grant in held])
        self._num_ready -= count * threads
        return count * threads / seconds

    def in_bulk(self, count: int) -> float:
        """Complete `count` groups and claim as many, in one call; returns groups per second."""
        self._take(count, ahead=count)
        started = time.perf_counter()
        self._held = self._settle(self._held, claim=count)
        seconds = time.perf_counter() - started
        self._num_ready -= count
        return count / seconds

    def put(self, groups: int) -> float:
        """Complete `groups` groups, claimed before, in one call; returns seconds."""
        self._take(groups, ahead=0)
        results = [grant.result(next(self._sets)) for grant in self._held]
        started = time.perf_counter()
        settled = self.worker.complete(results)
        seconds = time.perf_counter() - started
        assert len(settled.accepted) == groups
        self._held = []
        return seconds

    def drain(self, at_once: int) -> int:
        """Claim and complete until nothing is ready; returns how many groups were completed."""
        done = 0
        held = self.worker.claim(at_once)
        while held:
            results = [grant.result(next(self._sets)) for grant in held]
            done += len(held)
            held = self.worker.complete(results, claim=at_once).grants
        return done

    def finish(self, count: int, *, at_once: int) -> None:
        """Complete `count` groups, `at_once` a call that claims the next ones too."""
        self._take(at_once, ahead=count - at_once)
        for left in range(count - at_once, -1, -at_once):
            self._held = self._settle(self._held, claim=min(at_once, left))
        self._num_ready -= count - at_once

    def each_claimed(self, count: int) -> list[float]:
        """Claim groups one by one; returns the seconds of each call."""
        seconds = []
        for _ in range(count):
            took, grants = timed(lambda: self.worker.claim(1))
            seconds.append(took)
            self._held += grants
        return seconds

    def each_completed(self) -> list[float]:
        """Complete one by one what is held; returns the seconds of each call."""
        seconds = []
        for grant in self._held:
            result = grant.result(next(self._sets))
            seconds.append(timed(partial(self.worker.complete, [result]))[0])
        self._held = []
        return seconds

    def _take(self, count: int, *, ahead: int) -> None:
        """Hold exactly `count` groups, with `ahead` more to be claimed."""
        self.worker.release(self._held[count:])
        del self._held[count:]
        self.admit(ahead + count)
        if len(self._held) < count:
            missing = count - len(self._held)
            self._held += self.worker.claim(missing)
            self._num_ready -= missing

    def _settle(self, grants: Sequence[Grant], *, claim: int) -> list[Grant]:
        results = [grant.result(next(self._sets)) for grant in grants]
        settled = self.worker.complete(results, claim=claim)
        granted = settled.grants
        assert len(settled.accepted) == len(grants)
        assert len(granted) == claim
        return granted


def made_up(tokens: int, samples: int) -> list[list[Member]]:
    """Return the members of some groups, different from each other."""
    generator = np.random.default_rng(7)
    return [
        [
            Member(
                member=number,
                status="finished",
                response_tokens=generator.integers(0, 150_000, tokens, np.int32),
                logprobs=-generator.random(tokens, np.float32),
                token_versions="",
                finish_reason="stop",
                reward=float(number % 2),
            )
            for number in range(samples)
        ]
        for _ in range(max(1, DISTINCT // samples))
    ]


def together(works: Sequence[Callable[[], None]]) -> float:
    """Run each in a thread of its own; returns the seconds until the last was done."""
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised again below, in the measuring thread
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return time.perf_counter() - started
