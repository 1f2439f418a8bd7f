"""Consumer: the trainer's side of a store. It gets batches in order, and commits how far it came.

1. A consumer is a name with a position; several read the same trajectories without seeing each other. One process at a
   time holds a name: a second one waits until the first is gone.
2. A batch is planned once, durably, before it is handed out. After any crash the batches after the committed position
   come again: same groups, same order, same bytes.
3. `advance` commits the position; `commit_checkpoint` commits it together with the files of a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from strawflow import clock
from strawflow.errors import ConflictError, InvalidInputError, LeaseLostError
from strawflow.flow import by_reference, consume, publish_weights, rescue
from strawflow.flow.checkpoint_folder import seal_folder, verified_folder
from strawflow.flow.consume import Resumption
from strawflow.flow.payload import arrays_of
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.flow.trajectory import with_every_token
from strawflow.index import batches, consumers
from strawflow.index.consumers import Role
from strawflow.weights.verify import weights_digest


@dataclass(frozen=True)
class Batch:
    """One step of a consumer."""

    step: int
    digest: str
    """Chained over all batches up to this one: two runs with equal digests trained on equal bytes in equal order."""
    num_groups: int
    rows: pa.Table
    """One row per member in the order of the plan: trajectories (schema records.TRAJECTORY), or, where an assembler
    packs batches, packed sequences (schema records.BATCH)."""

    def with_every_token(self) -> pa.Table:
        """Return trajectory rows whose `loss_mask` and `token_versions` are told for every token.

        In `rows` they are null where one word tells them: every token trained, one version sampled it all.

        Raises:
            InvalidInputError: the rows are packed sequences.
            CorruptPackError: a row tells another number of items than it has tokens.
        """
        if "response_tokens" not in self.rows.column_names:
            raise InvalidInputError(
                f"step {self.step} holds packed sequences, told for every token as they are; take its `rows`"
            )
        whole = [with_every_token(rows) for rows in self.rows.to_batches()]
        return pa.Table.from_batches(whole, schema=self.rows.schema)

    def tensors(self) -> list[dict[str, np.ndarray[Any, Any]] | None]:
        """Return each row's arrays by name (what a processor made of its images, say), read-only; None where it has none.

        Raises:
            CorruptPackError: an array does not match its digest.
        """
        return arrays_of(self.rows.column("tensors"))


class Consumer:
    """Reads batches in order; made by `Store.consumer`. Use as a context manager.

    When the block is left by an error, the name is free at once: nothing uncommitted counts, its batches come again.
    """

    def __init__(self, run: Run, name: str, *, purposes: tuple[str, ...], wait_s: float) -> None:
        self._run = replace(run, consumer=name)
        self._purpose = purposes[-1]
        consume.require_consumer_name(self._run)
        self._session = WorkerSession(self._run, f"consumer-{name}")
        try:
            consume.ensure_consumer(self._session, purposes=purposes)
            self._role = self._take_over(wait_s)
            self._assembler = self._take_assembler()
            with self._run.index.read() as connection:
                self._position = consumers.find(connection, run.branch, name).position
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        self._handed_out = self._position

    @property
    def session_id(self) -> str:
        return self._session.session_id

    @property
    def position(self) -> int:
        """Last step that is committed."""
        return self._position

    def next_batch(
        self, num_groups: int = 1, *, at_least: int | None = None, wait_s: float = 0.0
    ) -> Batch | None:
        """Return the batch after the last one handed out; None when none is planned and too few groups wait.

        Planned batches come first, as they were planned. A new one takes up to `num_groups` completed groups, oldest
        weights first, once `at_least` (default: all of them) wait; `wait_s` seconds at most are waited for them.

        Raises:
            InvalidInputError: a number is below 1, or more groups are awaited than a batch takes.
            LeaseLostError: another process took the name over; stop.
            CorruptPackError: stored bytes do not match their checksum.
        """
        at_least = num_groups if at_least is None else at_least
        if (
            not 1 <= at_least <= num_groups
        ):  # below 1 a batch of nothing, or (SQL's -1) of all there is, would be planned
            raise InvalidInputError(
                f"at_least={at_least} of num_groups={num_groups}: 1 <= at_least <= num_groups must hold"
            )

        def look() -> Batch | None:
            self._session.mark_progress()
            self._session.require_live()
            return self._planned() or self._plan(num_groups, at_least)

        batch = clock.look_until_found(look, wait_s=wait_s)
        if batch is not None:
            self._handed_out = batch.step
        return batch

    def advance(self, step: int | None = None) -> None:
        """Commit the position: batches up to `step` (default: the last one handed out) never come again.

        Raises:
            LeaseLostError: another process took the name over; nothing changed.
            ConflictError: the step is not one of the batches handed out.
        """
        self._session.mark_progress()
        step = self._require_handed_out(step)
        by_reference.advance(self._session, self._role, expected=self._position, step=step)
        self._position = step

    def checkpoint_folder(self, step: int | None = None) -> Path:
        """Return the folder to write the checkpoint of `step` into; it belongs to nobody until it is committed.

        Raises:
            ConflictError: the step was not handed out, or has its checkpoint: writing again would damage it.
        """
        step = self._require_handed_out(step)
        consume.require_no_checkpoint(self._run, step=step)
        folder = self._run.root / consume.checkpoint_path(self._role, step)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def commit_checkpoint(self, step: int | None = None) -> str:
        """Commit the files in `checkpoint_folder(step)` together with the position; returns the checkpoint's id.

        The files are synced and listed with their checksums in a manifest first: a kill at any instant leaves the
        older checkpoint with its position, or this one with its own.

        Raises:
            LeaseLostError: another process took the name over; the files stay unnamed.
            NotFoundError: the folder is empty.
        """
        self._session.mark_progress()
        step = self._require_handed_out(step)
        stands_for = consume.stands_for(self._run, self._role, step=step)
        folder = self._run.root / consume.checkpoint_path(self._role, step)
        digest = seal_folder(folder, stands_for=stands_for)
        made = consume.commit_checkpoint(
            self._session, self._role, step=step, previous_step=self._position, state_digest=digest
        )
        self._position = step
        return made.checkpoint_id

    def newest_checkpoint(self) -> tuple[int, Path] | None:
        """Return (step, folder) of the newest committed checkpoint, all its files read and checked; None before the first.

        Raises:
            CorruptCheckpointError: the folder or a file in it is missing or damaged; names it and what can be done.
        """
        found = consume.newest_checkpoint(self._run)
        return None if found is None else (found.step, verified_folder(self._run, found))

    def publish_weights(self, step: int, file: Path) -> str:
        """Publish a safetensors file as the weights of a step, for workers to sample from; returns their version id.

        Raises:
            LeaseLostError: another process took the name over.
            CorruptCheckpointError: the file is missing or no safetensors file.
        """
        digest = weights_digest(file)
        version_id = publish_weights.version_name(self._run, self._role, step=step, digest=digest)
        publish_weights.store_file(self._run, version_id, file)
        publish_weights.publish_weights(
            self._session, self._role, step=step, version_id=version_id, digest=digest
        )
        return version_id

    def mark_progress(self) -> None:
        """Tell the heartbeat that the work goes on; needed only when no batch is asked for in ten minutes."""
        self._session.mark_progress()

    def close(self) -> None:
        """Give the name back."""
        self._session.end()

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.__exit__(kind, error, trace)
        if kind is not None:
            # A dead handle must not keep its own process from the name until the lease ends.
            rescue.give_up(self._session, reason=f"its block was left by {kind.__name__}")

    def _take_over(self, wait_s: float) -> Role:
        def look() -> Resumption | None:
            rescue.rescue_all(self._run)
            return consume.take_over(self._session)

        taken = clock.look_until_found(look, wait_s=wait_s)
        if taken is None:
            self._session.end()
            raise LeaseLostError(
                f"another process is consumer {self._run.consumer!r}; stop it, or wait for it with wait_s"
            )
        return taken.role

    def _take_assembler(self) -> Role | None:
        with self._run.index.begin() as connection:
            return consumers.take_role(
                connection, self._run.branch, f"assemble:{self._run.consumer}", self._session.session_id
            )

    def _planned(self) -> Batch | None:
        found = consume.batch_of_step(self._run, self._handed_out + 1)
        return None if found is None else self._read(found)

    def _plan(self, num_groups: int, at_least: int) -> Batch | None:
        if self._assembler is None:
            return None
        try:
            planned = by_reference.plan_next(
                self._session,
                self._assembler,
                purpose=self._purpose,
                num_groups=num_groups,
                at_least=at_least,
            )
        except ConflictError:
            # A group was taken back, or weights died, between the look and the plan: what is left is looked at afresh.
            return None
        if planned is None:
            return None
        batch, rows = planned
        return Batch(batch.step, batch.digest, batch.num_units, rows)

    def _read(self, found: batches.Batch) -> Batch:
        if found.objective == by_reference.OBJECTIVE:
            rows = by_reference.rows_of(self._run, self._session.reader, found)
        else:
            packed = consume.read_batch(self._run, self._session.reader, found)
            rows = pa.Table.from_batches([own for _, own in packed])
        return Batch(found.step, found.digest, found.num_units, rows)

    def _require_handed_out(self, step: int | None) -> int:
        self._session.require_not_lost()
        step = self._handed_out if step is None else step
        if not self._position <= step <= self._handed_out or step == 0:
            raise ConflictError(
                f"step {step} was not handed out: batches {self._position + 1} to {self._handed_out} were"
            )
        return step
