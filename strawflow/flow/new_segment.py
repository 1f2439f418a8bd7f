"""A segment about to be added to a dataset: its rows lie in packs, one transaction makes them the dataset's.

1. Its number is taken for granted in the journal entry and asked again in the transaction.
2. Row identities (content digest, occurrence) keep a row from being added twice, whoever adds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from strawflow.errors import ConflictError
from strawflow.flow import journal
from strawflow.flow.journal import Entry, EntryKind
from strawflow.flow.session import WorkerSession
from strawflow.ids import Extent
from strawflow.index import datasets, events, packs
from strawflow.index.datasets import Segment
from strawflow.index.engine import Connection

Identities = Sequence[tuple[bytes, int]]
"""(content digest, occurrence) of rows."""


class SegmentTakenError(ConflictError):
    """Another file became the dataset's next segment meanwhile."""


@dataclass(frozen=True)
class NewSegment:
    """Rows that are durable and wait for their transaction."""

    dataset_id: str
    purpose: str
    segment_seq: int
    num_rows: int
    source: str
    placed: Sequence[tuple[int, Extent]]
    """(first row, where it and those after it lie)."""
    priority: int = 0

    def entry(self, branch_id: str) -> Entry:
        """Return how the journal tells it."""
        body = {
            "dataset": self.dataset_id,
            "purpose": self.purpose,
            "segment_seq": self.segment_seq,
            "num_rows": self.num_rows,
            "source": self.source,
            "extents": [[first, journal.extent_ref(extent)] for first, extent in self.placed],
            **({"priority": self.priority} if self.priority else {}),
        }
        return Entry(EntryKind.SEGMENT, branch_id, body)

    def add(
        self, connection: Connection, session: WorkerSession, identities: Iterable[Identities]
    ) -> Segment:
        """Add it to its dataset, with the identities of its rows in pieces.

        Raises:
            SegmentTakenError: the dataset grew meanwhile. ConflictError: another added one of the rows meanwhile.
        """
        datasets.ensure(connection, self.dataset_id, purpose=self.purpose)
        named = packs.name_extents(
            connection, [extent for _, extent in self.placed], session_id=session.session_id
        )
        segment = datasets.add_segment(
            connection,
            self.dataset_id,
            num_rows=self.num_rows,
            source=self.source,
            priority=self.priority,
        )
        if segment.segment_seq != self.segment_seq:
            raise SegmentTakenError(f"dataset {self.dataset_id!r} grew meanwhile", dataset_id=self.dataset_id)
        datasets.add_segment_extents(
            connection,
            segment.segment_id,
            [(first, extent.extent_id) for (first, _), extent in zip(self.placed, named, strict=True)],
        )
        for rows in identities:
            datasets.add_rows(connection, self.dataset_id, rows)
        events.record(
            connection,
            "prompts.enqueued",
            session_id=session.session_id,
            dataset_id=self.dataset_id,
            num_rows=self.num_rows,
            source=self.source,
        )
        return segment
