"""Publishing weights: files durable first, then the row; and removing files that nothing needs any more.

    weights: files durable ▸ [E] ▸ journal entry durable ▸ version row published ▸ [F] ▸ engines load, report

E: a folder without a row, never loaded. F: published; whoever needs it loads it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strawflow import faults
from strawflow.errors import ConflictError, NotFoundError
from strawflow.flow import journal
from strawflow.flow.admit_evaluation import evaluation_of, fields_of, segments_to_evaluate
from strawflow.flow.journal import Entry, EntryKind
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.ids import weight_version_id
from strawflow.index import consumers, events, units, weights
from strawflow.index.consumers import Role
from strawflow.index.engine import Connection
from strawflow.index.units import NewUnit
from strawflow.index.weights import WeightVersion
from strawflow.packs.sync import sync_path
from strawflow.weights.verify import WEIGHTS_FILE

log = logging.getLogger(__name__)


def weights_path(version_id: str) -> str:
    return f"weights/{version_id}"


def publish_weights(session: WorkerSession, role: Role, *, step: int, version_id: str, digest: str) -> None:
    """Make a weight version whose folder is durable known; admits the evaluation its step calls for.

    Raises:
        LeaseLostError: another session took over as trainer; the folder stays unnamed.
        NotFoundError: the folder holds no weights; those before stay current.
        ConflictError: the version id was published with other content.
    """
    run = session.run
    faults.at("weights.after_files")
    with run.index.read() as connection:
        known = weights.find(connection, version_id)
    if known is not None:  # the id is the submission's: this is a repetition after a lost reply
        if (known.step, known.digest) != (step, digest):
            raise ConflictError(f"weights {version_id} were published with other content")
        return
    version = NewVersion(version_id, step, digest)
    while not _publish(session, role, version):
        continue  # units were admitted meanwhile, so that the evaluation needs later ids
    faults.at("weights.after_commit")


@dataclass(frozen=True)
class NewVersion:
    """Weights whose files are durable."""

    version_id: str
    step: int
    digest: str


def _publish(session: WorkerSession, role: Role, version: NewVersion) -> bool:
    run = session.run
    with run.index.read() as connection:
        segments = segments_to_evaluate(connection, run, step=version.step)
    evaluation = evaluation_of(run.config, segments, version_id=version.version_id, step=version.step)
    first_id = 0
    if evaluation:
        with run.index.begin() as connection:
            first_id = units.take_ids(connection, len(evaluation))
    body = {
        "consumer": run.consumer,
        "version_id": version.version_id,
        "step": version.step,
        "fence": role.fence,
        "path": weights_path(version.version_id),
        "digest": version.digest,
        "evaluation": fields_of(segments, first_id=first_id, count=len(evaluation)),
    }
    entry = Entry(EntryKind.WEIGHTS, run.branch, body)
    try:
        with journal.recorded(session, [entry]) as record, run.index.begin() as connection:
            consumers.require_role(connection, role)
            _require_files(run.root / weights_path(version.version_id))
            record.name(connection)
            weights.publish(
                connection,
                version_id=version.version_id,
                branch_id=run.branch,
                step=version.step,
                fence=role.fence,
                path=weights_path(version.version_id),
                digest=version.digest,
            )
            consumers.note_publisher(connection, run.branch, run.consumer)
            if evaluation:
                _admit_evaluation(connection, run, version, evaluation, first_id=first_id)
    except _AdmitAgainError:
        return False
    return True


def _require_files(folder: Path) -> None:
    if not any(folder.glob("*.safetensors")):
        raise NotFoundError(f"{folder} holds no safetensors file; the weights before it stay current")


class _AdmitAgainError(Exception):
    """The evaluation cannot be admitted as planned: plan it anew."""


def _admit_evaluation(
    connection: Connection, run: Run, version: NewVersion, evaluation: Sequence[NewUnit], *, first_id: int
) -> None:
    try:
        units.require_unused(connection, first_id)
    except ConflictError as error:
        raise _AdmitAgainError from error
    if units.has_epoch(connection, run.branch, purpose="eval", epoch=version.step):
        raise _AdmitAgainError
    units.admit(connection, run.branch, evaluation, ids=range(first_id, first_id + len(evaluation)))
    events.record(
        connection,
        "evaluation.admitted",
        version_id=version.version_id,
        step=version.step,
        num_units=len(evaluation),
    )


def store_file(run: Run, version_id: str, file: Path) -> Path:
    """Copy a safetensors file into the folder of a version and make it durable; returns the folder."""
    folder = run.root / weights_path(version_id)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{WEIGHTS_FILE}.tmp"
    shutil.copyfile(file, temporary)
    sync_path(temporary)
    temporary.rename(folder / WEIGHTS_FILE)
    for path in (folder, folder.parent):
        sync_path(path)
    return folder


def version_name(run: Run, role: Role, *, step: int, digest: str) -> str:
    return weight_version_id(run.branch, role.fence, step, digest)


def published_version(run: Run, step: int) -> WeightVersion | None:
    with run.index.read() as connection:
        return weights.of_step(connection, run.branch, step)


def version_to_serve(run: Run) -> WeightVersion | None:
    """Return the weights engines should serve now: what a version-bound unit waits for, else the newest published."""
    with run.index.read() as connection:
        required = units.oldest_required_version(connection, run.branch)
        if required is not None:
            return weights.find(connection, required)
        return weights.newest(connection, run.branch)


def remove_unneeded_weights(session: WorkerSession, role: Role) -> int:
    """Remove files of versions that no engine serves or loads, no unit waits for, no pin holds and no setting keeps.

    The rows say so first, under the trainer's fence: a crash between leaves files that nothing names, never a row whose
    files are gone.

    Raises:
        LeaseLostError: another session took over as trainer.
    """
    run = session.run
    with run.index.begin() as connection:
        consumers.require_role(connection, role)
        removed = [
            version
            for version in weights.removable(
                connection,
                run.branch,
                keep_last=run.config.trainer.keep_weights,
                keep_every=run.config.storage.keep_weights_every,
            )
            if weights.mark_files_removed(connection, version.version_id)
        ]
    for version in removed:
        try:
            shutil.rmtree(run.root / version.path)
        except OSError as error:
            log.warning("the files of weights %s could not be removed: %s", version.version_id, error)
    return len(removed)
