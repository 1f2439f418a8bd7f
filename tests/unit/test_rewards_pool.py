"""The reward pool with real processes and real misbehaviour: loops, crashes, exceptions, slow ones, dead parents."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from strawflow.errors import ConfigError, WorkerFailedError
from strawflow_workers.rollout.rewards.pool import RewardPool
from strawflow_workers.rollout.rewards.process import RewardProcess
from strawflow_workers.rollout.rewards.spec import RewardOutcome, RewardRequest, RewardSpec

VERIFIERS = '''
import os, signal, subprocess, sys, time

def act(response_text, *, prompt, label, metadata):
    """Do what the response says."""
    verb, _, rest = response_text.partition(" ")
    if verb == "score":
        return float(rest)
    if verb == "loop":
        while True:
            pass
    if verb == "deaf":
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        while True:
            try:
                time.sleep(1000)
            except BaseException:
                pass
    if verb == "sleep":
        time.sleep(float(rest))
        return 1.0
    if verb == "raise":
        raise ValueError(rest)
    if verb == "alarm":
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        signal.pause()
        return 0.25
    if verb == "return":
        return eval(rest)
    if verb == "exit":
        os._exit(int(rest))
    if verb == "sysexit":
        sys.exit(int(rest))
    if verb == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(100)
    if verb == "print":
        print("x" * 100_000)
        os.write(1, b"y" * 100)
        assert sys.stdin.read() == ""
        return 0.5
    if verb == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        open(rest, "w").write(str(child.pid))
        time.sleep(1000)
    if verb == "fields":
        return float((prompt, label, metadata) == ("p\\u2028", "l", {"a": [1.5, None]}))
    raise AssertionError(response_text)
'''

ACT = RewardSpec("misbehave:act")


@pytest.fixture(autouse=True)
def _verifiers_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "misbehave.py").write_text(VERIFIERS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def act(verb: str) -> RewardRequest:
    return RewardRequest(verb, prompt="p\u2028", label="l", metadata='{"a":[1.5,null]}')


def with_pool(
    body: Callable[[RewardPool], Coroutine[Any, Any, Any]], *, processes: int = 1, timeout_s: float = 20.0
) -> Any:
    """Run `body` with a started pool; afterwards no process that it started may be left."""
    # What other tests run beside this one stays: servers, a resource tracker, and what a database starts when it likes.
    before = set(psutil.Process().children(recursive=True))

    async def run() -> Any:
        async with RewardPool(ACT, num_processes=processes, timeout_s=timeout_s) as pool:
            return await body(pool)

    result = asyncio.run(run())
    left = [
        p for p in psutil.Process().children(recursive=True) if p not in before and p.name() != "postgres"
    ]
    assert left == []
    return result


def outcomes(*verbs: str, processes: int = 1, timeout_s: float = 20.0) -> list[RewardOutcome]:
    async def body(pool: RewardPool) -> list[RewardOutcome]:
        return await asyncio.gather(*(pool.score(act(verb)) for verb in verbs))

    result: list[RewardOutcome] = with_pool(body, processes=processes, timeout_s=timeout_s)
    return result


def until(condition: Callable[[], bool], *, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_each_request_gets_its_own_score_in_any_number() -> None:
    scored = outcomes(*(f"score {number}" for number in range(500)), processes=3)
    assert [outcome.score for outcome in scored] == list(range(500))


def test_a_verifier_sees_prompt_label_and_parsed_metadata() -> None:
    assert outcomes("fields")[0].score == 1.0


def test_a_reward_that_always_raises_fails_every_sample_and_scores_none_zero() -> None:
    for outcome in outcomes(*["raise cannot parse"] * 20):
        assert outcome == RewardOutcome(None, None, "the reward raised ValueError: cannot parse")


@pytest.mark.parametrize(
    "value, why",
    [
        ("None", "must be a number, this one is NoneType"),
        ("'1.0'", "must be a number, this one is str"),
        ("float('nan')", "must be a finite number, this one is nan"),
        ("float('inf')", "must be a finite number, this one is inf"),
        ("1j", "must be a number, this one is complex"),
        ("[1.0]", "must be a number, this one is list"),
    ],
)
def test_what_is_no_finite_number_is_a_failure(value: str, why: str) -> None:
    (outcome,) = outcomes(f"return {value}")
    assert outcome.score is None
    assert outcome.reward is None
    assert why in (outcome.failure or "")


def test_numbers_of_other_types_are_scores() -> None:
    values = ["True", "3", "__import__('numpy').float32(0.5)", "__import__('fractions').Fraction(1, 4)"]
    assert [outcome.score for outcome in outcomes(*(f"return {value}" for value in values))] == [
        1.0,
        3.0,
        0.5,
        0.25,
    ]


def test_a_verifier_may_use_signals_and_print_what_it_likes() -> None:
    assert [outcome.score for outcome in outcomes("alarm", "print", "score 1")] == [0.25, 0.5, 1.0]


@pytest.mark.parametrize(
    "verb, how",
    [
        ("exit 3", "ended with exit code 3"),
        ("exit 0", "ended with exit code 0"),
        ("sysexit 7", "ended with exit code 7"),
        ("segv", "was killed by SIGSEGV"),
    ],
)
def test_a_process_that_dies_fails_the_request_it_ran_and_no_other(verb: str, how: str) -> None:
    verbs = ["score 1"] * 50 + [verb] + ["score 2"] * 50
    results = outcomes(*verbs)
    assert results[50].failure == f"the reward's process {how}"
    assert [outcome.score for outcome in results] == [1.0] * 50 + [None] + [2.0] * 50


def test_hung_rewards_are_killed_marked_timed_out_and_do_not_slow_the_pool() -> None:
    """One in a hundred loops for ever, in two ways, against a pool of four."""
    verbs = [
        ("loop" if number % 200 == 50 else "deaf") if number % 100 == 50 else f"score {number}"
        for number in range(1000)
    ]

    async def body(pool: RewardPool) -> tuple[list[RewardOutcome], float, set[int]]:
        first = set(pool.pids)
        began = time.monotonic()
        results = await asyncio.gather(*(pool.score(act(verb)) for verb in verbs))
        return results, time.monotonic() - began, first

    results, seconds, first = with_pool(body, processes=4, timeout_s=1.0)
    hung = [number for number, verb in enumerate(verbs) if not verb.startswith("score")]
    assert [number for number, outcome in enumerate(results) if outcome.failure] == hung
    assert {results[number].failure for number in hung} == {"timed out after 1 s"}
    assert all(results[number].score == number for number in range(1000) if number not in hung)
    assert all(gone(pid) for pid in first)
    assert seconds < 15


def test_the_process_of_a_timed_out_request_is_gone_when_its_failure_is_told() -> None:
    async def body(pool: RewardPool) -> None:
        (before,) = pool.pids
        assert (await pool.score(act("deaf"))).failure == "timed out after 0.5 s"
        assert gone(before)
        assert (await pool.score(act("score 1"))).score == 1.0
        assert before not in pool.pids

    with_pool(body, timeout_s=0.5)


def test_what_a_hung_verifier_started_is_killed_with_it(tmp_path: Path) -> None:
    (outcome,) = outcomes(f"child {tmp_path / 'pid'}", timeout_s=1.0)
    assert outcome.failure == "timed out after 1 s"
    until(lambda: gone(int((tmp_path / "pid").read_text())))


@pytest.mark.parametrize("processes", [1, 2])
def test_ninety_nine_fast_rewards_do_not_wait_for_one_of_a_minute(processes: int) -> None:
    async def body(pool: RewardPool) -> float:
        for _ in range(100):  # so that requests share batches
            await pool.score(act("score 0"))
        began = time.monotonic()
        verbs = ["score 1"] * 30 + ["sleep 60"] + ["score 1"] * 69
        asked = [asyncio.create_task(pool.score(act(verb))) for verb in verbs]
        slow = asked.pop(30)
        fast = await asyncio.gather(*asked)
        assert [outcome.score for outcome in fast] == [1.0] * 99
        assert not slow.done()
        slow.cancel()
        return time.monotonic() - began

    assert with_pool(body, processes=processes, timeout_s=90.0) < 8


def test_a_slow_reward_within_the_limit_gets_its_score_and_the_spare_process_is_retired() -> None:
    async def body(pool: RewardPool) -> None:
        await pool.score(act("score 0"))
        slow = asyncio.create_task(pool.score(act("sleep 3")))
        fast = asyncio.create_task(pool.score(act("score 1")))
        assert (await fast).score == 1.0
        assert not slow.done()
        assert len(pool.pids) == 2
        assert (await slow).score == 1.0
        while len(pool.pids) > 1:
            await asyncio.sleep(0.05)

    with_pool(body)


def test_a_late_event_loop_does_not_time_a_good_reward_out() -> None:
    async def body(pool: RewardPool) -> RewardOutcome:
        asked = asyncio.create_task(pool.score(act("sleep 0.2")))
        while not pool._backlog.num_stuck and not asked.done():
            await asyncio.sleep(0.01)
        time.sleep(1.5)  # the loop hears nothing until after the limit
        return await asked

    assert with_pool(body, timeout_s=0.35).score == 1.0


def test_cheap_rewards_pass_at_two_thousand_a_second_in_one_process() -> None:
    async def body(pool: RewardPool) -> float:
        await asyncio.gather(*(pool.score(act("score 1")) for _ in range(200)))
        began = time.process_time(), time.monotonic()
        await asyncio.gather(*(pool.score(act("score 1")) for _ in range(4000)))
        return min(time.process_time() - began[0], time.monotonic() - began[1])

    # The pool's own processor time, so that a busy machine does not decide.
    assert with_pool(body) < 4000 / 2000


def test_a_reward_that_cannot_be_loaded_is_told_at_the_start() -> None:
    async def run(name: str) -> None:
        async with RewardPool(RewardSpec(name), num_processes=2, timeout_s=1.0):
            pass

    with pytest.raises(ConfigError, match="'misbehave:absent' cannot be loaded"):
        asyncio.run(run("misbehave:absent"))


def test_a_verifier_module_that_kills_its_process_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os; os._exit(9)")

    async def run() -> None:
        async with RewardPool(RewardSpec("deadly:score"), num_processes=1, timeout_s=1.0):
            pass

    with pytest.raises(WorkerFailedError, match="ended with exit code 9 while loading"):
        asyncio.run(run())


def test_closing_tells_those_who_wait_and_refuses_those_who_come() -> None:
    async def body(pool: RewardPool) -> None:
        waiting = [asyncio.create_task(pool.score(act("loop"))) for _ in range(3)]
        await asyncio.sleep(0)
        await pool.close()
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, WorkerFailedError)
        with pytest.raises(WorkerFailedError, match="was closed"):
            await pool.score(act("score 1"))

    with_pool(body)


def test_scoring_before_the_start_is_refused() -> None:
    async def run() -> None:
        await RewardPool(ACT, num_processes=1, timeout_s=1.0).score(act("score 1"))

    with pytest.raises(WorkerFailedError, match="not started"):
        asyncio.run(run())


PARENT = """
import asyncio, sys
from strawflow_workers.rollout.rewards.pool import RewardPool
from strawflow_workers.rollout.rewards.process import RewardProcess
from strawflow_workers.rollout.rewards.spec import RewardRequest, RewardSpec

