CREATE TABLE branches (
    branch_id VARCHAR NOT NULL,
    parent_id VARCHAR,
    from_checkpoint_id VARCHAR,
    from_step BIGINT,
    created_at VARCHAR NOT NULL,
    CONSTRAINT pk_branches PRIMARY KEY (branch_id)
);

CREATE TABLE datasets (
    dataset_id VARCHAR NOT NULL,
    purpose VARCHAR NOT NULL,
    created_at VARCHAR NOT NULL,
    CONSTRAINT pk_datasets PRIMARY KEY (dataset_id)
);

CREATE TABLE engine_slots (
    slot_id BIGSERIAL NOT NULL,
    model VARCHAR NOT NULL,
    placement INTEGER,
    url VARCHAR,
    state VARCHAR NOT NULL,
    is_by_hand BOOLEAN NOT NULL,
    session_id VARCHAR,
    reason TEXT,
    last_error TEXT,
    num_garbage BIGINT NOT NULL,
    strikes INTEGER NOT NULL,
    retry_at FLOAT,
    tokens_per_s FLOAT,
    updated_at VARCHAR NOT NULL,
    CONSTRAINT pk_engine_slots PRIMARY KEY (slot_id),
    CONSTRAINT ck_engine_slots_state_known CHECK (state IN ('starting', 'serving', 'draining', 'quarantined', 'gone')),
    CONSTRAINT ck_engine_slots_quarantined_iff_reason CHECK ((state = 'quarantined') = (reason IS NOT NULL))
);

CREATE INDEX ix_engine_slots_session_id ON engine_slots (session_id) WHERE session_id IS NOT NULL;

CREATE TABLE events (
    event_id BIGSERIAL NOT NULL,
    at_ms BIGINT NOT NULL,
    name VARCHAR NOT NULL,
    session_id VARCHAR,
    unit_id BIGINT,
    facts TEXT NOT NULL,
    CONSTRAINT pk_events PRIMARY KEY (event_id)
);

CREATE TABLE meta (
    key VARCHAR NOT NULL,
    value TEXT NOT NULL,
    CONSTRAINT pk_meta PRIMARY KEY (key)
);

CREATE TABLE pins (
    pin_id BIGSERIAL NOT NULL,
    subject_kind VARCHAR NOT NULL,
    subject VARCHAR NOT NULL,
    reason TEXT NOT NULL,
    session_id VARCHAR,
    at VARCHAR NOT NULL,
    CONSTRAINT pk_pins PRIMARY KEY (pin_id),
    CONSTRAINT ck_pins_subject_kind_known CHECK (subject_kind IN ('pack', 'batch', 'checkpoint', 'weights'))
);

CREATE INDEX ix_pins_subject_kind_subject ON pins (subject_kind, subject);

CREATE TABLE receipts (
    submission_id VARCHAR NOT NULL,
    verb VARCHAR NOT NULL,
    content_digest BYTEA NOT NULL,
    receipt TEXT NOT NULL,
    at_ms BIGINT NOT NULL,
    CONSTRAINT pk_receipts PRIMARY KEY (submission_id)
);

CREATE INDEX ix_receipts_at_ms ON receipts (at_ms);

CREATE TABLE sessions (
    session_id VARCHAR NOT NULL,
    kind VARCHAR NOT NULL,
    host VARCHAR NOT NULL,
    machine VARCHAR NOT NULL,
    pid INTEGER NOT NULL,
    process_started BIGINT NOT NULL,
    state VARCHAR NOT NULL,
    expires_at FLOAT NOT NULL,
    started_at VARCHAR NOT NULL,
    ended_at VARCHAR,
    incarnation BIGINT NOT NULL,
    CONSTRAINT pk_sessions PRIMARY KEY (session_id),
    CONSTRAINT ck_sessions_state_known CHECK (state IN ('live', 'ended', 'lost'))
);

CREATE INDEX ix_sessions_state_expires_at ON sessions (state, expires_at);

