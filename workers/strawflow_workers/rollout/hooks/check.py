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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any

from aiohttp import web

from strawflow.config import RunConfig
from strawflow.errors import ConfigError, InvalidInputError
from strawflow.flow.trajectory import Member, UnitResult, to_record_batch, with_every_token
from strawflow_workers.rollout.hooks import check_algorithm, check_prompts, slime
from strawflow_workers.rollout.hooks.check_prompts import Finding
from strawflow_workers.rollout.hooks.converted import GroupShaper, Shaped
from strawflow_workers.rollout.hooks.filtered import checked_verdict
from strawflow_workers.rollout.hooks.generated import checked_rollout, member_of
from strawflow_workers.rollout.hooks.interfaces import Interrupted, Sample
from strawflow_workers.rollout.hooks.load import KINDS, Function, import_function, load, positional_names
from strawflow_workers.rollout.hooks.made_up import (
    NUM_MEMBERS,
    ByteTokenizer,
    CheckEngine,
    CheckEngines,
    groups,
    rollout,
    sample,
    stored_rows,
)
from strawflow_workers.rollout.hooks.whole import checked_nesting

TIMEOUT_S = 30.0
BREAK_OFF_S = 2.0
BLOCKED_S = 1.0
"""Longer than this a hook may not keep the event loop from others."""


def check(path: str, kind: str | None = None, *, sets: Sequence[str] = ("easy", "hard")) -> list[Finding]:
    """Return what holds of a hook and what does not, up to the first that the others rest on; a curriculum is told of `sets`.

    Raises:
        ConfigError: no such kind, or the kind of the function cannot be told by its parameters.
    """
    others = ""
    try:
        if kind is None:
            kind = guessed_kind(path)
            others = _others_alike(kind)
        hook = load(kind, path, slime.arguments(RunConfig()))
    except ConfigError as error:
        return [Finding("can be imported and called with the right parameters", False, error.message)]
    findings = [Finding("can be imported and called with the right parameters", True, f"as {kind}{others}")]
    match kind:
        case "generate":
            findings += asyncio.run(_check_generate(hook))
        case "generate_groups":
            findings += asyncio.run(_check_claim(hook))
        case "sample_filter":
            findings += _check_filter(lambda sample: hook(sample, rollout()), [sample(n) for n in (0, 1)])
        case "post_process":
            findings += _check_shaping(GroupShaper(hook, None))
        case "convert":
            findings += _check_shaping(GroupShaper(None, hook))
        case "log":
            findings += _check_log(hook)
        case "curriculum":
            findings += check_prompts.check_curriculum(hook, sets)
        case "data_source":
            # Loaded anew each time, as by a worker that goes on where another ended.
            findings += check_prompts.check_data_source(
                hook, lambda: load(kind, path, slime.arguments(RunConfig()))
            )
        case "advantage":
            findings += check_algorithm.check_advantage(hook)
        case "reducer":
            findings += check_algorithm.check_reducer(hook)
        case "loss":
            findings += check_algorithm.check_loss(hook)
        case _:
            findings += _check_filter(hook, groups())
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
        if kind.is_told_by_parameters
        and (
            names == kind.parameters
            or tuple(n for n in names if n not in kind.slime_keywords) == (kind.slime_parameters or None)
        )
    ]
    if len(fits) != 1:
        raise ConfigError(
            f"hook {path!r} has parameters ({', '.join(names)}), which tell no kind; give --kind, one of {', '.join(KINDS)} "
            "(a reward is tried with `strawflow reward check`)"
        )
    return fits[0]


def _others_alike(kind: str) -> str:
    """Return in words which other kinds have the parameters by which this one was told; nothing where none has."""
    parameters = KINDS[kind].parameters
    alike = [name for name, other in KINDS.items() if name != kind and other.parameters == parameters]
    return f" (if it is another, give --kind {' or '.join(alike)})" if alike else ""


async def _check_generate(hook: Function) -> list[Finding]:
    findings: list[Finding] = []
    async with _over_http(CheckEngine()) as engine:
        members = await _members(hook, engine, findings)
        if len(members) == NUM_MEMBERS:
            _stored(members, findings)
            await _bears_a_cut(hook, engine, findings)
            await _breaks_off(hook, engine, findings)
            await _goes_on(hook, engine, members[0], findings)
    return findings


@asynccontextmanager
async def _over_http(engine: CheckEngine) -> AsyncIterator[CheckEngine]:
    """Give an engine an address where it speaks SGLang's /generate."""
    app = web.Application()
    app.router.add_post("/generate", engine.answer_http)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()


