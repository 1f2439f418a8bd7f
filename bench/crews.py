"""Processes that take work from strawflow together: what `crowd.Crowd` enters in each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from crowd import Work
from loop import Loop

import strawflow


@contextmanager
def worker(number: int, folder: str, at_once: int) -> Iterator[Work]:
    """Be one worker process: each round of work claims and completes until nothing is ready."""
    with Loop(strawflow.open(folder), tokens=16) as loop:
        yield lambda: loop.drain(at_once)
