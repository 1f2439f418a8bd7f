"""Progress saved while a unit is worked on, and the engines that a run wants to have.

1. Saved progress is records on top of the one that the unit names.
2. Engines are rows that outlive their processes. A run of before has none; its supervisor makes them from the configuration
   at its next start.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "continuations",
        sa.Column("unit_id", sa.BigInteger(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("extent_id", sa.BigInteger(), nullable=False),
        sa.Column("row_start", sa.Integer(), nullable=False),
        sa.Column("row_count", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["unit_id"], ["units.unit_id"], name="fk_continuations_unit_id"),
        sa.ForeignKeyConstraint(["extent_id"], ["extents.extent_id"], name="fk_continuations_extent_id"),
        sa.PrimaryKeyConstraint("unit_id", "fence", "seq", name="pk_continuations"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_continuations_extent_id", "continuations", ["extent_id"])
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
