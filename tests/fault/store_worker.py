"""Workers of the store as processes of their own: forked from one warm parent, told what to do by an order, watched by the
lines they write.

1. Run as a program this is the parent: it opens nothing itself, forks a child per order read from its input, and its
   children die with it. `--here ORDER` carries out one order in the program's own process, for a changed environment.
2. A child opens the run itself and works by the flow's verbs, as a rollout worker does; only what it stores is made up.
3. Each thing a worker does is one JSON line of its file, written in one piece: a kill loses only what was not done.
4. After an error that a retry may mend the same submission id is sent again. A claim has no such id: when its commit was
   not answered the worker gives its session up and starts another, which gives back whatever it was granted.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from threading import Event, Lock
from types import TracebackType
from typing import Any, TypeVar

import sqlalchemy as sa

from strawflow import faults, processes
from strawflow.errors import CommitUnknownError, StorageError
from strawflow.flow import claim as claiming
from strawflow.flow import complete as completing
from strawflow.flow import rescue
from strawflow.flow.check import check
from strawflow.flow.claim import Grant, PromptShelf
from strawflow.flow.run import Run, open_run
from strawflow.flow.session import WorkerSession
from strawflow.ids import new_id
from strawflow.index import packs, sessions, units, weights
from strawflow.index.engine import now
from strawflow.index.units import Unit
from strawflow.states import UnitState
from strawflow.testing.runs import SmallRun, made_up_result, small_run

REPOSITORY = Path(__file__).resolve().parents[2]

_PR_SET_PDEATHSIG = 1  # prctl(2)

T = TypeVar("T")


@dataclass(frozen=True)
class Order:
    """What one worker is to do; without more it claims and completes until the run has no open unit."""

    root: str
    lines: str = ""
    """The file its lines go to; the nest names one when this is empty."""
    limit: int = 1
    """Units a claim."""
    max_units: int | None = None
    """End after so many units were claimed."""
    unit_s: float = 0.0
    """Seconds of work on each unit; above 0 units are completed one by one, else together."""
    starts_when: str = ""
    """A path: begin once it exists."""
    holds_until: str = ""
    """A path: keep what was claimed until it exists, then complete."""
    rescues_while: str = ""
    """A path: as long as it exists, take back what expired sessions hold."""
    stops_holding: bool = False
    """SIGSTOP itself after the first claim."""
    stops_inside: bool = False
    """SIGSTOP itself inside a transaction that holds its session's row, after the first claim."""
    poison: tuple[int, ...] = ()
    """Units that kill whoever works on them."""
    fault: str = ""
    """Its STRAWFLOW_FAULT."""
    retry_s: float = 0.0
    """How long to go on retrying what failed in a way that a retry may mend."""
    resends: bool = False
    """Send each submission a second time and compare the receipts."""
    train_steps: int = 0
    """Be trainer and assembler instead, for so many steps."""


