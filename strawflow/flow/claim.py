"""Claiming: lease ready units to a session and bring their prompts along."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from strawflow import faults
from strawflow.config import SamplingProfile
from strawflow.flow.session import WorkerSession
from strawflow.index import datasets, packs, sessions, units
from strawflow.index.units import Unit


@dataclass(frozen=True)
class Prompt:
    """One stored prompt row; label and metadata as stored (text or JSON)."""

    prompt: str
    prompt_format: str
    label: str | None
    label_format: str | None
    metadata: str | None


@dataclass(frozen=True)
class Grant:
    """A leased unit: what to generate, how, and the fence to name on every write."""

    unit: Unit
    prompt: Prompt
    profile: SamplingProfile

    @property
    def unit_id(self) -> int:
        return self.unit.unit_id

    @property
    def fence(self) -> int:
        return self.unit.fence


class PromptShelf:
    """Reads prompt rows by (segment, position); segments are immutable, so their places are kept."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._places: dict[int, list[tuple[int, str]]] = {}
        self._rows: dict[str, pa.RecordBatch] = {}

    def read(self, segment_id: int, position: int) -> Prompt:
        places = self._places.get(segment_id)
        if places is None:
            with self._session.run.index.read() as connection:
                places = datasets.segment_extent_ids(connection, segment_id)
            self._places[segment_id] = places
        at = bisect_right(places, position, key=lambda place: place[0]) - 1
        first_row, extent_id = places[at]
        row = self._extent(extent_id).slice(position - first_row, 1).to_pylist()[0]
        return Prompt(row["prompt"], row["prompt_format"], row["label"], row["label_format"], row["metadata"])

    def _extent(self, extent_id: str) -> pa.RecordBatch:
        if extent_id not in self._rows:
            if len(self._rows) >= 64:  # a few MiB each: bounded, and epoch order comes back to them anyway
                self._rows.clear()
            with self._session.run.index.read() as connection:
                extent = packs.find_extents(connection, [extent_id])[extent_id]
            self._rows[extent_id] = self._session.reader.read(extent)
        return self._rows[extent_id]


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
    with run.index.read() as connection:  # most calls find nothing: look before taking the write lock
        if not units.any_ready(connection, run.branch, purposes=purposes):
            return []
    with run.index.begin() as connection:
        # A session declared lost is never rescued a second time: a lease granted to it would stay for ever.
        sessions.require_live(connection, session.session_id)
        claimed = units.claim(
            connection,
            run.branch,
            session.session_id,
            limit=limit,
            serving_version_id=serving_version_id,
            purposes=purposes,
        )
    faults.at("rollout.after_claim")
    profiles = run.config.profiles()
    return [Grant(u, shelf.read(u.segment_id, u.position), profiles[u.profile]) for u in claimed]


def release(session: WorkerSession, grants: Sequence[Grant]) -> int:
    """Give leases back unworked: attempts are refunded."""
    if not grants:
        return 0
    with session.run.index.begin() as connection:
        return units.release(connection, session.session_id, [g.unit_id for g in grants])
