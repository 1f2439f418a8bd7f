"""Streaming reader of prompt files: from a source to checked rows, bad ones refused or set aside.

1. Memory does not grow with the file; a negative slice bound costs a counting pass, not memory.
2. A slice counts records (blank lines are none, bad rows are), so both policies for bad rows see the same rows.
3. Policy `fail` raises at the first bad row; the caller must not make earlier rows visible before the end.
4. Physical line numbers count every newline of the decompressed file, blank lines too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, Literal

from strawflow.errors import InvalidInputError
from strawflow.prompts import strict_json
from strawflow.prompts.byte_lines import DEFAULT_MAX_LINE_BYTES, LineTooLong, open_bytes, read_lines
from strawflow.prompts.check_row import BadRowError, RowRules
from strawflow.prompts.columnar import open_columnar
from strawflow.prompts.row import PromptKeys, PromptRow
from strawflow.prompts.source import Compression, PromptSource
from strawflow.prompts.strict_json import StrictJsonError

OnBadRow = Literal["fail", "skip"]

_BYTE_ORDER_MARK = "\ufeff"
_REJECT_EXCERPT_CHARS = 500


@dataclass
class ReadReport:
    """What a read met; filled while the rows are drawn, complete once they are exhausted."""

    num_records: int = 0
    """Records within the slice, good and bad."""
    num_accepted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Bad rows by reason (stable words)."""

    @property
    def num_rejected(self) -> int:
        return self.rejected.total()


@dataclass(frozen=True, slots=True)
class _Record:
    """One record before it is parsed: `content` is a line of text, a row of columns, or an oversized line."""

    number: int
    content: bytes | LineTooLong | dict[str, object]


def read_prompts(
    source: PromptSource,
    keys: PromptKeys,
    *,
    on_bad_row: OnBadRow = "fail",
    reject_path: Path | None = None,
    allow_empty: bool = False,
    row_rewards: tuple[str, ...] = (),
    report: ReadReport | None = None,
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
) -> Iterator[PromptRow]:
    """Read the rows of a source, in file order, checking each.

    Streams: at no time more than a line (or a few hundred columnar rows) is held.

    Args:
        source: The file and the slice of its records.
        keys: Names of the prompt, label and metadata fields.
        on_bad_row: `fail` raises at the first bad row, `skip` sets bad rows aside.
        reject_path: Under `skip`, the file bad rows are appended to as JSON lines; made only when there is one.
        allow_empty: Take blank prompts as good ones (null or absent ones never are).
        row_rewards: Functions and addresses that a row's `metadata.reward` may name, beside strawflow's own rewards.
        report: Filled with counts while the rows are drawn.
        max_line_bytes: A text line above this is a bad row.

    Raises:
        InvalidInputError: a bad row under `fail` (`FILE:LINE: what is wrong`), or, under either policy, a file that
            cannot be read at all: unknown suffix, damaged compression, absent column, other encoding.
        NotFoundError: no such file.
    """
    if on_bad_row not in ("fail", "skip"):
        raise InvalidInputError(f"on_bad_row is {on_bad_row!r}; it must be 'fail' or 'skip'")
    report = report if report is not None else ReadReport()
    source.check_exists()
    rules = RowRules(
        keys, source.shown, allow_empty=allow_empty, row_rewards=row_rewards, folder=source.folder
    )
    with _RejectFile(reject_path) as rejects, closing(_records(source, keys, max_line_bytes)) as records:
        for record in records:
            report.num_records += 1
            try:
                row = rules.check(_parse(record, max_line_bytes), line=record.number)
            except BadRowError as error:
                if on_bad_row == "fail":
                    raise InvalidInputError(f"{source.shown}:{record.number}: {error.detail}") from error
                report.rejected[error.reason] += 1
                rejects.add(source, record, error)
            else:
                report.num_accepted += 1
                yield row


def count_records(source: PromptSource) -> int:
    """Return the number of records of a whole file (the slice is not applied), streaming."""
    source.check_exists()
    container, compression = source.layout()
    if container != "json_lines":
        with open_columnar(source.path, container, compression) as file:
            return file.count()
    return sum(1 for _ in _text_records(source.path, compression, DEFAULT_MAX_LINE_BYTES))


def _records(source: PromptSource, keys: PromptKeys, max_line_bytes: int) -> Generator[_Record, None, None]:
    """Yield the records within the slice."""
    container, compression = source.layout()
    if container == "json_lines":
        num_records = count_records(source) if source.needs_count else None
        start, stop = source.resolve(num_records)
        yield from islice(
            _text_records(source.path, compression, max_line_bytes), start, _at_least(start, stop)
        )
        return
    with open_columnar(source.path, container, compression) as file:
        start, stop = source.resolve(file.count() if source.needs_count else None)
        rows = islice(file.rows(keys.names(), start=start), None if stop is None else max(0, stop - start))
        for number, row in enumerate(rows, start + 1):
            yield _Record(number, row)


def _at_least(start: int, stop: int | None) -> int | None:
    # islice reads on to `start` when stop lies before it; an empty slice need not.
    return None if stop is None else max(start, stop)


def _text_records(path: Path, compression: Compression | None, max_line_bytes: int) -> Iterator[_Record]:
    with open_bytes(path, compression) as stream:
        for number, line in enumerate(read_lines(stream, path=path, max_line_bytes=max_line_bytes), 1):
            if isinstance(line, LineTooLong) or line.strip(b" \t\r"):
                yield _Record(number, line)


def _parse(record: _Record, max_line_bytes: int) -> object:
    content = record.content
    if isinstance(content, dict):
        return content
    if isinstance(content, LineTooLong):
        raise BadRowError(
            "line_too_long",
            f"the line is longer than the limit of {max_line_bytes} bytes; split or shorten it",
        )
    try:
        return strict_json.parse(content.decode("utf-8").lstrip(_BYTE_ORDER_MARK))
    except UnicodeDecodeError as error:
        raise BadRowError(
            "not_utf8",
            f"byte 0x{content[error.start]:02X} at byte {error.start + 1} of the line is not UTF-8; convert the file, "
            f"for example: iconv -f LATIN1 -t UTF-8",
        ) from error
    except StrictJsonError as error:
        raise BadRowError(error.reason, error.detail) from error


class _RejectFile:
    """Appends rejected rows as JSON lines; the file appears with the first of them."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> _RejectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, source: PromptSource, record: _Record, error: BadRowError) -> None:
        if self._path is None:
            return
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115 (closed by __exit__)
        entry = {
            "source": source.shown,
            "line": record.number,
            "reason": error.reason,
            "detail": error.detail,
            "row": _excerpt(record),
        }
        self._file.write(json.dumps(entry) + "\n")


def _excerpt(record: _Record) -> str:
    content = record.content
    if isinstance(content, LineTooLong):
        return ""
    if isinstance(content, dict):
        return repr(content)[:_REJECT_EXCERPT_CHARS]
    return content[: 4 * _REJECT_EXCERPT_CHARS].decode("utf-8", "backslashreplace")[:_REJECT_EXCERPT_CHARS]
