"""Engines that a run wants to have: a number that outlives their processes, their state, and why one is quarantined.

A run of before has none; its supervisor makes them from the configuration at its next start.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "engine_slots",
        sa.Column(
            "slot_id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("placement", sa.Integer()),
        sa.Column("url", sa.String()),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("is_by_hand", sa.Boolean(), nullable=False),
        sa.Column("session_id", sa.String()),
        sa.Column("reason", sa.Text()),
        sa.Column("last_error", sa.Text()),
        sa.Column("num_garbage", sa.BigInteger(), nullable=False),
        sa.Column("strikes", sa.Integer(), nullable=False),
        sa.Column("retry_at", sa.Float()),
        sa.Column("tokens_per_s", sa.Float()),
        sa.Column("updated_at", sa.String(), nullable=False),
        sa.CheckConstraint(
            "state IN ('starting', 'serving', 'draining', 'quarantined', 'gone')",
            name=op.f("ck_engine_slots_state_known"),
        ),
        sa.CheckConstraint(
            "(state = 'quarantined') = (reason IS NOT NULL)",
            name=op.f("ck_engine_slots_quarantined_iff_reason"),
        ),
        sa.PrimaryKeyConstraint("slot_id", name=op.f("pk_engine_slots")),
    )
    op.create_index(
        "ix_engine_slots_session_id",
        "engine_slots",
        ["session_id"],
        unique=False,
        sqlite_where=sa.text("session_id IS NOT NULL"),
        postgresql_where=sa.text("session_id IS NOT NULL"),
    )
