"""Receipts: what a submission id was answered, so that a retry after a lost reply gets the same answer.

1. The receipt is written in the transaction that did the work.
2. The same id with another content digest is a ConflictError, never a second effect.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from strawflow import clock
from strawflow.errors import ConflictError
from strawflow.index.prepared import Prepared, Transaction, rows_value


@dataclass(frozen=True)
class Receipt:
    """The answer to one submission; `content_digest` tells whether a repetition says the same thing."""

    submission_id: str
    verb: str
    content_digest: bytes
    answer: Any

    def require_same(self, *, verb: str, content_digest: bytes) -> None:
        """Raise ConflictError unless the submission at hand is the one that was answered."""
        if (self.verb, self.content_digest) != (verb, content_digest):
            raise ConflictError(
                f"submission id was already used for {self.verb!r} with other content; use a new id",
                submission_id=self.submission_id,
            )


_FIND = Prepared(
    "SELECT receipts.submission_id, verb, content_digest, receipt FROM {each} JOIN receipts "
    "ON receipts.submission_id = {text_value}"
)
_STORE = Prepared(
    "INSERT INTO receipts (submission_id, verb, content_digest, receipt, at_ms) "
    "VALUES (:submission_id, :verb, :content_digest, :receipt, :at_ms)"
)


def find_many(transaction: Transaction, submission_ids: Iterable[str]) -> dict[str, Receipt]:
    """Return the receipts of those submissions that were accepted."""
    wanted = list(submission_ids)
    rows = _FIND.rows(transaction, rows=rows_value(wanted)) if wanted else []
    return {row[0]: Receipt(row[0], row[1], bytes(row[2]), json.loads(row[3])) for row in rows}


def store(transaction: Transaction, receipts: Iterable[Receipt]) -> None:
    """Write receipts; one of a submission that has its receipt already is refused by the primary key."""
    rows = [
        {
            "submission_id": receipt.submission_id,
            "verb": receipt.verb,
            "content_digest": receipt.content_digest,
            "receipt": json.dumps(receipt.answer, separators=(",", ":")),
            "at_ms": clock.wall_ms(),
        }
        for receipt in receipts
    ]
    if rows:
        _STORE.many(transaction, rows)
