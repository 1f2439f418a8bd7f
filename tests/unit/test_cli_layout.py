"""Tables at the widths of terminals: no word is broken while it can be helped, nothing is wider, nothing gets lost."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from strawflow.cli.layout import Facts, wrapped
from strawflow.cli.output import table
from strawflow.plural import counted

UNITS = (
    "unit",
    "purpose",
    "profile",
    "epoch",
    "position",
    "state",
    "attempts",
    "reward",
    "tokens",
    "last error",
)
ERROR = "the engine closed the connection before the first token arrived"
ROWS = [
    (1, "train", "train", 0, 31, "completed", 1, 0.5, 10, None),
    (13, "train", "eval", 0, 19, "failed", 3, None, None, ERROR),
]


def shown(renderable: object, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(renderable)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120, 160])
def test_no_word_of_a_table_is_broken_and_no_line_is_wider(width: int) -> None:
    lines = shown(table(UNITS, ROWS), width)
    assert max(map(len, lines)) <= width
    words = set(" ".join(lines).replace(":", " ").split())
    assert words >= {*ERROR.split(), "completed", "failed", "purpose", "attempts", "31"}


def test_what_does_not_fit_beside_goes_beneath_its_row_and_what_holds_nothing_is_left_out() -> None:
    lines = shown(table(UNITS, ROWS), 80)
    assert lines[0].split() == list(UNITS[:-1])
    assert lines[-1] == f"    last error: {ERROR}"
    assert lines[-2].split()[0] == "13"
    assert "last error" not in " ".join(shown(table(UNITS, ROWS[:1]), 80))
    assert "last error" in shown(table(UNITS, ROWS), 160)[0]


def test_optional_columns_are_left_out_where_it_is_narrow() -> None:
    rows = [("consumer-trainer-cfd272bf09eb4ac3", "consumer-trainer", 1)]
    narrow = shown(table(("session", "kind", "units"), rows, optional=("kind",)), 30)
    assert narrow[0].split() == ["session", "units"]
    assert shown(table(("session", "kind", "units"), rows, optional=("kind",)), 80)[0].split()[1] == "kind"


def test_ids_break_behind_hyphens_and_are_folded_only_when_wider_than_all_there_is() -> None:
    assert wrapped("consumer-trainer-cfd272bf09eb4ac3", 20) == ["consumer-trainer-", "cfd272bf09eb4ac3"]
    assert wrapped("an id c000003-main.trainer-f1", 23) == ["an id", "c000003-main.trainer-f1"]
    assert wrapped("0123456789", 4) == ["0123", "4567", "89"]
    assert wrapped("at 16:15:58 or 2026-11-30", 11) == ["at 16:15:58", "or", "2026-11-30"]
    assert wrapped("", 5) == [""]


def test_facts_are_wrapped_beneath_themselves() -> None:
    assert shown(Facts([("steps", "one two three"), ("run", "x")]), 14) == [
        "steps one two",
        "      three",
        "run   x",
    ]


def test_counts_have_their_nouns_in_the_right_number() -> None:
    assert [counted(n, "row") for n in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert [counted(n, "batch", "batches") for n in (1, 2)] == ["1 batch", "2 batches"]
    assert re.findall(r"\b1 \w+s\b", counted(1, "unit is", "units are")) == []
