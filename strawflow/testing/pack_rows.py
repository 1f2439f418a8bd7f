"""Made-up rows of any stored kind, for tests and benchmarks: the schema decides what they look like.

1. The same (kind, num_rows, seed) gives equal rows; other seeds give others.
2. All lists of one row have one length (promise P9); required fields hold no nulls, nullable ones hold some.
3. The values mean nothing: a reward here was earned by nobody.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from strawflow.records import schema_of


def made_up_rows(kind: str, num_rows: int, *, seed: int = 0, list_length: int = 8) -> pa.RecordBatch:
    """Return `num_rows` rows of `kind`; lists hold 1 to `list_length` values."""
    source = random.Random(f"{kind}/{num_rows}/{seed}")
    schema = schema_of(kind)
    lengths = [source.randint(1, list_length) for _ in range(num_rows)]
    columns = [_column(field, lengths, source) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(field: pa.Field, lengths: list[int], source: random.Random) -> pa.Array:
    if pa.types.is_list(field.type):
        draw = _draw(field.type.value_type, field.name, source)
        is_parallel = not pa.types.is_struct(field.type.value_type)
        values: list[Any] = [[draw() for _ in range(length if is_parallel else 1)] for length in lengths]
    else:
        draw = _draw(field.type, field.name, source)
        values = [None if field.nullable and source.random() < 0.2 else draw() for _ in lengths]
    return pa.array(values, field.type)


def _draw(dtype: pa.DataType, name: str, source: random.Random) -> Callable[[], Any]:
    if pa.types.is_integer(dtype):
        top = 2 ** (dtype.bit_width - 1) - 1
        return lambda: source.randint(0, top)
    if pa.types.is_floating(dtype):
        return lambda: source.gauss(0.0, 1.0)
    if pa.types.is_fixed_size_binary(dtype):
        return lambda: source.randbytes(dtype.byte_width)
    if pa.types.is_list(dtype):
        item = _draw(dtype.value_type, name, source)
        return lambda: [item(), item()]
    if pa.types.is_struct(dtype):
        parts = {field.name: _draw(field.type, field.name, source) for field in dtype}
        return lambda: {part: draw() for part, draw in parts.items()}
    return lambda: f"{name} {source.randrange(10**6)} Stroh gesponnen ✓"
