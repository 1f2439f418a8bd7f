"""Retention: what grew old leaves, so that disk and index stay bounded; nothing a resume or a replay needs goes.

    row says "removed" ▸ files of a checkpoint or weight version removed

1. The newest checkpoint stays, and every one that is pinned or that a branch starts from. As long as the newest one lacks a
   part, no older one of its consumer goes.
2. Batches and units go once they lie `keep_steps` behind their consumer's position and before every checkpoint that a plain
   resume may go back to: the newest `keep_checkpoints` and the pinned ones. Those kept for their interval or as the start
   of a branch need no later batch; units that a branch from them would take over stay in the index.
3. All counts stay exact (index.retired).
4. A kill at any instant loses nothing: what a row calls removed is removed by the next sweep.

How rows leave the index is flow.retire's part; bytes that nothing names any more are flow.sweep's, half-empty packs
flow.compact's.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strawflow import clock, faults
from strawflow.config import RunConfig
from strawflow.errors import StorageError
from strawflow.flow import retire
from strawflow.flow.quota import tree_bytes
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.flow.sweep import Collected, Item
from strawflow.index import branches, consumers, events, retention, sessions, weights
from strawflow.index.consumers import Consumer
from strawflow.index.engine import Connection
from strawflow.index.retention import KeptCheckpoint, Limits
from strawflow.index.weights import WeightVersion
from strawflow.weights.verify import MANIFEST

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Policy:
    """What is kept; the fields are those of the configuration's section `storage`."""

    keep_checkpoints: int
    keep_checkpoints_every: int
    keep_weights: int
    keep_weights_every: int
    keep_steps: int
    receipt_age_s: float
    event_age_s: float


def policy_of(config: RunConfig) -> Policy:
    """Return what the run's configuration keeps."""
    names = (name for name in Policy.__dataclass_fields__ if name != "keep_weights")
    return Policy(
        keep_weights=config.trainer.keep_weights, **{name: getattr(config.storage, name) for name in names}
    )


def plan_retention(run: Run, policy: Policy) -> Collected:
    """Say what `retain` would do; changes nothing."""
    now_ms = clock.wall_ms()
    with run.index.read() as connection:
        kept = retention.checkpoints_with_files(connection)
        due = _due_checkpoints(run, kept, policy)
        left = [
            k for k in kept if k.checkpoint.checkpoint_id not in {d.checkpoint.checkpoint_id for d in due}
        ]
        items = [_checkpoint_item(run, k) for k in due]
        items += [_weights_item(run, v) for v in _due_weights(connection, policy)]
        for limits, mine in _limits(connection, left, policy):
            for consumer in mine:
                found = retention.batches_up_to(connection, consumer, limits.steps[consumer.consumer])
                items += retire.batches_items(consumer, [step for _, step in found])
            leaving = retire.num_leaving(connection, limits)
            items += [retire.rows_item("units", limits.branch_id, leaving)] if leaving else []
        receipts = retention.num_receipts_before(connection, now_ms - int(policy.receipt_age_s * 1000))
        items += [retire.rows_item("receipts", "older than any delivery", receipts)] if receipts else []
        if policy.event_age_s:
            old = retention.num_events_before(connection, now_ms - int(policy.event_age_s * 1000))
            items += [retire.rows_item("events", "move to packs of kind event", old)] if old else []
    return Collected(False, items + _damaged(run, kept, policy))


def retain(session: WorkerSession, policy: Policy) -> Collected:
    """Let what grew old leave. Idempotent; safe beside live workers and another retention.

    Raises:
        LeaseLostError: the session was declared lost; what was done is done.
        StorageError: the disk or the index did not answer.
    """
    run = session.run
    done = Collected(True)
    with run.index.read() as connection:
        kept = retention.checkpoints_with_files(connection)
    done.items += _remove_checkpoints(session, _due_checkpoints(run, kept, policy))
    done.items += _remove_weights(session, policy)
    with run.index.read() as connection:
        left = retention.checkpoints_with_files(connection)
        limits = _limits(connection, left, policy)
    for of_branch, mine in limits:
        for consumer in mine:
            done.items += retire.retire_batches(session, consumer, of_branch.steps[consumer.consumer])
        done.items += retire.retire_units(session, of_branch)
    now_ms = clock.wall_ms()
    done.items += retire.forget_receipts(session, before_ms=now_ms - int(policy.receipt_age_s * 1000))
    if policy.event_age_s:
        done.items += retire.move_events(session, before_ms=now_ms - int(policy.event_age_s * 1000))
    for kind in ("history", "event"):
        session.packs.seal(kind)  # from now on any Arrow reader opens them
    done.items += _damaged(run, kept, policy)
    done.items += _give_back(run)
    return done


def _give_back(run: Run) -> list[Item]:
    """Shrink an SQLite index that is mostly free pages; one that is in use by others is shrunk another time."""
    try:
        num_bytes = retention.give_back(run.index)
    except StorageError as error:
        log.warning("%s", error)
        return []
    return [Item("index", run.index.shown_url, "free pages of its file", num_bytes)] if num_bytes else []


# ---- checkpoints and weights


def _groups(kept: Sequence[KeptCheckpoint]) -> list[list[KeptCheckpoint]]:
    """Return the checkpoints of each branch and consumer, by step."""
    groups: dict[tuple[str, str], list[KeptCheckpoint]] = {}
    for k in kept:
        groups.setdefault((k.checkpoint.branch_id, k.checkpoint.consumer), []).append(k)
    return list(groups.values())


