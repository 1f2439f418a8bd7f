"""Fault points: every call names a registered point, every required point is placed, every action acts."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from strawflow import faults
from strawflow.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]


# Points not placed in the code yet; a point leaves this set in the change that places it.
def placed_points() -> Iterator[tuple[str, str | None]]:
    """Give (where, name) of every `faults.at(...)` in the code; name is None unless it is a literal."""
    for folder in ("strawflow", "workers"):
        for place in sorted((REPOSITORY / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(place.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "faults.at":
                    name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
                    where = f"{place.relative_to(REPOSITORY)}:{node.lineno}"
                    yield where, name if isinstance(name, str) else None


def run_at(spec: str, *, hits: int = 1) -> subprocess.Popen[bytes]:
    program = f"from strawflow import faults\nfor n in range({hits}):\n    print(n, flush=True)\n    faults.at('pack.after_sync')\nprint('through', flush=True)\n"
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, faults.VARIABLE: spec},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_every_placed_point_is_a_registered_literal() -> None:
    wrong = {where: name for where, name in placed_points() if name not in faults.POINTS}
    assert wrong == {}


def test_every_required_point_is_placed() -> None:
    placed = {name for _, name in placed_points()}
    assert faults.POINTS - placed == set()


def test_without_the_variable_nothing_happens_but_an_unknown_name_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    for name in faults.POINTS:
        faults.at(name)
    with pytest.raises(ConfigError, match=r"'pack\.after_lunch' is not registered"):
        faults.at("pack.after_lunch")


@pytest.mark.parametrize(
    "text, spec",
    [
        ("pack.after_sync", faults.FaultSpec("pack.after_sync", 1, "kill")),
        ("pack.after_sync:3", faults.FaultSpec("pack.after_sync", 3, "kill")),
        ("pack.after_sync:raise", faults.FaultSpec("pack.after_sync", 1, "raise")),
        ("pack.after_sync:12:hang", faults.FaultSpec("pack.after_sync", 12, "hang")),
    ],
)
def test_a_spec_names_point_hit_and_action(text: str, spec: faults.FaultSpec) -> None:
    assert faults.parse(text) == spec


@pytest.mark.parametrize(
    "text",
    [
        "straw",
        "pack.after_sync:",
        "pack.after_sync:0",
        "pack.after_sync:-1",
        "pack.after_sync:explode",
        "pack.after_sync:1:kill:2",
        "pack.after_sync:raise:2",
        "pack.after_sync:²",
    ],
)
def test_a_spec_that_cannot_be_meant_is_refused_at_any_point(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(faults.VARIABLE, text)
    with pytest.raises(ConfigError, match=faults.VARIABLE):
        faults.at("commit.before")


def test_raise_acts_at_the_nth_hit_of_its_own_point_only(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.reset()
    monkeypatch.setenv(faults.VARIABLE, "commit.after:3:raise")
    for _ in range(2):
        faults.at("commit.after")
        faults.at("commit.before")
    with pytest.raises(faults.InjectedFaultError, match=r"commit\.after, hit 3"):
        faults.at("commit.after")
    faults.at("commit.after")
    faults.reset()
    faults.at("commit.after")


def test_kill_ends_the_process_at_the_nth_hit_and_says_why() -> None:
    with run_at("pack.after_sync:2", hits=5) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert out.split() == [b"0", b"1"]
    assert b"fault point pack.after_sync, hit 2: kill" in err


def test_hang_stops_the_process_there_until_it_is_killed() -> None:
    with run_at("pack.after_sync:hang") as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert b"hit 1: hang" in process.stderr.readline()
        assert process.poll() is None
        process.kill()
        assert process.stdout.read() == b"0\n"
