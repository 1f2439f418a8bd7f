"""The tables of the SQL index: what exists, where it lies, and who may work on it.

1. Rows never hold payload; the largest values are digests, error texts and small JSON records.
2. The promise "trained exactly once" is the primary key of `assignments`; CHECKs and unique keys restate other invariants.
3. The same definitions serve SQLite and PostgreSQL; migrations/ builds them, a test keeps the two equal.
"""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from strawflow.states import BatchState, PackState, SessionState, UnitState, WeightState

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite autoincrements only a column spelled INTEGER; PostgreSQL needs 64 bits.
BigKey = BigInteger().with_variant(Integer, "sqlite")


def _one_of(column: str, states: type[StrEnum]) -> CheckConstraint:
    allowed = ", ".join(f"'{s.value}'" for s in states)
    return CheckConstraint(f"{column} IN ({allowed})", name=f"{column}_known")


meta = Table(
    "meta",
    metadata,
    Column("key", String, primary_key=True),
    Column("value", Text, nullable=False),
)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", String, primary_key=True),
    Column("kind", String, nullable=False),
    Column("host", String, nullable=False),  # for display
    Column("machine", String, nullable=False),  # boot id and pid namespace: where the pid means something
    Column("pid", Integer, nullable=False),
    Column("process_started", BigInteger, nullable=False),  # clock ticks since boot: tells a reused pid
    Column("state", String, nullable=False),
    Column("expires_at", Float, nullable=False),  # index time, seconds
    Column("started_at", String, nullable=False),  # wall time, for display
    Column("ended_at", String),
    _one_of("state", SessionState),
    Index("ix_sessions_state_expires_at", "state", "expires_at"),
)

packs = Table(
    "packs",
    metadata,
    Column("pack_id", String, primary_key=True),
    Column("kind", String, nullable=False),
    Column("path", String, nullable=False, unique=True),
    Column("state", String, nullable=False),
    Column("session_id", String, ForeignKey("sessions.session_id"), nullable=False),
    Column("num_bytes", BigInteger),
    Column("num_rows", BigInteger),
    Column("created_at", String, nullable=False),
    _one_of("state", PackState),
    Index("ix_packs_state_session_id", "state", "session_id"),
)

