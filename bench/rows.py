"""The form of every bench: rows of name, value, unit, against, ratio, target, ok, and how a script runs and prints them.

1. What is compared is measured in turn, round by round, in one process run: a disk or a neighbour that changes its mind
   changes it for both sides. Each side is first tried once, unmeasured.
2. `value` is the median of at least five rounds; `ratio` is the median of the ratios of each round, which need not be the
   quotient of the two medians.
3. A row without a target is for orientation. A script ends with 1 when a row misses its target.
4. It knows nothing of what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from strawflow.packs.probe import durability_of

ROUNDS = 5
T = TypeVar("T")

Side = Callable[[], float]
"""Does one round of its work and returns what it measured."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    value: float
    unit: str
    against: str | None = None
    ratio: float | None = None
    target: str | None = None
    ok: bool | None = None


@dataclass(frozen=True)
class Target:
    """A bound on a ratio or, where nothing is compared, on the value."""

    sense: str
    bound: float

    def holds(self, figure: float) -> bool:
        return figure >= self.bound if self.sense == ">=" else figure <= self.bound

    def __str__(self) -> str:
        return f"{self.sense} {self.bound:g}"


def at_least(bound: float) -> Target:
    return Target(">=", bound)


def at_most(bound: float) -> Target:
    return Target("<=", bound)


@dataclass(frozen=True)
class Bench:
    """What the command line asked for, and where to work."""

    folder: Path
    quick: bool
    rounds: int = ROUNDS
    options: argparse.Namespace = field(default_factory=argparse.Namespace)
    """The whole command line, for a script with options of its own."""

    def pick(self, quick: int, full: int) -> int:
        return quick if self.quick else full

    def path(self, name: str) -> Path:
        """Return a fresh folder of this name."""
        place = self.folder / name
        place.mkdir()
        return place


Section = Callable[[Bench], Iterable[Row]]


def take_turns(
    sides: Mapping[str, Side], rounds: int = ROUNDS, *, is_reversed: bool = True
) -> dict[str, list[float]]:
    """Measure all sides `rounds` times in turn; the first go of each is not counted.

    `is_reversed` turns the order round each time, so that none always follows the same other.
    """
    found: dict[str, list[float]] = {name: [] for name in sides}
    for name in sides:
        sides[name]()
    for number in range(rounds):
        turned = is_reversed and number % 2
        for name in reversed(list(sides)) if turned else sides:
            found[name].append(sides[name]())
    return found


def compare(
    name: str,
    ours: Sequence[float],
    unit: str,
    *,
    against: str,
    theirs: Sequence[float],
    target: Target | None = None,
) -> Row:
    """Return the row that sets our rounds against another's of the same turns."""
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return Row(
        name=name,
        value=rounded(statistics.median(ours)),
        unit=unit,
        against=f"{against} {rounded(statistics.median(theirs)):g}",
        ratio=rounded(ratio),
        target=None if target is None else str(target),
        ok=None if target is None else target.holds(ratio),
    )


def alone(name: str, values: Sequence[float], unit: str, *, target: Target | None = None) -> Row:
    """Return a row that is compared with nothing; a target then bounds the value itself."""
    value = statistics.median(values)
    return Row(
        name=name,
        value=rounded(value),
        unit=unit,
        target=None if target is None else str(target),
        ok=None if target is None else target.holds(value),
    )


def rounded(figure: float) -> float:
    """Keep three significant digits, and every digit before the point."""
    return round(figure) if abs(figure) >= 1000 else float(f"{figure:.3g}")


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Do the work once; returns the seconds it took and what it returned."""
    started = time.perf_counter()
    found = work()
    return time.perf_counter() - started, found


def main(
    description: str,
    sections: Mapping[str, Section],
    *,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> int:
    """Run the sections that were asked for, print their rows, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller amounts, meant for two minutes")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON on standard output")
    parser.add_argument("--folder", type=Path, help="where to work; default: the folder for temporary files")
    parser.add_argument("--only", action="append", choices=list(sections), help="a section, may be repeated")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    if add_options is not None:
        add_options(parser)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers and folders are cleared away
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="strawflow-bench-", dir=arguments.folder) as folder:
        print(machine(Path(folder)), file=sys.stderr if arguments.json else sys.stdout, flush=True)
        bench = Bench(Path(folder), arguments.quick, arguments.rounds, arguments)
        for name in arguments.only or sections:
            started = time.perf_counter()
            for row in sections[name](bench):
                found.append(row)
                if not arguments.json:
                    print(line(row), flush=True)
            print(f"  ({name}: {time.perf_counter() - started:.0f} s)", file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps([asdict(row) for row in found], indent=2))
    missed = [row.name for row in found if row.ok is False]
    if missed:
        print(
            f"exit code 1: missed {len(missed)} of {len(found)} rows: " + "; ".join(missed), file=sys.stderr
        )
    return 1 if missed else 0


def line(row: Row) -> str:
    """Return a row as a line of the table."""
    judged = {None: "", True: "ok", False: "MISSED"}[row.ok]
    target = "" if row.target is None else f"(target {row.target})"
    parts = [f"{row.name:<62} {row.value:>10g} {row.unit:<12}"]
    if row.against is not None:
        parts.append(f"{row.ratio:>7g} x {row.against}")
    return " ".join([*parts, target, judged]).rstrip()


def machine(folder: Path) -> str:
    """Return one line on the machine, the disk under `folder` and the versions that matter."""
    cpu = next(
        (
            text.split(":", 1)[1].strip()
            for text in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if text.startswith("model name")
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{len(os.sched_getaffinity(0))} cores ({cpu}), {memory:.0f} GiB, {durability_of(folder).filesystem}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, {datetime.now(UTC):%Y-%m-%d}"
    )
