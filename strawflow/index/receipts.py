"""Receipts: what a submission id was answered, so that a retry after a lost reply gets the same answer.

1. The receipt is written in the transaction that did the work.
2. The same id with another content digest is a ConflictError, never a second effect.
"""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow.errors import ConflictError
from strawflow.index import tables as t


def find(connection: Connection, submission_id: str, *, verb: str, content_digest: str) -> Any | None:
    """Return the stored receipt of this submission, or None when it was never accepted.

    Raises:
        ConflictError: the id was used for another verb or other content.
    """
    row = connection.execute(sa.select(t.receipts).where(t.receipts.c.submission_id == submission_id)).first()
    if row is None:
        return None
    if (row.verb, row.content_digest) != (verb, content_digest):
        raise ConflictError(
            f"submission id was already used for {row.verb!r} with other content; use a new id",
            submission_id=submission_id,
        )
    return json.loads(row.receipt)


def store(
    connection: Connection, submission_id: str, *, verb: str, content_digest: str, receipt: Any
) -> None:
    connection.execute(
        sa.insert(t.receipts).values(
            submission_id=submission_id, verb=verb, content_digest=content_digest, receipt=json.dumps(receipt)
        )
    )
