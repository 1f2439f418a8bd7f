"""Big arrays as rows of kind `tensor`: cut along the first axis, so that a reader touches the rows it wants.

1. An extent holds whole rows of the array, next to each other in C order; each of its own rows is at most 4 MiB of it. An
   array row beyond 4 MiB is cut further; the pieces after its first have row_count 0.
2. Several extents are preceded by their contents: an extent with one row for each of them and no data.
3. A slice costs the 4 MiB blocks it lies in, and one more per extent where it does not begin there; an extent begins at
   each of `cuts`, so a slice from cut to cut costs what it holds.
4. Only the place of the data in a message is looked up here; every byte comes verified from the reader.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from strawflow.errors import CorruptPackError, InvalidInputError
from strawflow.ids import Extent
from strawflow.packs.digests import BLOCK_BYTES
from strawflow.packs.messages import corrupt, ids_of, parse
from strawflow.packs.reader import PackReader
from strawflow.records import TENSOR

ROW_BYTES = 4 * 1024 * 1024
EXTENT_BYTES = 64 * 1024 * 1024
# An extent up to here is read whole at once; longer ones by their blocks, as many at a time.
_WHOLE_BYTES = 3 * BLOCK_BYTES

_NUMPY_NAMES = frozenset(
    np.dtype(code).name for code in ("?", "b", "h", "i", "q", "B", "H", "I", "Q", "e", "f", "d", "F", "D")
)
# What numpy has no type for travels as unsigned integers of the same width.
_BITS_OF = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
}

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class TensorInfo:
    """What an array is; `dtype` may be a name numpy lacks."""

    tensor_id: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bits(self) -> np.dtype[np.generic]:
        """The numpy type that rows are read as: the array's own, or unsigned integers of its width."""
        return np.dtype(_BITS_OF.get(self.dtype, self.dtype))

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.bits.itemsize


