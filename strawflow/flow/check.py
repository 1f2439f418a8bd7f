"""Checking a run: every promise that can be asked of its rows and bytes, asked.

1. Reads only. Every extent of every pack that is not condemned is read and verified, one at a time.
2. P1 as a query: every admitted unit is open or has exactly one fate; P2: the cursor counts what was admitted.
3. A finding is reported, never repaired here; an empty report means all promises held when it was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from strawflow.errors import CorruptCheckpointError, CorruptPackError, IncompatibleFormatError, StorageError
from strawflow.flow.run import Run
from strawflow.index import audit, checkpoints, packs, weights
from strawflow.index.packs import Pack
from strawflow.packs.reader import PackReader
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
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        return not self.findings


def check(run: Run, *, on_pack: Callable[[Pack], None] | None = None) -> CheckReport:
    """Read every live extent and ask every question; `on_pack` hears of each pack before it is read."""
    report = CheckReport()
    _check_rows(run, report)
    with run.index.read() as connection:
        listed = packs.listed(connection)
    for pack in listed:
        if pack.state is PackState.CONDEMNED:
            continue
        if on_pack is not None:
            on_pack(pack)
        report.num_packs += 1
        report.findings += _check_pack(run, pack, report)
    return report


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


def _check_pack(run: Run, pack: Pack, report: CheckReport) -> Iterator[Finding]:
    with run.index.read() as connection:
        extents = packs.extents_of_pack(connection, pack.pack_id)
    reader = PackReader(run.root)
    for extent in extents:
        try:
            rows = reader.read(extent)
        except (CorruptPackError, StorageError, IncompatibleFormatError) as error:
            yield Finding("extent", extent.extent_id, error.message)
            continue
        report.num_extents += 1
        report.num_rows += rows.num_rows
        report.num_bytes += extent.length
        if rows.num_rows != extent.num_rows:
            yield Finding("extent", extent.extent_id, f"holds {rows.num_rows} rows, not {extent.num_rows}")
    named = sum(extent.num_rows for extent in extents)
    # A sealed pack may hold more rows than are named (the index never took them), never fewer.
    if pack.state is PackState.SEALED and pack.num_rows is not None and named > pack.num_rows:
        yield Finding("pack", pack.path, f"was sealed with {pack.num_rows} rows, {named} are named in it")
