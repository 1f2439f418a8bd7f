"""Sources of prompts with a state of their own: environments whose difficulty follows the policy, curricula, generators.

    state before ▸ prompts made from it ▸ enqueued ▸ transaction(units, cursor, state after)

1. A state is committed in the transaction that makes the work which came of it. A kill before leaves the state before: made
   again from it, the same prompts are known already and are not doubled.
2. A branch goes on with the state that the checkpoint's cursor had; a rebuild brings it back from the journal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from strawflow.flow import admit
from strawflow.flow.admission import AT_ONCE, Schedule, SourceStep
from strawflow.flow.mixture import text_of
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.index import datasets


class Enqueue(Protocol):
    """`Store.enqueue`."""

    def __call__(self, prompts: Iterable[Mapping[str, Any]], /, *, dataset: str) -> int: ...


class Source:
    """One source of one dataset; `Store.source` makes it. Of several at once, the first to admit goes on."""

    def __init__(self, run: Run, writer: Callable[[], WorkerSession], enqueue: Enqueue, dataset: str) -> None:
        self._run, self._writer, self._enqueue, self._dataset = run, writer, enqueue, dataset
        self._version = 0
        self.state: Any = None
        """What the last admitted prompts left it in, as JSON gives it; None before the first."""
        self.read_again()

    def read_again(self) -> None:
        """Take up the state as it is stored now."""
        run = self._run
        with run.index.read() as connection:
            self._version = datasets.cursor(connection, run.branch, self._dataset).version
            stored = datasets.source_state(connection, run.branch, self._dataset)
        self.state = None if stored is None else json.loads(stored)

    def admit(self, prompts: Iterable[Mapping[str, Any]], *, state: Any, schedule: Schedule = AT_ONCE) -> int:
        """Make prompts ready to be claimed and store the state to go on from after them; returns how many groups were made.

        Among them are prompts that were enqueued and never admitted. Prompts the dataset holds already make none: tell what is
        to be a new one apart by its metadata. Without any, and while too little disk is left, the state is not stored either.

        Raises:
            InvalidInputError: names row and field; or the state is no JSON, or longer than 1 MiB. Nothing changed.
            ConflictError: another admitted from the dataset meanwhile; `read_again`, and make prompts from that state. These
                are enqueued, and nothing came of them yet.
        """
        text = text_of(state, of="a source")
        self._enqueue(prompts, dataset=self._dataset)
        step = SourceStep(text, self._version)
        num_admitted = admit.admit_rest(self._writer(), step, dataset_id=self._dataset, schedule=schedule)
        if num_admitted:
            self.read_again()
        return num_admitted
