"""A reward process: `python -m strawflow_workers.rollout.rewards.worker PARENT_PID`, spoken to over its standard streams.

In:  {"spec": {...}} once, then {"score": [[id, response_text, prompt, label, metadata], ...]} and {"skip": [id, ...]}.
Out: {"ready": true} or {"refused": text}, then [id, "scored", number], [id, "failed", text] or [id, "skipped", null].

1. Requests are answered one by one in the order they came, each answer written before the next request is begun, so
   the first unanswered request is the one that runs: the pool knows whom to blame.
2. The process dies with its parent, even in a loop that hears nothing. Time limits are the pool's matter.
3. What a verifier prints goes to standard error; the wire is out of its reach.
"""

from __future__ import annotations

import contextlib
import json
import math
import numbers
import os
import select
import sys
from collections import deque
from typing import Any

from strawflow.errors import ConfigError
from strawflow.parentage import die_with_parent
from strawflow_workers.rollout.rewards.frames import FrameBuffer, encode_frame
from strawflow_workers.rollout.rewards.spec import RewardSpec
from strawflow_workers.rollout.rewards.verifiers import Verifier, load_verifier

_FAILURE_CHARS = 2000


def main() -> None:
    """Serve until the pool closes the stream."""
    die_with_parent(int(sys.argv[1]))
    # When memory runs out the kernel should take the verifier, not the engine or the trainer: a wish, which a
    # container with a read-only /proc cannot grant.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("500")
    wire = _Wire()
    spec = RewardSpec(**wire.next_message()["spec"])
    try:
        verifier = load_verifier(spec)
    except ConfigError as error:
        wire.send({"refused": error.message})
        return
    wire.send({"ready": True})
    _serve(wire, verifier)


def _serve(wire: _Wire, verifier: Verifier) -> None:
    waiting: deque[list[Any]] = deque()
    unwanted: set[int] = set()
    while True:
        for message in wire.messages(block=not waiting):
            waiting.extend(message.get("score", ()))
            unwanted.update(message.get("skip", ()))
        if not waiting:  # the message only took requests back
            continue
        request_id, *request = waiting.popleft()
        if request_id in unwanted:
            unwanted.discard(request_id)
            wire.send([request_id, "skipped", None])
        else:
            wire.send([request_id, *_score(verifier, *request)])


def _score(
    verifier: Verifier, response_text: str, prompt: str, label: str | None, metadata: str | None
) -> tuple[str, float | str]:
    try:
        parsed = None if metadata is None else json.loads(metadata)
        value = verifier(response_text, prompt=prompt, label=label, metadata=parsed)
        return "scored", _finite_number(value)
    except Exception as error:  # whatever user code raises is the outcome of this request
        return "failed", f"the reward raised {type(error).__name__}: {error}"[:_FAILURE_CHARS]


def _finite_number(value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"a reward must be a number, this one is {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a reward must be a finite number, this one is {number}")
    return number


class _Wire:
    """Both directions of the wire, on descriptors that a verifier does not know."""

    def __init__(self) -> None:
        self._in, self._out = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        os.close(null)
        self._frames = FrameBuffer()
        self._poll = select.poll()
        self._poll.register(self._in, select.POLLIN | select.POLLHUP)

    def messages(self, *, block: bool) -> list[Any]:
        """Return the messages that have come, after waiting for the first when `block`; exit at the end of stream."""
        messages: list[Any] = []
        while self._poll.poll(None if block and not messages else 0):
            piece = os.read(self._in, 1 << 16)
            if not piece:
                sys.exit(0)
            self._frames.push(piece)
            messages.extend(self._frames.pop_all())
        return messages

    def next_message(self) -> Any:
        (message,) = self.messages(block=True)
        return message

    def send(self, value: Any) -> None:
        view = memoryview(encode_frame(value))
        while view:
            view = view[os.write(self._out, view) :]


if __name__ == "__main__":
    main()
