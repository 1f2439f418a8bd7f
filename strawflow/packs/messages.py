"""One extent's bytes and what they must be: inside the run, whole, matching their digests, a record batch of their kind.

1. Digests are checked before anything is parsed.
2. A failure names the file, the place and what to do, and carries the ids the index knows the extent by.
3. It opens and reads no file.
"""

from __future__ import annotations

from functools import cache

import pyarrow as pa

from strawflow.errors import CorruptPackError, InvalidInputError
from strawflow.ids import Extent
from strawflow.packs.digests import BLOCK_BYTES, DIGEST_BYTES, first_bad_block, is_one_block, num_blocks
from strawflow.records import COMPRESSION, as_present, check_schema, schema_of

MAGIC = b"ARROW1\0\0"
MAX_SCHEMA_BYTES = 1024 * 1024
_ALONE_BYTES = 256 * 1024
_ALONE = pa.ipc.IpcReadOptions(use_threads=False)


def check_extent(extent: Extent) -> None:
    """Refuse an extent that lies outside the run or nowhere.

    Raises:
        InvalidInputError: naming path, offset and length.
    """
    if extent.path.startswith("/") or ".." in extent.path.split("/"):
        raise InvalidInputError(
            f"an extent names {extent.path}, which is not inside the run", **ids_of(extent)
        )
    if extent.offset < len(MAGIC) or extent.length < 1:
        raise InvalidInputError(
            f"an extent of {extent.path} has offset {extent.offset} and length {extent.length}",
            **ids_of(extent),
        )


def schema_length(head: pa.Buffer, extent: Extent) -> int:
    """Return how many bytes the schema message takes after the magic, framing included.

    Raises:
        CorruptPackError: the file does not begin as an Arrow file.
    """
    begin = bytes(head[:16])
    length = int.from_bytes(begin[12:16], "little")
    if len(begin) < 16 or not begin.startswith(MAGIC) or length > MAX_SCHEMA_BYTES:
        raise CorruptPackError(f"{extent.path} does not begin as an Arrow file", **ids_of(extent))
    return 8 + length


def check_head(message: pa.Buffer, extent: Extent) -> pa.Schema:
    """Return the schema of a pack; one that is damaged, or of another kind or version than the extent's, is refused.

    Raises:
        CorruptPackError: it cannot be parsed.
        IncompatibleFormatError: it is another schema than this program reads.
    """
    try:
        stored = pa.ipc.read_schema(message)
        check_schema(stored, extent.kind, path=extent.path)
        return stored
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: text that is no UTF-8
        raise CorruptPackError(
            f"the schema at the head of {extent.path} is damaged: {error}", **ids_of(extent)
        ) from error


def verify(part: pa.Buffer, extent: Extent, *, first_block: int = 0, blocks: int | None = None) -> None:
    """Refuse bytes that are not the extent's blocks `first_block .. first_block + blocks` (default: all).

    Raises:
        CorruptPackError: naming the 4 MiB in which the first difference lies.
    """
    if part.size == extent.length <= BLOCK_BYTES and is_one_block(part, extent.digests):
        return  # by far the most common: a small extent, whole and intact
    last = num_blocks(extent.length) if blocks is None else first_block + blocks
    wanted = min(last * BLOCK_BYTES, extent.length) - first_block * BLOCK_BYTES
    if part.size < wanted:
        raise _cut_off(extent, extent.offset + first_block * BLOCK_BYTES + part.size)
    if len(extent.digests) != DIGEST_BYTES * num_blocks(extent.length):
        raise corrupt(
            extent, f"has {len(extent.digests)} bytes of digests, which is not its number of blocks"
        )
    bad = first_bad_block(memoryview(part), extent.digests[first_block * DIGEST_BYTES : last * DIGEST_BYTES])
    if bad is not None:
        place = extent.offset + (first_block + bad) * BLOCK_BYTES
        raise corrupt(extent, f"does not match its checksum in the 4 MiB from byte {place}")


def parse(message: pa.Buffer, extent: Extent, stored: pa.Schema | None = None) -> pa.RecordBatch:
    """Return the rows of a verified message by the present schema; columns that are stored raw point into it.

    `stored` is the schema of its pack; None: the present one.

    Raises:
        CorruptPackError: it is no record batch of the extent's kind, or has another number of rows.
    """
    schema = schema_of(extent.kind) if stored is None else stored
    try:
        if COMPRESSION[extent.kind] is None or message.size > _ALONE_BYTES:
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(message), schema)
        else:
            batch = _decompress_alone(message, extent.kind if stored is None else stored)
    except (
        pa.ArrowException,
        OSError,
        StopIteration,
    ) as error:  # StopIteration: the mark at the end of a stream
        raise corrupt(
            extent, f"matches its checksum but is no record batch of kind {extent.kind!r}: {error}"
        ) from error
    if batch.num_rows != extent.num_rows:
        raise corrupt(extent, f"holds {batch.num_rows} rows, expected {extent.num_rows}")
    return batch if stored is None else as_present(batch, extent.kind)


def _decompress_alone(message: pa.Buffer, of: str | pa.Schema) -> pa.RecordBatch:
    """Parse in this thread: waking Arrow's pool for each of many small buffers costs far more than it saves."""
    head = _schema_message(of) if isinstance(of, str) else of.serialize()
    stream = pa.py_buffer(b"".join((head, message)))
    return pa.ipc.open_stream(stream, options=_ALONE).read_next_batch()


@cache
def _schema_message(kind: str) -> pa.Buffer:
    return schema_of(kind).serialize()


def corrupt(extent: Extent, what: str) -> CorruptPackError:
    """Return the error for a damaged extent."""
    return CorruptPackError(
        f"{extent.path}: the extent at byte {extent.offset}, {extent.length} bytes long, {what}; restore the file "
        "from a copy",
        **ids_of(extent),
    )


def ids_of(extent: Extent) -> dict[str, int]:
    """What the index knows the extent by; one it has not named has only its place."""
    named = {"extent_id": extent.extent_id, "pack_id": extent.pack_id}
    return {name: number for name, number in named.items() if number}


def _cut_off(extent: Extent, end: int) -> CorruptPackError:
    return corrupt(extent, f"is cut off: the file ends at byte {end}")