class _Worker:
    """Carries out one order."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._pause = Event()
        self._lines = os.open(order.lines, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._num_claimed = 0

    def tell(self, event: str, **facts: Any) -> None:
        line = json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n"
        os.write(self._lines, line.encode())

    def carry_out(self) -> None:
        """Do the whole order; whatever goes wrong is told, never printed over the test's output."""
        try:
            if self._order.train_steps:
                self._train()
            else:
                self._work()
        except Exception as error:  # the test decides what each failure means
            self.tell("failed", error=type(error).__name__, message=str(error))
            return
        self.tell("ended")

    def _train(self) -> None:
        trainer = SmallRun(open_run(Path(self._order.root)))
        self.tell("ready")
        trainer.advance(self._order.train_steps)
        trainer.close()

    def _work(self) -> None:
        self._run = self._retrying(lambda: open_run(Path(self._order.root)))
        self._begin_session()
        self.tell(
            "ready",
            pid=os.getpid(),
            session_id=self._session.session_id,
            wall=time.time(),
            uptime=time.clock_gettime(time.CLOCK_BOOTTIME),
            monotonic=time.monotonic(),
        )
        self._await(self._order.starts_when)
        while self._order.max_units is None or self._num_claimed < self._order.max_units:
            self._rescue()
            grants = self._claim()
            if grants:
                self._hold(grants)
                self._complete(grants)
            elif self._order.max_units is None and not open_units(self._run):
                break
            else:
                self._pause.wait(0.02)
        self._retrying(self._session.end)
        self._run.close()

    def _begin_session(self) -> None:
        self._session = self._retrying(lambda: WorkerSession(self._run, "rollout"))
        self._shelf = PromptShelf(self._session)
        self._version = self._retrying(lambda: serving(self._run))

    def _claim(self) -> list[Grant]:
        started = time.perf_counter()
        try:
            grants = self._retrying(
                lambda: claiming.claim(
                    self._session, self._shelf, limit=self._order.limit, serving_version_id=self._version
                ),
                unless=CommitUnknownError,
            )
        except CommitUnknownError:
            given_up = self._session.session_id
            back = self._retrying(lambda: rescue.declare_lost(self._run, given_up, reason="unanswered claim"))
            self.tell("gave_up", session_id=given_up, num_units=back)
            self._begin_session()
            return []
        if grants:
            self._num_claimed += len(grants)
            self.tell(
                "claimed",
                units=[(g.unit_id, g.fence, g.unit.attempts) for g in grants],
                took_s=time.perf_counter() - started,
            )
        return grants

    def _hold(self, grants: Sequence[Grant]) -> None:
        if self._order.stops_holding:
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._order.stops_inside:
            with self._run.index.begin() as connection:
                sessions.require_live(connection, self._session.session_id)
                os.kill(os.getpid(), signal.SIGSTOP)
        if any(grant.unit_id in self._order.poison for grant in grants):
            os.kill(os.getpid(), signal.SIGKILL)
        self._await(self._order.holds_until, meanwhile=self._rescue)

    def _complete(self, grants: Sequence[Grant]) -> None:
        if not self._order.unit_s:
            self._submit(grants)
            return
        for grant in grants:
            self._pause.wait(self._order.unit_s)
            self._submit([grant])

    def _submit(self, grants: Sequence[Grant]) -> None:
        results = [made_up_result(grant, self._version) for grant in grants]
        submission_id = new_id("submission")

        def submit() -> completing.Receipt:
            return completing.complete(self._session, results, submission_id=submission_id)

        started = time.perf_counter()
        receipt = self._retrying(submit)
        took_s = time.perf_counter() - started
        self.tell("completed", accepted=receipt.accepted, lost=receipt.lost, took_s=took_s)
        if self._order.resends:
            self.tell("resent", is_equal=self._retrying(submit) == receipt)

    def _rescue(self) -> None:
        if self._order.rescues_while and Path(self._order.rescues_while).exists():
            num_units = self._retrying(lambda: rescue.rescue_expired(self._run))
            if num_units:
                self.tell("rescued", num_units=num_units)

    def _await(self, path: str, *, meanwhile: Callable[[], None] | None = None) -> None:
        while path and not Path(path).exists():
            self._pause.wait(0.02)
            if meanwhile is not None:
                meanwhile()

    def _retrying(self, call: Callable[[], T], *, unless: type[Exception] | tuple[()] = ()) -> T:
        deadline = time.monotonic() + self._order.retry_s
        while True:
            try:
                return call()
            except unless:
                raise
            except (StorageError, CommitUnknownError) as error:
                self.tell("error", error=type(error).__name__, message=str(error))
                if time.monotonic() >= deadline:
                    raise
                self._pause.wait(0.05)


class StoreWorker:
    """A worker as the test sees it: a process and its lines."""

    def __init__(self, pid: int, lines: Path) -> None:
        self.pid, self._path = pid, lines
        self._started_at = processes.started_at(pid)

    def lines(self, event: str | None = None) -> list[dict[str, Any]]:
        """Return what it told so far, of one event or all; a line cut short by a kill does not count."""
        if not self._path.exists():
            return []
        whole = self._path.read_text(encoding="utf-8").split("\n")[:-1]
        told = [json.loads(line) for line in whole]
        return [line for line in told if event in (None, line["event"])]

    def await_line(self, event: str, *, number: int = 1, seconds: float = 60) -> dict[str, Any]:
        """Wait for the n-th line of an event; one that comes no more is an AssertionError with what was told."""
        deadline = time.monotonic() + seconds
        while True:
            is_gone = not self.is_alive()
            found = self.lines(event)
            if len(found) >= number:
                return found[number - 1]
            assert not is_gone, f"it ended before its {event} number {number}: {self.lines()[-5:]}"
            assert time.monotonic() < deadline, f"no {event} in {seconds} s: {self.lines()[-5:]}"
            time.sleep(0.01)

    def await_end(self, *, seconds: float = 60) -> None:
        """Wait until its process is gone."""
        deadline = time.monotonic() + seconds
        while self.is_alive():
            assert time.monotonic() < deadline, f"it still runs after {seconds} s: {self.lines()[-5:]}"
            time.sleep(0.01)

    def await_stop(self, *, seconds: float = 60) -> None:
        """Wait until SIGSTOP has taken hold of it."""
        deadline = time.monotonic() + seconds
        while _state_of(self.pid) != "T":
            assert self.is_alive(), f"it ended instead of stopping: {self.lines()[-5:]}"
            assert time.monotonic() < deadline, f"it was not stopped within {seconds} s: {self.lines()[-5:]}"
            time.sleep(0.01)

    def itself(self) -> StoreWorker:
        """Return the worker under the program that started it, once it is ready."""
        return StoreWorker(self.await_line("ready")["pid"], self._path)

    def is_alive(self) -> bool:
        return self._started_at is not None and processes.started_at(self.pid) == self._started_at

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL it and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self.await_end()


