"""Ranks of a trainer as processes: one that dies ends all; one that is done is waited for."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest

from strawflow.config_parallel import ParallelSection, refuse_impossible_ranks
from strawflow.errors import ConfigError
from strawflow_workers.trainer.launch import is_launched

PROGRAM = """
import subprocess, sys, time
from strawflow_workers.trainer.launch import Others

def rank(code):
    return subprocess.Popen([sys.executable, "-S", "-c", code])

others = Others({{1: rank({first!r}), 2: rank({second!r})}}, store=None)
print(*(p.pid for p in others.processes.values()), flush=True)
with others.watched():
    {body}
print("ended well", flush=True)
"""
SLEEPS = "import time; time.sleep(60)"


def run(first: str, second: str, body: str) -> subprocess.CompletedProcess[str]:
    program = textwrap.dedent(PROGRAM).format(first=first, second=second, body=body)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )


def is_there(pid: str) -> bool:
    return subprocess.run(["kill", "-0", pid], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("death", "code", "told"),
    [("raise SystemExit(11)", 11, "exit code 11"), ("import os; os.kill(os.getpid(), 9)", 1, "signal 9")],
)
def test_a_rank_that_ends_ends_all_with_its_code_though_the_first_waits(
    death: str, code: int, told: str
) -> None:
    started = time.monotonic()
    ran = run(SLEEPS, death, "time.sleep(60)")
    assert ran.returncode == code
    assert f"rank 2 of the trainer ended with {told}: all its ranks end" in ran.stderr
    assert not any(is_there(pid) for pid in ran.stdout.split()[:2])
    assert time.monotonic() - started < 20


def test_an_error_of_the_first_ends_the_others() -> None:
    ran = run(SLEEPS, SLEEPS, "raise SystemExit(6)")
    assert ran.returncode == 6
    assert not any(is_there(pid) for pid in ran.stdout.split()[:2])


def test_ranks_that_were_told_to_end_are_waited_for() -> None:
    ran = run("pass", "import time; time.sleep(0.3)", "pass")
    assert ran.returncode == 0
    assert "ended well" in ran.stdout


def test_a_launcher_is_known_by_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not is_launched()
    monkeypatch.setenv("RANK", "0")
    assert not is_launched()  # a world of one needs nobody
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_launched()


def test_a_section_that_cannot_be_is_refused_by_name() -> None:
    for given, told in (
        ({"ranks": 3, "tensor": 2}, "no multiple"),
        ({"sequence": True}, "parallel.sequence needs"),
        ({"overlap_param_gather": True}, "parallel.overlap_param_gather needs"),
    ):
        with pytest.raises(ConfigError, match=told):
            refuse_impossible_ranks(ParallelSection.model_validate(given))
    assert ParallelSection(tensor=2, context=2).world_size == 4
    assert ParallelSection(ranks=4, tensor=2).world_size == 4