def to_tensor_batches(
    tensor_id: str,
    array: Array,
    *,
    dtype: str | None = None,
    cuts: Sequence[int] = (),
    extent_bytes: int = EXTENT_BYTES,
) -> list[pa.RecordBatch]:
    """Return the record batches to append, in this order, for one array; their extents together are the tensor.

    The data is not copied if it lies in C order: leave the array unchanged until they are appended. `dtype` names what the
    bits of an unsigned array mean (bfloat16, float8_*). `cuts` are rows at which readers' slices begin. An extent has at
    most `extent_bytes`, or one row.

    Raises:
        InvalidInputError: an array without axes, of a type that cannot be stored, or a cut outside it.
    """
    info, flat = _as_bits(tensor_id, array, dtype)
    if extent_bytes < 1 or any(not 0 <= cut <= info.shape[0] for cut in cuts):
        raise InvalidInputError(
            f"tensor {tensor_id!r} has {info.shape[0]} rows; cuts {list(cuts)} must lie in it, extent_bytes "
            f"({extent_bytes}) be at least 1"
        )
    borders = sorted({0, info.shape[0], *cuts})
    per_extent = max(1, extent_bytes // info.row_bytes) if info.row_bytes else max(1, info.shape[0])
    parts = [
        (start, min(start + per_extent, end))
        for begin, end in itertools.pairwise(borders)
        for start in range(begin, end, per_extent)
    ] or [(0, 0)]
    batches = [_part(info, flat, start, stop) for start, stop in parts]
    if len(batches) > 1:
        batches.insert(0, _contents(info, parts))
    return batches


def tensor_info(reader: PackReader, extents: Sequence[Extent], *, sealed: bool = False) -> TensorInfo:
    """Return name, type and shape of the tensor that `extents` are.

    Raises:
        InvalidInputError: they are no tensor, or not all of it.
        CorruptPackError, StorageError, IncompatibleFormatError: as `PackReader.read`.
    """
    return _parts(reader, extents, sealed=sealed)[0]


def read_tensor_rows(
    reader: PackReader, extents: Sequence[Extent], start: int, stop: int, *, sealed: bool = False
) -> Array:
    """Return rows `start .. stop` of the array that `extents` (as appended, in order) are; only blocks touched are read.

    Rows of one extent of a sealed pack are a view of the mapped file, read-only and not copied. Types numpy lacks come as
    unsigned integers of their width; `tensor_info` says what they are.

    Raises:
        InvalidInputError: the rows leave the array, or the extents are no tensor, or not all of it.
        CorruptPackError, StorageError, IncompatibleFormatError: as `PackReader.read`.
    """
    info, parts = _parts(reader, extents, sealed=sealed)
    if not 0 <= start <= stop <= info.shape[0]:
        raise InvalidInputError(
            f"rows {start} to {stop} leave tensor {info.tensor_id!r}, which has {info.shape[0]} rows"
        )
    shape = (stop - start, *info.shape[1:])
    touched = [part for part in parts if part.row_start < stop and start < part.row_start + part.row_count]
    if not touched or not info.row_bytes:
        return np.empty(shape, info.bits)
    if len(touched) == 1 and ((reader.can_map and sealed) or touched[0].is_small):
        data = _view(reader, touched[0], info, start, stop, sealed=sealed)
        return np.frombuffer(data, info.bits).reshape(shape)
    result = np.empty(shape, info.bits)
    target = memoryview(result.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    for part in touched:
        first, last = max(start, part.row_start), min(stop, part.row_start + part.row_count)
        room = target[(first - start) * info.row_bytes : (last - start) * info.row_bytes]
        _copy(reader, part, info, (first - part.row_start) * info.row_bytes, room)
    return result


@dataclass(frozen=True)
class _Part:
    """Which rows an extent holds, and its rows or layout when these have been read."""

    extent: Extent
    row_start: int
    row_count: int
    batch: pa.RecordBatch | None = None
    layout: _Layout | None = None

    @property
    def is_small(self) -> bool:
        return self.extent.length <= _WHOLE_BYTES


@dataclass(frozen=True)
class _Layout:
    """Where the data of an extent lies in its message; `head` is the first block of the message, verified."""

    info: TensorInfo
    row_start: int
    row_count: int
    data_at: int
    head: pa.Buffer


def _as_bits(tensor_id: str, array: Array, dtype: str | None) -> tuple[TensorInfo, pa.Buffer]:
    name = dtype or array.dtype.name
    if array.ndim == 0:
        raise InvalidInputError(
            f"tensor {tensor_id!r} has no axis to cut rows along; store it as an array of one row (reshape(1))"
        )
    if name not in _NUMPY_NAMES and name not in _BITS_OF:
        raise InvalidInputError(
            f"tensor {tensor_id!r} is of type {name}; known: {', '.join(sorted(_NUMPY_NAMES | _BITS_OF.keys()))}"
        )
    info = TensorInfo(tensor_id, name, array.shape)
    is_fit = array.dtype.name == name or array.dtype == info.bits
    if not is_fit or array.dtype.itemsize != info.bits.itemsize:
        raise InvalidInputError(
            f"tensor {tensor_id!r} of type {array.dtype} does not hold the bits of {name}"
        )
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return info, pa.py_buffer(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _part(info: TensorInfo, flat: pa.Buffer, start: int, stop: int) -> pa.RecordBatch:
    pieces = list(_pieces(info.row_bytes, start, stop))
    lengths = [length for _, _, length in pieces]
    data = flat.slice(start * info.row_bytes, (stop - start) * info.row_bytes)
    return _batch(info, [(first, count) for first, count, _ in pieces], lengths, data)


def _pieces(row_bytes: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (row_start, row_count, bytes) of each piece of at most 4 MiB."""
    if row_bytes <= ROW_BYTES:
        rows = ROW_BYTES // row_bytes if row_bytes else max(1, stop - start)
        for first in range(start, stop, rows) if stop > start else [start]:
            count = min(rows, stop - first)
            yield first, count, count * row_bytes
        return
    for row in range(start, stop):
        for begin in range(0, row_bytes, ROW_BYTES):
            yield row, int(begin == 0), min(ROW_BYTES, row_bytes - begin)


def _contents(info: TensorInfo, parts: list[tuple[int, int]]) -> pa.RecordBatch:
    return _batch(info, [(start, stop - start) for start, stop in parts], [0] * len(parts), pa.py_buffer(b""))


def _batch(
    info: TensorInfo, rows: list[tuple[int, int]], lengths: list[int], data: pa.Buffer
) -> pa.RecordBatch:
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    columns = [
        pa.array([info.tensor_id] * len(rows), pa.string()),
        pa.array([start for start, _ in rows], pa.int64()),
        pa.array([count for _, count in rows], pa.int64()),
        pa.array([info.dtype] * len(rows), pa.string()),
        pa.array([info.shape] * len(rows), pa.list_(pa.int64())),
        pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(rows), [None, pa.py_buffer(offsets), data]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=TENSOR)


def _parts(reader: PackReader, extents: Sequence[Extent], *, sealed: bool) -> tuple[TensorInfo, list[_Part]]:
    if not extents:
        raise InvalidInputError("no extents were given, so there is no tensor to read")
    for extent in extents:
        if extent.kind != "tensor":
            raise InvalidInputError(
                f"{extent.place} is of kind {extent.kind!r}, not 'tensor'", **ids_of(extent)
            )
    if len(extents) == 1:
        info, part = _only_part(reader, extents[0], sealed=sealed)
        _check_whole(info, [part], extents)
        return info, [part]
    contents = reader.read(extents[0], sealed=sealed)
    info = _info_of(contents)
    starts, counts = contents.column("row_start").to_pylist(), contents.column("row_count").to_pylist()
    if len(starts) != len(extents) - 1:
        raise InvalidInputError(
            f"tensor {info.tensor_id!r} has {len(starts)} extents after {extents[0].place}; {len(extents) - 1} were given"
        )
    parts = [_Part(*given) for given in zip(extents[1:], starts, counts, strict=True)]
    _check_whole(info, parts, extents)
    return info, parts


def _only_part(reader: PackReader, extent: Extent, *, sealed: bool) -> tuple[TensorInfo, _Part]:
    if extent.length <= _WHOLE_BYTES:
        batch = reader.read(extent, sealed=sealed)
        count = sum(batch.column("row_count").to_pylist())
        return _info_of(batch), _Part(extent, batch.column("row_start")[0].as_py(), count, batch=batch)
    layout = _layout(reader, extent, sealed=sealed)
    return layout.info, _Part(extent, layout.row_start, layout.row_count, layout=layout)


def _check_whole(info: TensorInfo, parts: list[_Part], extents: Sequence[Extent]) -> None:
    ends = [0, *itertools.accumulate(part.row_count for part in parts)]
    if [part.row_start for part in parts] != ends[:-1] or ends[-1] != info.shape[0]:
        raise InvalidInputError(
            f"the extents from {extents[0].place} on are not all of tensor {info.tensor_id!r}",
            **ids_of(extents[0]),
        )


def _info_of(batch: pa.RecordBatch) -> TensorInfo:
    first = batch.slice(0, 1)
    name, dtype, shape = (first.column(field)[0].as_py() for field in ("tensor_id", "dtype", "shape"))
    if dtype not in _NUMPY_NAMES and dtype not in _BITS_OF:
        raise InvalidInputError(f"tensor {name!r} is of type {dtype}, which this program does not read")
    return TensorInfo(name, dtype, tuple(shape))


def _layout(reader: PackReader, extent: Extent, *, sealed: bool) -> _Layout:
    """Find the data of an extent without reading it: parse the message over memory in which only its head is filled."""
    head = reader.read_bytes(extent, 0, min(BLOCK_BYTES, extent.length), sealed=sealed)
    # Untouched pages of this mapping take no memory.
    sparse = mmap.mmap(-1, extent.length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    framing = min(8 + int.from_bytes(bytes(head[4:8]), "little"), head.size)
    sparse[:framing] = bytes(head[:framing])
    message = pa.py_buffer(sparse)
    try:
        batch = parse(message, extent)
        starts = batch.column("row_start").buffers()[1]
        if starts.size == 0 or not 0 < starts.address - message.address < extent.length:
            raise corrupt(extent, "is compressed")
    except CorruptPackError as error:
        # The head is as it was written, so this is not damage: a body that is compressed cannot be parsed unread.
        raise InvalidInputError(
            f"{extent.place} is compressed or no tensor, so no part of it can be read", **ids_of(extent)
        ) from error
    data = batch.column("data").buffers()[2]
    data_at = data.address - message.address if data is not None and data.size else extent.length
    # The columns before the data; of very many rows they may pass the head.
    columns = head if data_at <= head.size else reader.read_bytes(extent, 0, data_at, sealed=sealed)
    columns = columns.slice(0, min(data_at, columns.size))
    sparse[: columns.size] = memoryview(columns)
    info, count = _info_of(batch), sum(batch.column("row_count").to_pylist())
    if (data.size if data is not None else 0) < count * info.row_bytes:
        raise InvalidInputError(f"{extent.place} holds less than the rows it names", **ids_of(extent))
    return _Layout(info, batch.column("row_start")[0].as_py(), count, data_at, head)


def _view(
    reader: PackReader, part: _Part, info: TensorInfo, start: int, stop: int, *, sealed: bool
) -> pa.Buffer:
    begin, length = (start - part.row_start) * info.row_bytes, (stop - start) * info.row_bytes
    if part.is_small:
        batch = part.batch or reader.read(part.extent, sealed=sealed)
        _check_same(info, _info_of(batch), part)
        return batch.column("data").buffers()[2].slice(begin, length)
    layout = part.layout or _layout(reader, part.extent, sealed=sealed)
    _check_same(info, layout.info, part)
    at = layout.data_at + begin
    return reader.read_bytes(part.extent, at, at + length, sealed=sealed)


def _copy(reader: PackReader, part: _Part, info: TensorInfo, begin: int, target: memoryview) -> None:
    """Copy data from byte `begin` of an extent on into `target`, a few blocks at a time."""
    layout = part.layout or _layout(reader, part.extent, sealed=False)
    _check_same(info, layout.info, part)
    at, end, done = layout.data_at + begin, layout.data_at + begin + len(target), 0
    while at < end:
        if at < layout.head.size:
            step = memoryview(layout.head)[at : min(end, layout.head.size)]
        else:
            border = (at // BLOCK_BYTES) * BLOCK_BYTES + _WHOLE_BYTES
            step = memoryview(reader.read_bytes(part.extent, at, min(end, border)))
        target[done : done + len(step)] = step.cast("B")
        at, done = at + len(step), done + len(step)


def _check_same(info: TensorInfo, found: TensorInfo, part: _Part) -> None:
    if found != info:
        raise InvalidInputError(
            f"{part.extent.place} belongs to tensor {found.tensor_id!r}, not to {info.tensor_id!r}",
            **ids_of(part.extent),
        )
