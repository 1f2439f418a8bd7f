"""The line of callers: what shares a window, who waits for whom and for how long, and what an interrupt leaves behind."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from strawflow.errors import CommitUnknownError, StorageError
from strawflow.flow import window as window_module
from strawflow.flow.submission import Answer, Submission
from strawflow.flow.window import MAX_UNITS, Line, Part

NUMBERS = count()


def part(*unit_ids: int, submission_id: str | None = None) -> Part:
    submission = Submission(submission_id, released=[(unit_id, 1) for unit_id in unit_ids])
    return Part(submission, submission_id or f"own-{next(NUMBERS)}", b"")


def answering(sizes: list[int], *, takes_s: float = 0.0) -> Callable[[Sequence[Part]], None]:
    def settle(window: Sequence[Part]) -> None:
        sizes.append(len(window))
        time.sleep(takes_s)
        for each in window:
            each.answer = Answer()

    return settle


def in_threads(num_threads: int, call: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(call, range(num_threads)))


def test_a_lone_caller_has_windows_of_its_own_and_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "_PATIENCE", 1000)
    monkeypatch.setattr(window_module, "_MAX_PATIENCE_S", 1000.0)
    sizes: list[int] = []
    line = Line(answering(sizes, takes_s=0.01))
    for _ in range(5):
        line.settle(part())
    assert sizes == [1] * 5


def test_who_comes_while_a_window_is_in_flight_shares_the_next() -> None:
    sizes: list[int] = []
    inside, go_on = threading.Event(), threading.Event()

    def settle(window: Sequence[Part]) -> None:
        inside.set()
        assert go_on.wait(20)
        answering(sizes)(window)

    line = Line(settle)
    with ThreadPoolExecutor(5) as pool:
        calls = [pool.submit(line.settle, part())]
        assert inside.wait(20)
        calls += [pool.submit(line.settle, part()) for _ in range(4)]
        while len(line._waiting) < 4:
            time.sleep(0.001)
        go_on.set()
        for call in calls:
            call.result(20)
    assert sizes == [1, 4]


def test_two_submissions_about_one_unit_or_with_one_id_never_share_a_window() -> None:
    line = Line(answering([]))
    line._waiting = [part(1), part(2), part(1), part(3, submission_id="a"), part(4, submission_id="a")]
    assert [p.unit_ids for p in line._take_window()] == [[1], [2], [3]]
    assert [p.unit_ids for p in line._take_window()] == [[1], [4]]


def test_a_window_holds_no_more_units_than_a_transaction_should_but_one_submission_may_hold_more() -> None:
    line = Line(answering([]))
    line._waiting = [part(*range(MAX_UNITS + 1)), part(10**6), part(10**6 + 1)]
    assert [len(p.unit_ids) for p in line._take_window()] == [MAX_UNITS + 1]
    assert line._is_gathered()  # by callers: two of the one that are expected
    assert [len(p.unit_ids) for p in line._take_window()] == [1, 1]


def test_threads_that_call_again_at_once_come_to_share_one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "_PATIENCE", 100)  # however slow the machine is
    monkeypatch.setattr(window_module, "_MAX_PATIENCE_S", 10.0)
    sizes: list[int] = []
    line = Line(answering(sizes, takes_s=0.001))
    warm = threading.Barrier(8, action=sizes.clear)

    def work(_: int) -> None:
        for lap in range(30):
            if lap == 10:
                warm.wait(60)
            line.settle(part())

    in_threads(8, work)
    assert sum(sizes) == 160
    assert len(sizes) < 27  # two halves that take turns would need 40


def test_a_wait_in_vain_is_tried_again_later_and_later() -> None:
    company = window_module._Company()
    company.were(2, took_s=60.0)
    waits = []
    for number in range(40):
        company._until = time.monotonic() + 60.0
        if company.is_worth_waiting():
            waits.append(number)
            company.learn(has_come=False)
    assert waits == [0, 2, 5, 10, 19, 36]
    company.learn(has_come=True)
    company._until = time.monotonic() + 60.0
    assert company.is_worth_waiting()


def test_patience_is_bounded_and_a_failure_leaves_none() -> None:
    company = window_module._Company()
    company.were(2, took_s=3600.0)
    assert 0 < company.patience_left_s() <= 0.05
    company.were(2, took_s=0.0)
    assert company.patience_left_s() <= 0
    assert not company.is_worth_waiting()


def test_what_settling_raises_is_the_answer_of_all_who_have_none() -> None:
    def settle(window: Sequence[Part]) -> None:
        window[0].answer = Answer()
        raise StorageError("the disk is gone")

    line = Line(settle)
    first, second = part(1), part(2)
    line._waiting = [second]
    line._company.size = 1
    line.settle(first)
    # The second came first, so it is at the head of the window.
    assert (second.answer, second.error) == (Answer(), None)
    assert isinstance(first.error, StorageError)
    line.settle(third := part(3))
    assert third.is_settled


def test_an_interrupted_leader_tells_the_others_that_they_do_not_know() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def settle(window: Sequence[Part]) -> None:
        inside.set()
        assert go_on.wait(20)
        if len(window) == 2:
            raise KeyboardInterrupt
        answering([])(window)

    line = Line(settle)
    parts = [part(n) for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(line.settle, parts[0])]
        assert inside.wait(20)
        for number in (1, 2):  # in this order
            calls.append(pool.submit(line.settle, parts[number]))
            while len(line._waiting) < number:
                time.sleep(0.001)
        go_on.set()
        calls[0].result(20)
        with pytest.raises(KeyboardInterrupt):
            calls[1].result(20)
        calls[2].result(20)
        assert isinstance(parts[2].error, CommitUnknownError)
        pool.submit(line.settle, parts[3]).result(20)
    assert parts[3].answer == Answer()


INTERRUPTED = """
import gc, random, signal, sys, threading, time
from strawflow.flow.submission import Answer, Submission
from strawflow.flow.window import Line, Part

gc.disable()  # an interrupt inside a callback of the collector would be told to nobody

def settle(window):
    for each in window:
        each.answer = Answer()

def part():
    return Part(Submission("any", released=[]), str(random.random()), b"")

def go_on():
    while not stop.is_set():
        each = part()
        line.settle(each)
        answered[0] += each.is_settled

def interrupt(*_):
    if armed[0]:
        raise KeyboardInterrupt

line, stop, answered, armed, num_interrupts = Line(settle), threading.Event(), [0], [False], 0
signal.signal(signal.SIGALRM, interrupt)
chance = random.Random(7)
other = threading.Thread(target=go_on, daemon=True)
other.start()
ends_at = time.monotonic() + 4.0
while time.monotonic() < ends_at:
    try:
        armed[0] = True
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 1e-3))
        while time.monotonic() < ends_at:
            line.settle(part())
        armed[0] = False
    except KeyboardInterrupt:
        armed[0] = False
        num_interrupts += 1
signal.signal(signal.SIGALRM, signal.SIG_IGN)
before = answered[0]
line.settle(last := part())
assert last.is_settled
ends_at = time.monotonic() + 20
while answered[0] < before + 10:
    assert time.monotonic() < ends_at, f"the other thread hangs after {num_interrupts} interrupts"
    time.sleep(0.01)
stop.set()
other.join(20)
assert not other.is_alive()
assert num_interrupts > 100, num_interrupts
"""


def test_interrupts_at_any_instant_leave_the_line_to_the_others() -> None:
    """A main thread is interrupted thousands of times while another goes on; at the end both still get answers."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
