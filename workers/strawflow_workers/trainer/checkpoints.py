"""Trainer checkpoints on disk, and directories that appear whole or not at all.

1. A directory is written under a temporary name, synced, and renamed; the final name never shows a part of
   it. Nothing is replaced.
2. `manifest.json` is written last and names every other file with its size and xxh3-128 digest; a reader
   believes nothing else.
3. Tensors are safetensors, everything else JSON: no pickle, no code.
4. Each rank owns `rank-NNNNN.*`. What the tensors mean is the trainer's business.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from strawflow.errors import AlreadyExistsError, CorruptCheckpointError, StorageError
from strawflow.packs.sync import sync_path
from strawflow.weights.verify import FORMAT, MANIFEST, describe_file, digest_entry, verify_checkpoint


@dataclass(frozen=True)
class RankState:
    """All that one rank needs to go on: tensors by name, and JSON-able values."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


class TensorsDigest:
    """The digest over name, type, shape and bytes of tensors that are added one by one in the order of their names."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor in."""
        tensor = tensor.detach().cpu().contiguous()
        self._digest.update(digest_entry(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
        raw: Any = tensor.view(-1).view(torch.uint8).numpy()
        self._digest.update(raw)

    def passing(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Take tensors in as they pass."""
        for name, tensor in tensors:
            self.add(name, tensor)
            yield name, tensor

    def hexdigest(self) -> str:
        """Return the xxh3-128 digest in hexadecimal digits."""
        return str(self._digest.hexdigest())


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the xxh3-128 hex digest over name, type, shape and bytes of each tensor, in order of their
    names."""
    digest = TensorsDigest()
    for name in sorted(tensors):
        digest.add(name, tensors[name])
    return digest.hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file that other users of the share may read, as they may read every other file."""
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(0o644)


def write_rank_state(
    final: Path, state: RankState, *, rank: int = 0, stands_for: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint of one rank as the new directory `final`, durable when this returns.

    `stands_for` says which place of which run it has (flow.consume.stands_for): with it the files alone tell
    how far the run had come.

    Raises:
        AlreadyExistsError: `final` exists.
        StorageError: a write or sync failed; nothing appeared under `final`.
    """
    with new_directory(final) as partial:
        stem = f"rank-{rank:05d}"
        write_tensors(partial / f"{stem}.safetensors", state.tensors)
        (partial / f"{stem}.json").write_text(json.dumps(state.values, allow_nan=False))
        files = {path.name: describe_file(path) for path in sorted(partial.iterdir())}
        manifest: dict[str, Any] = {"format": FORMAT, "world_size": 1, "files": files}
        if stands_for is not None:
            manifest["stands_for"] = dict(stands_for)
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))


def read_rank_state(path: Path, *, rank: int = 0) -> RankState:
    """Read and verify one rank's state.

    Raises:
        CorruptCheckpointError: a file is missing, or differs from the manifest; the message names it.
        IncompatibleFormatError: the format is not the one this program reads.
    """
    files = verify_checkpoint(path)
    stem = f"rank-{rank:05d}"
    for name in (f"{stem}.safetensors", f"{stem}.json"):
        if name not in files:
            raise CorruptCheckpointError(
                f"{path / MANIFEST}: names no {name}; restore the folder from a copy"
            )
    try:
        tensors = load_file(path / f"{stem}.safetensors")
        values: dict[str, Any] = json.loads((path / f"{stem}.json").read_text())
    except (SafetensorError, ValueError) as error:
        raise CorruptCheckpointError(
            f"{path / stem}.*: cannot be parsed ({error}); restore the folder from a copy"
        ) from error
    return RankState(tensors=tensors, values=values)


@contextlib.contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """Yield a temporary directory beside `final`; when the block ends well, sync it and rename it to `final`.

    A process killed inside leaves a directory whose name starts with a dot and holds ".partial-"; nothing
    refers to it.

    Raises:
        AlreadyExistsError: `final` exists, now or at the time of the rename.
        StorageError: a write, sync or rename failed.
    """
    if final.exists():
        raise AlreadyExistsError(f"{final} exists and is not replaced")
    partial = final.parent / f".{final.name}.partial-{uuid.uuid4().hex}"
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in partial.iterdir():
            sync_path(path)
        sync_path(partial)
        # A rename onto an empty directory would succeed; onto a full one it fails. Either way nothing with
        # content is replaced.
        os.rename(partial, final)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError) and not isinstance(error, StorageError):
            raise StorageError(
                f"{final}: could not be written ({error}); nothing was left under that name"
            ) from error
        raise
    try:
        sync_path(final.parent)
    except OSError as error:
        raise StorageError(
            f"{final}: was written, but its name may not survive a power loss ({error})"
        ) from error
