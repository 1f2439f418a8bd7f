"""`strawflow hook check`: the contract test of one hook, on made-up samples and an engine of its own; no run, no model.

1. It loads the hook as a worker does, calls it, and looks at what comes back with the very code that would store it.
2. The engine answers with tokens of a tokenizer of bytes (258 ids, the last but one ends a sequence) under one weight version;
   over HTTP it speaks SGLang's /generate, for hooks that ask it themselves.
3. Each requirement is a line: what is asked, whether it holds, and what to do where it does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from aiohttp import web

from strawflow.config import RunConfig
from strawflow.errors import ConfigError, InvalidInputError
from strawflow.flow.trajectory import Member, UnitResult, to_record_batch, with_every_token
from strawflow_workers.rollout.hooks import slime
from strawflow_workers.rollout.hooks.filtered import checked_verdict
from strawflow_workers.rollout.hooks.generated import checked_rollout, member_of
from strawflow_workers.rollout.hooks.interfaces import (
    CompletedGroup,
    Generated,
    GroupMember,
    Interrupted,
    Sample,
    Segment,
)
from strawflow_workers.rollout.hooks.load import KINDS, Function, import_function, load, positional_names
from strawflow_workers.rollout.hooks.turns import TurnSession

NUM_MEMBERS = 4
TIMEOUT_S = 30.0
BREAK_OFF_S = 2.0
BLOCKED_S = 1.0
"""Longer than this a hook may not keep the event loop from others."""
VERSION = "v000000-check"
EOS = 256
_RESPONSE = "The answer is 4."


@dataclass(frozen=True)
class Finding:
    """One requirement."""

    requirement: str
    holds: bool
    told: str = ""


class ByteTokenizer:
    """One token a byte."""

    eos_id = EOS

    def encode_text(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < EOS).decode(errors="replace")


class CheckEngine:
    """An engine that always gives the same answer, cut at max_new_tokens; its next answer may be that it is interrupted."""

    def __init__(self) -> None:
        self.url = ""
        self.eos_id = EOS
        self.served: Sequence[str] = (VERSION,)
        self.interrupts = False
        self.breaks_at: int | None = None
        """Interrupts once its session has saved so many turns."""
        self.begin(_sample(0))

    def begin(self, sample: Sample, saved: Member | None = None) -> None:
        """Be used for a sample, from what its session saved or afresh."""
        self._sample, self._saved = sample, saved
        self.opened: TurnSession | None = None
        """The hook's session, if it asked for one."""

    def session(self) -> TurnSession:
        if self.opened is None:
            self.opened = TurnSession(self, self._sample, run_id="check", saved=self._saved)
        return self.opened

    def require_going_on(self) -> None:
        turn = 0 if self.opened is None else self.opened.turn
        if self.interrupts or (self.breaks_at is not None and turn >= self.breaks_at):
            raise Interrupted

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: Mapping[str, Any] | None = None
    ) -> Generated:
        await asyncio.sleep(0)
        self.require_going_on()
        tokens, is_cut = self._answer({**self._sample.sampling, **(sampling or {})})
        return Generated(
            tokens=tokens,
            logprobs=[-0.5] * len(tokens),
            versions=[VERSION] * len(tokens),
            finish_reason="length" if is_cut else "stop",
        )

    def encode(self, text: str) -> list[int]:
        return ByteTokenizer().encode_text(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return ByteTokenizer().decode(tokens)

    def _answer(self, sampling: Mapping[str, Any]) -> tuple[list[int], bool]:
        whole = [*ByteTokenizer().encode_text(_RESPONSE), EOS]
        limit = int(sampling.get("max_new_tokens", len(whole)))
        return whole[:limit], limit < len(whole)

    async def answer_http(self, request: web.Request) -> web.Response:
        """SGLang's /generate."""
        body = await request.json()
        tokens, is_cut = self._answer(body.get("sampling_params") or {})
        reason = "abort" if self.interrupts else "length" if is_cut else "stop"
        meta = {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "weight_version": VERSION,
            "prompt_tokens": len(body.get("input_ids") or ()),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
        }
        text = ByteTokenizer().decode(tokens)
        return web.json_response({"text": text, "output_ids": tokens, "meta_info": meta})


def check(path: str, kind: str | None = None) -> list[Finding]:
    """Return what holds of a hook and what does not, up to the first that the others rest on.

    Raises:
        ConfigError: no such kind, or the kind of the function cannot be told by its parameters.
    """
    try:
        kind = kind or guessed_kind(path)
        hook = load(kind, path, slime.arguments(RunConfig()))
    except ConfigError as error:
        return [Finding("can be imported and called with the right parameters", False, error.message)]
    findings = [Finding("can be imported and called with the right parameters", True, f"as {kind}")]
    match kind:
        case "generate":
            findings += asyncio.run(_check_generate(hook))
        case "sample_filter":
            findings += _check_filter(lambda sample: hook(sample, _rollout()), [_sample(n) for n in (0, 1)])
        case "log":
            findings += _check_log(hook)
        case _:
            findings += _check_filter(hook, _groups())
    return findings


def guessed_kind(path: str) -> str:
    """Return the kind whose parameters a function has by name.

    Raises:
        ConfigError: it cannot be imported, or it is none or several.
    """
    if any(path == name for name, _ in KINDS["group_filter"].built_in):
        return "group_filter"
    function = import_function(path, where="hook")
    names = positional_names(function)
    fits = [
        name
        for name, kind in KINDS.items()
        if names == kind.parameters
        or tuple(n for n in names if n not in kind.slime_keywords) == (kind.slime_parameters or None)
    ]
    if len(fits) != 1:
        raise ConfigError(
            f"hook {path!r} has parameters ({', '.join(names)}), which tell no kind; give --kind, one of {', '.join(KINDS)}"
        )
    return fits[0]


async def _check_generate(hook: Function) -> list[Finding]:
    engine = CheckEngine()
    app = web.Application()
    app.router.add_post("/generate", engine.answer_http)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    findings: list[Finding] = []
    try:
        members = await _members(hook, engine, findings)
        if len(members) == NUM_MEMBERS:
            _stored(members, findings)
            await _bears_a_cut(hook, engine, findings)
            await _breaks_off(hook, engine, findings)
            await _goes_on(hook, engine, members[0], findings)
    finally:
        await runner.cleanup()
    return findings


async def _members(hook: Function, engine: CheckEngine, findings: list[Finding]) -> list[Member]:
    members: list[Member] = []
    slowest = 0.0
    for number in range(NUM_MEMBERS):
        made, blocked_s = await _timed(hook, _sample(number), engine)
        slowest = max(slowest, blocked_s)
        if isinstance(made, BaseException):
            findings.append(Finding("returns a rollout", False, f"member {number}: {_told(made)}"))
            return []
        members.append(made)
    num_segments = [len(m.segments) for m in members]
    findings.append(Finding("returns a rollout", True, f"segments of {NUM_MEMBERS} members: {num_segments}"))
    findings.append(
        Finding(
            "leaves the event loop to others",
            slowest < BLOCKED_S,
            ""
            if slowest < BLOCKED_S
            else f"it was kept for {slowest:.1f} s; await, or use asyncio.to_thread",
        )
    )
    return members


async def _timed(
    hook: Function,
    sample: Sample,
    engine: CheckEngine,
    *,
    timeout_s: float = TIMEOUT_S,
    saved: Member | None = None,
) -> tuple[Member | BaseException, float]:
    """Call the hook; returns its member or what it raised, and the longest time it kept the event loop."""
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - before)

    engine.begin(sample, saved)
    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    try:
        called: Awaitable[object] = hook(sample, engine)
        found = await asyncio.wait_for(called, timeout_s)
        await asyncio.sleep(0.02)
        tokenizer: Any = ByteTokenizer()
        return member_of(
            sample.member, checked_rollout(found), tokenizer=tokenizer, sampled_by=engine.served
        ), longest
    except (Exception, Interrupted) as error:  # what user code raises is what is found
        return error, longest
    finally:
        watching.cancel()


