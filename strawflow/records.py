"""The Arrow schemas of every stored kind, and their versions.

1. A stored schema names its kind and version in its metadata; a change of meaning is a new version.
2. No dictionary types: a single message of an open pack must be readable alone. Columns that can pass 2 GiB are large_*.
3. Parallel arrays of one row (tokens, mask, log-probabilities, versions) have equal length (promise P9).
"""

from __future__ import annotations

import pyarrow as pa

from strawflow.errors import IncompatibleFormatError, InvalidInputError


def _schema(kind: str, version: int, fields: list[pa.Field]) -> pa.Schema:
    return pa.schema(fields, metadata={"strawflow.kind": kind, "strawflow.version": str(version)})


def _required(name: str, dtype: pa.DataType) -> pa.Field:
    return pa.field(name, dtype, nullable=False)


TENSORS = pa.list_(
    pa.struct(
        [
            _required("name", pa.string()),
            _required("dtype", pa.string()),  # numpy's name
            _required("shape", pa.list_(pa.int64())),
            _required("digest", pa.binary(16)),  # xxh3-128 of the data
            # C order, little endian; null: an earlier row of the same group (in a batch: of the same message) has it.
            pa.field("data", pa.large_binary()),
        ]
    )
)
"""Arrays of one row by name: what a processor made of its images, say."""

PROMPT = _schema(
    "prompt",
    2,
    [
        _required("position", pa.int64()),  # row number in its dataset segment
        _required("content_digest", pa.binary(16)),  # xxh3-128 of (prompt, label, metadata) as stored
        _required("occurrence", pa.int32()),  # 0 for the first row of that content, 1 for the next, ...
        _required("prompt", pa.large_string()),  # text verbatim, or the JSON of chat messages
        _required("prompt_format", pa.string()),  # "text" or "messages"
        pa.field("label", pa.large_string()),  # text verbatim, or JSON
        pa.field("label_format", pa.string()),  # "text" or "json"; null without a label
        pa.field("metadata", pa.large_string()),  # JSON object
        _required("source", pa.string()),  # file the row came from
        _required("source_line", pa.int64()),  # physical line, or row number from 1 in columnar files
        # Since version 2. Files of images as they are (PNG, JPEG ...), in the order of the prompt; null without any.
        pa.field("images", pa.list_(pa.large_binary())),
    ],
)

TRAJECTORY = _schema(
    "trajectory",
    3,
    [
        _required("unit_id", pa.int64()),
        _required("fence", pa.int64()),
        _required("seq", pa.int64()),
        _required("member", pa.int32()),
        _required("segment", pa.int32()),
        _required("purpose", pa.string()),  # train, demo or eval
        _required("status", pa.string()),  # finished, truncated or failed
        pa.field("failure", pa.string()),  # why, when status is failed
        _required("prompt_tokens", pa.list_(pa.int32())),
        _required("response_tokens", pa.list_(pa.int32())),
        # Per response token, 1 = trained; null: every one is (a third of the bytes would say so otherwise).
        pa.field("loss_mask", pa.list_(pa.int8())),
        _required(
            "logprobs", pa.list_(pa.float32())
        ),  # per response token: log-softmax(logits / temperature)
        # Per response token: place in weight_versions, -1 where no weights sampled it; null: all of them have place 0, or
        # -1 where weight_versions is empty.
        pa.field("token_versions", pa.list_(pa.int32())),
        _required("weight_versions", pa.list_(pa.string())),  # distinct weight version ids of this row
        pa.field("reward", pa.float64()),  # null when failed, never 0 in its stead
        pa.field("score", pa.float64()),  # the verifier's raw score, before shaping to the reward
        pa.field("response_text", pa.large_string()),
        _required("finish_reason", pa.string()),
        _required("temperature", pa.float32()),
        _required("top_p", pa.float32()),
        _required("top_k", pa.int32()),
        _required("max_response_tokens", pa.int32()),
        _required("engine", pa.string()),  # engine id and build
        pa.field("tensors", TENSORS),  # since version 3
    ],
)

CONTINUATION = _schema(
    "continuation",
    3,
    [
        # One row is one member of a parked group; status may also be partial (no token yet: an empty response).
        *TRAJECTORY,
        pa.field("environment", pa.large_binary()),  # state the member's environment goes on from
    ],
)

PROGRESS = _schema(
    "progress",
    1,
    [
        # One row is what is new of one member of a group since the record before: progress saved while it is worked on.
        *CONTINUATION,
        # The record that this one goes on from; null: from the prompt. A member that it does not hold stands as before.
        pa.field("after_fence", pa.int64()),
        pa.field("after_seq", pa.int64()),
        # How many of the member's tokens before this record still count: the row's tokens follow them.
        _required("start", pa.int32()),
    ],
)

