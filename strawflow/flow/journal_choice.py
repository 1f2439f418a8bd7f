"""Which journal entries are believed once the index that could tell is gone: pure functions over entries and manifests.

1. Whatever was committed and seen by anyone is chosen: what contradicts it was written by a process that was killed before
   its transaction, or by one that had lost its role.
2. Of entries that cannot both be true the one wins that others build on: a checkpoint of the batches up to it, a batch
   of the one before, an admission of its cursor. Where nothing builds on either, the higher fence, then the later entry:
   nobody can have seen the other.
3. A hole in what builds on one another is told: the journal is damaged, and a rebuild from it would lose or repeat work.

It reads no file and knows no index.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from strawflow.flow.admission import told_runs
from strawflow.flow.journal import EntryKind, Place, StoredEntry

Line = tuple[str, str]
"""(branch, consumer)."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint's own files say of the place it has in the run."""

    branch_id: str
    consumer: str
    step: int
    fence: int
    batch_digest: str
    state_digest: str
    path: str


def without_withdrawn(entries: Iterable[StoredEntry]) -> tuple[list[StoredEntry], int]:
    """Return the entries in order of their places, without those that were refused, and how many those were."""
    entries = sorted(entries, key=lambda entry: entry.place)
    refused = {
        entry_id
        for entry in entries
        if entry.kind is EntryKind.WITHDRAWN
        for entry_id in entry.head["entries"]
    }
    kept = [e for e in entries if e.kind is not EntryKind.WITHDRAWN and e.entry_id not in refused]
    return kept, len(entries) - len(kept) - sum(e.kind is EntryKind.WITHDRAWN for e in entries)


def branches_in_order(entries: Iterable[StoredEntry], *, known: Iterable[str]) -> list[StoredEntry]:
    """Return the entries of branches that are not known yet in order of creation, one for each name."""
    newest: dict[str, StoredEntry] = {}
    for entry in entries:
        if entry.kind is EntryKind.BRANCH and entry.branch_id not in known:
            newest[entry.branch_id] = max(entry, newest.get(entry.branch_id, entry), key=_creation)
    return sorted(newest.values(), key=_creation)


def _creation(entry: StoredEntry) -> tuple[int, int, int]:
    return entry.incarnation, int(entry.head["first_unit_id"]), entry.at_ms


def consumers_in_order(
    entries: Iterable[StoredEntry], *, known: Collection[str], is_met: Callable[[int, int], bool]
) -> list[StoredEntry]:
    """Return one entry for each consumer of a branch that is not known yet; first those whose units others build on.

    Several may have been about to make one consumer, or to take the same units up for theirs: at most one of those that
    give a unit was committed, and where nothing tells of the ids that it gave, nobody has seen any.
    """
    of_name: dict[str, list[StoredEntry]] = defaultdict(list)
    for entry in entries:
        if entry.kind is EntryKind.CONSUMER and entry.head["consumer"] not in known:
            of_name[entry.head["consumer"]].append(entry)
    giving = [e for found in of_name.values() for e in found if "first_unit_id" in e.head]
    built_on: set[str] = set()
    if len(giving) > 1:
        built_on = {
            e.entry_id for e in giving if is_met(int(e.head["first_unit_id"]), len(e.body["carried"]))
        }

    def authority(entry: StoredEntry) -> tuple[bool, int, Place]:
        return entry.entry_id in built_on, entry.incarnation, entry.place

    return sorted((max(found, key=authority) for found in of_name.values()), key=authority, reverse=True)


def segments_in_order(
    entries: Sequence[StoredEntry],
    dataset_id: str,
    *,
    next_seq: int,
    is_met: Callable[[int, int], bool],
    on_hole: Callable[[str], None],
) -> list[tuple[StoredEntry, bool]]:
    """Return a dataset's segments from `next_seq` on, and whether each is certain.

    Two files may have claimed one number, one of them killed before its transaction: the one that prompts were admitted
    from has it, of two that came with their admissions the one whose units were met; the other is put behind all others, not
    certain. `on_hole` hears of a number that is missing.
    """
    claims: dict[int, list[StoredEntry]] = defaultdict(list)
    last_of: dict[str, StoredEntry] = {}
    for entry in entries:
        if entry.kind is EntryKind.SEGMENT and entry.head["dataset"] == dataset_id:
            # The same file may have claimed several numbers: the last is its own.
            first = _first_digest(entry)
            last_of[first] = max(
                entry, last_of.get(first, entry), key=lambda e: (int(e.head["segment_seq"]), e.place)
            )
    for entry in last_of.values():
        claims[int(entry.head["segment_seq"])].append(entry)
    admitted = _segments_admitted_from(entries, dataset_id)
    chosen: list[tuple[StoredEntry, bool]] = []
    behind: list[tuple[StoredEntry, bool]] = []
    for seq in range(next_seq, max(claims, default=-1) + 1):
        claimants = sorted(claims.get(seq, ()), key=lambda e: e.place)
        if not claimants:
            on_hole(f"dataset {dataset_id!r} has a segment after number {seq}, which is missing")
            break
        winner = claimants[0]
        if len(claimants) > 1:
            winner = max(claimants, key=lambda e: _claim_on_segment(e, admitted[seq], is_met, claimants[0]))
        chosen.append((winner, True))
        # One of an earlier incarnation belongs to a future that a restore gave up.
        behind += [(e, False) for e in claimants if e is not winner and e.incarnation == winner.incarnation]
    return chosen + behind


