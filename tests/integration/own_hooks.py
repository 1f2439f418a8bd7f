"""Hooks as users write them: for runs of tests, and good and bad ones for the contract test."""

from __future__ import annotations

import asyncio
import os
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from strawflow_workers.rollout.hooks.interfaces import (
    CompletedGroup,
    Engine,
    Engines,
    PostProcessed,
    Rollout,
    Sample,
    Segment,
    TrainingRow,
    TurnKey,
    Verdict,
)

FAN_OUT = (1, 3, 2, 1)
"""Segments of each member."""


async def fans_out(sample: Sample, engine: Engine) -> list[Segment]:
    """A rollout of several segments, each after a prompt of its own, with a token of the environment in the middle."""
    segments = []
    for number in range(FAN_OUT[sample.member]):
        prompt = [*sample.prompt_tokens, *engine.encode("again\n" * number)]
        segment = Segment(prompt_tokens=prompt)
        segment.add_generated(await engine.generate(prompt, {"max_new_tokens": 3}))
        segment.add_environment(engine.encode("x"))
        segment.add_generated(await engine.generate([*prompt, *segment.tokens], {"max_new_tokens": 2}))
        segments.append(segment)
    return segments


async def one_turn(sample: Sample, engine: Engine) -> Segment:
    segment = Segment()
    segment.add_generated(await engine.generate(sample.prompt_tokens))
    return segment


async def makes_no_segment(sample: Sample, engine: Engine) -> list[str]:
    return ["text"]


async def rewards_itself(sample: Sample, engine: Engine) -> Rollout:
    return Rollout(segments=[await one_turn(sample, engine)], reward=float(sample.member))


async def fails_on_member_1(sample: Sample, engine: Engine) -> Segment:
    if sample.member == 1:
        raise RuntimeError("the tool is not there")
    return await one_turn(sample, engine)


async def trains_on_the_environment(sample: Sample, engine: Engine) -> Segment:
    segment = await one_turn(sample, engine)
    segment.add_environment(engine.encode("x"))
    assert segment.loss_mask is not None
    segment.loss_mask[-1] = 1
    return segment


async def swallows_everything(sample: Sample, engine: Engine) -> Segment:
    try:
        return await one_turn(sample, engine)
    except BaseException:
        return Segment()


async def never_ends(sample: Sample, engine: Engine) -> Segment:
    import asyncio

    await asyncio.sleep(3600)
    return Segment()


JUDGED: list[tuple[int, int]] = []


def drops_member_2(sample: Sample, rollout: Rollout) -> Verdict:
    JUDGED.append((sample.unit_id, sample.member))
    return Verdict(sample.member != 2, "too_long")


def drops_all(group: CompletedGroup) -> Verdict:
    return Verdict(False, "too_easy")


SEEN: list[tuple[int, int]] = []


def keeps_even_units(group: CompletedGroup) -> Verdict:
    SEEN.append((group.unit_id, len(group.members)))
    return Verdict(group.unit_id % 2 == 0, "odd")


def says_nothing(group: CompletedGroup) -> None:
    return None


def takes_too_much(sample: Any, rollout: Any, more: Any) -> Verdict:
    return Verdict(True)


def is_not_async(sample: Any, engine: Any) -> Segment:
    return Segment()


NOT_A_FUNCTION = 3


async def blocks(sample: Sample, engine: Engine) -> Segment:
    import time

    time.sleep(0 if sample.member else 1.1)
    return await one_turn(sample, engine)


async def masks_all(sample: Sample, engine: Engine) -> Segment:
    segment = await one_turn(sample, engine)
    segment.loss_mask = [0] * len(segment.tokens)
    return segment


async def asks_for_ever(sample: Sample, engine: Engine) -> Segment:
    import asyncio

    while True:
        try:
            return await one_turn(sample, engine)
        except asyncio.CancelledError:
            raise
        except BaseException:
            await asyncio.sleep(0.01)


