"""Continuations: what was saved of a group that was broken off, as members again, and whether it is worth going on with.

A saved member is finished, truncated or failed for good, or partial: its tokens become part of the next request's prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from strawflow.flow.claim import Grant
from strawflow.flow.payload import arrays_of
from strawflow.flow.session import WorkerSession
from strawflow.flow.trajectory import NOT_SAMPLED, Member
from strawflow.index import consumers, events, weights
from strawflow.index.events import Event

log = logging.getLogger(__name__)

_AS_STORED = (
    "member",
    "status",
    "response_tokens",
    "logprobs",
    "finish_reason",
    "reward",
    "score",
    "failure",
    "response_text",
    "environment",
    "loss_mask",
    "prompt_tokens",
)
"""Fields of a member that are columns of its row."""


def saved_members(rows: pa.RecordBatch | None) -> dict[int, Member]:
    """Return the members of a `Grant.continuation` by number, each with all its segments; none without one."""
    if rows is None:
        return {}
    segments: dict[int, list[Member]] = {}
    tensors = arrays_of(rows.column("tensors"))
    for row, of_row in zip(rows.drop_columns(["tensors"]).to_pylist(), tensors, strict=True):
        segments.setdefault(row["member"], []).append(replace(_member(row), tensors=of_row))
    return {number: replace(first, siblings=tuple(others)) for number, (first, *others) in segments.items()}


def _member(row: Mapping[str, Any]) -> Member:
    versions = row["weight_versions"]
    as_stored = {name: row[name] for name in _AS_STORED}
    return Member(
        token_versions=["" if place == NOT_SAMPLED else versions[place] for place in row["token_versions"]],
        **as_stored,
    )


def without_outdated(session: WorkerSession, grants: Sequence[Grant]) -> list[Grant]:
    """Return the grants, those pristine whose saved tokens could not be trained any more; each is told as an event.

    With p the last step that has a batch, a group is trained at p + 1 at the earliest, applied to the weights of step p.
    Tokens of weights that the branch went back behind (dead) are never trained either.
    """
    versions = {g.unit_id: _versions(g) for g in grants if g.continuation is not None}
    if not versions:
        return list(grants)
    run = session.run
    with run.index.read() as connection:
        found = {v: weights.find(connection, v) for v in sorted(set().union(*versions.values()))}
        dead = weights.dead_ids(connection, run.branch)
        planned = consumers.find(connection, run.branch, run.consumer).planned
    dropped: dict[int, str] = {}
    for unit_id, of_unit in versions.items():
        steps = [version.step for v in of_unit if (version := found[v]) is not None]
        lag = planned - min(steps, default=planned)
        if dead.keys() & of_unit:
            dropped[unit_id] = "off_lineage"
        elif lag > run.config.rollout.max_staleness:
            dropped[unit_id] = "stale"
    if dropped:
        _tell(session, grants, dropped)
    return [replace(g, continuation=None) if g.unit_id in dropped else g for g in grants]


def _versions(grant: Grant) -> set[str]:
    assert grant.continuation is not None
    return {v for of_row in grant.continuation.column("weight_versions").to_pylist() for v in of_row}


def _tell(session: WorkerSession, grants: Sequence[Grant], dropped: dict[int, str]) -> None:
    happened = []
    for grant in grants:
        if grant.unit_id in dropped:
            assert grant.continuation is not None
            num_tokens = sum(
                len(tokens) for tokens in grant.continuation.column("response_tokens").to_pylist()
            )
            facts = {"reason": dropped[grant.unit_id], "num_tokens": num_tokens}
            happened.append(Event("continuation.dropped", session.session_id, grant.unit_id, facts))
            log.info("unit %d starts again from its prompt: %s", grant.unit_id, facts)
    with session.run.index.begin() as connection:
        events.record_many(connection, happened)