CREATE TABLE steps (
    branch_id VARCHAR NOT NULL,
    consumer VARCHAR NOT NULL,
    step BIGINT NOT NULL,
    fence BIGINT NOT NULL,
    metrics TEXT NOT NULL,
    recorded_at VARCHAR NOT NULL,
    CONSTRAINT pk_steps PRIMARY KEY (branch_id, consumer, step, fence)
);

CREATE TABLE tallies (
    branch_id VARCHAR NOT NULL,
    name VARCHAR NOT NULL,
    value BIGINT NOT NULL,
    CONSTRAINT pk_tallies PRIMARY KEY (branch_id, name)
);

CREATE TABLE checkpoints (
    checkpoint_id VARCHAR NOT NULL,
    branch_id VARCHAR NOT NULL,
    consumer VARCHAR NOT NULL,
    step BIGINT NOT NULL,
    fence BIGINT NOT NULL,
    path VARCHAR NOT NULL,
    state_digest VARCHAR NOT NULL,
    batch_digest VARCHAR NOT NULL,
    created_at VARCHAR NOT NULL,
    cursors TEXT,
    last_unit_id BIGINT,
    files_removed BOOLEAN NOT NULL,
    CONSTRAINT pk_checkpoints PRIMARY KEY (checkpoint_id),
    CONSTRAINT uq_checkpoints_branch_id_consumer_step UNIQUE (branch_id, consumer, step),
    CONSTRAINT fk_checkpoints_branch_id FOREIGN KEY(branch_id) REFERENCES branches (branch_id)
);

CREATE TABLE consumers (
    branch_id VARCHAR NOT NULL,
    consumer VARCHAR NOT NULL,
    position BIGINT NOT NULL,
    planned BIGINT NOT NULL,
    purposes VARCHAR NOT NULL,
    CONSTRAINT pk_consumers PRIMARY KEY (branch_id, consumer),
    CONSTRAINT fk_consumers_branch_id FOREIGN KEY(branch_id) REFERENCES branches (branch_id)
);

CREATE TABLE cursors (
    branch_id VARCHAR NOT NULL,
    dataset_id VARCHAR NOT NULL,
    version BIGINT NOT NULL,
    epoch INTEGER NOT NULL,
    segment_seq INTEGER NOT NULL,
    position BIGINT NOT NULL,
    num_admitted BIGINT NOT NULL,
    CONSTRAINT pk_cursors PRIMARY KEY (branch_id, dataset_id),
    CONSTRAINT fk_cursors_branch_id FOREIGN KEY(branch_id) REFERENCES branches (branch_id),
    CONSTRAINT fk_cursors_dataset_id FOREIGN KEY(dataset_id) REFERENCES datasets (dataset_id)
);

CREATE TABLE engines (
    engine_id VARCHAR NOT NULL,
    session_id VARCHAR NOT NULL,
    url VARCHAR NOT NULL,
    build VARCHAR NOT NULL,
    version_id VARCHAR,
    updated_at VARCHAR NOT NULL,
    CONSTRAINT pk_engines PRIMARY KEY (engine_id),
    CONSTRAINT fk_engines_session_id FOREIGN KEY(session_id) REFERENCES sessions (session_id)
);

CREATE TABLE packs (
    pack_id BIGSERIAL NOT NULL,
    kind VARCHAR NOT NULL,
    path VARCHAR NOT NULL,
    state VARCHAR NOT NULL,
    session_id VARCHAR NOT NULL,
    num_bytes BIGINT,
    num_rows BIGINT,
    created_at VARCHAR NOT NULL,
    sealed_at FLOAT,
    condemned_at FLOAT,
    CONSTRAINT pk_packs PRIMARY KEY (pack_id),
    CONSTRAINT ck_packs_state_known CHECK (state IN ('open', 'sealed', 'condemned')),
    CONSTRAINT uq_packs_path UNIQUE (path),
    CONSTRAINT fk_packs_session_id FOREIGN KEY(session_id) REFERENCES sessions (session_id)
);