def _due_checkpoints(run: Run, kept: Sequence[KeptCheckpoint], policy: Policy) -> list[KeptCheckpoint]:
    if not policy.keep_checkpoints:
        return []
    due = []
    for group in _groups(kept):
        older = [
            k
            for k in group[: -policy.keep_checkpoints]
            if not (k.is_pinned or k.starts_branch or _is_of_interval(k, policy))
        ]
        if older and missing_part(run.root / group[-1].checkpoint.path) is None:
            due += older
    return due


def missing_part(folder: Path) -> str | None:
    """Return what a checkpoint's folder lacks by its manifest, None if every file is there in its size; reads no file."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return next(
            (
                name
                for name, said in files.items()
                if not (folder / name).is_file() or (folder / name).stat().st_size != said["bytes"]
            ),
            None,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return MANIFEST


def _is_of_interval(k: KeptCheckpoint, policy: Policy) -> bool:
    return bool(policy.keep_checkpoints_every) and k.checkpoint.step % policy.keep_checkpoints_every == 0


def _damaged(run: Run, kept: Sequence[KeptCheckpoint], policy: Policy) -> list[Item]:
    """Say which newest checkpoints lack a part, so that none before them may go."""
    items = []
    for group in _groups(kept) if policy.keep_checkpoints else []:
        path = group[-1].checkpoint.path
        if len(group) > 1 and (part := missing_part(run.root / path)) is not None:
            why = (
                f"the newest checkpoint lacks {part}: restore it from a copy; no older one is removed before"
            )
            items.append(Item("damaged", path, why, 0))
    return items


def _remove_checkpoints(session: WorkerSession, due: Sequence[KeptCheckpoint]) -> list[Item]:
    run, items = session.run, []
    for k in due:
        session.mark_progress()
        item = _checkpoint_item(run, k)
        with run.index.begin() as connection:
            sessions.require_live(connection, session.session_id)
            if not retention.mark_checkpoint_removed(connection, k.checkpoint.checkpoint_id):
                continue
            events.record(
                connection, "checkpoint.removed", session_id=session.session_id, path=k.checkpoint.path
            )
        faults.at("retain.before_files")  # crash here: the row says removed, the sweep removes the files
        _remove_folder(run.root / k.checkpoint.path)
        items.append(item)
    return items


def _due_weights(connection: Connection, policy: Policy) -> list[WeightVersion]:
    return [
        version
        for branch in branches.listed(connection)
        for version in weights.removable(
            connection,
            branch.branch_id,
            keep_last=policy.keep_weights,
            keep_every=policy.keep_weights_every,
        )
    ]


def _remove_weights(session: WorkerSession, policy: Policy) -> list[Item]:
    run, items = session.run, []
    with run.index.read() as connection:
        due = _due_weights(connection, policy)
    for version in due:
        session.mark_progress()
        item = _weights_item(run, version)
        with run.index.begin() as connection:
            sessions.require_live(connection, session.session_id)
            if not weights.mark_files_removed(connection, version.version_id):
                continue
        faults.at("retain.before_files")  # crash here: the row says removed, the sweep removes the files
        _remove_folder(run.root / version.path)
        items.append(item)
    return items


def _remove_folder(folder: Path) -> None:
    """Remove a folder, its manifest first: nothing takes half of it for the whole."""
    try:
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"{folder} cannot be removed, a sweep will try again: {error}") from error


# ---- batches and units


def _limits(
    connection: Connection, kept: Sequence[KeptCheckpoint], policy: Policy
) -> list[tuple[Limits, list[Consumer]]]:
    """Return for each branch up to where its batches and units may leave, and its consumers."""
    if not policy.keep_steps:
        return []
    groups = {(g[0].checkpoint.branch_id, g[0].checkpoint.consumer): g for g in _groups(kept)}
    found = []
    for branch in branches.listed(connection):
        mine = consumers.listed(connection, branch.branch_id)
        of_mine = {c.consumer: groups.get((branch.branch_id, c.consumer), []) for c in mine}
        starts = {
            name: [(k.checkpoint.step, k.checkpoint.last_unit_id or 0) for k in group]
            for name, group in of_mine.items()
        }
        limits = Limits(
            branch_id=branch.branch_id,
            steps={c.consumer: _last_step(c, of_mine[c.consumer], policy) for c in mine},
            purposes={c.consumer: c.purposes for c in mine},
            starts=starts,
        )
        found.append((limits, mine))
    return found


def _last_step(consumer: Consumer, kept: Sequence[KeptCheckpoint], policy: Policy) -> int:
    """Return the last step whose batch may go: behind the position, and before what a resume may go back to."""
    newest = kept[-policy.keep_checkpoints :]
    go_back = [k.checkpoint.step for k in kept if k.is_pinned or k in newest]
    return min([consumer.position - policy.keep_steps, *go_back])


# ---- what is said


def _checkpoint_item(run: Run, k: KeptCheckpoint) -> Item:
    c = k.checkpoint
    return Item(
        "checkpoint",
        c.path,
        f"older than the newest that are kept (step {c.step})",
        tree_bytes(run.root / c.path),
    )


def _weights_item(run: Run, version: WeightVersion) -> Item:
    return Item(
        "weights", version.path, "no engine, unit or pin needs them", tree_bytes(run.root / version.path)
    )
