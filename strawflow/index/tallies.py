"""Tallies: counts kept up to date in the transaction that changes them, so that no verb has to count rows."""

from __future__ import annotations

from strawflow.index.prepared import Prepared, Transaction

_ADD = Prepared(
    "INSERT INTO tallies (branch_id, name, value) VALUES (:branch_id, :name, :amount) "
    "ON CONFLICT (branch_id, name) DO UPDATE SET value = tallies.value + excluded.value"
)
_VALUE = Prepared("SELECT value FROM tallies WHERE branch_id = :branch_id AND name = :name")
_OF = Prepared(
    "SELECT name, value FROM tallies WHERE branch_id = :branch_id AND name LIKE :prefix ORDER BY name"
)


def add(transaction: Transaction, branch_id: str, name: str, amount: int) -> None:
    """Add to a tally (0 when absent); others adding to it wait."""
    _ADD.count(transaction, branch_id=branch_id, name=name, amount=amount)


def value(transaction: Transaction, branch_id: str, name: str) -> int:
    rows = _VALUE.rows(transaction, branch_id=branch_id, name=name)
    return int(rows[0][0]) if rows else 0


def starting_with(transaction: Transaction, branch_id: str, prefix: str) -> dict[str, int]:
    """Return the tallies whose name starts with `prefix`."""
    rows = _OF.rows(transaction, branch_id=branch_id, prefix=f"{prefix}%")
    # To LIKE an underscore in a consumer's name is any letter.
    return {name: int(found) for name, found in rows if name.startswith(prefix)}
