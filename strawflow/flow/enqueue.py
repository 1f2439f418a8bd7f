"""Enqueuing: append a prompt file to a dataset as one immutable segment, all of it or nothing.

1. Bytes first: rows are appended to prompt packs while the file is read; one transaction at the end names them. A bad row
   or a crash before it leaves orphan bytes and no segment.
2. Row identity is (dataset, content digest, occurrence): rows the dataset already holds are passed over, so enqueuing
   the same file twice adds nothing.
3. Memory is bounded: identities of the rows being read wait in a temporary database file, not in memory.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from strawflow import eval_datasets, faults
from strawflow.config import RunConfig
from strawflow.errors import InvalidInputError
from strawflow.flow import journal
from strawflow.flow.new_segment import NewSegment, SegmentTakenError
from strawflow.flow.session import WorkerSession
from strawflow.ids import Extent
from strawflow.index import datasets
from strawflow.index.units import require_priority
from strawflow.prompts.images import num_bytes
from strawflow.prompts.reader import OnBadRow, ReadReport, read_prompts
from strawflow.prompts.row import PromptKeys, PromptRow, to_record_batch
from strawflow.prompts.source import PromptSource

_ROWS_PER_EXTENT = 4096
_BYTES_PER_EXTENT = 4 * 1024 * 1024


@dataclass
class EnqueueReport:
    """What an enqueue did."""

    dataset_id: str
    num_records: int = 0
    num_added: int = 0
    num_known: int = 0
    """Rows the dataset already held."""
    num_rejected: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    reject_path: str | None = None


@dataclass(frozen=True)
class EnqueueRequest:
    """What to enqueue and where."""

    dataset_id: str
    purpose: str
    source: PromptSource
    keys: PromptKeys
    on_bad_row: OnBadRow = "fail"
    reject_path: Path | None = None
    priority: int = 0
    """Of the groups made of these rows: higher is granted first."""


def purpose_of(config: RunConfig, dataset_id: str) -> str | None:
    """Return what a dataset of a run is for: train, demo or eval; None where the run's configuration knows none so called."""
    if dataset_id in config.eval_datasets():
        return "eval"
    if any(dataset_id == one.name for one in config.prompt_sets()):
        return "train"
    return "demo" if dataset_id == eval_datasets.DEMONSTRATIONS else None


def enqueue(session: WorkerSession, request: EnqueueRequest) -> EnqueueReport:
    """Append the rows of a prompt file to a dataset.

    Raises:
        InvalidInputError: a bad row under `fail`, an unreadable file, a priority that cannot be, or a dataset that is for
            something else; nothing is enqueued.
        NotFoundError: no such file.
        ConflictError: the dataset serves another purpose, or someone enqueued the same rows at the same time.
    """
    require_priority(request.priority)
    purpose = purpose_of(session.run.config, request.dataset_id) or request.purpose
    if purpose != request.purpose:
        raise InvalidInputError(
            f"dataset {request.dataset_id!r} of this run is for {purpose!r}, not {request.purpose!r}: nothing was enqueued"
        )
    if request.priority and request.purpose == "eval":
        raise InvalidInputError(
            f"the prompts of {request.dataset_id!r} are for evaluation, which has a priority of its own: leave it out"
        )
    for one in session.run.config.prompt_sets():
        if one.name == request.dataset_id and one.source:
            raise InvalidInputError(
                f"the prompts of {one.name!r} are made by {one.source} as the run goes on: nothing is enqueued there"
            )
    report = EnqueueReport(request.dataset_id)
    read = ReadReport()
    rows = read_prompts(
        request.source,
        request.keys,
        on_bad_row=request.on_bad_row,
        reject_path=request.reject_path,
        row_rewards=session.run.config.rollout.row_rewards,
        report=read,
    )
    with (
        tempfile.TemporaryDirectory(prefix="strawflow-enqueue-") as folder,
        _Spool(Path(folder) / "rows.sqlite") as spool,
    ):
        extents = _append_new_rows(session, request.dataset_id, rows, spool)
        faults.at("enqueue.before_commit")  # crash here: orphan bytes, named by nothing
        if spool.num_rows:
            _commit(session, request, extents, spool)
        report.num_added = spool.num_rows
    report.num_records, report.num_rejected = read.num_records, read.num_rejected
    report.num_known = read.num_accepted - report.num_added
    report.rejected = dict(read.rejected)
    if read.num_rejected and request.reject_path is not None:
        report.reject_path = str(request.reject_path)
    return report


