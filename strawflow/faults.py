"""Named fault points: the instants at which tests end, break or stop a process.

1. Without STRAWFLOW_FAULT in the environment `at` does nothing but check the name.
2. STRAWFLOW_FAULT is `name[:nth][:action]`; nth counts this process's hits of that name from 1 (default 1), and the
   action is taken at exactly that hit: `kill` (SIGKILL to oneself, the default), `raise`, `hang`, or `stop` (SIGSTOP to
   oneself: on SIGCONT the process goes on from there, as a zombie does).
3. Every name is registered in POINTS; an unknown one raises, in a call and in the variable alike.
4. This module knows nothing of what the points stand between; architecture section 6 draws that.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from dataclasses import dataclass

from strawflow.errors import ConfigError

VARIABLE = "STRAWFLOW_FAULT"

ACTIONS = frozenset({"kill", "raise", "hang", "stop"})

POINTS: frozenset[str] = frozenset(
    {
        "pack.after_append",  # bytes written, not synced
        "pack.after_sync",  # bytes durable, no row names them
        "seal.before_footer",  # every extent durable, no footer
        "seal.after_footer",  # footer written, not synced, the index still says open
        "commit.before",  # about to commit the transaction that names bytes
        "commit.after",  # committed, the reply not given
        "checkpoint.after_files",  # model files durable, no checkpoint row
        "checkpoint.after_commit",  # checkpoint and consumer position committed
        "weights.after_files",  # weight files durable, no version row
        "weights.after_commit",  # version published, no engine has it
        "trainer.before_step",
        "trainer.after_step",
        "rollout.after_claim",
        "rollout.after_save",
        "rollout.before_complete",
        "assemble.before_plan",
        "eval.after_plan",  # an evaluation's batch planned, its results not recorded
        "eval.after_record",  # results recorded, the position not advanced
        "enqueue.before_commit",
        "admit.before_commit",  # units, cursors and states of an admission written, its transaction not committed
        "admit.after_commit",  # admitted, nobody told
        "journal.after_entry",  # a change's journal entry durable, its transaction not begun
        "rebuild.before_commit",  # the new index filled, its transaction not committed
        "sweep.before_unlink",  # [G] pack condemned, its file still there
        "sweep.after_unlink",  # [H] file gone, its row still there
        "compact.before_commit",  # copies durable, every extent still named where it was
        "compact.after_commit",  # extents moved, the old pack condemned
        "retain.before_files",  # the row says that the files are removed, they are still there
        "retain.before_commit",  # retired rows durable in a pack, still in the index too
    }
)


class InjectedFaultError(RuntimeError):
    """Raised by a fault point told to raise; deliberately outside the error tree, so that no handler expects it."""


@dataclass(frozen=True)
class FaultSpec:
    """One parsed STRAWFLOW_FAULT."""

    name: str
    nth: int = 1
    action: str = "kill"


def parse(text: str) -> FaultSpec:
    """Parse `name[:nth][:action]`.

    Raises:
        ConfigError: unknown name or action, nth below 1, or too many parts.
    """
    name, *rest = text.split(":")
    if name not in POINTS:
        raise ConfigError(f"{VARIABLE} names no fault point: {name!r}; known: {', '.join(sorted(POINTS))}")
    nth = int(rest.pop(0)) if rest and rest[0].isascii() and rest[0].isdigit() else 1
    action = rest.pop(0) if rest else "kill"
    if nth < 1 or action not in ACTIONS or rest:
        raise ConfigError(
            f"{VARIABLE} is {text!r}; write name[:nth][:action] with nth from 1 and action one of "
            f"{', '.join(sorted(ACTIONS))}"
        )
    return FaultSpec(name, nth, action)


# Hits are counted per text of the variable: a test that sets another fault starts from 1 again.
_hits: Counter[str] = Counter()
_lock = threading.Lock()


def reset() -> None:
    """Forget the hits counted so far in this process."""
    with _lock:
        _hits.clear()


def at(name: str) -> None:
    """Mark the fault point `name`; a no-op unless STRAWFLOW_FAULT asks for this name and this hit.

    Raises:
        ConfigError: `name` is not registered, or STRAWFLOW_FAULT cannot be parsed.
        InjectedFaultError: the action is `raise`.
    """
    if name not in POINTS:
        raise ConfigError(f"fault point {name!r} is not registered; add it to strawflow.faults.POINTS")
    text = os.environ.get(VARIABLE)
    if not text:
        return
    spec = parse(text)
    if spec.name != name:
        return
    with _lock:
        _hits[text] += 1
        due = _hits[text] == spec.nth
    if due:
        _act(spec)


def _act(spec: FaultSpec) -> None:
    if spec.action == "raise":
        raise InjectedFaultError(f"fault point {spec.name}, hit {spec.nth}")
    # Straight to the descriptor: nothing buffered survives a SIGKILL, and logs should show why the process ended.
    os.write(2, f"fault point {spec.name}, hit {spec.nth}: {spec.action}\n".encode())
    if spec.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if spec.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    threading.Event().wait()
