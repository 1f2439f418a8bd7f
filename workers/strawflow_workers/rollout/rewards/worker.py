"""A reward process: `python -m strawflow_workers.rollout.rewards.worker PARENT_PID`, spoken to over its standard streams.

In:  {"spec": {...}, "limit_s": seconds} once, then {"score": [[id, function, texts, prompt, label, metadata, rewards], ...]}
     and {"skip": [id, ...]}.
Out: {"ready": {name: takes a group}, "warnings": [...]} or {"refused": text}, then [id, "scored", [number or failure, ...]],
     [id, "failed", text] or [id, "skipped", null]; before them [id, "loading", null] and [id, "loaded", warnings] where a row's
     own reward is loaded first.

1. Requests are answered one by one in the order they came, each answer written before the next request is begun, so
   the first unanswered request is the one that runs: the pool knows whom to blame.
2. The process dies with its parent, even in a loop that hears nothing. Time limits are the pool's matter.
3. What a verifier prints goes to standard error; the wire is out of its reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import select
import sys
from collections import deque
from typing import Any

from strawflow.errors import ConfigError
from strawflow.parentage import die_with_parent
from strawflow.reward_names import parse_reward
from strawflow_workers.rollout.rewards.calls import Call, Value, checked_values, finite_number
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
    start = wire.next_message()
    verifiers = _Verifiers(RewardSpec(**start["spec"]), limit_s=start["limit_s"])
    try:
        verifiers.load_configured()
    except ConfigError as error:
        wire.send({"refused": error.message})
        return
    wire.send({"ready": verifiers.groups, "warnings": verifiers.warnings})
    _serve(wire, verifiers)


class _Verifiers:
    """The verifiers of this process: those of the configuration at once, those that rows name when they come."""

    def __init__(self, spec: RewardSpec, *, limit_s: float) -> None:
        self._spec = spec
        self._limit_s = limit_s
        self._loaded: dict[str, Verifier] = {}

    def load_configured(self) -> None:
        """Load the run's rewards.

        Raises:
            ConfigError: one of them cannot be loaded.
        """
        for name in (self._spec.name, *self._spec.row_rewards, self._spec.post_process):
            if name and not parse_reward(name).over_http:
                self.load(name)

    def load(self, name: str) -> Verifier:
        found = load_verifier(
            name,
            settings=self._spec.settings,
            limit_s=self._limit_s,
            post_processes=name == self._spec.post_process,
        )
        self._loaded[name] = found
        return found

    def get(self, name: str) -> Verifier | None:
        return self._loaded.get(name)

    @property
    def groups(self) -> dict[str, bool]:
        return {name: verifier.takes_group for name, verifier in self._loaded.items()}

    @property
    def warnings(self) -> list[str]:
        return [text for verifier in self._loaded.values() for text in verifier.warnings]


def _serve(wire: _Wire, verifiers: _Verifiers) -> None:
    waiting: deque[list[Any]] = deque()
    unwanted: set[int] = set()
    while True:
        for message in wire.messages(block=not waiting):
            waiting.extend(message.get("score", ()))
            unwanted.update(message.get("skip", ()))
        if not waiting:  # the message only took requests back
            continue
        request_id, *row = waiting.popleft()
        if request_id in unwanted:
            unwanted.discard(request_id)
            wire.send([request_id, "skipped", None])
            continue
        call = Call(*row)
        verifier = verifiers.get(call.function)
        if verifier is None:
            wire.send([request_id, "loading", None])  # which the request's own time limit does not count
            try:
                verifier = verifiers.load(call.function)
            except ConfigError as error:
                wire.send([request_id, "failed", error.message[:_FAILURE_CHARS]])
                continue
            wire.send([request_id, "loaded", verifier.warnings])
        wire.send([request_id, *_answer(verifier, call)])


def _answer(verifier: Verifier, call: Call) -> tuple[str, list[Value] | str]:
    try:
        metadata = None if call.metadata is None else json.loads(call.metadata)
        row = {"prompt": call.prompt, "label": call.label, "metadata": metadata}
        if call.rewards is not None:
            found = _called(verifier, list(call.rewards), response_texts=list(call.texts), **row)
        elif verifier.takes_group:
            found = _called(verifier, list(call.texts), **row)
        else:
            return "scored", [finite_number(_called(verifier, call.texts[0], **row))]
        return "scored", checked_values(found, num_texts=len(call.texts))
    except Exception as error:  # whatever user code raises is the outcome of this request
        return "failed", f"the reward raised {type(error).__name__}: {error}"[:_FAILURE_CHARS]


def _called(verifier: Verifier, *given: Any, **row: Any) -> Any:
    found = verifier.function(*given, **row)
    if inspect.iscoroutine(found):  # an `async def`
        return asyncio.run(found)
    return found


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
