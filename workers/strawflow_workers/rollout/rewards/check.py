"""`strawflow reward check`: try a reward on samples in a file, without engines and without a run.

The file is JSONL. A row holds "response", or "responses" for the members of a group, and what a prompt row holds: "prompt",
"label", "metadata" (an object; its "reward" beats SPEC). A reward of groups is given the "responses" of a row at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strawflow.cli import output
from strawflow.errors import InvalidInputError, NotFoundError
from strawflow.prompts import strict_json
from strawflow.prompts.strict_json import StrictJsonError
from strawflow_workers.rollout.rewards.scorer import RewardScorer, ScorerOptions
from strawflow_workers.rollout.rewards.spec import RewardOutcome, RewardRequest

_AT_ONCE = 256
"""Groups that are scored at a time."""


@dataclass(frozen=True)
class CheckedSample:
    """One response and what the reward made of it."""

    line: int
    member: int
    score: float | None
    reward: float | None
    failure: str | None


def check_command(path: Path, options: ScorerOptions, *, as_json: bool) -> int:
    """Score the samples of a file and print each; returns 0, failures or not: they are what it is asked for.

    Raises:
        ConfigError: the reward is unknown or cannot be loaded.
        InvalidInputError: a row is no sample.
        NotFoundError: no such file.
    """
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
    samples = asyncio.run(_checked(_groups(path), options))
    scores = [sample.score for sample in samples if sample.score is not None]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if as_json:
        output.print_json(
            {
                "reward": options.spec.name,
                "num_samples": len(samples),
                "num_failed": len(samples) - len(scores),
                "mean_score": sum(scores) / len(scores) if scores else None,
                "mean_reward": sum(rewards) / len(rewards) if rewards else None,
                "samples": [asdict(sample) for sample in samples],
            }
        )
        return 0
    output.print_table(
        ("line", "member", "score", "reward", "failure"),
        [(s.line, s.member, s.score, s.reward, output.clipped(s.failure, 200) or "-") for s in samples],
        empty=f"{path} holds no samples",
    )
    if samples:
        print(f"{len(samples)} samples: {_summary(samples, scores)}")
    return 0


def _summary(samples: list[CheckedSample], scores: list[float]) -> str:
    failures = Counter(sample.failure for sample in samples if sample.failure is not None)
    told = [f"{len(scores)} scored" + (f", mean {sum(scores) / len(scores):.4g}" if scores else "")]
    told += [f"{failures.total()} failed"] if failures else []
    return "; ".join(told)


async def _checked(
    groups: list[tuple[int, list[RewardRequest]]], options: ScorerOptions
) -> list[CheckedSample]:
    places = asyncio.Semaphore(_AT_ONCE)
    async with RewardScorer(options) as scorer:

        async def outcomes(requests: list[RewardRequest]) -> list[RewardOutcome]:
            async with places:
                unscored = RewardOutcome(None, None, None)
                if scorer.waits_for_group(requests[0].metadata):
                    found = [unscored] * len(requests)
                else:
                    found = list(await asyncio.gather(*map(scorer.score, requests)))
                return await scorer.settle_group(requests, found)

        results = await asyncio.gather(*(outcomes(requests) for _, requests in groups))
    return [
        CheckedSample(line, member, outcome.score, outcome.reward, outcome.failure)
        for (line, _), result in zip(groups, results, strict=True)
        for member, outcome in enumerate(result)
    ]


def _groups(path: Path) -> list[tuple[int, list[RewardRequest]]]:
    """Return (line, the samples of the row), for each row."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}; samples are JSON lines in UTF-8") from error
    return [
        (number, _requests(line, f"{path}:{number}"))
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]


def _requests(line: str, where: str) -> list[RewardRequest]:
    try:
        row = strict_json.parse(line)
    except StrictJsonError as error:
        raise InvalidInputError(f"{where}: {error.detail}") from error
    if not isinstance(row, dict):
        raise InvalidInputError(f"{where}: the row is no object; write one object per line")
    responses = row.get("responses", [row["response"]] if "response" in row else None)
    if not isinstance(responses, list) or not responses or not all(isinstance(r, str) for r in responses):
        raise InvalidInputError(f"{where}: the row needs 'response', a text, or 'responses', a list of texts")
    metadata = row.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise InvalidInputError(f"{where}: 'metadata' must be an object")
    prompt = row.get("prompt", "")
    return [
        RewardRequest(
            response,
            _as_stored(prompt) or "",
            _as_stored(row.get("label")),
            _as_stored(metadata),
            prompt_is_messages=isinstance(prompt, list),
        )
        for response in responses
    ]


def _as_stored(value: Any) -> str | None:
    """Return a prompt or label as an enqueue stores it: text verbatim, anything else as JSON."""
    return value if value is None or isinstance(value, str) else strict_json.dump(value)