CREATE INDEX ix_packs_state_session_id ON packs (state, session_id);

CREATE TABLE prompt_rows (
    dataset_id VARCHAR NOT NULL,
    digest BYTEA NOT NULL,
    occurrence INTEGER NOT NULL,
    CONSTRAINT pk_prompt_rows PRIMARY KEY (dataset_id, digest, occurrence),
    CONSTRAINT fk_prompt_rows_dataset_id FOREIGN KEY(dataset_id) REFERENCES datasets (dataset_id)
);

CREATE TABLE roles (
    branch_id VARCHAR NOT NULL,
    role VARCHAR NOT NULL,
    fence BIGINT NOT NULL,
    session_id VARCHAR,
    CONSTRAINT pk_roles PRIMARY KEY (branch_id, role),
    CONSTRAINT fk_roles_branch_id FOREIGN KEY(branch_id) REFERENCES branches (branch_id)
);

CREATE TABLE segments (
    segment_id BIGSERIAL NOT NULL,
    dataset_id VARCHAR NOT NULL,
    segment_seq INTEGER NOT NULL,
    num_rows BIGINT NOT NULL,
    source VARCHAR NOT NULL,
    created_at VARCHAR NOT NULL,
    CONSTRAINT pk_segments PRIMARY KEY (segment_id),
    CONSTRAINT uq_segments_dataset_id_segment_seq UNIQUE (dataset_id, segment_seq),
    CONSTRAINT fk_segments_dataset_id FOREIGN KEY(dataset_id) REFERENCES datasets (dataset_id)
);

CREATE TABLE weight_versions (
    version_id VARCHAR NOT NULL,
    branch_id VARCHAR NOT NULL,
    step BIGINT NOT NULL,
    fence BIGINT NOT NULL,
    path VARCHAR NOT NULL,
    digest VARCHAR NOT NULL,
    state VARCHAR NOT NULL,
    superseded_by VARCHAR,
    files_removed BOOLEAN NOT NULL,
    created_at VARCHAR NOT NULL,
    CONSTRAINT pk_weight_versions PRIMARY KEY (version_id),
    CONSTRAINT ck_weight_versions_state_known CHECK (state IN ('published', 'dead', 'superseded')),
    CONSTRAINT ck_weight_versions_superseded_iff_by CHECK ((state = 'superseded') = (superseded_by IS NOT NULL)),
    CONSTRAINT fk_weight_versions_branch_id FOREIGN KEY(branch_id) REFERENCES branches (branch_id)
);

CREATE INDEX ix_weight_versions_branch_id_state_step ON weight_versions (branch_id, state, step);

CREATE TABLE extents (
    extent_id BIGSERIAL NOT NULL,
    pack_id BIGINT NOT NULL,
    "offset" BIGINT NOT NULL,
    length BIGINT NOT NULL,
    num_rows BIGINT NOT NULL,
    digests BYTEA NOT NULL,
    CONSTRAINT pk_extents PRIMARY KEY (extent_id),
    CONSTRAINT fk_extents_pack_id FOREIGN KEY(pack_id) REFERENCES packs (pack_id)
);

CREATE INDEX ix_extents_pack_id ON extents (pack_id);

CREATE TABLE batches (
    batch_id BIGSERIAL NOT NULL,
    branch_id VARCHAR NOT NULL,
    consumer VARCHAR NOT NULL,
    step BIGINT NOT NULL,
    objective VARCHAR NOT NULL,
    state VARCHAR NOT NULL,
    num_units INTEGER NOT NULL,
    num_sequences INTEGER NOT NULL,
    num_tokens BIGINT NOT NULL,
    mean_reward FLOAT,
    max_staleness INTEGER NOT NULL,
    denominators TEXT NOT NULL,
    digest VARCHAR NOT NULL,
    plan_extent_id BIGINT NOT NULL,
    fence BIGINT NOT NULL,
    planned_at VARCHAR NOT NULL,
    CONSTRAINT pk_batches PRIMARY KEY (batch_id),
    CONSTRAINT uq_batches_branch_id_consumer_step UNIQUE (branch_id, consumer, step),
    CONSTRAINT ck_batches_state_known CHECK (state IN ('planned', 'trained', 'retired')),
    CONSTRAINT fk_batches_branch_id FOREIGN KEY(branch_id) REFERENCES branches (branch_id),
    CONSTRAINT fk_batches_plan_extent_id FOREIGN KEY(plan_extent_id) REFERENCES extents (extent_id)
);

