"""Checking a run: every promise that can be asked of its rows and bytes, asked.

1. Reads only. Every extent of every pack that is not condemned is read and verified, one at a time.
2. P1 as a query: every admitted unit is open or has exactly one fate; P2: the cursor counts what was admitted.
3. A finding is reported, never repaired here; an empty report means all promises held when it was asked.
4. Damage that is in quarantine and that nothing needs any more is counted, and so are bytes that nothing names: neither is
   a broken promise.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from strawflow.errors import (
    CorruptCheckpointError,
    CorruptPackError,
    IncompatibleFormatError,
    StorageError,
    StrawflowError,
)
from strawflow.flow import later_packs
from strawflow.flow.index_place import SWEEP_BLOCKED
from strawflow.flow.run import Run
from strawflow.ids import Extent
from strawflow.index import audit, checkpoints, meta, packs, quarantine, weights
from strawflow.index.packs import Pack
from strawflow.packs.places import open_place
from strawflow.packs.posix import file_of
from strawflow.packs.reader import PackReader
from strawflow.packs.scan import open_scan
from strawflow.plural import counted
from strawflow.states import PackState
from strawflow.weights.verify import verify_checkpoint, verify_weights


@dataclass(frozen=True)
class Finding:
    """One broken promise: which check, what it is about, what is wrong."""

    check: str
    subject: str
    message: str


@dataclass
class CheckReport:
    """What was looked at and what was found."""

    num_packs: int = 0
    num_extents: int = 0
    num_rows: int = 0
    num_bytes: int = 0
    num_quarantined: int = 0
    """Damaged extents in quarantine that nothing needs any more."""
    num_unnamed: int = 0
    """Messages in packs that no row names: never accepted, or waiting for the sweep."""
    unnamed_bytes: int = 0
    num_unnamed_files: int = 0
    """Files under packs/ that no row names."""
    unnamed_file_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        return not self.findings


@dataclass(frozen=True)
class Looked:
    """An extent that was read, and the error if that failed."""

    pack: Pack
    extent: Extent
    error: StrawflowError | None
    is_missing: bool = False
    """Whether the pack's file is not there at all."""

    @property
    def is_out_of_reach(self) -> bool:
        """Whether the bytes may be whole and could only not be had just now: permissions, a mount that does not answer."""
        cause = None if self.error is None else self.error.__cause__
        return isinstance(cause, OSError) and not self.is_missing and cause.errno != errno.EIO


def check(run: Run, *, on_pack: Callable[[Pack], None] | None = None) -> CheckReport:
    """Read every live extent and ask every question; `on_pack` hears of each pack before it is read."""
    report = CheckReport()
    _check_rows(run, report)
    with run.index.read() as connection:
        contained = quarantine.listed(connection)
    for pack, looks in read_packs(run):
        if on_pack is not None:
            on_pack(pack)
        report.num_packs += 1
        extents: list[Extent] = []
        damaged: list[Looked] = []
        for looked in looks:
            extents.append(looked.extent)
            if looked.error is not None:
                damaged.append(looked)
            elif looked.extent.extent_id in contained:
                report.findings.append(_lifted(looked))
            else:
                report.num_extents += 1
                report.num_rows += looked.extent.num_rows
                report.num_bytes += looked.extent.length
        report.findings += _damage(run, pack, damaged, contained, report)
        if not any(looked.is_missing for looked in damaged):
            report.findings += _check_file(run, pack, extents, report)
    _check_unnamed_files(run, report)
    return report


def read_packs(run: Run) -> Iterator[tuple[Pack, Iterator[Looked]]]:
    """Yield every pack that is not condemned, and its extents as they are read; nothing is kept of them."""
    reader = PackReader(run.root)
    with run.index.read() as connection:
        listed = packs.listed(connection)
    try:
        for pack in listed:
            if pack.state is not PackState.CONDEMNED:
                yield pack, _read(run, reader, pack)
    finally:
        reader.close()


def _read(run: Run, reader: PackReader, pack: Pack) -> Iterator[Looked]:
    with run.index.read() as connection:
        extents = packs.extents_of_pack(connection, pack.pack_id)
    for extent in extents:
        try:
            reader.read(extent)
        except (CorruptPackError, StorageError, IncompatibleFormatError) as error:
            if _still_lies_there(run, extent):
                missing = isinstance(error.__cause__, FileNotFoundError)
                yield Looked(pack, extent, error, is_missing=missing)
            continue
        yield Looked(pack, extent, None)


def _still_lies_there(run: Run, extent: Extent) -> bool:
    """Tell whether an extent that could not be read was not just moved, which salvage and compaction do."""
    with run.index.read() as connection:
        return any(e == extent for e in packs.extents_of_pack(connection, extent.pack_id))