extents = Table(
    "extents",
    metadata,
    Column("extent_id", String, primary_key=True),
    Column("pack_id", String, ForeignKey("packs.pack_id"), nullable=False, index=True),
    Column("offset", BigInteger, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("num_rows", BigInteger, nullable=False),
    Column("digests", LargeBinary, nullable=False),
)

datasets = Table(
    "datasets",
    metadata,
    Column("dataset_id", String, primary_key=True),
    Column("purpose", String, nullable=False),
    Column("created_at", String, nullable=False),
)

segments = Table(
    "segments",
    metadata,
    Column("segment_id", BigKey, primary_key=True, autoincrement=True),
    Column("dataset_id", String, ForeignKey("datasets.dataset_id"), nullable=False),
    Column("segment_seq", Integer, nullable=False),
    Column("num_rows", BigInteger, nullable=False),
    Column("source", String, nullable=False),
    Column("created_at", String, nullable=False),
    UniqueConstraint("dataset_id", "segment_seq"),
)

segment_extents = Table(
    "segment_extents",
    metadata,
    Column("segment_id", BigInteger, ForeignKey("segments.segment_id"), primary_key=True),
    Column("first_row", BigInteger, primary_key=True),
    Column("extent_id", String, ForeignKey("extents.extent_id"), nullable=False),
)

prompt_rows = Table(
    "prompt_rows",
    metadata,
    Column("dataset_id", String, ForeignKey("datasets.dataset_id"), primary_key=True),
    Column("digest", LargeBinary(16), primary_key=True),
    Column("occurrence", Integer, primary_key=True),
)

branches = Table(
    "branches",
    metadata,
    Column("branch_id", String, primary_key=True),
    Column("parent_id", String),
    Column("from_checkpoint_id", String),
    Column("created_at", String, nullable=False),
)

cursors = Table(
    "cursors",
    metadata,
    Column("branch_id", String, ForeignKey("branches.branch_id"), primary_key=True),
    Column("dataset_id", String, ForeignKey("datasets.dataset_id"), primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("segment_seq", Integer, nullable=False),
    Column("position", BigInteger, nullable=False),
    Column("num_admitted", BigInteger, nullable=False),
)

units = Table(
    "units",
    metadata,
    Column("unit_id", BigKey, primary_key=True, autoincrement=True),
    Column("branch_id", String, ForeignKey("branches.branch_id"), nullable=False),
    Column("purpose", String, nullable=False),  # train, demo or eval
    Column("profile", String, nullable=False),  # name of the sampling settings in the run's configuration
    Column("segment_id", BigInteger, ForeignKey("segments.segment_id"), nullable=False),
    Column("epoch", Integer, nullable=False),  # of the dataset; for eval the step of the weights under test
    Column("position", BigInteger, nullable=False),
    Column("state", String, nullable=False),
    Column("required_version_id", String),  # eval: the only weight version that may serve it
    Column("priority", Integer, nullable=False, default=0),
    Column("fence", BigInteger, nullable=False, default=0),
    Column("seq", BigInteger, nullable=False, default=0),
    Column("attempts", Integer, nullable=False, default=0),
    Column(
        "crashes", Integer, nullable=False, default=0
    ),  # lost together with other units: see index.units.rescue
    Column("session_id", String),
    Column("last_error", Text),
    Column("extent_id", String, ForeignKey("extents.extent_id")),  # trajectories of the accepted completion
    Column("row_start", Integer),
    Column("row_count", Integer),
    Column("version_step", BigInteger),  # oldest weight step among the sampled tokens
    Column("mean_reward", Float),
    Column("num_tokens", Integer),
    UniqueConstraint("branch_id", "profile", "segment_id", "epoch", "position"),
    _one_of("state", UnitState),
    CheckConstraint("(state = 'leased') = (session_id IS NOT NULL)", name="leased_iff_session"),
    CheckConstraint("(state = 'completed') = (extent_id IS NOT NULL)", name="completed_iff_extent"),
    Index("ix_units_claim", "branch_id", "state", "priority", "unit_id"),
    Index("ix_units_session_id", "session_id"),
)

consumers = Table(
    "consumers",
    metadata,
    Column("branch_id", String, ForeignKey("branches.branch_id"), primary_key=True),
    Column("consumer", String, primary_key=True),
    Column("position", BigInteger, nullable=False),  # last step covered by a checkpoint
    Column("planned", BigInteger, nullable=False),  # last step with a stored batch
)

roles = Table(
    "roles",
    metadata,
    Column("branch_id", String, ForeignKey("branches.branch_id"), primary_key=True),
    Column("role", String, primary_key=True),  # consume:<consumer> or assemble:<consumer>
    Column("fence", BigInteger, nullable=False),
    Column("session_id", String),
)

offers = Table(
    "offers",
    metadata,
    Column("branch_id", String, primary_key=True),
    Column("consumer", String, primary_key=True),
    Column("unit_id", BigInteger, ForeignKey("units.unit_id"), primary_key=True),
)

assignments = Table(
    "assignments",
    metadata,
    Column("branch_id", String, primary_key=True),
    Column("consumer", String, primary_key=True),
    Column("epoch", Integer, primary_key=True),
    Column("unit_id", BigInteger, ForeignKey("units.unit_id"), primary_key=True),
    Column("batch_id", BigInteger, ForeignKey("batches.batch_id")),
    Column("outcome", String, nullable=False),  # trained or dropped
    Column("reason", String),
    CheckConstraint("outcome IN ('trained', 'dropped')", name="outcome_known"),
    CheckConstraint("(outcome = 'dropped') = (reason IS NOT NULL)", name="dropped_iff_reason"),
    CheckConstraint("outcome = 'dropped' OR batch_id IS NOT NULL", name="trained_in_batch"),
    Index("ix_assignments_batch_id", "batch_id"),
)

batches = Table(
    "batches",
    metadata,
    Column("batch_id", BigKey, primary_key=True, autoincrement=True),
    Column("branch_id", String, ForeignKey("branches.branch_id"), nullable=False),
    Column("consumer", String, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("objective", String, nullable=False),
    Column("state", String, nullable=False),
    Column("num_units", Integer, nullable=False),
    Column("num_sequences", Integer, nullable=False),
    Column("num_tokens", BigInteger, nullable=False),
    Column("mean_reward", Float),
    Column("max_staleness", Integer, nullable=False),
    Column("denominators", Text, nullable=False),  # JSON list: loss denominator of each mini-batch
    Column(
        "digest", String, nullable=False
    ),  # chained: xxh3-128 over the previous batch's digest and this one's extents
    Column("plan_extent_id", String, ForeignKey("extents.extent_id"), nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("planned_at", String, nullable=False),
    UniqueConstraint("branch_id", "consumer", "step"),
    _one_of("state", BatchState),
)

batch_extents = Table(
    "batch_extents",
    metadata,
    Column("batch_id", BigInteger, ForeignKey("batches.batch_id"), primary_key=True),
    Column("mini_batch", Integer, primary_key=True),
    Column("slice", Integer, primary_key=True),
    Column("micro_batch", Integer, primary_key=True),
    Column("extent_id", String, ForeignKey("extents.extent_id"), nullable=False),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("checkpoint_id", String, primary_key=True),
    Column("branch_id", String, ForeignKey("branches.branch_id"), nullable=False),
    Column("consumer", String, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("path", String, nullable=False),
    Column("state_digest", String, nullable=False),
    Column("batch_digest", String, nullable=False),
    Column("created_at", String, nullable=False),
    UniqueConstraint("branch_id", "consumer", "step"),
)

weight_versions = Table(
    "weight_versions",
    metadata,
    Column("version_id", String, primary_key=True),
    Column("branch_id", String, ForeignKey("branches.branch_id"), nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("path", String, nullable=False),
    Column("digest", String, nullable=False),
    Column("state", String, nullable=False),
    Column("superseded_by", String),
    Column("files_removed", Boolean, nullable=False, default=False),
    Column("created_at", String, nullable=False),
    _one_of("state", WeightState),
    CheckConstraint("(state = 'superseded') = (superseded_by IS NOT NULL)", name="superseded_iff_by"),
    Index("ix_weight_versions_branch_id_state_step", "branch_id", "state", "step"),
)

engines = Table(
    "engines",
    metadata,
    Column("engine_id", String, primary_key=True),
    Column("session_id", String, ForeignKey("sessions.session_id"), nullable=False),
    Column("url", String, nullable=False),
    Column("build", String, nullable=False),
    Column("version_id", String),  # what the engine itself reported last
    Column("updated_at", String, nullable=False),
)

steps = Table(
    "steps",
    metadata,
    Column("branch_id", String, primary_key=True),
    Column("consumer", String, primary_key=True),
    Column("step", BigInteger, primary_key=True),
    Column("fence", BigInteger, primary_key=True),
    Column("metrics", Text, nullable=False),  # JSON
    Column("recorded_at", String, nullable=False),
)

receipts = Table(
    "receipts",
    metadata,
    Column("submission_id", String, primary_key=True),
    Column("verb", String, nullable=False),
    Column("content_digest", String, nullable=False),
    Column("receipt", Text, nullable=False),  # JSON
)

events = Table(
    "events",
    metadata,
    Column("event_id", BigKey, primary_key=True, autoincrement=True),
    Column("at", String, nullable=False),  # wall time, for display
    Column("name", String, nullable=False),
    Column("session_id", String),
    Column("unit_id", BigInteger),
    Column("facts", Text, nullable=False),  # JSON
)