def _claim_on_segment(
    entry: StoredEntry,
    admitted: Mapping[str, Sequence[StoredEntry]],
    is_met: Callable[[int, int], bool],
    first: StoredEntry,
) -> tuple[int, bool, bool, int, bool]:
    """Return how good a claim on a segment's number is; `admitted` are the admissions from it, by digest of its rows."""
    own = admitted.get(_first_digest(entry)[:32], ())
    came_with_it = [a for a in own if "whole_segment" in a.head]
    return (
        entry.incarnation,
        any(is_met(*run) for a in came_with_it for run in told_runs(a.body)),
        bool(own),
        # Of two that came with their admissions the later one found the number free.
        max((a.at_ms for a in came_with_it), default=0),
        entry is first,
    )


def _first_digest(entry: StoredEntry) -> str:
    return str(entry.body["extents"][0][1][0])


def _segments_admitted_from(
    entries: Iterable[StoredEntry], dataset_id: str
) -> dict[int, dict[str, list[StoredEntry]]]:
    """Return {segment number: {digest of its first extent: the admissions from it}}."""
    admitted: dict[int, dict[str, list[StoredEntry]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        if entry.kind is EntryKind.ADMISSION and entry.head["dataset"] == dataset_id:
            for seq, _, digest in entry.head["read"]:
                admitted[seq][digest].append(entry)
    return admitted


def admissions_in_order(
    entries: Iterable[StoredEntry],
    branch_id: str,
    dataset_id: str,
    *,
    cursor: Sequence[int],
    is_met: Callable[[int, int], bool],
    on_hole: Callable[[str], None],
) -> list[StoredEntry]:
    """Return the admissions that lead on from a cursor; `is_met` tells whether any unit of (first id, count) was met.

    `on_hole` hears of one that is missing between others.
    """
    following: dict[tuple[int, ...], list[StoredEntry]] = defaultdict(list)
    for entry in entries:
        head = entry.head
        if entry.kind is EntryKind.ADMISSION and (entry.branch_id, head["dataset"]) == (
            branch_id,
            dataset_id,
        ):
            following[tuple(head["before"])].append(entry)
    at = tuple(cursor)
    chosen: list[StoredEntry] = []
    while candidates := following.pop(at, None):
        best = candidates[0]
        if len(candidates) > 1:
            best = max(
                candidates,
                key=lambda e: (
                    e.incarnation,
                    any(is_met(first, count) for first, count in told_runs(e.body)),
                    tuple(e.head["after"]) in following,
                ),
            )
        chosen.append(best)
        at = tuple(best.head["after"])
    if missing := [before for before in following if before[0] > at[0]]:
        on_hole(
            f"the admission that moved the cursor of dataset {dataset_id!r} on branch {branch_id!r} to version "
            f"{min(missing)[0]} is missing"
        )
    return chosen


def resumed_at(entries: Iterable[StoredEntry], line: Line) -> dict[int, int]:
    """Return {fence of a trainer: the committed step it went on from, at most}, as far as it left a trace."""
    found: dict[int, int] = {}
    for entry in entries:
        head = entry.head
        if (entry.branch_id, head.get("consumer")) != line:
            continue
        match entry.kind:
            case EntryKind.STEP:
                step = int(head["step"]) - 1
            case EntryKind.CHECKPOINT:
                step = int(head["previous_step"])
            case EntryKind.ADVANCE:
                step = int(head["from_step"])
            case EntryKind.WEIGHTS:  # of the step it went on from, or of a later one
                step = int(head["step"])
            case _:
                continue
        fence = int(head["fence"])
        found[fence] = min(step, found.get(fence, step))
    return found


def is_contradicted(step: int, fence: int, resumed: Mapping[int, int]) -> bool:
    """Tell whether a later trainer went on from before `step`: then what this fence wrote of it was not committed."""
    return any(later > fence and at < step for later, at in resumed.items())


def manifests_by_preference(
    manifests: Iterable[Manifest], line: Line, resumed: Mapping[int, int]
) -> list[Manifest]:
    """Return the checkpoints of a line that no later trainer contradicts, the newest first."""
    mine = [
        m
        for m in manifests
        if (m.branch_id, m.consumer) == line and not is_contradicted(m.step, m.fence, resumed)
    ]
    return sorted(mine, key=lambda m: (m.fence, m.step), reverse=True)


def _authority(entry: StoredEntry) -> tuple[int, Place]:
    return int(entry.head["fence"]), entry.place


class PlanChain:
    """The planned batches of one line, each told by the digest of all up to it."""

    def __init__(self, entries: Iterable[StoredEntry], line: Line, *, step: int, digest: str) -> None:
        """Start behind `step`, whose digest is `digest`."""
        self._base = step, digest
        self._by_digest: dict[tuple[int, str], StoredEntry] = {}
        self._following: dict[tuple[int, str], list[StoredEntry]] = defaultdict(list)
        self._void: dict[str, int] = {}
        for entry in entries:
            head = entry.head
            if (entry.branch_id, head.get("consumer")) != line:
                continue
            if entry.kind is EntryKind.VOID:
                for voided in head["digests"]:
                    self._void[voided] = max(int(head["fence"]), self._void.get(voided, 0))
            if entry.kind is EntryKind.PLAN:
                at = int(head["step"])
                same = self._by_digest.get((at, head["digest"]), entry)
                self._by_digest[at, head["digest"]] = max(entry, same, key=_authority)
                self._following[at, head["previous"]].append(entry)

    def up_to(self, step: int, digest: str) -> list[StoredEntry] | None:
        """Return the batches from the start to this one; None when they do not lead there."""
        found: list[StoredEntry] = []
        while (step, digest) != self._base:
            entry = self._by_digest.get((step, digest))
            if entry is None or step <= self._base[0]:
                return None
            found.append(entry)
            step, digest = step - 1, str(entry.head["previous"])
        return found[::-1]

    def beyond(self, step: int, digest: str, *, fits: Callable[[StoredEntry], bool]) -> Iterator[StoredEntry]:
        """Yield the batches planned after this one, each before the next is asked for.

        `fits` tells whether a batch gives none of its units away again: one that does was never committed.
        """
        while True:
            # A batch that was taken back may have been planned again in the same bytes, under a higher fence.
            candidates = [
                e
                for e in self._following.get((step + 1, digest), ())
                if int(e.head["fence"]) >= self._void.get(e.head["digest"], 0)
            ]
            candidates.sort(key=_authority, reverse=True)
            best = next((e for e in candidates if fits(e)), None)
            if best is None:
                return
            yield best
            step, digest = step + 1, str(best.head["digest"])


@dataclass(frozen=True)
class Unconnected:
    """What an entry or a checkpoint tells of and nothing led to."""

    what: str
    subject: str
    message: str


def unconnected(
    entries: Sequence[StoredEntry],
    manifests: Iterable[Manifest],
    *,
    planned: Mapping[Line, int],
    branch_ids: Iterable[str],
) -> list[Unconnected]:
    """Return what a journal with holes could not connect; `planned` is the last step that each line was brought back to.

    Batches that were taken back are left out: they may have been planned again.
    """
    found: dict[tuple[str, str], Unconnected] = {}

    def tell(what: str, subject: str, line: Line) -> None:
        branch_id, consumer = line
        where = f"of consumer {consumer!r} on branch {branch_id!r}"
        if branch_id not in known:
            why = f"{where}: nothing tells how this branch began"
        elif line not in planned:
            why = f"{where}: nothing tells how this consumer began"
        else:
            why = f"{where}: no batches lead to it from step {planned[line]}"
        found.setdefault((what, f"{subject} {line}"), Unconnected(what, subject, why))

    known = set(branch_ids)
    voided = {d for e in entries if e.kind is EntryKind.VOID for d in e.head["digests"]}
    for entry in entries:
        head = entry.head
        line = entry.branch_id, str(head.get("consumer"))
        match entry.kind:
            case EntryKind.PLAN if head["digest"] not in voided and head["step"] > planned.get(line, -1):
                tell("batch", f"step {head['step']}", line)
            case EntryKind.CHECKPOINT if head["step"] > planned.get(line, -1):
                tell("checkpoint", str(head["path"]), line)
            case _:
                continue
    for manifest in manifests:
        line = manifest.branch_id, manifest.consumer
        if manifest.step > planned.get(line, -1):
            tell("checkpoint", manifest.path, line)
    return list(found.values())


def units_of_plan(entry: StoredEntry) -> list[int]:
    """Return the units that a batch gives a fate."""
    return [unit_id for _, _, _, unit_ids in entry.body["fates"] for unit_id in unit_ids]


def advanced_to(entries: Iterable[StoredEntry], line: Line, resumed: Mapping[int, int]) -> int:
    """Return the last step that a consumer committed without a checkpoint; 0 when none."""
    return max(
        (
            int(e.head["step"])
            for e in entries
            if e.kind is EntryKind.ADVANCE
            and (e.branch_id, e.head["consumer"]) == line
            and not is_contradicted(int(e.head["step"]), int(e.head["fence"]), resumed)
        ),
        default=0,
    )