def _check_rows(run: Run, report: CheckReport) -> None:
    with run.index.read() as connection:
        questions = {
            "fate": audit.broken_fates(connection, run.branch, run.consumer),
            "cursor": audit.broken_cursors(connection, run.branch),
            "batch": audit.broken_batches(connection, run.branch, run.consumer),
            "count": audit.broken_counts(connection),
            "dangling": audit.dangling(connection),
        }
        newest_checkpoint = checkpoints.newest(connection, run.branch, run.consumer)
        newest_weights = weights.newest(connection, run.branch)
    report.findings += [Finding(name, *answer) for name, answers in questions.items() for answer in answers]
    # Only the newest must be there: older weights are removed as they fall out of use.
    if newest_checkpoint is not None:
        path = newest_checkpoint.path
        report.findings += _problem("checkpoint", path, lambda: verify_checkpoint(run.root / path))
    if newest_weights is not None:
        folder, digest = newest_weights.path, newest_weights.digest
        report.findings += _problem("weights", folder, lambda: verify_weights(run.root / folder, digest))


def _problem(kind: str, path: str, verify: Callable[[], object]) -> list[Finding]:
    try:
        verify()
    except (CorruptCheckpointError, IncompatibleFormatError) as error:
        return [Finding(kind, path, error.message)]
    return []


def _lifted(looked: Looked) -> Finding:
    message = "is in quarantine and whole again: `strawflow index quarantine RUN --yes` gives it back"
    return Finding("extent", str(looked.extent.extent_id), message)


_NEXT = "`strawflow index quarantine RUN` tells what it held and what can be done"
_OUT_OF_REACH = "that is no damage: let this user read it, or mend the mount"


def _damage(
    run: Run,
    pack: Pack,
    damaged: list[Looked],
    contained: Collection[int],
    report: CheckReport,
) -> Iterator[Finding]:
    """Tell what cannot be read; one finding for a file that is gone."""
    if not damaged:
        return
    with run.index.read() as connection:
        needed = quarantine.needed_among(connection, [looked.extent.extent_id for looked in damaged])
    told = [
        looked
        for looked in damaged
        if looked.extent.extent_id not in contained or looked.extent.extent_id in needed
    ]
    report.num_quarantined += len(damaged) - len(told)
    if told and all(looked.is_missing for looked in told):
        message = f"is missing, and {counted(len(told), 'extent that is named lies', 'extents that are named lie')} in it; {_NEXT}"
        yield Finding("pack", pack.path, message)
        return
    for looked in told:
        is_known = " (in quarantine, and needed)" * (looked.extent.extent_id in contained)
        assert looked.error is not None
        what_next = _OUT_OF_REACH if looked.is_out_of_reach else _NEXT
        yield Finding(
            "extent", str(looked.extent.extent_id), f"{looked.error.message}{is_known}; {what_next}"
        )


def _check_file(run: Run, pack: Pack, extents: list[Extent], report: CheckReport) -> Iterator[Finding]:
    """Ask of the file what no extent alone tells: its footer, as any Arrow reader reads it, and what nothing names."""
    named = sum(extent.num_rows for extent in extents)
    # A sealed pack may hold more rows than are named (the index never took them), never fewer.
    if pack.state is PackState.SEALED and pack.num_rows is not None and named > pack.num_rows:
        yield Finding("pack", pack.path, f"was sealed with {pack.num_rows} rows, {named} are named in it")
    try:
        scan = open_scan(open_place(run.root), pack.path)
        places = scan.places()
    except (CorruptPackError, StorageError, IncompatibleFormatError) as error:
        if extents:  # a pack whose writer died before its first message may have no file
            yield Finding("pack", pack.path, error.message)
        return
    offsets = {extent.offset for extent in extents}
    unnamed = [length for offset, length in places if offset not in offsets]
    report.num_unnamed += len(unnamed)
    report.unnamed_bytes += sum(unnamed)
    if pack.state is not PackState.SEALED:
        return
    try:
        with pa.OSFile(str(file_of(run.root, pack.path))) as source, pa.ipc.open_file(source) as file:
            num_batches = file.num_record_batches
    except (pa.ArrowException, OSError) as error:
        yield Finding("pack", pack.path, f"was sealed, and Arrow readers cannot open it: {error}")
        return
    if not scan.is_sealed or num_batches != len(places):
        yield Finding(
            "pack", pack.path, f"has a footer of {num_batches} record batches, {len(places)} are there"
        )


def _check_unnamed_files(run: Run, report: CheckReport) -> None:
    sizes = later_packs.unnamed(run)
    report.num_unnamed_files, report.unnamed_file_bytes = len(sizes), sum(sizes.values())
    with run.index.read() as connection:
        is_told = meta.find(connection, SWEEP_BLOCKED) is not None
    if not is_told and (later := later_packs.later_among(run, sizes)):
        report.findings.append(Finding("packs", later[0], later_packs.why(later)))