async def _check_claim(hook: Function) -> list[Finding]:
    """A hook of whole claims: three groups, the last a single member as in a second try."""
    whole = [[replace(sample(n), unit_id=unit) for n in range(NUM_MEMBERS)] for unit in (1, 2)]
    asked = [*whole, [replace(sample(2), unit_id=3)]]
    findings: list[Finding] = []
    requirement = "returns a rollout for each sample, nested alike"
    async with _over_http(CheckEngine()) as engine:
        try:
            made = await asyncio.wait_for(hook(asked, CheckEngines(engine)), TIMEOUT_S)
            rollouts = checked_nesting(made, asked)
            tokenizer: Any = ByteTokenizer()
            members = [
                [
                    member_of(s.member, checked_rollout(r), tokenizer=tokenizer, sampled_by=engine.served)
                    for s, r in zip(*pair, strict=True)
                ]
                for pair in zip(asked, rollouts, strict=True)
            ]
        except (Exception, Interrupted) as error:  # what user code raises is what is found
            return [Finding(requirement, False, _told(error))]
        findings.append(Finding(requirement, True, f"{[len(group) for group in members]} members"))
        _stored(members[0], findings)
        engine.interrupts = True
        try:
            await asyncio.wait_for(hook(asked, CheckEngines(engine)), BREAK_OFF_S)
            holds = True
        except (Exception, Interrupted) as error:  # whatever it makes of it, but for going on
            holds = not isinstance(error, TimeoutError)
        told = "" if holds else f"it went on for {BREAK_OFF_S:g} s; let Interrupted pass, do not ask again"
        findings.append(Finding("ends when its groups are broken off", holds, told))
    return findings


async def _members(hook: Function, engine: CheckEngine, findings: list[Finding]) -> list[Member]:
    members: list[Member] = []
    slowest = 0.0
    for number in range(NUM_MEMBERS):
        made, blocked_s = await _timed(hook, sample(number), engine)
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
    result = UnitResult(1, 1, 1, list(sample(0).prompt_tokens), members, profile, "check")
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
    short = replace(sample(0), sampling={**sample(0).sampling, "max_new_tokens": 3})
    made, _ = await _timed(hook, short, engine)
    holds = isinstance(made, Member)
    told = f"told as {made.status}" if isinstance(made, Member) else _told(made)
    findings.append(Finding("bears answers of 3 tokens", holds, told))


async def _breaks_off(hook: Function, engine: CheckEngine, findings: list[Finding]) -> None:
    """Whatever it makes of an interruption the worker sees; only going on for ever keeps a drain waiting."""
    engine.interrupts = True
    made, _ = await _timed(hook, sample(0), engine, timeout_s=BREAK_OFF_S)
    holds = not isinstance(made, TimeoutError)
    told = "" if holds else f"it went on for {BREAK_OFF_S:g} s; let Interrupted pass, do not ask again"
    findings.append(Finding("ends when its group is broken off", holds, told))


async def _goes_on(hook: Function, engine: CheckEngine, whole: Member, findings: list[Finding]) -> None:
    """Break the hook off at every turn that its session saves; each time it must make the rest as if never broken."""
    engine.interrupts = False
    engine.begin(sample(0))
    await _timed(hook, sample(0), engine)
    num_turns = 0 if engine.opened is None else engine.opened.turn
    if not num_turns:
        return
    requirement = "goes on at each saved turn as if never broken off"
    for turn in range(1, num_turns + 1):
        engine.breaks_at = turn
        made, _ = await _timed(hook, sample(0), engine)
        saved = None if engine.opened is None else engine.opened.saved
        engine.breaks_at = None
        if isinstance(made, Interrupted) and saved is not None:
            made, _ = await _timed(hook, sample(0), engine, saved=saved)
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


def _check_shaping(shaper: GroupShaper) -> list[Finding]:
    findings: list[Finding] = []
    told = []
    is_same = True
    for group in groups():
        try:
            first, second = (shaper.shape(group.unit_id, stored_rows(group)) for _ in range(2))
        except ConfigError as error:
            return [Finding("returns what can be trained", False, error.message)]
        is_same = is_same and _shown(first) == _shown(second)
        num_sound = sum(row["status"] != "failed" for row in first.rows)
        told.append(f"{num_sound - len(first.left_out)} of {num_sound} rows")
    findings.append(Finding("returns what can be trained", True, ", ".join(told)))
    findings.append(
        Finding("says the same of the same", is_same, "" if is_same else "it is asked again after a restart")
    )
    return findings


def _shown(shaped: Shaped) -> str:
    own = {key: advantages.tolist() for key, advantages in shaped.row_advantages.items()}
    return repr((shaped.rows, sorted(shaped.left_out), shaped.member_advantages, own))


def _check_log(hook: Function) -> list[Finding]:
    fate = {"outcome": "trained", "reason": None, "advantage": 0.5, "staleness": 0}
    rows = [{**row, **fate} for group in groups() for row in stored_rows(group)]
    numbers = {"num_sequences": len(rows), "num_tokens": 500, "max_staleness": 0, "num_masked_tokens": 0}
    metrics = {"objective": "grpo", "mean_reward": 0.5, **numbers, "drops": {"zero_deviation": 2}}
    try:
        hook(1, rows, metrics)
    except Exception as error:  # what user code raises is what is found
        return [Finding("takes a batch", False, _told(error))]
    return [Finding("takes a batch", True, f"{len(rows)} rows")]


def _told(error: object) -> str:
    return f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else repr(error)


def check_command(arguments: argparse.Namespace) -> int:
    """Print what `check` finds; 0 where all of it holds."""
    findings = check(arguments.path, arguments.kind, sets=arguments.sets.split(","))
    is_sound = all(f.holds for f in findings)
    if arguments.json:
        print(
            json.dumps({"path": arguments.path, "holds": is_sound, "findings": [asdict(f) for f in findings]})
        )
    else:
        for f in findings:
            print(f"{'ok  ' if f.holds else 'FAIL'}  {f.requirement}{': ' + f.told if f.told else ''}")
    return 0 if is_sound else ConfigError.exit_code