JOURNAL = _schema(
    "journal",
    1,
    [
        # One row is one change of the run that its packs alone would not tell.
        _required("entry", pa.string()),  # what changed: flow.journal.EntryKind
        _required("branch_id", pa.string()),
        _required("incarnation", pa.int64()),
        _required("at_ms", pa.int64()),  # wall time, milliseconds since 1970
        _required(
            "body", pa.large_string()
        ),  # JSON object, by kind of entry, with an id and a checksum of the row
    ],
)

BATCH = _schema(
    "batch",
    3,
    [
        # One row is one packed sequence: the list offsets of a message are the sequence boundaries and the list
        # values are the packed arrays, aligned to tokens (prompt + response); prompt places hold 0.
        _required("step", pa.int64()),
        _required("mini_batch", pa.int32()),  # optimizer update within the step
        _required("slice", pa.int32()),  # data-parallel slice
        _required("micro_batch", pa.int32()),
        _required("unit_id", pa.int64()),
        _required("fence", pa.int64()),
        _required("seq", pa.int64()),
        _required("member", pa.int32()),
        _required("segment", pa.int32()),
        _required("tokens", pa.list_(pa.int32())),
        _required("loss_mask", pa.list_(pa.int8())),
        _required("logprobs", pa.list_(pa.float32())),
        _required("advantages", pa.list_(pa.float32())),
        _required(
            "version_steps", pa.list_(pa.int32())
        ),  # step of the weight version that sampled each token, -1 elsewhere
        _required("prompt_length", pa.int32()),
        _required("temperature", pa.float32()),
        _required("reward", pa.float64()),
        pa.field("tensors", TENSORS),  # since version 2
        # Since version 3. What each trained token of the row weighs in the loss, before its denominator; null: 1.
        pa.field("loss_weight", pa.float32()),
    ],
)

PLAN = _schema(
    "plan",
    1,
    [
        # One row is the fate of one member of one unit in this step.
        _required("step", pa.int64()),
        _required("unit_id", pa.int64()),
        _required("fence", pa.int64()),
        _required("seq", pa.int64()),
        _required("member", pa.int32()),
        _required("segment", pa.int32()),
        _required("outcome", pa.string()),  # trained, filtered or excluded
        pa.field("reason", pa.string()),
        pa.field("reward", pa.float64()),
        pa.field("advantage", pa.float32()),
        _required("staleness", pa.int32()),  # planned step - 1 - step of the oldest version; 0 is on-policy
        _required("num_tokens", pa.int32()),
        pa.field("mini_batch", pa.int32()),
        pa.field("slice", pa.int32()),
        pa.field("micro_batch", pa.int32()),
    ],
)

TENSOR = _schema(
    "tensor",
    1,
    [
        # One row is at most 4 MiB of one array in C order; the rows of an extent lie next to each other in its message.
        # An array of several extents has a first one whose rows say what each of the others holds, without data.
        _required("tensor_id", pa.string()),
        _required("row_start", pa.int64()),  # row of the array's first axis
        _required("row_count", pa.int64()),  # 0 when it goes on with the row that the one before began
        _required("dtype", pa.string()),  # numpy's name, or bfloat16 and the like, stored as bits
        _required("shape", pa.list_(pa.int64())),  # of the whole array
        _required("data", pa.large_binary()),  # little endian
    ],
)

HISTORY = _schema(
    "history",
    2,
    [
        # One row is one unit that left the index: what it was, and what became of it for each consumer.
        _required("branch_id", pa.string()),
        _required("unit_id", pa.int64()),
        _required("purpose", pa.string()),
        _required("profile", pa.string()),
        _required("segment_id", pa.int64()),
        _required("epoch", pa.int32()),
        _required("position", pa.int64()),
        _required("state", pa.string()),  # completed or failed
        _required("fence", pa.int64()),
        _required("seq", pa.int64()),
        _required("attempts", pa.int32()),
        _required("crashes", pa.int32()),
        _required("parks", pa.int32()),
        _required("requeues", pa.int32()),
        pa.field("last_error", pa.large_string()),
        pa.field("version_step", pa.int64()),
        pa.field("mean_reward", pa.float64()),
        pa.field("num_tokens", pa.int32()),
        # Parallel lists, one item for each consumer.
        _required("consumers", pa.list_(pa.string())),
        _required("outcomes", pa.list_(pa.string())),  # trained or dropped
        _required("reasons", pa.list_(pa.string())),  # null where trained
        _required("steps", pa.list_(pa.int64())),  # the step that was being planned
        _required("batch_ids", pa.list_(pa.int64())),  # null where dropped outside any batch
        _required("retired_at_ms", pa.int64()),  # wall time, milliseconds since 1970
        # Since version 2. The prompt's segment, whose id an index that is rebuilt may give to another:
        _required("dataset_id", pa.string()),
        _required("segment_seq", pa.int32()),
        # and where the trajectories lay, for as long as they do; null without any, or while they are in quarantine.
        pa.field("result_digests", pa.binary()),
        pa.field("result_path", pa.string()),
        pa.field("result_offset", pa.int64()),
        pa.field("result_length", pa.int64()),
        pa.field("result_num_rows", pa.int64()),  # of the whole extent
        pa.field("result_row_start", pa.int32()),
        pa.field("result_row_count", pa.int32()),
    ],
)

