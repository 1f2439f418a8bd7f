"""The supervisor of one host: starts the workers of a run as child processes and starts again whatever dies.

1. A child's death is told to the index at once: its session is lost, its units and roles are free before the lease ends.
2. Children die with the supervisor (the kernel sees to it), so a kill of everything leaves nothing running.
3. A worker that dies again and again without the run getting on ends the run, with the end of its log; errors that a
   restart cannot mend (configuration, corruption, starvation) end it at once.
4. There is one rollout worker for each engine that the run wants, as the index says now (flow.engines): added and removed
   while the run goes on. A worker whose engine is quarantined is no dead worker: it is started when its engine may be tried
   again. One engine that dies again and again does not end the run while another serves.
5. The lock file only tells a second supervisor that it is one too many; correctness rests on fences.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from strawflow.errors import (
    AlreadyExistsError,
    CommitUnknownError,
    ConfigError,
    CorruptCheckpointError,
    CorruptPackError,
    IncompatibleFormatError,
    InvalidInputError,
    StorageError,
    StrawflowError,
    WorkerFailedError,
)
from strawflow.flow import engines, eval_consumer, inputs, progress, rescue, tally
from strawflow.flow.run import Run, open_run
from strawflow.flow.session import WorkerSession
from strawflow_workers.drain import Drain
from strawflow_workers.wanted_engines import Due, WantedEngines

log = logging.getLogger(__name__)

FINAL_ERRORS: dict[int, type[StrawflowError]] = {
    error.exit_code: error
    for error in (
        ConfigError,
        CorruptCheckpointError,
        CorruptPackError,
        IncompatibleFormatError,
        InvalidInputError,
        WorkerFailedError,
    )
}
MAX_DEATHS_WITHOUT_PROGRESS = 5
MAX_INDEX_FAULTS = 12
BACKOFF_S = (0.0, 0.2, 1.0, 3.0, 8.0)
ENGINE_BACKOFF_S = (*BACKOFF_S, 15.0, 30.0, 60.0)
"""Of a rollout worker that goes on dying while others serve."""
DRAIN_TIMEOUT_S = 30.0
TICK_S = 0.1
UPKEEP_S = 1.0


@dataclass
class Child:
    """One kind of worker and its present process."""

    kind: str
    arguments: tuple[str, ...] = ()
    slot_id: int | None = None
    """Number of its engine."""
    process: subprocess.Popen[bytes] | None = None
    log_path: Path | None = None
    attempt: int = 0
    deaths_in_a_row: int = 0
    seen_step: int = -1
    """Last planned step when it last died: progress since then pardons."""
    start_at: float = 0.0
    is_done: bool = False
    ends_by: float | None = None
    """Its engine is gone: it is killed then."""


@dataclass
class Supervisor:
    """Runs a run's workers until it is finished, drained or beyond help."""

    run: Run
    drain: Drain
    on_tick: Callable[[], None] = lambda: None
    children: list[Child] = field(init=False)
    _engines: WantedEngines = field(init=False)
    _upkeep_at: float = 0.0

    def __post_init__(self) -> None:
        self.children = [Child("train"), Child("assemble")]
        self._engines = WantedEngines(self.run)

    def supervise(self) -> bool:
        """Run until everything is done; False when drained before the end.

        Raises:
            WorkerFailedError: a worker cannot be kept alive; the message quotes the end of its log. An error that no
                restart mends keeps its own class.
            StorageError: the index did not answer, again and again.
        """
        with self._counted():
            self._recover()
            try:
                return self._tend()
            finally:
                self._stop_children()
                try:
                    self._recover()
                except StorageError as error:  # why the run ends must be what is told; the next start does it
                    log.warning("what the workers held is taken back by the next start: %s", error)

    def _recover(self) -> None:
        """Take back what processes that are gone held. The session is short: one across the run could expire unused."""
        rescue.declare_dead_processes_lost(self.run)
        with WorkerSession(self.run, "recover") as session:
            rescue.recover_packs(session)

    def _tend(self) -> bool:
        if progress.rollout_is_done(self.run):  # nothing is left to do: start nobody
            return True
        faults_in_a_row = 0
        while not self.drain.requested:
            try:
                if self._tick():
                    return True
                faults_in_a_row = 0
            except (
                StorageError,
                CommitUnknownError,
            ) as error:  # a full disk or a restarting database may be mended
                faults_in_a_row += 1
                if faults_in_a_row > MAX_INDEX_FAULTS:
                    raise
                log.warning("trying again: %s", error)
                self.drain.wait(BACKOFF_S[min(faults_in_a_row, len(BACKOFF_S) - 1)])
            self.drain.wait(TICK_S)
        return False

    def _tick(self) -> bool:
        """One round over the children; True when all are done."""
        self._upkeep()
        for child in list(self.children):
            self._tend_child(child)
        self.on_tick()
        # A frozen engine is never done: it is told to end with the run.
        return all(child.is_done for child in self.children if child.kind != "engine")

    def _upkeep(self) -> None:
        """Take back what expired sessions held, and kill children that live on without their session (hung, stopped)."""
        if time.monotonic() - self._upkeep_at < UPKEEP_S:
            return
        self._upkeep_at = time.monotonic()
        rescue.rescue_expired(self.run)
        lost = rescue.pids_of_lost_sessions(self.run)
        for child in self.children:
            if child.process is not None and child.process.pid in lost:
                log.warning("the %s worker lost its session and is killed", child.kind)
                child.process.kill()
        self._follow_engines()

    def _follow_engines(self) -> None:
        """Have a worker for each engine that the run wants now, and none for one that is gone."""
        self._engines.look()
        known = {child.slot_id for child in self.children}
        self.children += [
            Child(self._engines.kind(slot_id), ("--slot", str(slot_id)), slot_id)
            for slot_id in self._engines.slots
            if slot_id not in known
        ]
        for child in self.children:
            if child.slot_id is None or child.process is None or child.slot_id in self._engines.slots:
                continue
            # The worker looks by itself; one that hangs is not waited for.
            child.ends_by = child.ends_by or time.monotonic() + DRAIN_TIMEOUT_S
            if time.monotonic() >= child.ends_by:
                child.process.kill()

    def _tend_child(self, child: Child) -> None:
        if child.is_done:
            return
        if child.process is None:
            self._start_when_due(child)
            return
        code = child.process.poll()
        if code is None:
            return
        child.process = None
        rescue.declare_dead_processes_lost(self.run)
        if code == 0 and self._is_done(child.kind):
            child.is_done = True
        elif child.slot_id is None or not self._engines.left(child.slot_id):
            self._after_death(child, code)  # also a worker that someone else told to drain

    def _start_when_due(self, child: Child) -> None:
        due = Due.START if child.slot_id is None else self._engines.due(child.slot_id)
        if due is Due.FORGET:
            self.children.remove(child)
        elif due is Due.WAIT:
            child.is_done = self._is_done(child.kind)  # the others may have finished meanwhile
        elif time.monotonic() >= child.start_at:
            self._start(child)

    def _is_done(self, kind: str) -> bool:
        now = progress.standing(self.run)
        total = self.run.config.total_steps
        match kind:
            case "assemble":
                return now.planned >= total
            case "train":
                return now.position >= total
            case _:
                return progress.rollout_is_done(self.run)

    def _start(self, child: Child) -> None:
        """Start a child's process.

        Raises:
            StorageError: its log cannot be made, or there is no room for another process.
        """
        try:
            self._open_log_and_start(child)
        except OSError as error:
            raise StorageError(f"the {child.kind} worker cannot be started: {error}") from error

    def _open_log_and_start(self, child: Child) -> None:
        child.attempt = self._next_attempt(child.kind)
        child.log_path = self.run.log_path(child.kind, child.attempt)
        child.log_path.parent.mkdir(exist_ok=True)
        with child.log_path.open("ab") as sink:
            child.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "strawflow_workers.entry",
                    child.kind,
                    str(self.run.root),
                    "--die-with-parent",
                    str(os.getpid()),
                    *child.arguments,
                ],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone, which drains its children in order
            )

    def _next_attempt(self, kind: str) -> int:
        logs = (self.run.root / "logs").glob(f"{kind}-*.log")
        return 1 + max((int(p.stem.rpartition("-")[2]) for p in logs), default=0)

    def _after_death(self, child: Child, code: int) -> None:
        if code in FINAL_ERRORS:
            raise FINAL_ERRORS[code](f"the {child.kind} worker ended the run: {_last_words(child.log_path)}")
        planned = progress.standing(self.run).planned
        child.deaths_in_a_row = 1 if planned > child.seen_step else child.deaths_in_a_row + 1
        child.seen_step = planned
        others_serve = self._engines.others_serve(child.slot_id)
        if child.deaths_in_a_row > MAX_DEATHS_WITHOUT_PROGRESS and not others_serve:
            raise WorkerFailedError(
                f"the {child.kind} worker died {child.deaths_in_a_row} times while the run got nowhere; "
                f"the end of {child.log_path}: {_last_words(child.log_path)}"
            )
        if child.slot_id is not None:
            engines.tell_error(self.run, child.slot_id, _last_words(child.log_path))
        tally.count_restart(self.run, kind=child.kind, exit_code=code)
        backoff_s = ENGINE_BACKOFF_S if others_serve else BACKOFF_S
        child.start_at = time.monotonic() + backoff_s[min(child.deaths_in_a_row, len(backoff_s)) - 1]
        log.warning("the %s worker ended with code %d; it is started again", child.kind, code)

    def _stop_children(self) -> None:
        running = [c.process for c in self.children if c.process is not None]
        if running and self.drain.requested:
            print(
                "stopping: the workers finish what they hold and are told to end ...",
                file=sys.stderr,
                flush=True,
            )
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        clock = tally.SecondsTally(self.run)
        ticked = self.on_tick

        def tick() -> None:
            clock.update()
            ticked()

        self.on_tick = tick
        try:
            yield
        finally:
            clock.update(force=True)