def _stored(members: list[Member], findings: list[Finding]) -> None:
    failed = [m.failure for m in members if m.status == "failed"]
    profile = RunConfig().profiles()["train"]
    result = UnitResult(1, 1, 1, list(_sample(0).prompt_tokens), members, profile, "check")
    told = ""
    try:
        result.check()
        rows = with_every_token(to_record_batch([result])).to_pylist()
        trained = sum(sum(row["loss_mask"]) for row in rows)
        told = f"{len(rows)} rows, {trained} trained tokens"
    except InvalidInputError as error:
        findings.append(
            Finding("can be stored: parallel arrays, one mask item a token", False, error.message)
        )
        return
    findings.append(Finding("can be stored: parallel arrays, one mask item a token", True, told))
    why = f"failed: {failed[0]}" if failed else "no token has loss_mask 1"
    findings.append(
        Finding("has tokens to train", trained > 0 and not failed, why if not trained or failed else "")
    )


async def _bears_a_cut(hook: Function, engine: CheckEngine, findings: list[Finding]) -> None:
    short = replace(_sample(0), sampling={**_sample(0).sampling, "max_new_tokens": 3})
    made, _ = await _timed(hook, short, engine)
    holds = isinstance(made, Member)
    told = f"told as {made.status}" if isinstance(made, Member) else _told(made)
    findings.append(Finding("bears answers of 3 tokens", holds, told))


