"""Claiming: lease ready units to a session and bring their prompts along."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from strawflow import faults
from strawflow.config import SamplingProfile
from strawflow.flow import quota
from strawflow.flow.chain import Chain, last_record, read_chains, saved_members
from strawflow.flow.exchange import backlog_room
from strawflow.flow.placed import read_extent
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.flow.submission import Submission
from strawflow.flow.trajectory import Member, UnitResult
from strawflow.index import datasets, leases, packs
from strawflow.index.leases import Wanted
from strawflow.index.units import Unit


@dataclass(frozen=True)
class Prompt:
    """One stored prompt row; label and metadata as stored (text or JSON)."""

    prompt: str
    prompt_format: str
    label: str | None
    label_format: str | None
    metadata: str | None
    images: Sequence[bytes] | None = None
    """Image files as they are, in the order of the prompt; None without any."""


@dataclass(frozen=True)
class Grant:
    """A leased unit: what to generate, how, and the fence to name on every write."""

    unit: Unit
    prompt: Prompt
    profile: SamplingProfile
    continuation: pa.RecordBatch | None = None
    """What was saved of it before, one row per member (schema records.CONTINUATION, mask and versions told for every
    token); None for a fresh one."""

    @cached_property
    def chain(self) -> Chain:
        """What is saved of it under this grant; whoever saves keeps it up to date."""
        if self.continuation is None:
            return Chain(self.fence)
        return Chain(self.fence, last_record(self.continuation), saved_members(self.continuation))

    def result(
        self, members: Sequence[Member], *, prompt_tokens: Sequence[int] = (), engine: str = ""
    ) -> UnitResult:
        """Return what to hand in for this group: its members, the tokens they were sampled after, and who sampled.

        Make it after the last save: a later write has a higher `seq`.
        """
        return UnitResult(
            self.unit_id, self.fence, self.chain.next_seq, prompt_tokens, members, self.profile, engine
        )

    @property
    def unit_id(self) -> int:
        return self.unit.unit_id

    @property
    def fence(self) -> int:
        return self.unit.fence


class PromptShelf:
    """What a grant brings along beside its unit: prompt rows by (segment, position), and sampling settings by name.

    Segments are immutable, so the places of their rows are kept.
    """

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._places: dict[int, list[tuple[int, int]]] = {}
        self._prompts: dict[int, list[Prompt]] = {}
        self.profiles = session.run.config.profiles()

    def read(self, segment_id: int, position: int) -> Prompt:
        places = self._places.get(segment_id)
        if places is None:
            with self._session.run.index.read() as connection:
                places = datasets.segment_extent_ids(connection, segment_id)
            self._places[segment_id] = places
        at = bisect_right(places, position, key=lambda place: place[0]) - 1
        first_row, extent_id = places[at]
        return self._extent(extent_id)[position - first_row]

    def _extent(self, extent_id: int) -> list[Prompt]:
        prompts = self._prompts.get(extent_id)
        if prompts is None:
            if len(self._prompts) >= 64:  # a few MiB each: bounded, and epoch order comes back to them anyway
                self._prompts.clear()
            with self._session.run.index.read() as connection:
                extent = packs.find_extents(connection, [extent_id])[extent_id]
            rows = read_extent(self._session.run, self._session.reader, extent)
            # All at once: taken out of Arrow one by one they cost as much as the rest of a grant.
            columns = (rows.column(name).to_pylist() for name in Prompt.__dataclass_fields__)
            prompts = self._prompts[extent_id] = [Prompt(*row) for row in zip(*columns, strict=True)]
        return prompts


def claim(
    session: WorkerSession,
    shelf: PromptShelf,
    *,
    limit: int,
    serving_version_id: str | None,
    purposes: Sequence[str] | None = None,
) -> list[Grant]:
    """Lease up to `limit` units; an empty list means there is nothing to do now.

    Raises:
        LeaseLostError: the session was declared lost.
    """
    run = session.run
    if quota.gauge(run).watch():
        return []
    with run.index.read() as connection:  # most calls find nothing: look before taking the write lock
        if not leases.any_ready(connection, run.branch, purposes=purposes):
            return []
    wanted = Wanted(limit, serving_version_id, None if purposes is None else tuple(purposes))
    answer = session.exchange.submit(Submission(None, wanted=wanted))
    faults.at("rollout.after_claim")
    return grants_of(session, shelf, answer.granted)


def any_left(run: Run) -> bool:
    """Tell whether any training group may be leased now: one is ready, and the backlog of the run's consumer is not full."""
    with run.index.read() as connection:
        if not leases.any_ready(connection, run.branch, purposes=("train",)):
            return False
        return backlog_room(connection, run) > 0


def grants_of(session: WorkerSession, shelf: PromptShelf, granted: Sequence[Unit]) -> list[Grant]:
    """Bring the prompts of granted units along, and what was saved of those that were parked."""
    saved = read_chains(session.run, session.reader, granted)
    return [
        Grant(u, shelf.read(u.segment_id, u.position), shelf.profiles[u.profile], saved.get(u.unit_id))
        for u in granted
    ]


def release(session: WorkerSession, grants: Sequence[Grant]) -> int:
    """Give leases back unworked: attempts are refunded."""
    if not grants:
        return 0
    keys = [(g.unit_id, g.fence) for g in grants]
    return len(session.exchange.submit(Submission(None, released=keys)).released)