CREATE INDEX ix_batches_plan_extent_id ON batches (plan_extent_id);

CREATE TABLE quarantine (
    extent_id BIGINT NOT NULL,
    reason TEXT NOT NULL,
    at VARCHAR NOT NULL,
    CONSTRAINT pk_quarantine PRIMARY KEY (extent_id),
    CONSTRAINT fk_quarantine_extent_id FOREIGN KEY(extent_id) REFERENCES extents (extent_id)
);

CREATE TABLE segment_extents (
    segment_id BIGINT NOT NULL,
    first_row BIGINT NOT NULL,
    extent_id BIGINT NOT NULL,
    CONSTRAINT pk_segment_extents PRIMARY KEY (segment_id, first_row),
    CONSTRAINT fk_segment_extents_segment_id FOREIGN KEY(segment_id) REFERENCES segments (segment_id),
    CONSTRAINT fk_segment_extents_extent_id FOREIGN KEY(extent_id) REFERENCES extents (extent_id)
);

CREATE INDEX ix_segment_extents_extent_id ON segment_extents (extent_id);

CREATE TABLE units (
    unit_id BIGINT NOT NULL,
    branch_id VARCHAR NOT NULL,
    purpose VARCHAR NOT NULL,
    profile VARCHAR NOT NULL,
    segment_id BIGINT NOT NULL,
    epoch INTEGER NOT NULL,
    position BIGINT NOT NULL,
    state VARCHAR NOT NULL,
    required_version_id VARCHAR,
    claim_class INTEGER NOT NULL,
    precedence INTEGER NOT NULL,
    scheduling_key BIGINT NOT NULL,
    not_before FLOAT,
    fence BIGINT NOT NULL,
    seq BIGINT NOT NULL,
    attempts INTEGER NOT NULL,
    crashes INTEGER NOT NULL,
    parks INTEGER NOT NULL,
    requeues INTEGER NOT NULL,
    session_id VARCHAR,
    last_error TEXT,
    extent_id BIGINT,
    row_start INTEGER,
    row_count INTEGER,
    version_step BIGINT,
    mean_reward FLOAT,
    num_tokens INTEGER,
    CONSTRAINT pk_units PRIMARY KEY (unit_id),
    CONSTRAINT uq_units_branch_id_profile_segment_id_epoch_position UNIQUE (branch_id, profile, segment_id, epoch, position),
    CONSTRAINT ck_units_state_known CHECK (state IN ('ready', 'leased', 'completed', 'failed')),
    CONSTRAINT ck_units_leased_iff_session CHECK ((state = 'leased') = (session_id IS NOT NULL)),
    CONSTRAINT ck_units_completed_has_extent CHECK (state <> 'completed' OR extent_id IS NOT NULL),
    CONSTRAINT ck_units_only_ready_waits CHECK (not_before IS NULL OR state = 'ready'),
    CONSTRAINT fk_units_branch_id FOREIGN KEY(branch_id) REFERENCES branches (branch_id),
    CONSTRAINT fk_units_segment_id FOREIGN KEY(segment_id) REFERENCES segments (segment_id),
    CONSTRAINT fk_units_extent_id FOREIGN KEY(extent_id) REFERENCES extents (extent_id)
);