async def _breaks_off(hook: Function, engine: CheckEngine, findings: list[Finding]) -> None:
    """Whatever it makes of an interruption the worker sees; only going on for ever keeps a drain waiting."""
    engine.interrupts = True
    made, _ = await _timed(hook, _sample(0), engine, timeout_s=BREAK_OFF_S)
    holds = not isinstance(made, TimeoutError)
    told = "" if holds else f"it went on for {BREAK_OFF_S:g} s; let Interrupted pass, do not ask again"
    findings.append(Finding("ends when its group is broken off", holds, told))


async def _goes_on(hook: Function, engine: CheckEngine, whole: Member, findings: list[Finding]) -> None:
    """Break the hook off at every turn that its session saves; each time it must make the rest as if never broken."""
    engine.interrupts = False
    engine.begin(_sample(0))
    await _timed(hook, _sample(0), engine)
    num_turns = 0 if engine.opened is None else engine.opened.turn
    if not num_turns:
        return
    requirement = "goes on at each saved turn as if never broken off"
    for turn in range(1, num_turns + 1):
        engine.breaks_at = turn
        made, _ = await _timed(hook, _sample(0), engine)
        saved = None if engine.opened is None else engine.opened.saved
        engine.breaks_at = None
        if isinstance(made, Interrupted) and saved is not None:
            made, _ = await _timed(hook, _sample(0), engine, saved=saved)
        if isinstance(made, BaseException):
            findings.append(Finding(requirement, False, f"after turn {turn}: {_told(made)}"))
            return
        if _parts(made) != _parts(whole):
            told = f"broken off after turn {turn} it made another rollout; begin from session.turn and session.state"
            findings.append(Finding(requirement, False, told))
            return
    findings.append(Finding(requirement, True, f"{num_turns} turns"))


def _parts(member: Member) -> list[tuple[list[int], list[int] | None]]:
    """Return what a rollout is made of: each segment's tokens and mask."""
    return [
        (list(s.response_tokens), None if s.mask_array is None else s.mask_array.tolist())
        for s in member.segments
    ]