class _Spool:
    """Identities of the rows of one file: how often each content came, and which are new; kept on disk."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.executescript(
            "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-32768;"
            "CREATE TABLE seen (digest BLOB PRIMARY KEY, times INTEGER NOT NULL) WITHOUT ROWID;"
            "CREATE TABLE added (digest BLOB NOT NULL, occurrence INTEGER NOT NULL);"
            "BEGIN;"
        )
        self.num_rows = 0

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def occurrence(self, digest: bytes) -> int:
        """Count this row; returns how many of the same content came before it in the file."""
        (times,) = self._database.execute(
            "INSERT INTO seen VALUES (?, 1) ON CONFLICT (digest) DO UPDATE SET times = times + 1 RETURNING times",
            (digest,),
        ).fetchone()
        return int(times) - 1

    def add(self, rows: Sequence[tuple[bytes, int]]) -> None:
        self._database.executemany("INSERT INTO added VALUES (?, ?)", rows)
        self.num_rows += len(rows)

    def chunks(self, size: int) -> Iterator[list[tuple[bytes, int]]]:
        cursor = self._database.execute("SELECT digest, occurrence FROM added ORDER BY rowid")
        while chunk := cursor.fetchmany(size):
            yield chunk


def _append_new_rows(
    session: WorkerSession, dataset_id: str, rows: Iterator[PromptRow], spool: _Spool
) -> list[tuple[int, Extent]]:
    placed: list[tuple[int, Extent]] = []
    for chunk in _chunked(rows):
        session.mark_progress()
        occurrences = [spool.occurrence(row.content_digest) for row in chunk]
        with session.run.index.read() as connection:
            known = datasets.known_occurrences(connection, dataset_id, [row.content_digest for row in chunk])
        new = [
            (row, occurrence)
            for row, occurrence in zip(chunk, occurrences, strict=True)
            if occurrence >= known.get(row.content_digest, 0)
        ]
        if not new:
            continue
        batch = to_record_batch(
            [row for row, _ in new], first_position=spool.num_rows, occurrences=[o for _, o in new]
        )
        placed.append((spool.num_rows, session.packs.append("prompt", batch)))
        spool.add([(row.content_digest, occurrence) for row, occurrence in new])
    return placed


def _chunked(rows: Iterator[PromptRow]) -> Iterator[list[PromptRow]]:
    chunk: list[PromptRow] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += len(row.prompt) + len(row.label or "") + len(row.metadata or "") + num_bytes(row.images)
        if len(chunk) >= _ROWS_PER_EXTENT or size >= _BYTES_PER_EXTENT:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _commit(
    session: WorkerSession, request: EnqueueRequest, placed: list[tuple[int, Extent]], spool: _Spool
) -> None:
    while not _try_commit(session, request, placed, spool):
        continue  # another file became the dataset's next segment meanwhile


def _try_commit(
    session: WorkerSession, request: EnqueueRequest, placed: list[tuple[int, Extent]], spool: _Spool
) -> bool:
    run = session.run
    with run.index.read() as connection:
        next_seq = datasets.next_segment_seq(connection, request.dataset_id)
    segment = NewSegment(
        request.dataset_id,
        request.purpose,
        next_seq,
        spool.num_rows,
        str(request.source),
        placed,
        request.priority,
    )
    try:
        with (
            journal.recorded(session, [segment.entry(run.branch)]) as record,
            run.index.begin() as connection,
        ):
            record.name(connection)
            segment.add(connection, session, spool.chunks(5000))
    except SegmentTakenError:
        return False
    return True
