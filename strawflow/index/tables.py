"""The tables of the SQL index: what exists, where it lies, and who may work on it.

1. Rows never hold payload; the largest values are digests, error texts and small JSON records.
2. The promise "trained exactly once" is the primary key of `assignments`; CHECKs and unique keys restate other invariants.
3. Where `sqlite_with_rowid` is False the rows are little more than their key: no second tree beside the key's.
4. The same definitions serve SQLite and PostgreSQL; migrations/ builds them, a test keeps the two equal.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

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
    text,
)

from strawflow.states import BatchState, EngineState, PackState, SessionState, UnitState, WeightState

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


def _where(condition: str) -> dict[str, Any]:
    """Return an index's condition for both dialects: it then holds only the rows a verb looks for."""
    return {"sqlite_where": text(condition), "postgresql_where": text(condition)}


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
    Column("incarnation", BigInteger, nullable=False, default=0),  # of the index, when it started
    _one_of("state", SessionState),
    Index("ix_sessions_state_expires_at", "state", "expires_at"),
)

packs = Table(
    "packs",
    metadata,
    Column("pack_id", BigKey, primary_key=True, autoincrement=True),
    Column("kind", String, nullable=False),
    Column("path", String, nullable=False, unique=True),
    Column("state", String, nullable=False),
    Column("session_id", String, ForeignKey("sessions.session_id"), nullable=False),
    Column("num_bytes", BigInteger),
    Column("num_rows", BigInteger),
    Column("created_at", String, nullable=False),
    Column("sealed_at", Float),  # index time, seconds
    Column("condemned_at", Float),  # index time, seconds: its file goes once references have aged out
    _one_of("state", PackState),
    Index("ix_packs_state_session_id", "state", "session_id"),
)