def _check_filter(judge: Callable[[Any], object], given: Sequence[Any]) -> list[Finding]:
    findings: list[Finding] = []
    verdicts = []
    for value in given:
        try:
            first, second = checked_verdict(judge(value)), checked_verdict(judge(value))
        except Exception as error:  # what user code raises is what is found
            return [*findings, Finding("returns a verdict", False, _told(error))]
        verdicts.append((first, second))
    told = ", ".join("keep" if v.keep else f"drop ({v.reason})" for v, _ in verdicts)
    findings.append(Finding("returns a verdict", True, told))
    same = all(first == second for first, second in verdicts)
    findings.append(
        Finding("says the same of the same", same, "" if same else "it is asked again after a restart")
    )
    return findings


def _check_log(hook: Function) -> list[Finding]:
    fate = {"outcome": "trained", "reason": None, "advantage": 0.5, "staleness": 0}
    rows = [
        {**row, **fate, "unit_id": g.unit_id, "status": m.status, "reward": m.reward, "failure": m.failure}
        for g in _groups()
        for m in g.members
        for row in m.segments
    ]
    numbers = {"num_sequences": len(rows), "num_tokens": 500, "max_staleness": 0, "num_masked_tokens": 0}
    metrics = {"objective": "grpo", "mean_reward": 0.5, **numbers, "drops": {"zero_deviation": 2}}
    try:
        hook(1, rows, metrics)
    except Exception as error:  # what user code raises is what is found
        return [Finding("takes a batch", False, _told(error))]
    return [Finding("takes a batch", True, f"{len(rows)} rows")]


def _sample(member: int) -> Sample:
    prompt = "What is 2 + 2?\n"
    return Sample(
        unit_id=1,
        member=member,
        prompt=prompt,
        prompt_format="text",
        prompt_tokens=ByteTokenizer().encode_text(prompt),
        sampling={"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 64, "n": 1},
        purpose="train",
        label="4",
        metadata={},
    )


def _rollout() -> Any:
    tokens = ByteTokenizer().encode_text(_RESPONSE)
    segment = Segment(
        tokens=tokens, logprobs=[-0.5] * len(tokens), versions=[VERSION] * len(tokens), text=_RESPONSE
    )
    return checked_rollout(segment)


def _groups() -> list[CompletedGroup]:
    """Groups of equal and of different rewards, one with a failed member and one with a member of two segments."""
    return [
        _group([1.0] * NUM_MEMBERS),
        _group([0.0] * NUM_MEMBERS),
        _group([0.0, 1.0, 0.0, 1.0]),
        _group([0.0, 1.0, None, 1.0]),
        _group([0.0, 1.0, 0.5, 1.0], num_segments=2),
    ]


def _group(rewards: Sequence[float | None], *, num_segments: int = 1) -> CompletedGroup:
    tokens = ByteTokenizer().encode_text(_RESPONSE)
    row = {
        "prompt_tokens": list(_sample(0).prompt_tokens),
        "response_tokens": tokens,
        "response_text": _RESPONSE,
        "loss_mask": [1] * len(tokens),
        "logprobs": [-0.5] * len(tokens),
        "token_versions": [0] * len(tokens),
        "weight_versions": [VERSION],
        "finish_reason": "stop",
    }
    return CompletedGroup(
        unit_id=1,
        members=[
            GroupMember(
                member=n,
                status="failed" if reward is None else "finished",
                segments=[{**row, "member": n, "segment": at} for at in range(num_segments)],
                reward=reward,
                score=reward,
                failure="reward: ValueError" if reward is None else None,
            )
            for n, reward in enumerate(rewards)
        ],
    )


def _told(error: object) -> str:
    return f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else repr(error)


def check_command(arguments: argparse.Namespace) -> int:
    """Print what `check` finds; 0 where all of it holds."""
    findings = check(arguments.path, arguments.kind)
    is_sound = all(f.holds for f in findings)
    if arguments.json:
        print(
            json.dumps({"path": arguments.path, "holds": is_sound, "findings": [asdict(f) for f in findings]})
        )
    else:
        for f in findings:
            print(f"{'ok  ' if f.holds else 'FAIL'}  {f.requirement}{': ' + f.told if f.told else ''}")
    return 0 if is_sound else ConfigError.exit_code
