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


PROMPT = _schema(
    "prompt",
    1,
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
    ],
)

TRAJECTORY = _schema(
    "trajectory",
    1,
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
        _required("loss_mask", pa.list_(pa.int8())),  # per response token, 1 = trained
        _required(
            "logprobs", pa.list_(pa.float32())
        ),  # per response token: log-softmax(logits / temperature)
        _required("token_versions", pa.list_(pa.int32())),  # per response token: place in weight_versions
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
    ],
)

BATCH = _schema(
    "batch",
    1,
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

SCHEMAS: dict[str, pa.Schema] = {"prompt": PROMPT, "trajectory": TRAJECTORY, "batch": BATCH, "plan": PLAN}

COMPRESSION: dict[str, str | None] = {"prompt": "zstd", "trajectory": "lz4", "batch": None, "plan": "zstd"}
"""Buffer compression per kind: what is read once a step stays raw, what is kept for reading later is squeezed."""


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


def check_schema(schema: pa.Schema, kind: str, *, path: str) -> None:
    """Raise IncompatibleFormatError when a stored schema is not the one this program reads."""
    expected = schema_of(kind)
    found = {k.decode(): v.decode() for k, v in (schema.metadata or {}).items()}
    if found.get("strawflow.kind") != kind or not schema.equals(expected):
        raise IncompatibleFormatError(
            f"{path} holds {found.get('strawflow.kind')!r} version {found.get('strawflow.version')!r}, "
            f"expected {kind!r} version {expected.metadata[b'strawflow.version'].decode()!r}"
        )
