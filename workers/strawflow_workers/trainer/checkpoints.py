"""Trainer checkpoints on disk, and directories that appear whole or not at all.

1. A directory is written under a temporary name, synced, and renamed; the final name never shows a part of
   it. Nothing is replaced.
2. `manifest.json` is written last and names every other file with its size and xxh3-128 digest; a reader
   believes nothing else.
3. Tensors are safetensors, everything else JSON: no pickle, no code.
4. Each rank writes and reads `rank-NNNNN.*` alone; the manifest says how many there are and what they shared. What the tensors mean is the trainer's business.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from strawflow.errors import AlreadyExistsError, ConfigError, CorruptCheckpointError, StorageError
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


def digest_of_ranks(digests: Sequence[str]) -> str:
    """Return one digest for those of all ranks, in their order; that of a lone rank is its own."""
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128(" ".join(digests).encode()).hexdigest()


class Together(Protocol):
    """What is asked of the ranks that write or read a checkpoint together (ranks.Ranks)."""

    @property
    def rank(self) -> int:
        """Which of them this is."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def layout(self) -> dict[str, int]:
        """How many share what."""

    def tell(self, message: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return what rank 0 gives."""

    def collect(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what all ranks give."""


PLAIN: Mapping[str, int] = {"tensor": 1, "pipeline": 1, "context": 1, "data": 1, "distributed_optimizer": 0}
"""The layout that a manifest says nothing of."""


@dataclass(frozen=True)
class Alone:
    """The only rank of a trainer."""

    rank: int = 0
    size: int = 1
    layout: dict[str, int] = field(default_factory=lambda: dict(PLAIN))

    def tell(self, message: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return dict(message or {})

    def collect(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [dict(message)]


ALONE = Alone()


def write_rank_state(
    final: Path, state: RankState, ranks: Together = ALONE, *, stands_for: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint of all ranks as the new directory `final`, durable when this returns on rank 0.

    Each rank writes its own files and makes them durable; then rank 0 writes the manifest and gives the directory its name.
    `stands_for` says which place of which run it has (flow.consume.stands_for): with it the files alone tell
    how far the run had come.

    Raises:
        AlreadyExistsError: `final` exists.
        StorageError: a write or sync failed on some rank; nothing appeared under `final`.
    """
    if ranks.rank > 0:
        ranks.collect(_written(Path(ranks.tell()["partial"]), state, ranks, final))
        return
    with new_directory(final) as partial:
        ranks.tell({"partial": str(partial)})
        files: dict[str, Any] = {}
        for found in ranks.collect(_written(partial, state, ranks, final)):
            if "error" in found:
                raise StorageError(found["error"])
            files.update(found["files"])
        manifest: dict[str, Any] = {"format": FORMAT, "world_size": ranks.size, "files": files}
        if ranks.layout != PLAIN:
            manifest["layout"] = ranks.layout
        if stands_for is not None:
            manifest["stands_for"] = dict(stands_for)
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _written(partial: Path, state: RankState, ranks: Together, final: Path) -> dict[str, Any]:
    """Write a rank's files and return their descriptions by name, or what went wrong: the other ranks wait for an answer."""
    stem = f"rank-{ranks.rank:05d}"
    paths = [partial / f"{stem}.json", partial / f"{stem}.safetensors"]
    try:
        write_tensors(paths[1], state.tensors)
        paths[0].write_text(json.dumps(state.values, allow_nan=False))
        if ranks.size > 1:  # a lone rank's files are synced with their directory
            for path in paths:
                sync_path(path)
        return {"files": {path.name: describe_file(path) for path in paths}}
    except (OSError, SafetensorError) as error:
        return {"error": f"{final}: could not be written ({error}); nothing was left under that name"}


def read_rank_state(path: Path, ranks: Together = ALONE) -> RankState:
    """Read and verify this rank's state.

    Raises:
        CorruptCheckpointError: a file is missing, or differs from the manifest; the message names it.
        IncompatibleFormatError: the format is not the one this program reads.
        ConfigError: it was written by ranks that shared the model in another way.
    """
    stem = f"rank-{ranks.rank:05d}"
    own = (f"{stem}.safetensors", f"{stem}.json")
    files = verify_checkpoint(path, only=own if ranks.size > 1 else None)
    _require_layout(path, ranks)
    for name in own:
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


def _require_layout(path: Path, ranks: Together) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    stored = manifest.get("layout", PLAIN)
    if stored != ranks.layout:
        there, here = (
            " x ".join(f"{axis} {num}" for axis, num in sorted(layout.items()))
            for layout in (stored, ranks.layout)
        )
        raise ConfigError(
            f"{path} was written by {there} ranks, this trainer has {here}: set the section `parallel` as it was then"
        )


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