CREATE INDEX ix_units_bound ON units (branch_id, epoch, unit_id) WHERE required_version_id IS NOT NULL AND state IN ('ready', 'leased');

CREATE INDEX ix_units_claim ON units (branch_id, claim_class, precedence, scheduling_key, unit_id) WHERE state = 'ready' AND not_before IS NULL;

CREATE INDEX ix_units_extent_id ON units (extent_id) WHERE extent_id IS NOT NULL;

CREATE INDEX ix_units_failed ON units (branch_id, purpose, unit_id) WHERE state = 'failed';

CREATE INDEX ix_units_not_before ON units (branch_id, not_before) WHERE not_before IS NOT NULL;

CREATE INDEX ix_units_session_id ON units (session_id) WHERE session_id IS NOT NULL;

CREATE TABLE assignments (
    unit_id BIGINT NOT NULL,
    branch_id VARCHAR NOT NULL,
    consumer VARCHAR NOT NULL,
    epoch INTEGER NOT NULL,
    batch_id BIGINT,
    outcome VARCHAR NOT NULL,
    reason VARCHAR,
    at_step BIGINT NOT NULL,
    CONSTRAINT pk_assignments PRIMARY KEY (unit_id, branch_id, consumer, epoch),
    CONSTRAINT ck_assignments_outcome_known CHECK (outcome IN ('trained', 'dropped')),
    CONSTRAINT ck_assignments_dropped_iff_reason CHECK ((outcome = 'dropped') = (reason IS NOT NULL)),
    CONSTRAINT ck_assignments_trained_in_batch CHECK (outcome = 'dropped' OR batch_id IS NOT NULL),
    CONSTRAINT fk_assignments_unit_id FOREIGN KEY(unit_id) REFERENCES units (unit_id),
    CONSTRAINT fk_assignments_batch_id FOREIGN KEY(batch_id) REFERENCES batches (batch_id)
);

CREATE INDEX ix_assignments_batch_id ON assignments (batch_id);

CREATE TABLE batch_extents (
    batch_id BIGINT NOT NULL,
    mini_batch INTEGER NOT NULL,
    slice INTEGER NOT NULL,
    micro_batch INTEGER NOT NULL,
    extent_id BIGINT NOT NULL,
    CONSTRAINT pk_batch_extents PRIMARY KEY (batch_id, mini_batch, slice, micro_batch),
    CONSTRAINT fk_batch_extents_batch_id FOREIGN KEY(batch_id) REFERENCES batches (batch_id),
    CONSTRAINT fk_batch_extents_extent_id FOREIGN KEY(extent_id) REFERENCES extents (extent_id)
);

CREATE INDEX ix_batch_extents_extent_id ON batch_extents (extent_id);

CREATE TABLE continuations (
    unit_id BIGINT NOT NULL,
    fence BIGINT NOT NULL,
    seq BIGINT NOT NULL,
    extent_id BIGINT NOT NULL,
    row_start INTEGER NOT NULL,
    row_count INTEGER NOT NULL,
    CONSTRAINT pk_continuations PRIMARY KEY (unit_id, fence, seq),
    CONSTRAINT fk_continuations_unit_id FOREIGN KEY(unit_id) REFERENCES units (unit_id),
    CONSTRAINT fk_continuations_extent_id FOREIGN KEY(extent_id) REFERENCES extents (extent_id)
);

CREATE INDEX ix_continuations_extent_id ON continuations (extent_id);

CREATE TABLE offers (
    branch_id VARCHAR NOT NULL,
    consumer VARCHAR NOT NULL,
    purpose VARCHAR NOT NULL,
    version_step BIGINT NOT NULL,
    unit_id BIGINT NOT NULL,
    CONSTRAINT pk_offers PRIMARY KEY (branch_id, consumer, purpose, version_step, unit_id),
    CONSTRAINT fk_offers_unit_id FOREIGN KEY(unit_id) REFERENCES units (unit_id)
);

CREATE INDEX ix_offers_unit_id ON offers (unit_id);
