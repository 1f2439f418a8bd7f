"""Making a checkpoint folder whole: every file synced and listed, with its checksum, in a manifest that is written last."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from strawflow.errors import NotFoundError
from strawflow.flow.run import write_durably
from strawflow.packs.sync import sync_path
from strawflow.weights.verify import FORMAT, MANIFEST, describe_file


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
