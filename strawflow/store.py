"""Store: a run as its producers and consumers see it: prompts in, trajectories across, batches out, all durable.

    store = strawflow.create("runs/mine", prompts="prompts.jsonl")
    with store.worker() as worker: ...        # leases prompt groups, completes them
    with store.consumer("trainer") as trainer: ...   # gets batches in order, commits how far it came

1. It is what strawflow's own workers are built on: a generator or trainer of your own and ours read the same run.
2. Safe for threads. A process that was forked opens the store again; one that is spawned may be given the store itself.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from strawflow import config as configuration
from strawflow.consumer import Consumer
from strawflow.errors import LeaseLostError
from strawflow.flow import admit, rescue
from strawflow.flow.admission import Schedule
from strawflow.flow.enqueue import EnqueueRequest, enqueue, purpose_of
from strawflow.flow.run import Run, create_run, folder_of, open_run
from strawflow.flow.session import WorkerSession
from strawflow.prompts.mappings import KEYS, written_down
from strawflow.prompts.row import PromptKeys
from strawflow.prompts.source import PromptSource
from strawflow.source import Source
from strawflow.worker import Worker

_SOURCE = "api"
"""What rows that came as mappings name as their source: the file they pass through is gone when they are read."""


def create(
    folder: str | Path,
    *,
    prompts: str | Path | Iterable[Mapping[str, Any]] | None = None,
    fresh: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Store:
    """Create a run in a folder and, if given, enqueue its prompts (a file, or rows with `prompt`, `label`, `metadata`, `images`).

    `settings` maps `section.field` to a value, as in `strawflow run create --section.field`; `fresh` removes a run that
    is there.

    Raises:
        AlreadyExistsError: the folder holds a run. ConfigError: a setting is wrong, or the folder an address. InvalidInputError: a prompt is.
    """
    flags = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in (settings or {}).items()
    }
    store = Store(create_run(folder_of(folder), configuration.load_config(flags=flags), fresh=fresh))
    if prompts is not None:
        store.enqueue(prompts)
    return store


def open(folder: str | Path) -> Store:
    """Open a run that exists.

    Raises:
        NotFoundError: the folder is no run. IncompatibleFormatError: its index is of another revision.
    """
    return Store(open_run(folder_of(folder)))


class Store:
    """An open run; use as a context manager, or `close` it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._session: WorkerSession | None = None
        self._lock = threading.Lock()

    @property
    def run(self) -> Run:
        """The run behind it, for the layers below (`strawflow.flow`, `strawflow.index`)."""
        return self._run

    def enqueue(
        self,
        prompts: str | Path | Iterable[Mapping[str, Any]],
        *,
        dataset: str = admit.PROMPTS,
        priority: int = 0,
    ) -> int:
        """Append prompts as one immutable segment, all or nothing; rows the dataset holds already add nothing.

        Returns how many rows were new. `dataset` is one of the run's (prompts, demonstrations, held_out, those of
        eval.datasets) or any other name, for prompts to train on that `admit` names. Groups made of them wait with `priority` (32 bits, see `admit`). A stored row names
        the file it came from and its line; one given as a mapping `api` and its number, from 1.

        Raises:
            InvalidInputError: names file, line and field, or the priority; nothing was enqueued. NotFoundError: no such file.
        """
        if isinstance(prompts, str | Path):
            return self._enqueue(PromptSource.parse(str(prompts)), dataset, priority)
        with written_down(prompts, name=_SOURCE) as source:
            return self._enqueue(source, dataset, priority, KEYS)

    def source(self, dataset: str = admit.PROMPTS) -> Source:
        """Return a source of prompts whose own state is stored with the work that came of it."""
        return Source(self._run, self._writer, self.enqueue, dataset)

    def admit(
        self,
        count: int,
        *,
        dataset: str | None = None,
        priority: int | None = None,
        scheduling_key: int = 0,
        not_before: datetime | None = None,
    ) -> int:
        """Make the next `count` prompts of a dataset ready to be claimed, in epoch order; returns how many. Without a dataset
        those of the run's prompt sets (`data.prompts`), by weight where there are several.

        The order is a keyed permutation of each epoch (`run.seed`); the cursor moves in the transaction that makes the
        groups, so none is admitted twice or left out. Of those that wait, the highest `priority` is granted first (32 bits;
        that of their enqueue if left out), then the lowest `scheduling_key` (64 bits), then the first admitted; none
        before `not_before`, a time with its zone. Evaluation has priority 10, parked groups go before all.

        Raises:
            InvalidInputError: the count is no whole number from 0 to a million, nothing was enqueued to the dataset, a number
                is out of range, or the time has no zone. ConfigError: a prompt set of weight above 0 holds none, or its
                prompts are made by a hook, which a rollout worker calls.
        """
        schedule = Schedule(priority, scheduling_key, not_before)
        return admit.admit_more(self._writer(), count=count, dataset_id=dataset, schedule=schedule)

    def worker(self, name: str = "worker") -> Worker:
        """Start a worker session: a producer that leases and completes prompt groups.

        Raises:
            InvalidInputError: the name cannot begin file names.
        """
        return Worker(self._run, name)

    def consumer(
        self, name: str = "trainer", *, purposes: tuple[str, ...] = ("train",), wait_s: float = 0.0
    ) -> Consumer:
        """Become the named consumer, which is created when first asked for and then is offered all that its branch sees.

        On a branch that is what the line before it had settled by where it left, and what the branch itself holds.

        Raises:
            LeaseLostError: another live process is it, for longer than `wait_s` seconds.
        """
        return Consumer(self._run, name, purposes=purposes, wait_s=wait_s)

    def rescue(self) -> int:
        """Take back what dead and expired workers held, and close the packs they left open; returns how many groups.

        Our supervisor does this all the time; call it where none runs.
        """
        num_units = rescue.rescue_all(self._run)
        rescue.recover_packs(self._writer())
        return num_units

    def close(self) -> None:
        """End what this store itself wrote with and let go of the index; workers and consumers are closed on their own."""
        if self._session is not None:
            self._session.end()
            self._session = None
        self._run.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._run.root),)

    def _enqueue(
        self, source: PromptSource, dataset: str, priority: int, keys: PromptKeys | None = None
    ) -> int:
        data = self._run.config.data
        keys = keys or PromptKeys(
            data.input_key, data.label_key or None, data.metadata_key or None, data.images_key or None
        )
        purpose = purpose_of(self._run.config, dataset) or "train"
        request = EnqueueRequest(dataset, purpose, source, keys, priority=priority)
        return enqueue(self._writer(), request).num_added

    def _writer(self) -> WorkerSession:
        """Return the session of this store's own writes, started by the first of them.

        One that was lost, as a program's is that made no call for long or was stopped, is replaced: it held nothing.
        """
        self._run.index.require_own_process()
        with self._lock:  # two of them would leave one whose heartbeat nobody ends
            if self._session is not None:
                self._give_up_if_lost(self._session)
            if self._session is None:
                self._session = WorkerSession(self._run, "store")
            self._session.mark_progress()
            return self._session

    def _give_up_if_lost(self, session: WorkerSession) -> None:
        try:
            session.require_live()
        except LeaseLostError as error:
            session.__exit__(type(error), error, None)
            rescue.give_up(
                session, reason="its heartbeat had stopped; the store went on with another session"
            )
            self._session = None