extents = Table(
    "extents",
    metadata,
    Column("extent_id", BigKey, primary_key=True, autoincrement=True),
    Column("pack_id", BigInteger, ForeignKey("packs.pack_id"), nullable=False, index=True),
    Column("offset", BigInteger, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("num_rows", BigInteger, nullable=False),
    Column("digests", LargeBinary, nullable=False),
)

quarantine = Table(
    "quarantine",
    metadata,
    Column("extent_id", BigInteger, ForeignKey("extents.extent_id"), primary_key=True, autoincrement=False),
    Column("reason", Text, nullable=False),
    Column("at", String, nullable=False),
)

pins = Table(
    "pins",
    metadata,
    Column("pin_id", BigKey, primary_key=True, autoincrement=True),
    Column("subject_kind", String, nullable=False),  # pack, batch, checkpoint or weights
    Column("subject", String, nullable=False),
    Column("reason", Text, nullable=False),
    Column("session_id", String),  # ends with this worker session; null: until it is removed
    Column("at", String, nullable=False),
    CheckConstraint("subject_kind IN ('pack', 'batch', 'checkpoint', 'weights')", name="subject_kind_known"),
    Index("ix_pins_subject_kind_subject", "subject_kind", "subject"),
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
    Column("extent_id", BigInteger, ForeignKey("extents.extent_id"), nullable=False),
    Index("ix_segment_extents_extent_id", "extent_id"),
    sqlite_with_rowid=False,
)

prompt_rows = Table(
    "prompt_rows",
    metadata,
    Column("dataset_id", String, ForeignKey("datasets.dataset_id"), primary_key=True),
    Column("digest", LargeBinary(16), primary_key=True),
    Column("occurrence", Integer, primary_key=True),
    sqlite_with_rowid=False,
)

branches = Table(
    "branches",
    metadata,
    Column("branch_id", String, primary_key=True),
    Column("parent_id", String),
    Column("from_checkpoint_id", String),
    Column("from_step", BigInteger),  # batches up to this step are the parent's
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
    # Given from the counter in meta, so that bytes written before the transaction can name them.
    Column("unit_id", BigKey, primary_key=True, autoincrement=False),
    Column("branch_id", String, ForeignKey("branches.branch_id"), nullable=False),
    Column("purpose", String, nullable=False),  # train, demo or eval
    Column("profile", String, nullable=False),  # name of the sampling settings in the run's configuration
    Column("segment_id", BigInteger, ForeignKey("segments.segment_id"), nullable=False),
    Column("epoch", Integer, nullable=False),  # of the dataset; for eval the step of the weights under test
    Column("position", BigInteger, nullable=False),
    Column("state", String, nullable=False),
    Column("required_version_id", String),  # eval: the only weight version that may serve it
    Column("claim_class", Integer, nullable=False, default=1),  # 0 parked, 1 fresh: parked go first
    # inside a class the lowest goes first: minus the priority, so that one plain index holds the order of claims
    Column("precedence", Integer, nullable=False, default=0),
    Column(
        "scheduling_key", BigInteger, nullable=False, default=0
    ),  # then the lower; parked: oldest weight step
    Column("not_before", Float),  # index time, seconds: ready, and not offered until then
    Column("fence", BigInteger, nullable=False, default=0),
    Column("seq", BigInteger, nullable=False, default=0),
    Column("attempts", Integer, nullable=False, default=0),
    # lost together with other units: see index.rescues
    Column("crashes", Integer, nullable=False, default=0),
    Column("parks", Integer, nullable=False, default=0),
    Column("requeues", Integer, nullable=False, default=0),
    Column("session_id", String),
    Column("last_error", Text),
    # completed: the trajectories of the accepted completion; otherwise the progress last saved, if any
    Column("extent_id", BigInteger, ForeignKey("extents.extent_id")),
    Column("row_start", Integer),
    Column("row_count", Integer),
    Column("version_step", BigInteger),  # oldest weight step among the sampled tokens
    Column("mean_reward", Float),
    Column("num_tokens", Integer),
    UniqueConstraint("branch_id", "profile", "segment_id", "epoch", "position"),
    _one_of("state", UnitState),
    CheckConstraint("(state = 'leased') = (session_id IS NOT NULL)", name="leased_iff_session"),
    CheckConstraint("state <> 'completed' OR extent_id IS NOT NULL", name="completed_has_extent"),
    CheckConstraint("not_before IS NULL OR state = 'ready'", name="only_ready_waits"),
    Index(
        "ix_units_claim",
        "branch_id",
        "claim_class",
        "precedence",
        "scheduling_key",
        "unit_id",
        **_where("state = 'ready' AND not_before IS NULL"),
    ),
    Index("ix_units_not_before", "branch_id", "not_before", **_where("not_before IS NOT NULL")),
    Index("ix_units_session_id", "session_id", **_where("session_id IS NOT NULL")),
    Index("ix_units_failed", "branch_id", "purpose", "unit_id", **_where("state = 'failed'")),
    Index(
        "ix_units_bound",
        "branch_id",
        "epoch",
        "unit_id",
        **_where("required_version_id IS NOT NULL AND state IN ('ready', 'leased')"),
    ),
    Index("ix_units_extent_id", "extent_id", **_where("extent_id IS NOT NULL")),
)

continuations = Table(
    "continuations",
    metadata,
    # Progress saved while a unit is worked on: each record goes on from the one before it, the first from the one that
    # the unit itself names. Completing or parking the unit folds them.
    Column("unit_id", BigInteger, ForeignKey("units.unit_id"), primary_key=True),
    Column("fence", BigInteger, primary_key=True),
    Column("seq", BigInteger, primary_key=True),
    Column("extent_id", BigInteger, ForeignKey("extents.extent_id"), nullable=False),
    Column("row_start", Integer, nullable=False),
    Column("row_count", Integer, nullable=False),
    Index("ix_continuations_extent_id", "extent_id"),
    sqlite_with_rowid=False,
)

consumers = Table(
    "consumers",
    metadata,
    Column("branch_id", String, ForeignKey("branches.branch_id"), primary_key=True),
    Column("consumer", String, primary_key=True),
    Column("position", BigInteger, nullable=False),  # last step covered by a checkpoint or an advance
    Column("planned", BigInteger, nullable=False),  # last step with a stored batch
    Column("purposes", String, nullable=False, default="demo,train"),  # of the units it is offered
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
    Column("purpose", String, primary_key=True),
    # Copied from the unit: the order in which a consumer takes offers is the order of this key.
    Column("version_step", BigInteger, primary_key=True),
    Column("unit_id", BigInteger, ForeignKey("units.unit_id"), primary_key=True),
    Index("ix_offers_unit_id", "unit_id"),
    sqlite_with_rowid=False,
)

assignments = Table(
    "assignments",
    metadata,
    # By unit first: what became of one unit is one look, and so is the check that a retired unit leaves none behind.
    Column("unit_id", BigInteger, ForeignKey("units.unit_id"), primary_key=True),
    Column("branch_id", String, primary_key=True),
    Column("consumer", String, primary_key=True),
    Column("epoch", Integer, primary_key=True),
    Column("batch_id", BigInteger, ForeignKey("batches.batch_id")),
    Column("outcome", String, nullable=False),  # trained or dropped
    Column("reason", String),
    Column("at_step", BigInteger, nullable=False),  # the step that was being planned
    CheckConstraint("outcome IN ('trained', 'dropped')", name="outcome_known"),
    CheckConstraint("(outcome = 'dropped') = (reason IS NOT NULL)", name="dropped_iff_reason"),
    CheckConstraint("outcome = 'dropped' OR batch_id IS NOT NULL", name="trained_in_batch"),
    Index("ix_assignments_batch_id", "batch_id"),
    sqlite_with_rowid=False,
)

tallies = Table(
    "tallies",
    metadata,
    Column("branch_id", String, primary_key=True),
    Column("name", String, primary_key=True),  # what is counted, e.g. dropped/trainer/train
    Column("value", BigInteger, nullable=False),
    sqlite_with_rowid=False,
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
    Column("plan_extent_id", BigInteger, ForeignKey("extents.extent_id"), nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("planned_at", String, nullable=False),
    UniqueConstraint("branch_id", "consumer", "step"),
    Index("ix_batches_plan_extent_id", "plan_extent_id"),
    _one_of("state", BatchState),
)

batch_extents = Table(
    "batch_extents",
    metadata,
    Column("batch_id", BigInteger, ForeignKey("batches.batch_id"), primary_key=True),
    Column("mini_batch", Integer, primary_key=True),
    Column("slice", Integer, primary_key=True),
    Column("micro_batch", Integer, primary_key=True),
    Column("extent_id", BigInteger, ForeignKey("extents.extent_id"), nullable=False),
    Index("ix_batch_extents_extent_id", "extent_id"),
    sqlite_with_rowid=False,
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
    # Where a branch from here starts: the cursors (JSON) and the last unit admitted; null before revision 0002.
    Column("cursors", Text),
    Column("last_unit_id", BigInteger),
    Column("files_removed", Boolean, nullable=False, default=False),
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

engine_slots = Table(
    "engine_slots",
    metadata,
    Column("slot_id", BigKey, primary_key=True, autoincrement=True),
    Column("model", String, nullable=False),  # policy, or a frozen model of the topology
    Column("placement", Integer),  # which of the topology's; null: one server, by the run's own flags
    Column("url", String),  # attached; null: started by the run itself
    Column("state", String, nullable=False),
    Column("is_by_hand", Boolean, nullable=False),  # its worker was started by hand: no supervisor starts one
    Column("session_id", String),  # the worker that has it now
    Column("reason", Text),  # quarantined: why
    Column("last_error", Text),
    Column("num_garbage", BigInteger, nullable=False),  # answers that could not be used, ever
    Column("strikes", Integer, nullable=False),  # quarantines since it last served well for a while
    Column("retry_at", Float),  # index time, seconds: a quarantined one of our own is not started before
    Column("tokens_per_s", Float),
    Column("updated_at", String, nullable=False),
    _one_of("state", EngineState),
    CheckConstraint("(state = 'quarantined') = (reason IS NOT NULL)", name="quarantined_iff_reason"),
    Index("ix_engine_slots_session_id", "session_id", **_where("session_id IS NOT NULL")),
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
    Column("content_digest", LargeBinary, nullable=False),
    Column("receipt", Text, nullable=False),  # JSON
    Column("at_ms", BigInteger, nullable=False),  # wall time, milliseconds since 1970
    Index("ix_receipts_at_ms", "at_ms"),
    sqlite_with_rowid=False,
)

events = Table(
    "events",
    metadata,
    Column("event_id", BigKey, primary_key=True, autoincrement=True),
    Column("at_ms", BigInteger, nullable=False),  # wall time, milliseconds since 1970, for display
    Column("name", String, nullable=False),
    Column("session_id", String),
    Column("unit_id", BigInteger),
    Column("facts", Text, nullable=False),  # JSON
)
