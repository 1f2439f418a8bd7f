"""Making a checkpoint folder whole: every file synced and listed, with its checksum, in a manifest that is written last.

And finding it so again: whoever is about to load one asks first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from strawflow.errors import CorruptCheckpointError, IncompatibleFormatError, NotFoundError
from strawflow.flow.run import TRAINER, Run, write_durably
from strawflow.index import checkpoints
from strawflow.index.checkpoints import Checkpoint
from strawflow.packs.sync import sync_path
from strawflow.weights.verify import FORMAT, MANIFEST, describe_file, verify_checkpoint


def seal_folder(folder: Path, *, stands_for: Mapping[str, Any]) -> str:
    """Sync the files of a folder and write its manifest; returns an xxh3-128 over their names and contents.

    The manifest also says which place of the run the files have (flow.consume.stands_for).
    A folder without a manifest is no checkpoint; sealing it again writes the manifest anew.

    Raises:
        NotFoundError: the folder holds no file.
    """
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    if not paths:
        raise NotFoundError(f"{folder} holds no file; write the checkpoint there first")
    for path in paths:
        sync_path(path)
    for below in sorted({p.parent for p in paths} | {folder}):
        sync_path(below)
    files = {str(p.relative_to(folder)): describe_file(p) for p in paths}
    digest = str(xxhash.xxh3_128_hexdigest(json.dumps(files, sort_keys=True).encode()))
    manifest = {"format": FORMAT, "files": files, "stands_for": {**stands_for, "state_digest": digest}}
    write_durably(folder / MANIFEST, json.dumps(manifest, indent=2).encode())
    sync_path(folder.parent)
    return digest


def verified_folder(run: Run, checkpoint: Checkpoint) -> Path:
    """Return the folder of a checkpoint once every file in it was read and matches the manifest.

    Raises:
        CorruptCheckpointError: the folder, its manifest or a file is missing or damaged; names it and what can be done.
        IncompatibleFormatError: written by a version this program does not read.
    """
    folder = run.root / checkpoint.path
    try:
        verify_checkpoint(folder)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            f"{error.message}; {_other_way(run, checkpoint)}", checkpoint_id=checkpoint.checkpoint_id
        ) from error
    return folder


def _other_way(run: Run, damaged: Checkpoint) -> str:
    """Tell what there is when the folder cannot be restored: the newest checkpoint before it that is whole."""
    with run.index.read() as connection:
        line = checkpoints.listed(connection, run.branch, run.consumer)
    older = [c for c in line if c.step < damaged.step and not c.files_removed]
    whole = next((c for c in reversed(older) if is_whole(run.root / c.path)), None)
    if whole is None:
        return "there is no older checkpoint that is whole"
    if run.consumer != TRAINER:
        return f"the newest one before it that is whole is {run.root / whole.path}"
    return (
        "or branch from the newest one before it that is whole: "
        f"`strawflow branch create RUN --from {whole.checkpoint_id} NAME`"
    )


def is_whole(folder: Path) -> bool:
    """Tell whether every file of a checkpoint's folder matches its manifest."""
    try:
        verify_checkpoint(folder)
    except (CorruptCheckpointError, IncompatibleFormatError):
        return False
    return True
