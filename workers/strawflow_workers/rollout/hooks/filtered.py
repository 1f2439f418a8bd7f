"""Calling filters: what they say is checked, so that a filter that returns nothing does not keep or drop by accident."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from strawflow.errors import ConfigError
from strawflow_workers.rollout.hooks.interfaces import (
    CompletedGroup,
    GroupFilter,
    GroupMember,
    Rollout,
    Sample,
    SampleFilter,
    Verdict,
)


def nonzero_deviation(group: CompletedGroup) -> Verdict:
    """Keep a group whose rewards differ: equal ones give every member advantage 0 (DAPO's dynamic sampling)."""
    rewards = group.rewards
    return Verdict(keep=bool(rewards) and min(rewards) < max(rewards), reason="zero_deviation")


DROPPED = "sample filter: "
"""Begins the failure of a member that the sample filter dropped."""


def why_dropped(sample_filter: SampleFilter, sample: Sample, rollout: Rollout) -> str | None:
    """Ask a sample filter; returns the failure of a member that is dropped, or whose filter failed, None for one kept."""
    try:
        verdict = checked_verdict(sample_filter(sample, rollout))
    except Exception as error:  # whatever user code raises is the outcome of this member
        return f"the sample filter raised {type(error).__name__}: {error}"
    return None if verdict.keep else f"{DROPPED}{verdict.reason}"


def judge_group(
    group_filter: GroupFilter, unit_id: int, members: Sequence[Sequence[dict[str, Any]]]
) -> Verdict:
    """Ask a group filter about a stored group; `members` are the rows of each.

    Raises:
        ConfigError: the filter raised, or returned no verdict: without one nothing can be planned.
    """
    group = completed_group(unit_id, [row for rows in members for row in rows])
    try:
        return checked_verdict(group_filter(group))
    except Exception as error:  # user code; it is mended, and the run resumed
        raise ConfigError(
            f"assemble.group_filter raised at unit {unit_id}: {type(error).__name__}: {error}"
        ) from error


def completed_group(unit_id: int, rows: Sequence[dict[str, Any]]) -> CompletedGroup:
    """Return a stored group as hooks see it; `rows` are its members' segments, member after member."""
    members = [list(own) for _, own in groupby(rows, key=itemgetter("member"))]
    return CompletedGroup(unit_id=unit_id, members=[_member(own) for own in members])


def checked_verdict(found: object) -> Verdict:
    """Return what a filter returned.

    Raises:
        TypeError: it is no Verdict, or one that drops without a reason.
    """
    if not isinstance(found, Verdict) or not isinstance(found.keep, bool):
        raise TypeError(f"a filter must return a Verdict, this one returned {found!r}")
    if not found.keep and not found.reason:
        raise TypeError("a filter that drops must say why: Verdict(False, reason)")
    return found


def _member(rows: Sequence[dict[str, Any]]) -> GroupMember:
    first = rows[0]
    return GroupMember(
        member=first["member"],
        status=first["status"],
        segments=rows,
        reward=first["reward"],
        score=first["score"],
        failure=first["failure"],
    )
