"""What the checkpoints in a run's folder say of themselves: the manifests that tell which batches they stand for.

Files are read here and nothing is believed: whether a checkpoint is whole and on a line is flow.found_lines' part.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from strawflow import clock
from strawflow.flow.journal import EntryKind, StoredEntry
from strawflow.flow.journal_choice import Manifest
from strawflow.weights.verify import MANIFEST


def row_of_manifest(manifest: Manifest) -> dict[str, Any]:
    """Return the row of a checkpoint that was written and not committed: no branch can start from it.

    A checkpoint's folder is called like the checkpoint, by this program as by earlier ones whose ids hold no consumer.
    """
    return {
        "checkpoint_id": Path(manifest.path).name,
        "branch_id": manifest.branch_id,
        "consumer": manifest.consumer,
        "step": manifest.step,
        "fence": manifest.fence,
        "path": manifest.path,
        "state_digest": manifest.state_digest,
        "batch_digest": manifest.batch_digest,
        "created_at": clock.wall_time(),
        "cursors": None,
        "last_unit_id": None,
    }


def read_manifests(root: Path) -> list[Manifest]:
    """Return what the checkpoints in a run's folder say of themselves; one that says nothing is left out."""
    found = []
    for path in sorted((root / "checkpoints").glob(f"*/{MANIFEST}")):
        try:
            told = json.loads(path.read_text(encoding="utf-8"))["stands_for"]
            found.append(
                Manifest(
                    branch_id=told["branch"],
                    consumer=told["consumer"],
                    step=int(told["step"]),
                    fence=int(told["fence"]),
                    batch_digest=told["batch_digest"],
                    state_digest=told["state_digest"],
                    path=str(path.parent.relative_to(root)),
                )
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue  # an older program's, or damaged: verified before anything is believed of it
    return found


def manifests_of(entries: Iterable[StoredEntry], root: Path, *, known: Iterable[Manifest]) -> list[Manifest]:
    """Return the checkpoints that the journal tells of and whose files do not say it themselves."""
    told = {manifest.path for manifest in known}
    heads = [e.head for e in entries if e.kind is EntryKind.CHECKPOINT]
    return [
        Manifest(
            branch_id=head["branch_id"],
            consumer=head["consumer"],
            step=head["step"],
            fence=head["fence"],
            batch_digest=head["batch_digest"],
            state_digest=head["state_digest"],
            path=head["path"],
        )
        for head in heads
        if head["path"] not in told and (root / head["path"] / MANIFEST).is_file()
    ]