class Nest:
    """The warm parent, and the workers it forked; at the end none of them is left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count()
        self._lock = Lock()
        self._alone: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Nest:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fault.store_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        started: list[subprocess.Popen[Any]] = [self._process, *self._alone]
        for process in started:
            process.kill()  # the kernel kills what they started
            process.communicate()

    def start(self, order: Order) -> StoreWorker:
        """Fork a worker from the warm parent."""
        order = self._with_lines(order)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(asdict(order)) + "\n")
            self._process.stdin.flush()
            pid = int(self._process.stdout.readline())
        return StoreWorker(pid, Path(order.lines))

    def start_alone(self, order: Order, *, prefix: Sequence[str], environment: dict[str, str]) -> StoreWorker:
        """Start a worker as a program of its own, under another program and environment; see `StoreWorker.itself`."""
        order = self._with_lines(order)
        tied = ["setpriv", "--pdeathsig", "KILL"]
        program = [sys.executable, "-m", "tests.fault.store_worker", "--here", json.dumps(asdict(order))]
        started = subprocess.Popen(
            [*tied, *prefix, *program], cwd=REPOSITORY, env={**os.environ, **environment}
        )
        self._alone.append(started)
        return StoreWorker(started.pid, Path(order.lines))

    def _with_lines(self, order: Order) -> Order:
        return replace(order, lines=order.lines or str(self._folder / f"worker-{next(self._numbers)}.jsonl"))


def wide_run(folder: Path, num_units: int, settings: Mapping[str, str] | None = None) -> SmallRun:
    """Create a small run with so many units of one member each admitted, all to be had now."""
    one_step = {
        "rollout.prompts_per_step": str(num_units),
        "rollout.samples_per_prompt": "1",
        "rollout.max_staleness": "0",
        "trainer.steps": "1",
    }
    return small_run(folder, num_prompts=min(num_units, 512), settings={**one_step, **(settings or {})})


def state_of(run: Run, unit_id: int) -> Unit:
    with run.index.read() as connection:
        return units.find(connection, unit_id)


def num_named_rows(run: Run) -> int:
    """Return how many trajectory rows the index names."""
    with run.index.read() as connection:
        places = [
            packs.extents_of_pack(connection, p.pack_id)
            for p in packs.listed(connection)
            if p.kind == "trajectory"
        ]
    return sum(extent.num_rows for extents in places for extent in extents)


def index_time(run: Run) -> float:
    """Return the time that decides expiry, in seconds."""
    with run.index.read() as connection:
        return float(connection.execute(sa.select(now(connection))).scalar_one())


def expires_in_s(run: Run, session_id: str) -> float:
    """Return how long a session's lease still lasts by index time; negative once it ran out."""
    with run.index.read() as connection:
        return next(s.expires_in_s for s in sessions.listed(connection) if s.session_id == session_id)


def assert_all_done_once(run: Run, workers: Sequence[StoreWorker], *, num_units: int) -> None:
    """Every unit of a wide run is completed and in one receipt, no fence was granted twice, every stored byte is sound, and
    the index names one trajectory row a unit: what a lost reply or a failure made the workers write again is named by none.
    """
    given = granted(workers)
    assert len(set(given)) == len(given), "a fence was granted twice"
    assert sorted(accepted(workers)) == list(range(1, num_units + 1))
    with run.index.read() as connection:
        counts = units.count_by_state(connection, run.branch)
    assert counts == {("train", "completed"): num_units}
    assert check(run).findings == []
    assert num_named_rows(run) == num_units


def open_units(run: Run) -> int:
    """Return how many units are ready or leased."""
    with run.index.read() as connection:
        counts = units.count_by_state(connection, run.branch)
    return sum(n for (_, state), n in counts.items() if state in (UnitState.READY, UnitState.LEASED))


def serving(run: Run) -> str:
    """Return the id of the newest published weights."""
    with run.index.read() as connection:
        newest = weights.newest(connection, run.branch)
    assert newest is not None
    return newest.version_id


def granted(workers: Sequence[StoreWorker]) -> list[tuple[int, int]]:
    """Return (unit, fence) of every grant that any of the workers told of."""
    return [(unit, fence) for w in workers for line in w.lines("claimed") for unit, fence, _ in line["units"]]


def accepted(workers: Sequence[StoreWorker]) -> list[int]:
    """Return every unit of every receipt that any of the workers was given."""
    return [unit for w in workers for line in w.lines("completed") for unit in line["accepted"]]


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _carry_out(text: str) -> None:
    _die_with_parent()
    read = json.loads(text)
    order = Order(**{**read, "poison": tuple(read["poison"])})
    if order.fault:
        os.environ[faults.VARIABLE] = order.fault
    _Worker(order).carry_out()


def _fork(text: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        _carry_out(text)
    finally:
        os._exit(0)  # nothing of the parent's is to be closed or flushed here


def main() -> None:
    if sys.argv[1:2] == ["--here"]:
        _carry_out(sys.argv[2])
        return
    _die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps: a dead worker is gone at once
    for text in sys.stdin:
        print(_fork(text), flush=True)


if __name__ == "__main__":
    main()
