"""Tables and lists of facts that fit: where a terminal is narrow cells wrap at words, and columns go beneath their rows.

1. A cell breaks at spaces and behind - / _ . : , between words; inside a word only where one is wider than all there is.
2. While the columns do not fit side by side, those that hold nothing are left out, then those that a command calls optional,
   then one after the other is told beneath each row: the widest prose first, else the last column. The first one stays.
3. What is left out or beneath depends on the width alone; --json has everything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, chop_cells

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

_GAP = 2
_PROSE = 20
"""What consists of several words is not squeezed below so many characters."""
_INDENT = 4

# Not inside numbers and times: a letter stands on one side at least.
_BREAKS = re.compile(r"(?<=[A-Za-z][-/_.:,])(?=\S)|(?<=[-/_.:,])(?=[A-Za-z])")


def wrapped(text: str, width: int) -> list[str]:
    """Return a text as lines of at most `width` cells: broken at spaces, or inside a word that is wider than a line."""
    lines, line = [], ""
    for word in text.split():
        joined = f"{line} {word}" if line else word
        if cell_len(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        *whole, line = _broken(word, width)
        lines += whole
    return [*lines, line]


def _broken(word: str, width: int) -> list[str]:
    """Return a word as lines: broken behind its hyphens and the like, a part that is still too wide anywhere."""
    lines, line = [], ""
    for part in _BREAKS.split(word):
        if cell_len(line + part) <= width:
            line += part
            continue
        if line:
            lines.append(line)
        *whole, line = chop_cells(part, width)
        lines += whole
    return [*lines, line]


@dataclass(frozen=True)
class Column:
    name: str
    cells: tuple[str, ...]
    is_number: bool
    is_empty: bool
    """Holds no value in any row."""
    is_optional: bool = False

    @property
    def is_prose(self) -> bool:
        return any(" " in cell for cell in self.cells)

    @property
    def full_width(self) -> int:
        return max(cell_len(text) for text in (self.name, *self.cells))

    @property
    def least_width(self) -> int:
        """What it takes without breaking a word."""
        name = max(cell_len(part) for part in _parts(self.name))
        if self.is_number:
            return max(name, *(cell_len(cell) for cell in self.cells))
        widest = max(cell_len(part) for cell in self.cells for part in _parts(cell))
        least = min(_PROSE, self.full_width) if self.is_prose else 0
        return max(name, widest, least)


@dataclass(frozen=True)
class Table:
    """Rows under the names of their columns; a rich renderable."""

    columns: tuple[Column, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        beside, beneath = split(self.columns, options.max_width)
        widths = _widths(beside, options.max_width)
        for line in _side_by_side([c.name for c in beside], beside, widths):
            yield Text(line, style="bold")
        yield Text("─" * min(options.max_width, sum(widths) + _GAP * (len(widths) - 1)))
        for number in range(len(self.columns[0].cells)):
            for line in _side_by_side([c.cells[number] for c in beside], beside, widths):
                yield Text(line)
            told = [f"{c.name}: {c.cells[number]}" for c in beneath if c.cells[number] not in ("-", "")]
            for line in wrapped("; ".join(told), options.max_width - _INDENT) if told else ():
                yield Text(" " * _INDENT + line)


@dataclass(frozen=True)
class Facts:
    """Values beside their names, wrapped under themselves; a rich renderable."""

    pairs: Sequence[tuple[str, str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        indent = max(len(name) for name, _ in self.pairs) + 1
        for name, value in self.pairs:
            first, *rest = wrapped(value, max(1, options.max_width - indent))
            yield Text.assemble((f"{name:<{indent}}", "dim"), first)
            for line in rest:
                yield Text(" " * indent + line)


def split(columns: Sequence[Column], width: int) -> tuple[list[Column], list[Column]]:
    """Return the columns that stand side by side in so many cells, and those that go beneath each row."""
    beside, beneath = list(columns), list[Column]()
    while len(beside) > 1 and _least(beside) > width:
        others = beside[1:]
        idle = [c for c in others if c.is_empty] or [c for c in others if c.is_optional]
        if idle:
            beside.remove(idle[-1])
            continue
        prose = [c for c in others if c.is_prose]
        moved = max(prose, key=lambda c: c.full_width) if prose else others[-1]
        beside.remove(moved)
        beneath.append(moved)
    return beside, [c for c in columns if c in beneath]


def _parts(text: str) -> list[str]:
    return [part for word in text.split() for part in _BREAKS.split(word)] or [""]


def _least(columns: Sequence[Column]) -> int:
    return sum(c.least_width for c in columns) + _GAP * (len(columns) - 1)


def _widths(columns: Sequence[Column], width: int) -> list[int]:
    """Give each column what its words need, and what is left first to those that miss the least."""
    widths = [c.least_width for c in columns]
    left = width - _least(columns)
    for at in sorted(range(len(columns)), key=lambda at: columns[at].full_width - widths[at]):
        more = max(0, min(left, columns[at].full_width - widths[at]))
        widths[at] += more
        left -= more
    return [min(w, width) for w in widths]


def _side_by_side(texts: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> Iterator[str]:
    cells = [wrapped(text, width) for text, width in zip(texts, widths, strict=True)]
    for number in range(max(map(len, cells))):
        parts = []
        for lines, column, width in zip(cells, columns, widths, strict=True):
            line = lines[number] if number < len(lines) else ""
            padding = " " * (width - cell_len(line))
            parts.append(padding + line if column.is_number else line + padding)
        yield (" " * _GAP).join(parts).rstrip()


def columns_of(
    names: Sequence[str],
    rows: Sequence[Sequence[Any]],
    cells: Sequence[Sequence[str]],
    *,
    optional: Sequence[str],
) -> tuple[Column, ...]:
    """Return the columns of rows of values and of how these are shown."""
    return tuple(
        Column(
            name=name,
            cells=tuple(row[at] for row in cells),
            is_number=all(isinstance(row[at], int | float) or row[at] is None for row in rows),
            is_empty=all(row[at] is None for row in rows),
            is_optional=name in optional,
        )
        for at, name in enumerate(names)
    )