EVENT = _schema(
    "event",
    1,
    [
        # One row is one event of the index's log that grew old there.
        _required("event_id", pa.int64()),
        _required("at_ms", pa.int64()),
        _required("name", pa.string()),
        pa.field("session_id", pa.string()),
        pa.field("unit_id", pa.int64()),
        _required("facts", pa.large_string()),  # JSON object
    ],
)

SCHEMAS: dict[str, pa.Schema] = {
    "prompt": PROMPT,
    "trajectory": TRAJECTORY,
    "continuation": CONTINUATION,
    "progress": PROGRESS,
    "batch": BATCH,
    "plan": PLAN,
    "journal": JOURNAL,
    "tensor": TENSOR,
    "history": HISTORY,
    "event": EVENT,
}


def _earlier(schema: pa.Schema, version: int, *, without: tuple[str, ...]) -> pa.Schema:
    """Return the schema of an earlier version, which lacked columns."""
    kind = schema.metadata[b"strawflow.kind"].decode()
    return _schema(kind, version, [field for field in schema if field.name not in without])


def _first_version(schema: pa.Schema) -> pa.Schema:
    """Return version 1 of trajectories and continuations: mask and token versions were told for every token."""
    required = ("loss_mask", "token_versions")
    fields = [
        f.with_nullable(False) if f.name in required else f for f in _earlier(schema, 1, without=("tensors",))
    ]
    return _schema(schema.metadata[b"strawflow.kind"].decode(), 1, fields)


_OF_HISTORY_2 = (
    *(name for name in HISTORY.names if name.startswith("result_")),
    "dataset_id",
    "segment_seq",
)
EARLIER: dict[str, tuple[pa.Schema, ...]] = {
    "prompt": (_earlier(PROMPT, 1, without=("images",)),),
    "trajectory": (_first_version(TRAJECTORY), _earlier(TRAJECTORY, 2, without=("tensors",))),
    "continuation": (_first_version(CONTINUATION), _earlier(CONTINUATION, 2, without=("tensors",))),
    "batch": (
        _earlier(BATCH, 1, without=("tensors", "loss_weight")),
        _earlier(BATCH, 2, without=("loss_weight",)),
    ),
    "history": (_earlier(HISTORY, 1, without=_OF_HISTORY_2),),
}
"""Earlier versions that are read as they lie, and given the columns that they lack as nulls (`as_present`)."""

COMPRESSION: dict[str, str | None] = {
    "prompt": "zstd",
    "trajectory": None,
    "continuation": None,
    "progress": None,
    "batch": None,
    "plan": "zstd",
    "journal": "zstd",
    "tensor": None,
    "history": "zstd",
    "event": "zstd",
}
"""Buffer compression per kind: what a step reads stays raw, what is kept for reading later is squeezed. Token ids and
log-probabilities shrink little (lz4: by a tenth to a third), and cost more time to squeeze than to write."""


def schema_of(kind: str) -> pa.Schema:
    """Return the schema of a kind.

    Raises:
        InvalidInputError: no such kind.
    """
    try:
        return SCHEMAS[kind]
    except KeyError:
        raise InvalidInputError(
            f"unknown record kind {kind!r}; known: {', '.join(sorted(SCHEMAS))}"
        ) from None


def as_present(rows: pa.RecordBatch, kind: str) -> pa.RecordBatch:
    """Return rows of a readable version as rows of the present one; what an earlier one lacks is null."""
    present = schema_of(kind)
    if rows.schema.names == present.names:
        return pa.RecordBatch.from_arrays(rows.columns, schema=present)
    columns = [
        rows.column(f.name) if f.name in rows.schema.names else pa.nulls(rows.num_rows, f.type)
        for f in present
    ]
    return pa.RecordBatch.from_arrays(columns, schema=present)


def as_written(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return rows that came from a pack of this schema as it holds them; undoes `as_present`."""
    return pa.RecordBatch.from_arrays([rows.column(name) for name in schema.names], schema=schema)


def check_schema(schema: pa.Schema, kind: str, *, path: str) -> None:
    """Raise IncompatibleFormatError when a stored schema is none that this program reads."""
    expected = schema_of(kind)
    found = {k.decode(): v.decode() for k, v in (schema.metadata or {}).items()}
    # With its metadata: the columns of another version may have the same names and types, and mean something else.
    readable = (expected, *EARLIER.get(kind, ()))
    if not any(schema.equals(known, check_metadata=True) for known in readable):
        raise IncompatibleFormatError(
            f"{path} holds {found.get('strawflow.kind')!r} version {found.get('strawflow.version')!r}, "
            f"expected {kind!r} version {expected.metadata[b'strawflow.version'].decode()!r}"
        )
