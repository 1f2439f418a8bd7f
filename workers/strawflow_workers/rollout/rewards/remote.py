"""The reward `remote:URL`: a server of the user's own scores a response, or with `group:` a group of them.

It is sent {"prompt", "response", "label", "metadata"}, for a group "responses" in the place of "response"; messages, labels and
metadata as the JSON that they are. It answers a number or {"score": number}; for a group a list of numbers or {"scores": [...]}.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from strawflow_workers.rollout.rewards.calls import Value, checked_values, finite_number
from strawflow_workers.rollout.rewards.reward_server import RewardServerError, RewardServers
from strawflow_workers.rollout.rewards.spec import RewardRequest


async def score(servers: RewardServers, url: str, request: RewardRequest) -> Value:
    """Return the score of one response, or why there is none."""
    body = {"prompt": request.prompt, "response": request.response_text, **_row(request)}
    try:
        answer = await servers.post(url, body)
        return finite_number(answer["score"] if isinstance(answer, dict) and "score" in answer else answer)
    except RewardServerError as error:
        return str(error)
    except (TypeError, ValueError) as error:
        return f"{url}: {error}"


async def score_group(servers: RewardServers, url: str, requests: Sequence[RewardRequest]) -> list[Value]:
    """Return a score for each member of a group, or why there is none."""
    texts = [request.response_text for request in requests]
    body = {"prompt": requests[0].prompt, "responses": texts, **_row(requests[0])}
    try:
        answer = await servers.post(url, body)
        found = answer["scores"] if isinstance(answer, dict) and "scores" in answer else answer
        return checked_values(found, num_texts=len(texts))
    except RewardServerError as error:
        return [str(error)] * len(texts)
    except (TypeError, ValueError) as error:
        return [f"{url}: {error}"] * len(texts)


def _row(request: RewardRequest) -> dict[str, Any]:
    return {
        "label": request.label,
        "metadata": None if request.metadata is None else json.loads(request.metadata),
    }
