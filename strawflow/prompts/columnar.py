"""Rows of Parquet and Arrow files, a few hundred at a time.

1. Only the wanted columns are read; a column that is absent is an error of the file, not of its rows.
2. Values come out as the JSON-like Python values they stand for; nothing is converted to text here.
3. A compressed file is first unpacked, in pieces, to an unnamed temporary file: these formats need to seek.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from strawflow.errors import InvalidInputError
from strawflow.prompts.byte_lines import open_bytes
from strawflow.prompts.source import Compression, Container

_ROWS_AT_A_TIME = 512
_ARROW_MAGIC = b"ARROW1"


class ColumnarFile:
    """An opened Parquet or Arrow file."""

    def __init__(self, source: pa.NativeFile, path: Path, container: Container) -> None:
        self._source = source
        self._path = path
        self._container = container

    def count(self) -> int:
        """Return the number of rows."""
        with self._errors_named():
            if self._container == "parquet":
                return int(pq.ParquetFile(self._source).metadata.num_rows)
            return sum(batch.num_rows for batch in self._arrow_batches(columns=[]))

    def rows(self, columns: Sequence[str], *, start: int) -> Iterator[dict[str, Any]]:
        """Yield rows from row `start` on, each holding the named columns.

        Raises:
            InvalidInputError: a column is absent or stands twice; the file is damaged.
        """
        passed = 0
        with self._errors_named():
            for batch in self._batches(list(columns)):
                if passed + batch.num_rows > start:
                    wanted = batch.slice(max(0, start - passed))
                    for offset in range(0, wanted.num_rows, _ROWS_AT_A_TIME):
                        yield from wanted.slice(offset, _ROWS_AT_A_TIME).to_pylist(maps_as_pydicts="strict")
                passed += batch.num_rows

    def _batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        if self._container == "arrow":
            yield from self._arrow_batches(columns)
            return
        parquet = pq.ParquetFile(self._source, buffer_size=1 << 20, pre_buffer=False)
        self._column_places(parquet.schema_arrow, columns)
        yield from parquet.iter_batches(batch_size=_ROWS_AT_A_TIME, columns=columns, use_threads=False)

    def _arrow_batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        self._source.seek(0)
        is_file = self._source.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
        open_reader = pa.ipc.open_file if is_file else pa.ipc.open_stream
        self._source.seek(0)
        places = self._column_places(open_reader(self._source).schema, columns)
        self._source.seek(0)
        # An empty list of fields means all of them, so a bare count reads one.
        options = pa.ipc.IpcReadOptions(included_fields=places or [0], use_threads=False)
        reader = open_reader(self._source, options=options)
        if is_file:
            for place in range(reader.num_record_batches):
                yield reader.get_batch(place)
        else:
            yield from reader

    def _column_places(self, schema: pa.Schema, columns: list[str]) -> list[int]:
        for name in columns:
            found = len(schema.get_all_field_indices(name))
            if found != 1:
                there = ", ".join(schema.names) or "no columns"
                raise InvalidInputError(
                    f"{self._path}: {'no column' if found == 0 else 'more than one column'} {name!r}; it has {there}"
                )
        return [schema.get_field_index(name) for name in columns]

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:
            if getattr(error, "errno", None) is not None:  # the disk failed, not the format
                raise
            raise InvalidInputError(
                f"{self._path} cannot be read as {self._container}: {error}; it is damaged, cut short or misnamed"
            ) from error


@contextmanager
def open_columnar(
    path: Path, container: Container, compression: Compression | None
) -> Iterator[ColumnarFile]:
    """Open a Parquet file, or an Arrow file of either the file or the stream form."""
    if compression is None:
        with pa.OSFile(str(path)) as source:
            yield ColumnarFile(source, path, container)
        return
    with tempfile.TemporaryFile(prefix="strawflow-prompts-") as unpacked:
        with open_bytes(path, compression) as stream:
            shutil.copyfileobj(stream, unpacked, 1 << 20)
        unpacked.seek(0)
        yield ColumnarFile(pa.PythonFile(unpacked, mode="r"), path, container)