def changes_its_mind(group: CompletedGroup) -> Verdict:
    SEEN.append((group.unit_id, 0))
    return Verdict(len(SEEN) % 2 == 0, "odd")


IS_SLOW = [False]


async def fans_out_slowly(sample: Sample, engine: Engine) -> list[Segment]:
    """As `fans_out`, but while IS_SLOW all members except the one of three segments wait."""
    import asyncio

    while IS_SLOW[0] and FAN_OUT[sample.member] < 3:
        await asyncio.sleep(0.05)
    return await fans_out(sample, engine)


LOGGED: list[tuple[int, Any, Any]] = []


def logs_and_raises(step: int, rows: Any, metrics: Any) -> None:
    LOGGED.append((step, rows, metrics))
    if step == 1:
        raise OSError("the dashboard is away")


def prints(step: int, rows: Any, metrics: Any) -> None:
    print(step, len(rows), metrics["mean_reward"])


TOOL_CALLS: list[TurnKey] = []
STANDS_AT: list[int] = []
"""The turns, counted from 1, after which a session waits until it is broken off; each once."""


FLUSHES = [False]
"""The engine computes every turn's tokens anew, whoever sampled them: equal tokens before give equal bits after."""
IS_STUCK = [False]
"""The tool does not come back."""


async def counts(number: int, *, key: TurnKey) -> str:
    """A tool."""
    TOOL_CALLS.append(key)
    while IS_STUCK[0]:
        await asyncio.sleep(0.01)
    return f" {number + 1}!"


async def three_turns(sample: Sample, engine: Engine) -> Sequence[Segment]:
    """Three turns, each with an answer of a tool after it, the last in a segment of its own; its state counts them."""
    session = engine.session()
    while session.turn < 3:
        if FLUSHES[0]:
            await asyncio.to_thread(urllib.request.urlopen, f"{engine.url}/flush_cache", b"", 10)
        if session.turn == 2 and len(session.segments) == 1:
            session.begin_segment([*sample.prompt_tokens, *session.segments[0].tokens[-4:]])
        await session.sample({"max_new_tokens": 6, "temperature": 0.0})
        number = (session.state or {"answers": 0})["answers"]
        session.add_environment(engine.encode(await session.call(counts, number)))
        session.save({"answers": number + 1})
        if session.turn in STANDS_AT:
            STANDS_AT.remove(session.turn)
            await asyncio.sleep(3600)
    return session.segments


async def forgets_where_it_was(sample: Sample, engine: Engine) -> Sequence[Segment]:
    session = engine.session()
    for _ in range(2):
        await session.sample({"max_new_tokens": 4})
        session.save()
    return session.segments


def arrays_of_member(member: int, images: Sequence[bytes]) -> dict[str, Any] | None:
    """Arrays of many types and shapes for odd members; none for the others."""
    if member % 2 == 0:
        return None
    return {
        "grid": np.array([[1, len(images), 3]], np.int64),
        "pixels": np.frombuffer(b"".join(images) or b"\x00\x80\x7f", np.uint8),
        "halves": np.array([np.nan, -0.0, np.inf, 6.1e-5], np.float16).reshape(2, 1, 2),
        "scalar": np.array(member, np.float64),
        "none": np.empty((0, 4), np.float32),
        "flags": np.array([True, False]),
        "strided": np.arange(24, dtype=np.int32).reshape(4, 6)[::2, ::3],
    }


async def with_arrays(sample: Sample, engine: Engine) -> Segment:
    """Its first member is sampled without images."""
    segment = Segment(tensors=arrays_of_member(sample.member, sample.images))
    images = () if sample.member == 0 else None
    segment.add_generated(await engine.generate(sample.prompt_tokens, images=images))
    return segment


def spreads_rewards(group: CompletedGroup) -> PostProcessed:
    """Twice the rewards, and advantages that count the members that did not fail from -1 on."""
    return PostProcessed(
        rewards=[2 * reward for reward in group.rewards],
        advantages=[float(place - 1) for place in range(len(group.rewards))],
    )


