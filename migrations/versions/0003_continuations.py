"""Progress that is saved while a unit is worked on: records on top of the one that the unit names."""

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
