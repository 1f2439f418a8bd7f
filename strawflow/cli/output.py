"""Rendering: what a command found, as a table for people or as JSON for programs.

1. With --json exactly one JSON document goes to stdout; errors are one JSON document on stderr.
2. Values reach JSON by their own names: dataclass fields, enum values, paths as text. NaN and infinity become null.
3. It knows no command and reads nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from strawflow.cli.layout import Table
    from strawflow.errors import StrawflowError

WIDTH_WITHOUT_TERMINAL = 160


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def clock_time(at: str) -> str:
    """Return the time of day (UTC) of a stored wall time: tables are narrow, --json has it whole."""
    return at[11:19]


def print_json(value: Any, *, one_line: bool = False) -> None:
    print(json.dumps(plain(value), indent=None if one_line else 2, ensure_ascii=False), flush=True)


def print_error(error: StrawflowError, *, as_json: bool) -> None:
    """Write an error to stderr: one line, or {"error": {kind, message, facts}}."""
    if as_json:
        shown = {"error": {"kind": error.kind, "message": error.message, "facts": plain(error.facts)}}
        print(json.dumps(shown, ensure_ascii=False, default=str), file=sys.stderr, flush=True)
    else:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)


def console() -> Console:
    """Return where people read: as wide as the terminal or COLUMNS say, or wide enough for pipes and logs."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH_WITHOUT_TERMINAL
    return Console(highlight=False, width=width)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str, optional: Sequence[str] = ()
) -> None:
    """Print rows under their column names; `empty` stands for none, `optional` columns are left out where it is narrow."""
    if not rows:
        print(empty)
        return
    console().print(table(columns, rows, optional=optional), soft_wrap=False)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, optional: Sequence[str] = ()) -> Table:
    """Return rows (at least one) as rich shows them; numbers stand to the right."""
    from strawflow.cli.layout import Table, columns_of

    cells = [[cell(value) for value in row] for row in rows]
    return Table(columns_of(columns, rows, cells, optional=optional))


def say(text: str) -> None:
    """Print a sentence, broken between words where it is wider than the terminal; whole into pipes and logs."""
    if not (sys.stdout.isatty() or "COLUMNS" in os.environ):
        print(text)
        return
    from strawflow.cli.layout import wrapped

    print("\n".join(wrapped(text, console().width)))


def cell(value: Any) -> str:
    """Return a value as people read it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def size(num_bytes: int) -> str:
    """Return bytes in the largest unit that keeps the number at 1 or more."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def clipped(text: str | None, limit: int) -> str:
    """Return one line of at most `limit` characters."""
    line = " ".join((text or "").split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
