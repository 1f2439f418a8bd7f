"""The journal: every change of a run that its packs alone would not tell, as rows of a pack of kind `journal`.

    change planned ▸ entry durable ▸ transaction (names the entry, makes the change true)

1. An entry is durable before the transaction that makes it true, and is named in it.
2. Nothing in an entry depends on what only the transaction knows: what it takes for granted (a cursor's version, the last
   planned step) is asked again there, and a change that finds it otherwise is planned anew.
3. An entry whose transaction did not commit does no harm: one that was refused is withdrawn by a later row; of those left
   by a kill, flow.rebuild takes none that another entry, a checkpoint or a digest contradicts.
4. Extents are told by their digests, so that they are found wherever compaction moved them.
5. Each row carries a checksum of its own: without an index nothing else would vouch for it.

What an entry means is its writer's business; flow.replaying reads them.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import xxhash

from strawflow import clock, faults
from strawflow.errors import CommitUnknownError, IncompatibleFormatError, LeaseLostError, StorageError
from strawflow.ids import Extent, new_id
from strawflow.index import packs
from strawflow.index.prepared import Transaction
from strawflow.records import JOURNAL

if TYPE_CHECKING:
    from strawflow.flow.session import WorkerSession

log = logging.getLogger(__name__)

KIND = "journal"
_CHECKSUM, _ENTRY_ID = "xxh3", "entry_id"
_LONG = frozenset(
    {
        "extents",
        "rows",
        "fates",
        "units",
        "carried",
        "kept",
        "seen",
        "readers",
        "retired",
        "metrics",
        "unit_ids",
    }
)


class EntryKind(StrEnum):
    """What changed."""

    SEGMENT = "segment"
    """A dataset grew by an immutable segment."""
    ADMISSION = "admission"
    """Units were made from a dataset and its cursor moved; the units follow from the two cursors."""
    DROP = "drop"
    """Units were dropped outside any batch."""
    PLAN = "plan"
    """A batch was planned."""
    VOID = "void"
    """The last planned batches were taken back."""
    STEP = "step"
    """A trainer applied a batch and measured something."""
    CHECKPOINT = "checkpoint"
    """A checkpoint and the position it stands for were committed."""
    ADVANCE = "advance"
    """A consumer's position was committed without a checkpoint."""
    WEIGHTS = "weights"
    """A weight version was published, with the evaluation it admits."""
    BRANCH = "branch"
    """A branch was started from a checkpoint."""
    CONSUMER = "consumer"
    """A consumer was created."""
    REQUEUE = "requeue"
    """Units were sent back pristine by a consumer that could not use their results."""
    REOPEN = "reopen"
    """Units whose stored results or progress are damaged were made pristine."""
    RETRY = "retry"
    """An operator offered failed units again."""
    RELEASE = "release"
    """An operator took back what a worker held."""
    DIGESTS = "digests"
    """Extents that no other entry names, and their checksums."""
    INCARNATION = "incarnation"
    """The index was rebuilt."""
    WITHDRAWN = "withdrawn"
    """The transaction of these entries was refused."""


@dataclass(frozen=True)
class Entry:
    """One change about to be made; `body` is JSON-able."""

    kind: EntryKind
    branch_id: str
    body: Mapping[str, Any]
    entry_id: str = field(default_factory=lambda: new_id("entry"))


@dataclass(frozen=True)
class Recorded:
    """Entries that are durable and wait for their transaction."""

    extents: Sequence[Extent]
    session_id: str

    def name(self, transaction: Transaction) -> None:
        """Name the entries; for the transaction that makes them true.

        Raises:
            LeaseLostError: the session that wrote them was declared lost.
        """
        packs.name_extents(transaction, self.extents, session_id=self.session_id)


@contextmanager
def recorded(session: WorkerSession, entries: Sequence[Entry]) -> Iterator[Recorded]:
    """Make entries durable for the transaction inside; if that is refused they are withdrawn.

    Raises:
        StorageError: they could not be written; nothing changed.
    """
    rows = [to_rows(entries, incarnation=session.incarnation)] if entries else []
    made = Recorded(session.packs.append_many(KIND, rows), session.session_id)
    if entries:
        faults.at("journal.after_entry")  # crash here: an entry of what never became true
    try:
        yield made
    except CommitUnknownError:
        raise  # it may have committed
    except Exception:
        if entries:
            _withdraw(session, entries)
        raise


def _withdraw(session: WorkerSession, entries: Sequence[Entry]) -> None:
    body = {"entries": [entry.entry_id for entry in entries]}
    withdrawn = Entry(EntryKind.WITHDRAWN, entries[0].branch_id, body)
    try:
        session.packs.append(KIND, to_rows([withdrawn], incarnation=session.incarnation))
    except StorageError as error:
        # As after a kill: the entry stands, and whatever contradicts it wins.
        log.warning("refused journal entries could not be withdrawn: %s", error)


RESULTS = ("trajectory", "continuation", "progress")
"""Kinds whose extents no entry of their own names: they tell what they are, and their checksums are written down."""


