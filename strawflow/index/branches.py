"""Branches: lines of history; unit states, plans, cursors and positions are keyed by them."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow import clock
from strawflow.index import tables as t


def create(connection: Connection, branch_id: str) -> None:
    connection.execute(sa.insert(t.branches).values(branch_id=branch_id, created_at=clock.wall_time()))
