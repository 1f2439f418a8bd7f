"""Arrays beside a row (what a processor made of its images, say), as the column `tensors` of trajectories and batches holds them.

1. Bytes are kept as they are: type, shape and every bit come back.
2. Rows of one group, and of one message of a batch, that have the same array hold its data once: the first has it, the others
   name it by its digest.
3. Data that does not match its digest, or that no row before has, is damage and never becomes an array.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from strawflow.errors import CorruptPackError, InvalidInputError
from strawflow.flow.columns import constant

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]

_KINDS = "biufc"
"""numpy's letters for booleans, integers, floats and complex numbers."""


def check_tensors(tensors: Arrays | None, *, of: str) -> None:
    """Raise InvalidInputError when an array is of a type that cannot be stored (objects, text, dates)."""
    for name, array in (tensors or {}).items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in _KINDS:
            kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise InvalidInputError(
                f"{of}: tensor {name!r} is {kind}; hand in a numpy array of numbers or booleans"
            )


def tensor_column(groups: Sequence[Sequence[Arrays | None]], dtype: pa.DataType) -> pa.Array:
    """Return the column for rows of groups, one after the other; None: the row has no arrays."""
    if all(of_row is None for rows in groups for of_row in rows):
        return constant(None, dtype, sum(len(rows) for rows in groups))
    cells: list[list[dict[str, Any]] | None] = []
    for rows in groups:
        seen: set[bytes] = set()
        cells += [None if of_row is None else [_stored(*t, seen) for t in of_row.items()] for of_row in rows]
    return pa.array(cells, dtype)


def _stored(name: str, array: Array, seen: set[bytes]) -> dict[str, Any]:
    data = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).tobytes()
    digest = xxhash.xxh3_128_digest(data)
    is_new = digest not in seen
    seen.add(digest)
    # Of a scalar numpy makes an array of one: the shape is told from before.
    told = {"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "digest": digest}
    return {**told, "data": data if is_new else None}


def arrays_of(column: pa.Array | pa.ChunkedArray) -> list[dict[str, Array] | None]:
    """Return each row's arrays by name, read-only; `column` holds whole groups, or a whole message of a batch.

    Raises:
        CorruptPackError: data does not match its digest, or stands in no row before.
    """
    known: dict[bytes, bytes] = {}
    return [
        None if cell is None else {told["name"]: _array(told, known) for told in cell}
        for cell in _cells(column)
    ]


def fill_in(cells: Iterable[list[dict[str, Any]] | None]) -> None:
    """Give every array its data, in place, where a row before holds it: rows can then be taken from among each other.

    `cells` are those of whole groups in their order, as `to_pylist` returns them.
    """
    known: dict[bytes, bytes] = {}
    for told in (told for cell in cells if cell is not None for told in cell):
        if told["data"] is None:
            told["data"] = known.get(told["digest"])
        else:
            known[told["digest"]] = told["data"]


def _cells(column: pa.Array | pa.ChunkedArray) -> Iterable[list[dict[str, Any]] | None]:
    if column.null_count == len(column):
        return [None] * len(column)
    cells: list[list[dict[str, Any]] | None] = column.to_pylist()
    return cells


def _array(told: Mapping[str, Any], known: dict[bytes, bytes]) -> Array:
    name, digest, data = told["name"], told["digest"], told["data"]
    if data is None:
        data = known.get(digest)
        if data is None:
            raise CorruptPackError(
                f"tensor {name!r} says that a row before holds its data, and none does; read whole groups, in their order"
            )
    elif digest not in known:
        if xxhash.xxh3_128_digest(data) != digest:
            raise CorruptPackError(f"the data of tensor {name!r} does not match its digest; drop its group")
        known[digest] = data
    dtype, shape = np.dtype(told["dtype"]), tuple(told["shape"])
    if len(data) != dtype.itemsize * math.prod(shape):
        raise CorruptPackError(
            f"tensor {name!r} of type {dtype} and shape {shape} has {len(data)} bytes; drop its group"
        )
    return np.frombuffer(data, dtype.newbyteorder("<")).reshape(shape)
