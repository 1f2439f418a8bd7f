"""straw-queue 0.1.6, used at its best: one store per thread, one coordinator, results published in chunks.

1. A result must carry its task's and attempt's ids in the record's metadata, else the coordinator refuses it.
2. A store refuses a second thread while a publication is in flight, so every thread has its own (measured beside one
   store behind a lock: three to four times as fast). The coordinator takes calls of all threads.
3. There is no call that completes many tasks, so a chunk is one acquire, one publish_many and a complete for each.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path

import numpy as np
from straw import Coordinator, Publication, Record, RecordRef, RecordSetRef, SharedFilesystemStore, TaskSpec
from straw.protocol import Assignment
from straw.tensor import TensorRef, publish_tensors

LABEL = "straw 0.1.6"
CHUNKS = (8, 16, 32)
"""The best was among these whenever 4 to 128 were tried."""


class StrawQueue:
    """A queue with tasks enough for what is asked of it, and `threads` stores to publish through."""

    def __init__(self, folder: Path, payloads: list[bytes], *, threads: int = 1) -> None:
        self._payloads = payloads
        self._stores = [SharedFilesystemStore(folder, "bench") for _ in range(threads)]
        self._coordinator = Coordinator(self._stores[0], exclusive_owner="the bench")
        self._numbers = itertools.count()
        self._num_ready = 0

    def close(self) -> None:
        self._coordinator.close()
        for store in self._stores:
            store.close()

    def submit(self, count: int) -> None:
        """Have at least `count` tasks ready; not measured."""
        missing = count - self._num_ready
        if missing > 0:
            tasks = [TaskSpec(f"task-{next(self._numbers)}") for _ in range(missing)]
            self._coordinator.submit_tasks(tasks[0].task_id, tasks)
            self._num_ready += missing

    def cycles(self, count: int) -> float:
        """Acquire one, publish one, complete one, `count` times over; returns cycles per second."""
        self.submit(count)
        started = time.perf_counter()
        self._cycle(self._stores[0], "worker", count)
        self._num_ready -= count
        return count / (time.perf_counter() - started)

    def cycles_in_threads(self, count: int) -> float:
        """Do the same in all threads at once, `count` cycles each; returns cycles per second."""
        total = count * len(self._stores)
        self.submit(total)
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                self._cycle(self._stores[number], f"worker-{number}", count)
            except BaseException as error:  # told to the measuring thread below
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(self._stores))]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - started
        if failures:
            raise failures[0]
        self._num_ready -= total
        return total / took

    def in_chunks(self, count: int, chunk: int) -> float:
        """Complete `count` tasks in chunks; returns tasks per second."""
        self.submit(count)
        store, done = self._stores[0], 0
        started = time.perf_counter()
        while done < count:
            assignments = self._coordinator.acquire("worker", min(chunk, count - done)).assignments
            refs = store.publish_many(
                [Publication((self._record(a, done + place),)) for place, a in enumerate(assignments)],
                submission_id=f"chunk-{assignments[0].task.task_id}",
            )
            for assignment, ref in zip(assignments, refs, strict=True):
                self._complete(assignment, ref)
            done += len(assignments)
        self._num_ready -= count
        return count / (time.perf_counter() - started)

    def _cycle(self, store: SharedFilesystemStore, worker: str, count: int) -> None:
        for number in range(count):
            (assignment,) = self._coordinator.acquire(worker, 1).assignments
            ref = store.publish([self._record(assignment, number)], submission_id=assignment.task.task_id)
            self._complete(assignment, ref)

    def _complete(self, assignment: Assignment, ref: RecordSetRef) -> None:
        self._coordinator.complete_task(
            assignment.lease,
            submission_id=assignment.task.task_id,
            result_ref=ref,
            result_digest=ref.digest,
        )

    def _record(self, assignment: Assignment, number: int) -> Record:
        ids = {"task_id": assignment.task.task_id, "attempt_id": assignment.lease.attempt_id}
        return Record(assignment.task.task_id, self._payloads[number % len(self._payloads)], metadata=ids)


def recover(folder: Path) -> tuple[Coordinator, object]:
    """Open a queue that is there and acquire a task."""
    coordinator = Coordinator(
        SharedFilesystemStore(folder, "bench"), exclusive_owner="the bench", recover=True
    )
    (assignment,) = coordinator.acquire("worker", 1).assignments
    return coordinator, assignment


class StrawRecords:
    """Records of `num_bytes` random bytes, to append and to read back.

    Big records are read fastest as tensors: a session then checks the record's 4 MiB chunks and nothing twice (measured:
    700 MB/s, against 410 for the same bytes as plain records in a session and 550 without one).
    """

    def __init__(self, folder: Path, *, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.payloads = [os.urandom(num_bytes) for _ in range(max(1, min(64, 2**25 // num_bytes)))]
        self._store = SharedFilesystemStore(folder, "bench", codecs=("bytes.v1", "json.v1", "tensor.v1"))
        self._numbers = itertools.count()
        self._records: list[RecordRef] = []
        self._tensors: list[TensorRef] = []

    def close(self) -> None:
        self._store.close()

    def append(self, count: int) -> float:
        """Publish records one by one; returns bytes per second."""
        started = time.perf_counter()
        for _ in range(count):
            number = next(self._numbers)
            payload = self.payloads[number % len(self.payloads)]
            self._store.publish([Record(f"record-{number}", payload)], submission_id=f"publish-{number}")
        return count * self.num_bytes / (time.perf_counter() - started)

    def fill_records(self, count: int) -> None:
        """Write what `read_records` will read, as one extent; not measured."""
        records = [Record(f"fill-{n}", self.payloads[n % len(self.payloads)]) for n in range(count)]
        self._records += self._store.write_records(records, submission_id="fill")

    def read_records(self) -> float:
        """Read every record, checked, in one session; returns bytes per second."""
        started = time.perf_counter()
        with self._store.read_session() as session:
            for ref in self._records:
                session.read_record(ref)
        return len(self._records) * self.num_bytes / (time.perf_counter() - started)

    def fill_tensors(self, count: int) -> None:
        """Write what `read_tensors` will read; not measured."""
        for number in range(count):
            content = np.frombuffer(self.payloads[number % len(self.payloads)], np.uint8)
            self._tensors += publish_tensors(self._store, {"x": content}, submission_id=f"tensor-{number}")

    def read_tensors(self) -> float:
        """Read every tensor, checked, in one session; returns bytes per second."""
        started = time.perf_counter()
        with self._store.read_session() as session:
            for tensor in self._tensors:
                session.read_tensor_range(tensor.record_ref, 0, self.num_bytes)
        return len(self._tensors) * self.num_bytes / (time.perf_counter() - started)