def _last_words(path: Path | None) -> str:
    """Return the last line of a log that says something, and where the rest lies."""
    if path is None or not path.exists():
        return "(no log)"
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1] if lines else '(empty)'} [{path}]"


@contextlib.contextmanager
def only_supervisor(run: Run) -> Iterator[None]:
    """Hold the run's lock file while the block runs.

    Raises:
        AlreadyExistsError: another supervisor runs this run; nothing was touched.
        StorageError: the lock file cannot be opened.
    """
    lock = FileLock(run.root / "supervisor.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise AlreadyExistsError(
            f"{run.root} is being run by another process; watch it with `strawflow status {run.root} --watch`"
        ) from None
    except OSError as error:  # a read-only mount, permissions
        raise StorageError(f"{run.root} cannot be run here: {error}") from error
    try:
        yield
    finally:
        lock.release()


def resume(root: Path, *, as_json: bool) -> int:
    """Go on with a run until it is finished; returns the process's exit code."""
    from strawflow_workers import report

    run = open_run(root)
    drain = Drain()
    drain.on_signals()
    with only_supervisor(run):
        if not progress.rollout_is_done(run) and not _run_to_the_end(run, drain, as_json=as_json):
            print(
                f"stopped; `{report.program()} resume {report.shortest(run)}` goes on from here",
                file=sys.stderr,
            )
            return 130
        eval_consumer.collect(run)  # whoever was to read the last evaluation may have been killed
        summary = report.kept_summary(run) or report.write_summary(run)
    if as_json:
        print(json.dumps(summary))
    else:
        report.print_summary(run, summary)
    return 0


def _run_to_the_end(run: Run, drain: Drain, *, as_json: bool) -> bool:
    from strawflow_workers import report
    from strawflow_workers.quickstart.prepare import prepare_if_quickstart
    from strawflow_workers.rollout import engine_plan
    from strawflow_workers.rollout.hooks import load as hooks

    started = time.monotonic()
    prepare_if_quickstart(run)
    inputs.require(run)
    hooks.require(run.config)
    engine_plan.require_startable(run.config)
    tally.count_resume(run, prepared_s=time.monotonic() - started)
    report.forget_summary(run)
    with report.progress_display(run, as_json=as_json) as display:
        return Supervisor(run, drain, on_tick=display.update).supervise()
