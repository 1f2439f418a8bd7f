"""Results of generation as rows: the members of a unit and the checks they must pass before they are stored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from strawflow.config import SamplingProfile
from strawflow.errors import InvalidInputError
from strawflow.records import TRAJECTORY

NOT_SAMPLED = -1
"""token_versions of a token that no weights sampled (a demonstration)."""


COMPLETE_SEQ = 1
"""A unit without saved progress has one guarded write: its completion."""


@dataclass(frozen=True)
class Member:
    """One member of a group: finished, truncated at the token limit, or failed with a reason.

    `logprobs[i]` is log-softmax(logits / temperature) of `response_tokens[i]` in the pass that sampled it;
    `token_versions[i]` is the id of the weights of that pass ("" for a demonstration). Both have the response's length.
    """

    member: int
    status: str
    response_tokens: Sequence[int]
    logprobs: Sequence[float]
    token_versions: Sequence[str]
    finish_reason: str
    reward: float | None
    score: float | None = None
    failure: str | None = None
    response_text: str | None = None

    def check(self) -> None:
        """Raise InvalidInputError when the parallel arrays disagree, a number is not finite, or a result is missing."""
        num_tokens = len(self.response_tokens)
        if not num_tokens == len(self.logprobs) == len(self.token_versions):
            raise InvalidInputError(
                f"member {self.member}: {num_tokens} tokens, {len(self.logprobs)} log-probabilities, "
                f"{len(self.token_versions)} versions; they must be equally many"
            )
        if not all(math.isfinite(x) for x in self.logprobs):
            raise InvalidInputError(f"member {self.member}: a log-probability is not finite")
        if (self.status == "failed") != (self.failure is not None):
            raise InvalidInputError(
                f"member {self.member}: a failed member needs its reason, another must have none"
            )
        if self.status == "failed" and self.reward is not None:
            raise InvalidInputError(f"member {self.member}: a failed member has no reward")


def failed_member(member: int, reason: str) -> Member:
    """Return a member that failed before anything could be kept of it."""
    return Member(
        member=member,
        status="failed",
        response_tokens=(),
        logprobs=(),
        token_versions=(),
        finish_reason="error",
        reward=None,
        failure=reason,
    )


@dataclass(frozen=True)
class UnitResult:
    """All members of one unit, ready to be stored."""

    unit_id: int
    fence: int
    seq: int
    prompt_tokens: Sequence[int]
    members: Sequence[Member]
    profile: SamplingProfile
    engine: str

    @property
    def num_tokens(self) -> int:
        return sum(len(m.response_tokens) for m in self.members)

    @property
    def mean_reward(self) -> float | None:
        rewards = [m.reward for m in self.members if m.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    def versions(self) -> set[str]:
        return {version for m in self.members for version in m.token_versions if version}


def to_record_batch(results: Sequence[UnitResult]) -> pa.RecordBatch:
    """Return the trajectory rows of several units, unit after unit, member after member.

    Raises:
        InvalidInputError: a member breaks promise P9 or P10.
    """
    rows = [_row(result, member) for result in results for member in result.members]
    return pa.RecordBatch.from_pylist(rows, schema=TRAJECTORY)


def _row(result: UnitResult, member: Member) -> dict[str, object]:
    member.check()
    distinct = sorted({version for version in member.token_versions if version})
    place = {version: at for at, version in enumerate(distinct)}
    return {
        "unit_id": result.unit_id,
        "fence": result.fence,
        "seq": result.seq,
        "member": member.member,
        "segment": 0,
        "purpose": result.profile.purpose,
        "status": member.status,
        "failure": member.failure,
        "prompt_tokens": list(result.prompt_tokens),
        "response_tokens": list(member.response_tokens),
        "loss_mask": [1] * len(member.response_tokens),
        "logprobs": list(member.logprobs),
        "token_versions": [place.get(version, NOT_SAMPLED) for version in member.token_versions],
        "weight_versions": distinct,
        "reward": member.reward,
        "score": member.score,
        "response_text": member.response_text,
        "finish_reason": member.finish_reason,
        "temperature": result.profile.temperature,
        "top_p": result.profile.top_p,
        "top_k": -1,
        "max_response_tokens": result.profile.max_response_tokens,
        "engine": result.engine,
    }
