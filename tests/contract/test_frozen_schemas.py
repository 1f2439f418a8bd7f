"""The rendered contracts in schemas/ say what the code says."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from strawflow.states import TRANSITIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rendered() -> dict[str, str]:
    script: dict[str, Any] = runpy.run_path(
        str(ROOT / "scripts" / "render_schemas.py"), run_name="render_schemas"
    )
    result: dict[str, str] = script["rendered"]()
    return result


NAMES = ("arrow.txt", "sql.sqlite.sql", "sql.postgresql.sql", "cli.txt", "errors.txt", "states.md")


@pytest.mark.parametrize("name", NAMES)
def test_the_rendered_contract_has_not_drifted_from_the_code(rendered: dict[str, str], name: str) -> None:
    stored = (ROOT / "schemas" / name).read_text(encoding="utf-8")
    assert rendered[name] == stored, (
        "a contract changed: if that is meant, run `python scripts/render_schemas.py`"
    )


def test_the_folder_holds_the_rendered_contracts_and_nothing_else(rendered: dict[str, str]) -> None:
    assert sorted(rendered) == sorted(NAMES)
    assert sorted(path.name for path in (ROOT / "schemas").iterdir()) == sorted(NAMES)


def test_the_sqlite_ddl_builds_a_database(rendered: dict[str, str]) -> None:
    engine = sa.create_engine("sqlite://")
    with engine.begin() as connection:
        for statement in rendered["sql.sqlite.sql"].split(";\n"):
            if statement.strip():
                connection.exec_driver_sql(statement)
        assert "assignments" in sa.inspect(connection).get_table_names()
    engine.dispose()


def test_error_kinds_and_exit_codes_name_one_error_each(rendered: dict[str, str]) -> None:
    rows = [line.split() for line in rendered["errors.txt"].splitlines() if not line.startswith("#")]
    kinds, names, codes = zip(*rows, strict=True)
    assert len(set(kinds)) == len(set(names)) == len(set(codes)) == len(rows)
    assert not {"130", "0"} & set(codes)


def test_every_transition_is_drawn(rendered: dict[str, str]) -> None:
    for verb, old, new in TRANSITIONS:
        assert f"{old.value} --> {new.value}: {verb}" in rendered["states.md"]


def test_no_variable_means_two_things(rendered: dict[str, str]) -> None:
    variables = [
        line.rsplit("[", 1)[1].rstrip("]")
        for line in rendered["cli.txt"].splitlines()
        if "[STRAWFLOW" in line
    ]
    again = {v for v in variables if variables.count(v) > 1}
    assert again == {"STRAWFLOW_JSON"}  # the one option that every command has