def trains_last_segments(group: CompletedGroup) -> list[TrainingRow]:
    """The last segment of each rollout, its first token masked, later tokens weighted less; others are left out."""
    rows = []
    for member in group.members:
        if member.status == "failed" or member.member == 3:
            continue
        row = TrainingRow.of(member.segments[-1])
        row.loss_mask = [0, *row.loss_mask[1:]]
        row.advantages = [1 / (1 + at) for at in range(len(row.response_tokens))]
        row.reward = 0.25
        rows.append(row)
    return rows


def converts_to_nothing(group: CompletedGroup) -> list[TrainingRow]:
    return []


def forgets_a_member(group: CompletedGroup) -> PostProcessed:
    return PostProcessed(rewards=group.rewards[1:])


def invents_a_segment(group: CompletedGroup) -> list[TrainingRow]:
    row = TrainingRow.of(group.members[0].segments[0])
    row.segment = 9
    return [row]


def trains_what_was_not_sampled(group: CompletedGroup) -> list[TrainingRow]:
    row = TrainingRow.of(group.members[0].segments[0])
    row.token_versions = [-1] * len(row.response_tokens)
    return [row]


def shortens_a_list(group: CompletedGroup) -> list[TrainingRow]:
    row = TrainingRow.of(group.members[0].segments[0])
    row.logprobs = row.logprobs[1:]
    return [row]


CLAIMS: list[list[int]] = []
"""Members of each group of each claim."""


async def makes_a_claim(groups: Sequence[Sequence[Sample]], engines: Engines) -> list[list[Segment]]:
    """All rollouts of a claim side by side."""
    CLAIMS.append([len(group) for group in groups])
    flat = [sample for group in groups for sample in group]
    made = iter(await asyncio.gather(*(one_turn(sample, engines.of(sample)) for sample in flat)))
    return [[next(made) for _ in group] for group in groups]


async def spoils_member_1(groups: Sequence[Sequence[Sample]], engines: Engines) -> list[list[Segment]]:
    made = await makes_a_claim(groups, engines)
    for group, own in zip(groups, made, strict=True):
        for sample, segment in zip(group, own, strict=True):
            if sample.member == 1:
                segment.logprobs = segment.logprobs[1:]
    return made


async def forgets_a_group(groups: Sequence[Sequence[Sample]], engines: Engines) -> list[list[Segment]]:
    return (await makes_a_claim(groups, engines))[1:]


async def turns_of_a_claim(groups: Sequence[Sequence[Sample]], engines: Engines) -> list[list[Any]]:
    flat = [sample for group in groups for sample in group]
    made = iter(await asyncio.gather(*(three_turns(sample, engines.of(sample)) for sample in flat)))
    return [[next(made) for _ in group] for group in groups]


JOURNAL = "STRAWFLOW_TEST_JOURNAL"
"""Names the file that the tool below keeps; while another beside it, `.stuck`, is there, it does not come back."""


def keeps_a_journal(text: str, *, key: TurnKey) -> str:
    """A tool whose effect must not be had twice: a key that it knows is answered without it."""
    journal = Path(os.environ[JOURNAL])
    lines = journal.read_text().splitlines() if journal.exists() else []
    with journal.open("a") as file:
        file.write(f"{key} {'again' if any(str(key) in line for line in lines) else 'new'}\n")
    while journal.with_suffix(".stuck").exists():
        time.sleep(0.01)
    return text


async def two_turns_with_a_journal(sample: Sample, engine: Engine) -> Sequence[Segment]:
    session = engine.session()
    while session.turn < 2:
        found = await session.sample({"max_new_tokens": 4})
        session.add_environment(engine.encode(await session.call(keeps_a_journal, f"{len(found.tokens)}!")))
        session.save()
    return session.segments
