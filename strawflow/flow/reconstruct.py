"""Bringing an index up to what the run's folder says: packs, journal, checkpoint manifests, weights.

1. The index may be fresh, or one restored from a backup: whatever it knows already stays, what came later is added. Both
   are the same code, and repeating it changes nothing.
2. Trusted first are checkpoints (they hold position and batch digest), then the journal, then trajectories.
3. Afterwards every unit without a result is ready, every result without a fate is offered once, by record id; fences of all
   that was met are of older incarnations.
4. It runs in the caller's transaction: all of it becomes true, or nothing.

Which entries are believed is flow.journal_choice's part, how an index takes its place flow.index_place's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from strawflow import clock
from strawflow.config import RunConfig, SamplingProfile
from strawflow.errors import ConflictError, CorruptPackError
from strawflow.flow import history_again, inherit, journal, returned
from strawflow.flow import journal_choice as choice
from strawflow.flow.admission import Schedule, cursor_fields, take_rows, take_segment, told_ids
from strawflow.flow.assemble import UNIT_FAILED
from strawflow.flow.branch import inherit_cursors, inherit_drops
from strawflow.flow.found_lines import Lines
from strawflow.flow.found_manifests import manifests_of, read_manifests
from strawflow.flow.found_packs import FoundPacks, Loss
from strawflow.flow.found_progress import FoundProgress
from strawflow.flow.found_results import FoundGroup, groups_of
from strawflow.flow.journal import EntryKind, ExtentRef, StoredEntry
from strawflow.flow.mixer import Mixture
from strawflow.flow.run import ACTIVE_BRANCH, MAIN_BRANCH, TRAINER
from strawflow.ids import Extent
from strawflow.index import (
    branches,
    carry,
    consumers,
    continuations,
    datasets,
    meta,
    mixtures,
    reconstruction,
    retired_again,
    returns,
    units,
)
from strawflow.index.continuations import SavedRecord
from strawflow.index.datasets import Cursor, Segment
from strawflow.index.engine import Connection
from strawflow.index.reconstruction import FoundResult
from strawflow.states import UnitState

_CHUNK = 2000
LOST_RESULT = (
    "its trajectories were not found when the index was rebuilt; it has its fate and is not opened again"
)
LOST_ERROR = "it used up its attempts; its last error was lost with the index"
LOST_WEIGHTS = "the weights it is bound to cannot be served any more"


@dataclass
class Reconstruction:
    """What was brought back, and what was not."""

    num_packs: int = 0
    """Pack files that had no row."""
    num_extents: int = 0
    """Extents that were named anew."""
    num_moved: int = 0
    """Extents found where salvage or compaction brought them."""
    num_entries: int = 0
    num_withdrawn: int = 0
    num_segments: int = 0
    num_rows: int = 0
    """Prompts of those segments."""
    num_units: int = 0
    num_results: int = 0
    num_parked: int = 0
    num_batches: int = 0
    num_drops: int = 0
    num_returned: int = 0
    """Units that were sent back, opened again, retried or released."""
    num_checkpoints: int = 0
    num_weights: int = 0
    num_branches: int = 0
    num_retired: int = 0
    num_offered: int = 0
    num_unverified: int = 0
    """Messages of results whose checksum nobody wrote down before the index was lost."""
    positions: dict[str, tuple[int, int]] = field(default_factory=dict)
    """branch/consumer: (position, last planned step)."""
    incarnation: int = 0
    """Highest that anything met was written in."""
    num_missing: int = 0
    """Packs that the index names and that are gone or too short; told among the losses."""
    losses: list[Loss] = field(default_factory=list)


def reconstruct(
    connection: Connection, root: Path, config: RunConfig, *, lossy: bool = False
) -> Reconstruction:
    """Add to the index in this transaction whatever the run's folder holds beyond it; every session in it is lost.

    With `lossy` a hole in the journal is told among the losses, and what it would have led to is left out.

    Raises:
        CorruptPackError: the journal has a hole, or what was found cannot all be true; nothing is to be committed.
        StorageError: a file cannot be read.
    """
    with reconstruction.contradictions_told():
        work = _Work(connection, root, config, lossy=lossy)
        try:
            return work.run()
        finally:
            work.packs.close()


class _Work:
    def __init__(self, connection: Connection, root: Path, config: RunConfig, *, lossy: bool) -> None:
        self.connection, self.config, self.lossy = connection, config, lossy
        self.report = Reconstruction()
        self.packs = FoundPacks(connection, root)
        self.manifests = read_manifests(root)
        self.entries: list[StoredEntry] = []
        self._last_met = 0
        self._has_holes = False

    def run(self) -> Reconstruction:
        report = self.report
        self.packs.bring_back_moved()
        self.entries, report.num_withdrawn = choice.without_withdrawn(self.packs.entries())
        report.num_entries = len(self.entries)
        if not self.entries and self.packs.num_packs and not reconstruction.datasets_of(self.connection):
            raise CorruptPackError(
                f"{self.packs.root} has packs and no journal that can be read: it was written by a program before "
                "journals, or they are gone; restore a backup"
            )
        for hole in self.packs.holes:
            self._on_hole(
                f"{hole}: what it told of is lost, which may be admissions, plans, drops, checkpoints or weights"
            )
        self.manifests += manifests_of(self.entries, self.packs.root, known=self.manifests)
        if branches.find(self.connection, MAIN_BRANCH) is None:
            began = min((entry.at_ms for entry in self.entries), default=None)
            branches.create(self.connection, MAIN_BRANCH)
            if began is not None:
                reconstruction.date_branch(self.connection, MAIN_BRANCH, clock.shown(began))
            consumers.ensure(self.connection, MAIN_BRANCH, TRAINER)
        self._segments()
        lines = Lines(
            self.connection,
            self.config,
            self.packs,
            self.entries,
            self.manifests,
            on_hole=self._on_hole,
            is_met=self._is_met,
        )
        known = [branch.branch_id for branch in branches.listed(self.connection)]
        started = choice.branches_in_order(self.entries, known=known)
        for branch_id in known:
            self._admissions(branch_id)
            lines.bring_back(branch_id)
        for entry in started:
            self._start_branch(entry)
            self._admissions(entry.branch_id)
            lines.bring_back(entry.branch_id)
        self._results()
        for branch_id in known:
            lines.drop_again(branch_id)
        for entry in started:
            for consumer, position, _ in _starts(entry):
                inherit_drops(
                    self.connection, entry.branch_id, consumer, parent_id=entry.head["parent"], step=position
                )
            lines.drop_again(entry.branch_id)
        report.num_returned = returns.bring_back(
            self.connection, returned.told(self.entries), given_up=UNIT_FAILED
        )
        self.packs.drop_superseded()
        self._finish(lines)
        return report

    def _on_hole(self, message: str) -> None:
        if not self.lossy:
            raise CorruptPackError(
                f"{message}: the journal is damaged; restore a backup, or go on with --lossy"
            )
        self._has_holes = True
        self.packs.losses.append(Loss("journal", "hole", message))

    # ---- prompts

    def _segments(self) -> None:
        named = {e.head["dataset"] for e in self.entries if e.kind is EntryKind.SEGMENT}
        for dataset_id in sorted(named):
            next_seq = datasets.next_segment_seq(self.connection, dataset_id)
            found = choice.segments_in_order(
                self.entries, dataset_id, next_seq=next_seq, is_met=self._is_met, on_hole=self._on_hole
            )
            for entry, is_certain in found:
                self._add_segment(entry, is_certain=is_certain)
        admitted = {e.head["dataset"] for e in self.entries if e.kind is EntryKind.ADMISSION}
        for dataset_id in sorted(admitted - set(reconstruction.datasets_of(self.connection))):
            self._on_hole(
                f"units were admitted from dataset {dataset_id!r}, and nothing tells of its segments"
            )

    def _add_segment(self, entry: StoredEntry, *, is_certain: bool) -> None:
        body = entry.body
        dataset_id = body["dataset"]
        found = [
            (first, *self.packs.find_or_quarantine(ExtentRef.of("prompt", ref)))
            for first, ref in body["extents"]
        ]
        datasets.ensure(self.connection, dataset_id, purpose=body["purpose"])
        try:
            with self.connection.begin_nested():
                segment = datasets.add_segment(
                    self.connection,
                    dataset_id,
                    num_rows=body["num_rows"],
                    source=body["source"],
                    priority=body.get("priority", 0),
                )
                datasets.add_segment_extents(
                    self.connection,
                    segment.segment_id,
                    [(first, extent.extent_id) for first, extent, _ in found],
                )
                for _, extent, is_whole in found:
                    if is_whole:
                        self._add_identities(dataset_id, extent)
        except ConflictError:
            if is_certain:
                raise
            return  # the same rows were enqueued again: this writer was killed before its transaction
        self.report.num_segments += 1
        self.report.num_rows += body["num_rows"]

    def _add_identities(self, dataset_id: str, extent: Extent) -> None:
        rows = self.packs.read(extent).select(["content_digest", "occurrence"])
        pairs = zip(*(column.to_pylist() for column in rows.columns), strict=True)
        datasets.add_rows(self.connection, dataset_id, list(pairs))

    # ---- branches and admissions

    def _start_branch(self, entry: StoredEntry) -> None:
        body, name = entry.body, entry.branch_id
        branches.create(
            self.connection,
            name,
            parent_id=body["parent"],
            from_checkpoint_id=body["from_checkpoint"],
            from_step=body["from_step"],
            starts={consumer: position for consumer, position, _ in body.get("starts", ())},
            weights_step=body.get("weights_step"),
        )
        reconstruction.date_branch(self.connection, name, clock.shown(entry.at_ms))
        if branches.find(self.connection, body["parent"]) is None:
            self._on_hole(
                f"branch {name!r} began from branch {body['parent']!r}, and nothing tells how that one began"
            )
        positions: dict[str, int] = {}
        for consumer, positions[consumer], purposes in _starts(entry):
            consumers.ensure(self.connection, name, consumer, purposes=purposes, position=positions[consumer])
        parents = reconstruction.carried_units(self.connection, body["carried"])
        parents |= history_again.from_entry(self.connection, body.get("retired", ()))
        if missing := set(body["carried"]) - parents.keys():
            self._on_hole(f"branch {name!r} took unit {min(missing)} up, which nothing admitted")
            return
        carried = list(inherit.with_results(body, parents, self.packs.find_anyway).values())
        carry.carry_over(
            self.connection,
            carried,
            to_branch=name,
            first_id=body["first_unit_id"],
            seen={
                consumer: (positions[consumer], places) for consumer, places in body.get("seen", {}).items()
            },
        )
        inherit_cursors(self.connection, name, body["cursors"], Counter(c.dataset_id for c in carried))
        meta.put(self.connection, ACTIVE_BRANCH, name)
        self.report.num_branches += 1
        self.report.num_units += len(carried)

    def _admissions(self, branch_id: str) -> None:
        for dataset_id in reconstruction.datasets_of(self.connection):
            cursor = datasets.cursor(self.connection, branch_id, dataset_id)
            segments = datasets.segments_of(self.connection, dataset_id)
            for entry in choice.admissions_in_order(
                [e for e in self.entries if not self._is_of_other_rows(e, dataset_id, segments)],
                branch_id,
                dataset_id,
                cursor=cursor_fields(cursor),
                is_met=self._is_met,
                on_hole=self._on_hole,
            ):
                moved = self._admit(branch_id, cursor, entry)
                if moved is None:
                    break
                cursor = moved

    def _is_of_other_rows(self, entry: StoredEntry, dataset_id: str, segments: Sequence[Segment]) -> bool:
        """Tell whether an admission came with rows of its own, and its dataset has others in their place."""
        head = entry.head
        seq = head.get("whole_segment")
        if entry.kind is not EntryKind.ADMISSION or head["dataset"] != dataset_id or seq is None:
            return False
        if seq >= len(segments):
            return True
        digest = datasets.first_digest(self.connection, segments[seq].segment_id).hex()
        return bool(head["read"][0][2] != digest)

    def _admit(self, branch_id: str, cursor: Cursor, entry: StoredEntry) -> Cursor | None:
        head = entry.head
        purpose, profile = head["purpose"], head["profile"]
        segments = datasets.segments_of(self.connection, cursor.dataset_id)[: head["num_segments"]]
        if not segments:
            self._on_hole(
                f"dataset {cursor.dataset_id!r} has none of the segments that units were admitted from"
            )
            return None
        schedule = Schedule.from_fields(head.get("schedule", {}))
        make = schedule.maker(purpose, profile)
        if "whole_segment" in head:
            new, moved = take_segment(cursor, segments[-1], make=make)
        else:
            new, moved = take_rows(cursor, segments, head["count"], seed=self.config.run.seed, make=make)
        if cursor_fields(moved) != head["after"] or len(segments) != head["num_segments"]:
            self._on_hole(
                f"the admission of {head['count']} units from dataset {cursor.dataset_id!r} does not lead where the "
                "journal says: segments are missing, or config.json was changed"
            )
            return None
        units.admit(self.connection, branch_id, new, ids=told_ids(entry.body))
        datasets.cursor_for_update(self.connection, branch_id, cursor.dataset_id)
        datasets.move_cursor(self.connection, branch_id, moved, expected_version=cursor.version)
        if (state := head.get("source_state")) is not None:
            datasets.put_source_state(self.connection, branch_id, cursor.dataset_id, state)
        self._draws_go_on(branch_id, head.get("mixture"))
        self.report.num_units += len(new)
        return moved

    def _draws_go_on(self, branch_id: str, told: str | None) -> None:
        """Take up what draws by weight go on from; of the admissions of several sets the last drawn tells it."""
        stored = Mixture.from_text(mixtures.find(self.connection, branch_id))
        if told is not None and Mixture.from_text(told).version > stored.version:
            mixtures.put(self.connection, branch_id, told)

    def _is_met(self, first_id: int, count: int) -> bool:
        at = np.searchsorted(self._unit_ids_met, first_id)
        return bool(at < len(self._unit_ids_met) and self._unit_ids_met[at] < first_id + count)

    @cached_property
    def _unit_ids_met(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Every unit that anything tells of, in order; asked only when two admissions claim one cursor."""
        met: set[int] = set()
        for entry in self.entries:
            if entry.kind is EntryKind.PLAN:
                met.update(choice.units_of_plan(entry))
            elif entry.kind is EntryKind.DROP:
                met.update(unit_id for _, unit_id, _, _ in entry.body["units"])
            elif entry.kind in (EntryKind.BRANCH, EntryKind.CONSUMER):
                met.update(entry.body.get("carried", ()))
            elif entry.kind in returned.KINDS:
                met.update(unit_id for unit_id, *_ in entry.body["units"])
        for kind in journal.RESULTS:
            for _, rows in self.packs.messages(kind):
                met.update(rows.column("unit_id").to_pylist())
        return np.array(sorted(met), np.int64)

    # ---- results

    def _results(self) -> None:
        steps = reconstruction.steps_of_versions(self.connection)
        for extent, rows in self.packs.results("trajectory"):
            for groups in _chunks(groups_of(rows)):
                self._take_results(extent, groups, steps)
        progress = FoundProgress()
        for kind in ("continuation", "progress"):
            for extent, rows in self.packs.results(kind):
                for groups in _chunks(groups_of(rows)):
                    for group, profile in self._newer(groups, steps):
                        if kind == "progress" or group.has_all(profile.num_samples):
                            progress.add(extent, group)
        for chain in progress.chains():
            self._take_chain(chain, steps)

    def _take_results(self, extent: Extent, groups: Iterable[FoundGroup], steps: dict[str, int]) -> None:
        best: dict[int, FoundGroup] = {}
        for group, profile in self._newer(groups, steps):
            held = best.get(group.unit_id)
            is_newer = held is None or (group.fence, group.seq) > (held.fence, held.seq)
            if is_newer and group.has_all(profile.num_samples):
                best[group.unit_id] = group
        if best:
            extent_id = self.packs.name(extent).extent_id
            results = [_result(group, UnitState.COMPLETED, extent_id, steps) for group in best.values()]
            reconstruction.take_results(self.connection, results)
            self.report.num_results += len(best)

    def _take_chain(self, chain: list[tuple[Extent, FoundGroup]], steps: dict[str, int]) -> None:
        """Let a unit go on from its saved progress."""
        placed = [(self.packs.name(extent).extent_id, group) for extent, group in chain]
        results = [_result(group, UnitState.READY, extent_id, steps) for extent_id, group in placed]
        whole = replace(
            results[0],
            fence=results[-1].fence,
            seq=results[-1].seq,
            version_step=min(r.version_step for r in results),
            num_tokens=sum(r.num_tokens for r in results),
        )
        reconstruction.take_results(self.connection, [whole])
        records = [
            SavedRecord(r.unit_id, r.fence, r.seq, r.extent_id, r.row_start, r.row_count) for r in results[1:]
        ]
        continuations.put(self.connection, records)
        self.report.num_parked += 1

    def _newer(
        self, groups: Iterable[FoundGroup], steps: dict[str, int]
    ) -> Iterator[tuple[FoundGroup, SamplingProfile]]:
        """Yield the sound groups of units that the index knows, newer than what it has of them."""
        profiles = self.config.profiles()
        groups = list(groups)
        standing = reconstruction.standing_of(self.connection, {g.unit_id for g in groups})
        for group in groups:
            self.report.incarnation = max(self.report.incarnation, reconstruction.incarnation_of(group.fence))
            self._last_met = max(self._last_met, group.unit_id)
            unit = standing.get(group.unit_id)
            if unit is None:
                continue
            if unit.profile not in profiles:
                raise CorruptPackError(
                    f"unit {group.unit_id} is of profile {unit.profile!r}, which config.json does not have: it was changed"
                )
            if (
                (group.fence, group.seq) > (unit.fence, unit.seq)
                and group.is_sound
                and group.purpose == unit.purpose
                and group.versions <= steps.keys()
            ):
                yield group, profiles[unit.profile]

    # ---- the end

    def _finish(self, lines: Lines) -> None:
        report, connection = self.report, self.connection
        reconstruction.set_fated_aside(connection, reason=LOST_ERROR, dropped_as=UNIT_FAILED)
        aside = reconstruction.set_fated_aside(connection, reason=LOST_RESULT)
        report.num_retired = self._retire()
        for unit_id in sorted(set(aside) - self._retired):
            self.packs.losses.append(Loss("unit", str(unit_id), LOST_RESULT))
        for unit_id in reconstruction.set_unservable_aside(connection, reason=LOST_WEIGHTS):
            self.packs.losses.append(Loss("unit", str(unit_id), LOST_WEIGHTS))
        report.num_offered = reconstruction.offer_again(connection)
        reconstruction.raise_ids(connection, self._last_unit_id())
        fences = [int(e.head["fence"]) for e in self.entries if "fence" in e.head]
        fences += [m.fence for m in self.manifests]
        report.incarnation = max(
            report.incarnation,
            max((e.incarnation for e in self.entries), default=0),
            reconstruction.incarnation_of(max(fences, default=0)),
        )
        packs = self.packs
        missing = packs.missing()
        report.num_missing = len(missing)
        packs.losses += missing
        if self._has_holes:
            self._tell_unconnected(lines)
        report.num_packs, report.num_extents, report.num_moved = (
            packs.num_packs,
            packs.num_named,
            packs.num_moved,
        )
        report.num_unverified, report.losses = packs.num_unverified, packs.losses
        report.num_batches, report.num_drops = lines.num_batches, lines.num_drops
        report.num_checkpoints, report.num_weights = lines.num_checkpoints, lines.num_weights
        report.positions = {"/".join(line): found for line, found in lines.positions.items()}

    def _tell_unconnected(self, lines: Lines) -> None:
        hanging = choice.unconnected(
            self.entries,
            self.manifests,
            planned={line: planned for line, (_, planned) in lines.positions.items()},
            branch_ids=[branch.branch_id for branch in branches.listed(self.connection)],
        )
        self.packs.losses += [Loss(u.what, u.subject, u.message) for u in hanging]

    def _retire(self) -> int:
        """Let units that had left for the history leave again; events that did are named where they lie."""
        self._retired: set[int] = set()
        for extent, rows in self.packs.messages("history", only_new=True):
            self.packs.name(extent)
            wanted = {
                row["unit_id"]: len(row["consumers"])
                for row in rows.select(["unit_id", "consumers"]).to_pylist()
            }
            self._retired |= retired_again.retire_again(self.connection, wanted)
        for extent, _ in self.packs.messages("event", only_new=True):
            self.packs.name(extent)
        return len(self._retired)

    def _last_unit_id(self) -> int:
        ends = [self._last_met]
        for entry in self.entries:
            head = entry.head
            if entry.kind is EntryKind.ADMISSION:
                ends.append(told_ids(entry.body)[-1])
            elif entry.kind is EntryKind.WEIGHTS:
                ends.append(head["evaluation"]["first_unit_id"] + head["evaluation"]["count"] - 1)
            elif entry.kind in (EntryKind.BRANCH, EntryKind.CONSUMER) and "first_unit_id" in head:
                ends.append(head["first_unit_id"] + len(entry.body["carried"]) - 1)
        return max(ends)


def _starts(entry: StoredEntry) -> list[tuple[str, int, list[str]]]:
    """Return (consumer, position, purposes) of those who go on on a branch: once only the one of the checkpoint did."""
    head = entry.head
    told = head.get("starts", [[head["consumer"], head["from_step"], consumers.TRAINABLE]])
    return [(consumer, position, list(purposes)) for consumer, position, purposes in told]


def _chunks(groups: Iterable[FoundGroup]) -> Iterator[list[FoundGroup]]:
    groups = iter(groups)
    while chunk := list(islice(groups, _CHUNK)):
        yield chunk


def _result(group: FoundGroup, state: UnitState, extent_id: int, steps: dict[str, int]) -> FoundResult:
    return FoundResult(
        unit_id=group.unit_id,
        fence=group.fence,
        seq=group.seq,
        state=state,
        extent_id=extent_id,
        row_start=group.row_start,
        row_count=group.row_count,
        version_step=min((steps[v] for v in group.versions), default=0),
        mean_reward=group.mean_reward,
        num_tokens=group.num_tokens,
    )
