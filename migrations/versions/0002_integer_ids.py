"""Integer ids, partial indexes, branches, pins, quarantine; rows that cost less.

1. Every table whose shape changed is built anew beside the old one and filled from it; then the old one is dropped.
2. Extents and packs get integers in the order they were made; what named them by text follows.
3. Checkpoints of before have no cursors: they resume as ever, and no branch can start from them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_REPLACED = (
    "batch_extents",
    "assignments",
    "offers",
    "batches",
    "units",
    "segment_extents",
    "prompt_rows",
    "extents",
    "packs",
    "receipts",
    "events",
)
"""Children before what they refer to: the order in which the old tables can be dropped."""


def upgrade() -> None:
    op.add_column("sessions", sa.Column("incarnation", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("branches", sa.Column("from_step", sa.BigInteger()))
    op.add_column(
        "consumers", sa.Column("purposes", sa.String(), nullable=False, server_default="demo,train")
    )
    op.add_column("checkpoints", sa.Column("cursors", sa.Text()))
    op.add_column("checkpoints", sa.Column("last_unit_id", sa.BigInteger()))
    op.add_column(
        "checkpoints", sa.Column("files_removed", sa.Boolean(), nullable=False, server_default=sa.false())
    )
    for table in _REPLACED:
        _set_aside(table)
    _create()
    for statement in _FILL:
        op.execute(statement)
    _fill_with_times()
    if op.get_bind().dialect.name == "postgresql":
        for table, column in (
            ("packs", "pack_id"),
            ("extents", "extent_id"),
            ("batches", "batch_id"),
            ("events", "event_id"),
        ):
            op.execute(
                f"SELECT setval(pg_get_serial_sequence('{table}', '{column}'), "
                f"(SELECT coalesce(max({column}), 0) + 1 FROM {table}), false)"
            )
    for table in _REPLACED:
        op.drop_table(f"old_{table}")


def _set_aside(table: str) -> None:
    """Rename a table and, where their names belong to the database, all that came with it."""
    bind = op.get_bind()
    inspector = sa.inspect(bind)
    indexes = [i["name"] for i in inspector.get_indexes(table)]
    if bind.dialect.name == "sqlite":
        for name in indexes:
            op.execute(f'DROP INDEX IF EXISTS "{name}"')
        # Without this, SQLite would point the foreign keys of other tables at the renamed one.
        op.execute("PRAGMA legacy_alter_table = ON")
        op.rename_table(table, f"old_{table}")
        op.execute("PRAGMA legacy_alter_table = OFF")
        return
    names = [
        row.name
        for row in bind.execute(
            sa.text(
                "SELECT c.relname AS name FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid "
                "WHERE i.indrelid = CAST(:table AS regclass)"
            ),
            {"table": table},
        )
    ]
    for name in names:
        op.execute(f'ALTER INDEX "{name}" RENAME TO "old_{name}"')
    for row in bind.execute(
        sa.text(
            "SELECT s.relname AS name FROM pg_class s JOIN pg_depend d ON d.objid = s.oid "
            "WHERE s.relkind = 'S' AND d.refobjid = CAST(:table AS regclass)"
        ),
        {"table": table},
    ).all():
        op.execute(f'ALTER SEQUENCE "{row.name}" RENAME TO "old_{row.name}"')
    op.rename_table(table, f"old_{table}")


_FILL = (
    "INSERT INTO packs (pack_id, kind, path, state, session_id, num_bytes, num_rows, created_at) "
    "SELECT row_number() OVER (ORDER BY created_at, pack_id), kind, path, state, session_id, num_bytes, num_rows, "
    "created_at FROM old_packs",
    'INSERT INTO extents (extent_id, pack_id, "offset", length, num_rows, digests) '
    'SELECT row_number() OVER (ORDER BY p.pack_id, e."offset", e.extent_id), p.pack_id, e."offset", e.length, e.num_rows, e.digests '
    "FROM old_extents e JOIN old_packs q ON q.pack_id = e.pack_id JOIN packs p ON p.path = q.path",
    # The number an extent got, beside the name it had: both orders are the same.
    "CREATE TABLE named_extents AS SELECT e.extent_id AS old_id, "
    'row_number() OVER (ORDER BY p.pack_id, e."offset", e.extent_id) AS new_id '
    "FROM old_extents e JOIN old_packs q ON q.pack_id = e.pack_id JOIN packs p ON p.path = q.path",
    "CREATE UNIQUE INDEX ix_named_extents ON named_extents (old_id)",
    "INSERT INTO segment_extents (segment_id, first_row, extent_id) SELECT s.segment_id, s.first_row, n.new_id "
    "FROM old_segment_extents s JOIN named_extents n ON n.old_id = s.extent_id",
    "INSERT INTO prompt_rows (dataset_id, digest, occurrence) SELECT dataset_id, digest, occurrence FROM old_prompt_rows",
    "INSERT INTO units (unit_id, branch_id, purpose, profile, segment_id, epoch, position, state, required_version_id, "
    "claim_class, precedence, scheduling_key, fence, seq, attempts, crashes, parks, requeues, session_id, last_error, "
    "extent_id, row_start, row_count, version_step, mean_reward, num_tokens) "
    "SELECT u.unit_id, u.branch_id, u.purpose, u.profile, u.segment_id, u.epoch, u.position, u.state, "
    "u.required_version_id, 1, -u.priority, 0, u.fence, u.seq, u.attempts, u.crashes, 0, 0, u.session_id, u.last_error, "
    "n.new_id, u.row_start, u.row_count, u.version_step, u.mean_reward, u.num_tokens "
    "FROM old_units u LEFT JOIN named_extents n ON n.old_id = u.extent_id",
    "INSERT INTO meta (key, value) SELECT 'last_unit_id', CAST(coalesce(max(unit_id), 0) AS VARCHAR(20)) FROM old_units",
    "INSERT INTO batches (batch_id, branch_id, consumer, step, objective, state, num_units, num_sequences, num_tokens, "
    "mean_reward, max_staleness, denominators, digest, plan_extent_id, fence, planned_at) "
    "SELECT b.batch_id, b.branch_id, b.consumer, b.step, b.objective, b.state, b.num_units, b.num_sequences, "
    "b.num_tokens, b.mean_reward, b.max_staleness, b.denominators, b.digest, n.new_id, b.fence, b.planned_at "
    "FROM old_batches b JOIN named_extents n ON n.old_id = b.plan_extent_id",
    "INSERT INTO batch_extents (batch_id, mini_batch, slice, micro_batch, extent_id) "
    "SELECT b.batch_id, b.mini_batch, b.slice, b.micro_batch, n.new_id "
    "FROM old_batch_extents b JOIN named_extents n ON n.old_id = b.extent_id",
    "INSERT INTO offers (branch_id, consumer, purpose, version_step, unit_id) "
    "SELECT o.branch_id, o.consumer, u.purpose, coalesce(u.version_step, 0), o.unit_id "
    "FROM old_offers o JOIN old_units u ON u.unit_id = o.unit_id",
    # A drop outside any batch happened while some step was being planned, and nobody wrote down which.
    "INSERT INTO assignments (branch_id, consumer, epoch, unit_id, batch_id, outcome, reason, at_step) "
    "SELECT a.branch_id, a.consumer, a.epoch, a.unit_id, a.batch_id, a.outcome, a.reason, coalesce(b.step, 0) "
    "FROM old_assignments a LEFT JOIN old_batches b ON b.batch_id = a.batch_id",
    "INSERT INTO tallies (branch_id, name, value) "
    "SELECT a.branch_id, 'dropped/' || a.consumer || '/' || u.purpose, count(*) "
    "FROM old_assignments a JOIN old_units u ON u.unit_id = a.unit_id WHERE a.batch_id IS NULL "
    "GROUP BY a.branch_id, a.consumer, u.purpose",
    "DROP TABLE named_extents",
)


def _fill_with_times() -> None:
    """Receipts and events: wall times and digests were text, and are numbers and bytes now."""
    if op.get_bind().dialect.name == "postgresql":
        at_ms = "CAST(extract(epoch FROM CAST(at AS timestamptz)) * 1000 AS BIGINT)"
        digest = "decode(content_digest, 'hex')"
    else:
        at_ms = "CAST(round((julianday(at) - 2440587.5) * 86400000) AS INTEGER)"
        digest = "unhex_text(content_digest)"
        op.get_bind().connection.driver_connection.create_function("unhex_text", 1, bytes.fromhex)
    op.execute(
        "INSERT INTO receipts (submission_id, verb, content_digest, receipt, at_ms) "
        f"SELECT submission_id, verb, {digest}, receipt, 0 FROM old_receipts"
    )
    op.execute(
        "INSERT INTO events (event_id, at_ms, name, session_id, unit_id, facts) "
        f"SELECT event_id, {at_ms}, name, session_id, unit_id, facts FROM old_events"
    )


def _create() -> None:
    op.create_table(
        "events",
        sa.Column(
            "event_id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=True),
        sa.Column("unit_id", sa.BigInteger(), nullable=True),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_events")),
    )
    op.create_table(
        "pins",
        sa.Column(
            "pin_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("subject_kind", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=True),
        sa.Column("at", sa.String(), nullable=False),
        sa.CheckConstraint(
            "subject_kind IN ('pack', 'batch', 'checkpoint', 'weights')",
            name=op.f("ck_pins_subject_kind_known"),
        ),
        sa.PrimaryKeyConstraint("pin_id", name=op.f("pk_pins")),
    )
    op.create_index("ix_pins_subject_kind_subject", "pins", ["subject_kind", "subject"], unique=False)
    op.create_table(
        "receipts",
        sa.Column("submission_id", sa.String(), nullable=False),
        sa.Column("verb", sa.String(), nullable=False),
        sa.Column("content_digest", sa.LargeBinary(), nullable=False),
        sa.Column("receipt", sa.Text(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("submission_id", name=op.f("pk_receipts")),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_receipts_at_ms", "receipts", ["at_ms"], unique=False)
    op.create_table(
        "tallies",
        sa.Column("branch_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("branch_id", "name", name=op.f("pk_tallies")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "packs",
        sa.Column(
            "pack_id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=True),
        sa.Column("num_rows", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.String(), nullable=False),
        sa.Column("sealed_at", sa.Float(), nullable=True),
        sa.Column("condemned_at", sa.Float(), nullable=True),
        sa.CheckConstraint("state IN ('open', 'sealed', 'condemned')", name=op.f("ck_packs_state_known")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name=op.f("fk_packs_session_id")),
        sa.PrimaryKeyConstraint("pack_id", name=op.f("pk_packs")),
        sa.UniqueConstraint("path", name=op.f("uq_packs_path")),
    )
    op.create_index("ix_packs_state_session_id", "packs", ["state", "session_id"], unique=False)
    op.create_table(
        "prompt_rows",
        sa.Column("dataset_id", sa.String(), nullable=False),
        sa.Column("digest", sa.LargeBinary(length=16), nullable=False),
        sa.Column("occurrence", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["dataset_id"], ["datasets.dataset_id"], name=op.f("fk_prompt_rows_dataset_id")
        ),
        sa.PrimaryKeyConstraint("dataset_id", "digest", "occurrence", name=op.f("pk_prompt_rows")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "extents",
        sa.Column(
            "extent_id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("pack_id", sa.BigInteger(), nullable=False),
        sa.Column("offset", sa.BigInteger(), nullable=False),
        sa.Column("length", sa.BigInteger(), nullable=False),
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("digests", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["pack_id"], ["packs.pack_id"], name=op.f("fk_extents_pack_id")),
        sa.PrimaryKeyConstraint("extent_id", name=op.f("pk_extents")),
    )
    op.create_index(op.f("ix_extents_pack_id"), "extents", ["pack_id"], unique=False)
    op.create_table(
        "batches",
        sa.Column(
            "batch_id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("branch_id", sa.String(), nullable=False),
        sa.Column("consumer", sa.String(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("objective", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("num_units", sa.Integer(), nullable=False),
        sa.Column("num_sequences", sa.Integer(), nullable=False),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("mean_reward", sa.Float(), nullable=True),
        sa.Column("max_staleness", sa.Integer(), nullable=False),
        sa.Column("denominators", sa.Text(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("plan_extent_id", sa.BigInteger(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("planned_at", sa.String(), nullable=False),
        sa.CheckConstraint("state IN ('planned', 'trained', 'retired')", name=op.f("ck_batches_state_known")),
        sa.ForeignKeyConstraint(["branch_id"], ["branches.branch_id"], name=op.f("fk_batches_branch_id")),
        sa.ForeignKeyConstraint(
            ["plan_extent_id"], ["extents.extent_id"], name=op.f("fk_batches_plan_extent_id")
        ),
        sa.PrimaryKeyConstraint("batch_id", name=op.f("pk_batches")),
        sa.UniqueConstraint("branch_id", "consumer", "step", name=op.f("uq_batches_branch_id_consumer_step")),
    )
    op.create_index("ix_batches_plan_extent_id", "batches", ["plan_extent_id"], unique=False)
    op.create_table(
        "quarantine",
        sa.Column("extent_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["extent_id"], ["extents.extent_id"], name=op.f("fk_quarantine_extent_id")),
        sa.PrimaryKeyConstraint("extent_id", name=op.f("pk_quarantine")),
    )
    op.create_table(
        "segment_extents",
        sa.Column("segment_id", sa.BigInteger(), nullable=False),
        sa.Column("first_row", sa.BigInteger(), nullable=False),
        sa.Column("extent_id", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["extent_id"], ["extents.extent_id"], name=op.f("fk_segment_extents_extent_id")
        ),
        sa.ForeignKeyConstraint(
            ["segment_id"], ["segments.segment_id"], name=op.f("fk_segment_extents_segment_id")
        ),
        sa.PrimaryKeyConstraint("segment_id", "first_row", name=op.f("pk_segment_extents")),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_segment_extents_extent_id", "segment_extents", ["extent_id"], unique=False)
    op.create_table(
        "units",
        sa.Column(
            "unit_id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=False,
            nullable=False,
        ),
        sa.Column("branch_id", sa.String(), nullable=False),
        sa.Column("purpose", sa.String(), nullable=False),
        sa.Column("profile", sa.String(), nullable=False),
        sa.Column("segment_id", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("required_version_id", sa.String(), nullable=True),
        sa.Column("claim_class", sa.Integer(), nullable=False),
        sa.Column("precedence", sa.Integer(), nullable=False),
        sa.Column("scheduling_key", sa.BigInteger(), nullable=False),
        sa.Column("not_before", sa.Float(), nullable=True),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("crashes", sa.Integer(), nullable=False),
        sa.Column("parks", sa.Integer(), nullable=False),
        sa.Column("requeues", sa.Integer(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("extent_id", sa.BigInteger(), nullable=True),
        sa.Column("row_start", sa.Integer(), nullable=True),
        sa.Column("row_count", sa.Integer(), nullable=True),
        sa.Column("version_step", sa.BigInteger(), nullable=True),
        sa.Column("mean_reward", sa.Float(), nullable=True),
        sa.Column("num_tokens", sa.Integer(), nullable=True),
        sa.CheckConstraint(
            "(state = 'leased') = (session_id IS NOT NULL)", name=op.f("ck_units_leased_iff_session")
        ),
        sa.CheckConstraint("not_before IS NULL OR state = 'ready'", name=op.f("ck_units_only_ready_waits")),
        sa.CheckConstraint(
            "state <> 'completed' OR extent_id IS NOT NULL", name=op.f("ck_units_completed_has_extent")
        ),
        sa.CheckConstraint(
            "state IN ('ready', 'leased', 'completed', 'failed')", name=op.f("ck_units_state_known")
        ),
        sa.ForeignKeyConstraint(["branch_id"], ["branches.branch_id"], name=op.f("fk_units_branch_id")),
        sa.ForeignKeyConstraint(["extent_id"], ["extents.extent_id"], name=op.f("fk_units_extent_id")),
        sa.ForeignKeyConstraint(["segment_id"], ["segments.segment_id"], name=op.f("fk_units_segment_id")),
        sa.PrimaryKeyConstraint("unit_id", name=op.f("pk_units")),
        sa.UniqueConstraint(
            "branch_id",
            "profile",
            "segment_id",
            "epoch",
            "position",
            name=op.f("uq_units_branch_id_profile_segment_id_epoch_position"),
        ),
    )
    op.create_index(
        "ix_units_bound",
        "units",
        ["branch_id", "epoch", "unit_id"],
        unique=False,
        sqlite_where=sa.text("required_version_id IS NOT NULL AND state IN ('ready', 'leased')"),
        postgresql_where=sa.text("required_version_id IS NOT NULL AND state IN ('ready', 'leased')"),
    )
    op.create_index(
        "ix_units_claim",
        "units",
        ["branch_id", "claim_class", "precedence", "scheduling_key", "unit_id"],
        unique=False,
        sqlite_where=sa.text("state = 'ready' AND not_before IS NULL"),
        postgresql_where=sa.text("state = 'ready' AND not_before IS NULL"),
    )
    op.create_index(
        "ix_units_extent_id",
        "units",
        ["extent_id"],
        unique=False,
        sqlite_where=sa.text("extent_id IS NOT NULL"),
        postgresql_where=sa.text("extent_id IS NOT NULL"),
    )
    op.create_index(
        "ix_units_failed",
        "units",
        ["branch_id", "purpose", "unit_id"],
        unique=False,
        sqlite_where=sa.text("state = 'failed'"),
        postgresql_where=sa.text("state = 'failed'"),
    )
    op.create_index(
        "ix_units_not_before",
        "units",
        ["branch_id", "not_before"],
        unique=False,
        sqlite_where=sa.text("not_before IS NOT NULL"),
        postgresql_where=sa.text("not_before IS NOT NULL"),
    )
    op.create_index(
        "ix_units_session_id",
        "units",
        ["session_id"],
        unique=False,
        sqlite_where=sa.text("session_id IS NOT NULL"),
        postgresql_where=sa.text("session_id IS NOT NULL"),
    )
    op.create_table(
        "assignments",
        sa.Column("unit_id", sa.BigInteger(), nullable=False),
        sa.Column("branch_id", sa.String(), nullable=False),
        sa.Column("consumer", sa.String(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("batch_id", sa.BigInteger(), nullable=True),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("at_step", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "(outcome = 'dropped') = (reason IS NOT NULL)", name=op.f("ck_assignments_dropped_iff_reason")
        ),
        sa.CheckConstraint(
            "outcome = 'dropped' OR batch_id IS NOT NULL", name=op.f("ck_assignments_trained_in_batch")
        ),
        sa.CheckConstraint("outcome IN ('trained', 'dropped')", name=op.f("ck_assignments_outcome_known")),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.batch_id"], name=op.f("fk_assignments_batch_id")),
        sa.ForeignKeyConstraint(["unit_id"], ["units.unit_id"], name=op.f("fk_assignments_unit_id")),
        sa.PrimaryKeyConstraint("unit_id", "branch_id", "consumer", "epoch", name=op.f("pk_assignments")),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_assignments_batch_id", "assignments", ["batch_id"], unique=False)
    op.create_table(
        "batch_extents",
        sa.Column("batch_id", sa.BigInteger(), nullable=False),
        sa.Column("mini_batch", sa.Integer(), nullable=False),
        sa.Column("slice", sa.Integer(), nullable=False),
        sa.Column("micro_batch", sa.Integer(), nullable=False),
        sa.Column("extent_id", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.batch_id"], name=op.f("fk_batch_extents_batch_id")),
        sa.ForeignKeyConstraint(
            ["extent_id"], ["extents.extent_id"], name=op.f("fk_batch_extents_extent_id")
        ),
        sa.PrimaryKeyConstraint(
            "batch_id", "mini_batch", "slice", "micro_batch", name=op.f("pk_batch_extents")
        ),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_batch_extents_extent_id", "batch_extents", ["extent_id"], unique=False)
    op.create_table(
        "offers",
        sa.Column("branch_id", sa.String(), nullable=False),
        sa.Column("consumer", sa.String(), nullable=False),
        sa.Column("purpose", sa.String(), nullable=False),
        sa.Column("version_step", sa.BigInteger(), nullable=False),
        sa.Column("unit_id", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["unit_id"], ["units.unit_id"], name=op.f("fk_offers_unit_id")),
        sa.PrimaryKeyConstraint(
            "branch_id", "consumer", "purpose", "version_step", "unit_id", name=op.f("pk_offers")
        ),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_offers_unit_id", "offers", ["unit_id"], unique=False)