async def main():
    async with RewardPool(RewardSpec("misbehave:act"), num_processes=2, timeout_s=600) as pool:
        asked = [asyncio.create_task(pool.score(RewardRequest("deaf", "p"))) for _ in range(2)]
        while len(pool.pids) < 2 or pool._backlog.num_stuck < 2:
            await asyncio.sleep(0.02)
        print(*pool.pids, flush=True)
        await asyncio.gather(*asked)

asyncio.run(main())
"""


def test_no_reward_process_outlives_a_parent_killed_with_sigkill() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert not any(gone(pid) for pid in pids)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.communicate()
    until(lambda: all(gone(pid) for pid in pids))


def test_processes_that_find_themselves_one_too_many_at_the_same_time_do_not_all_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("strawflow_workers.rollout.rewards.pool._IDLE_SECONDS", 1.0)
    kill = RewardProcess.kill

    async def kill_slowly(process: RewardProcess) -> None:
        await asyncio.sleep(2.0)  # as on a busy host: the other's patience ends meanwhile
        await kill(process)

    monkeypatch.setattr(RewardProcess, "kill", kill_slowly)

    async def body(pool: RewardPool) -> RewardOutcome:
        pool._add_lane()  # as a stuck process calls for
        while len(pool.pids) < 2:
            await asyncio.sleep(0.02)
        await pool.score(act("score 0.5"))  # wakes both, so that their patience ends together
        await asyncio.sleep(4.0)
        return await pool.score(act("score 1.0"))

    assert with_pool(body).score == 1.0
