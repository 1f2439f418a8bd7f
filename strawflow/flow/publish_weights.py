"""Publishing weights: files durable first, then the row; and removing files that nothing needs any more.

    weights: files durable ▸ [E] ▸ version row published ▸ [F] ▸ engines load, report

E: a folder without a row, never loaded. F: published; whoever needs it loads it.
"""

from __future__ import annotations

import logging
import shutil

from strawflow import faults
from strawflow.flow.admit import admit_evaluation, steps_with_evaluation
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.ids import weight_version_id
from strawflow.index import consumers, units, weights
from strawflow.index.consumers import Role
from strawflow.index.weights import WeightVersion

log = logging.getLogger(__name__)


def weights_path(version_id: str) -> str:
    return f"weights/{version_id}"


def publish_weights(session: WorkerSession, role: Role, *, step: int, version_id: str, digest: str) -> None:
    """Make a weight version whose folder is durable known; admits the evaluation its step calls for.

    Raises:
        LeaseLostError: another session took over as trainer; the folder stays unnamed.
    """
    run = session.run
    faults.at("weights.after_files")
    with run.index.begin() as connection:
        consumers.require_role(connection, role)
        weights.publish(
            connection,
            version_id=version_id,
            branch_id=run.branch,
            step=step,
            fence=role.fence,
            path=weights_path(version_id),
            digest=digest,
        )
        if step in steps_with_evaluation(run.config):
            admit_evaluation(connection, run, version_id=version_id, step=step)
    faults.at("weights.after_commit")


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
    """Remove files of versions that no engine serves or loads, no unit waits for and that are not among the newest kept.

    The rows say so first, under the trainer's fence: a crash between leaves files that nothing names, never a row whose
    files are gone.

    Raises:
        LeaseLostError: another session took over as trainer.
    """
    run = session.run
    with run.index.begin() as connection:
        consumers.require_role(connection, role)
        removable = weights.removable(connection, run.branch, keep_last=run.config.trainer.keep_weights)
        for version in removable:
            weights.mark_files_removed(connection, version.version_id)
    for version in removable:
        try:
            shutil.rmtree(run.root / version.path)
        except OSError as error:
            log.warning("the files of weights %s could not be removed: %s", version.version_id, error)
    return len(removable)