def checksums(branch_id: str, extents: Iterable[Extent]) -> list[Entry]:
    """Return the entry that holds the checksums of results, none if there are none among the extents."""
    by_path: dict[str, list[list[Any]]] = {}
    for extent in extents:
        if extent.kind in RESULTS:
            by_path.setdefault(extent.path, []).append([extent.offset, extent.digests.hex()])
    return [Entry(EntryKind.DIGESTS, branch_id, {"extents": by_path})] if by_path else []


class ChecksumLog:
    """Checksums of the results a session had accepted, written down with the heartbeat and at the end.

    A rebuild takes a result only if it matches its checksum. Of those accepted after the last time it can only see
    that they have the right form.
    """

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._waiting: list[Extent] = []

    def add(self, extents: Iterable[Extent]) -> None:
        with self._lock:
            self._waiting += extents

    def write(self) -> None:
        """Write down what waits; a failure leaves it to the next time."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        entries = checksums(self._session.run.branch, waiting)
        if not entries:
            return
        try:
            with (
                recorded(self._session, entries) as record,
                self._session.run.index.begin() as connection,
            ):
                record.name(connection)
        except (StorageError, CommitUnknownError, LeaseLostError) as error:
            log.warning("the checksums of results could not be written down now: %s", error)
            with self._lock:
                self._waiting = waiting + self._waiting


def to_rows(entries: Iterable[Entry], *, incarnation: int, at_ms: int | None = None) -> pa.RecordBatch:
    """Return entries as rows (schema records.JOURNAL)."""
    at_ms = clock.wall_ms() if at_ms is None else at_ms
    rows = []
    for entry in entries:
        body = {**entry.body, _ENTRY_ID: entry.entry_id}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        body[_CHECKSUM] = _checksum(entry.kind, entry.branch_id, incarnation, at_ms, text)
        rows.append(
            {
                "entry": entry.kind.value,
                "branch_id": entry.branch_id,
                "incarnation": incarnation,
                "at_ms": at_ms,
                "body": json.dumps(body, sort_keys=True, separators=(",", ":")),
            }
        )
    return pa.RecordBatch.from_pylist(rows, schema=JOURNAL)


def _checksum(kind: str, branch_id: str, incarnation: int, at_ms: int, text: str) -> str:
    return xxhash.xxh3_64_hexdigest(f"{kind}\0{branch_id}\0{incarnation}\0{at_ms}\0{text}".encode())


@dataclass(frozen=True, order=True)
class Place:
    """Where an entry lies; of one writer's entries the later has the higher place."""

    path: str
    offset: int
    row: int


@dataclass(frozen=True)
class StoredEntry:
    """An entry as read back; its body is kept as text, since some are long."""

    kind: EntryKind
    branch_id: str
    incarnation: int
    at_ms: int
    text: str
    place: Place

    @property
    def body(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text)
        return found

    @cached_property
    def head(self) -> dict[str, Any]:
        """The body without its long parts."""
        return {name: value for name, value in self.body.items() if name not in _LONG}

    @property
    def entry_id(self) -> str:
        return str(self.head[_ENTRY_ID])


def from_rows(rows: pa.RecordBatch, *, path: str, offset: int) -> tuple[list[StoredEntry], int]:
    """Return the entries of a message and how many of its rows do not match their checksums.

    Raises:
        IncompatibleFormatError: a whole row tells of a kind of change that this program does not know.
    """
    found: list[StoredEntry] = []
    num_damaged = 0
    for number, row in enumerate(rows.to_pylist()):
        try:
            body = json.loads(row["body"])
            checksum = body.pop(_CHECKSUM)
            text = json.dumps(body, sort_keys=True, separators=(",", ":"))
            head = row["entry"], row["branch_id"], row["incarnation"], row["at_ms"]
            is_whole = checksum == _checksum(*head, text)
        except (ValueError, KeyError, TypeError, AttributeError):
            is_whole = False
        if not is_whole:
            num_damaged += 1
            continue
        if row["entry"] not in set(EntryKind):
            raise IncompatibleFormatError(
                f"{path} tells of a change of kind {row['entry']!r}, which this program does not know; use a newer one"
            )
        place = Place(path, offset, number)
        found.append(
            StoredEntry(
                EntryKind(row["entry"]),
                row["branch_id"],
                row["incarnation"],
                row["at_ms"],
                row["body"],
                place,
            )
        )
    return found, num_damaged


def extent_ref(extent: Extent) -> list[Any]:
    """Return how an entry names an extent: by its digests, and where it lies for now."""
    return [extent.digests.hex(), extent.num_rows, extent.path, extent.offset, extent.length]


@dataclass(frozen=True)
class ExtentRef:
    """An extent as an entry names it."""

    kind: str
    digests: bytes
    num_rows: int
    path: str
    offset: int
    length: int

    @classmethod
    def of(cls, kind: str, ref: Sequence[Any]) -> ExtentRef:
        digests, num_rows, path, offset, length = ref
        return cls(kind, bytes.fromhex(digests), num_rows, path, offset, length)
