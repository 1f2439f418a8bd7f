"""Continuations: whether what was saved of a group that was broken off is worth going on with."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from strawflow.flow.claim import Grant
from strawflow.flow.session import WorkerSession
from strawflow.index import consumers, events, weights
from strawflow.index.events import Event

log = logging.getLogger(__name__)


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
