"""The same promises with real SGLang: its engine, its worker and everything at once are killed in the middle, or paused."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.fault.kill_run import (
    SupervisedRun,
    campaign,
    check_finished,
    make_run,
    num_planned,
    processes_of,
    serving_engines,
    wait_for_new_engine,
    wait_until,
)

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    ("parts", "steps"),
    [
        (["everything"], 10),
        pytest.param(["engine", "everything", "rollout"], 24, marks=pytest.mark.long),
    ],
    ids=["one", "three"],
)
def test_kills_with_real_sglang_lose_and_repeat_nothing(tmp_path: Path, parts: list[str], steps: int) -> None:
    root = tmp_path / "run"
    make_run(root, engine="sglang", steps=steps, seed=5).close()
    supervised = SupervisedRun(root)
    digests = campaign(supervised, parts, seed=5, gap_s=(1.0, 2.0), seconds=400, once_serving=True)
    assert sum(supervised.num_kills.values()) == len(parts)
    supervised.finish(seconds=240)
    check_finished(root, digests)


def signal_engine(root: Path, number: signal.Signals) -> list[psutil.Process]:
    """Send a signal to every process of the run's only server: launcher, scheduler, detokenizer."""
    (launcher,) = (
        process
        for process in (psutil.Process(pid) for pid, kind in processes_of(root).items() if kind == "engine")
        if process.parent() is None or "sglang.launch_server" not in process.parent().cmdline()
    )
    tree = [launcher, *launcher.children(recursive=True)]
    for process in tree:
        process.send_signal(number)
    return tree


@pytest.mark.long
def test_real_sglang_goes_on_after_a_pause_and_is_replaced_when_it_hangs(tmp_path: Path) -> None:
    root = tmp_path / "run"
    make_run(root, engine="sglang", steps=40, seed=6, health_timeout_s=10.0, load_timeout_s=20.0).close()
    supervised = SupervisedRun(root)
    supervised.start()
    first = wait_for_new_engine(root, set())
    wait_until(lambda: num_planned(root) >= 4, seconds=120, what="the fourth step")
    signal_engine(root, signal.SIGSTOP)
    time.sleep(4.0)  # health checks fail meanwhile
    signal_engine(root, signal.SIGCONT)
    paused_at = num_planned(root)
    wait_until(lambda: num_planned(root) >= paused_at + 4, seconds=60, what="steps after the pause")
    assert serving_engines(root) == first, "an engine that was only paused was replaced"
    hung = signal_engine(root, signal.SIGSTOP)
    wait_for_new_engine(root, first)
    assert not any(process.is_running() for process in hung), "processes of the hung engine are left"
    supervised.finish(seconds=240)
    check_finished(root, {})
