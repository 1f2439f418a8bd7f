"""Verifying weights and checkpoints on disk, by whoever is about to load them and by `index check`.

1. A weight version's digest covers name, type, shape and bytes of every tensor, whatever the order in the file.
2. A checkpoint's manifest covers every file's size and bytes; it is written last.
3. No torch is needed: a safetensors file is a JSON header and raw bytes (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Collection
from pathlib import Path
from typing import Any

import xxhash

from strawflow.errors import CorruptCheckpointError, IncompatibleFormatError

WEIGHTS_FILE = "model.safetensors"
MANIFEST = "manifest.json"
FORMAT = 1
_BLOCK_BYTES = 4 * 1024 * 1024
_HEADER_LENGTH_BYTES = 8
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


def digest_entry(name: str, dtype: str, shape: list[int]) -> bytes:
    """Return what precedes a tensor's bytes in the digest; `dtype` is torch's name without the prefix."""
    return f"{name}\0{dtype}\0{shape}\0".encode()


def weights_digest(path: Path) -> str:
    """Return the xxh3-128 hex digest over name, type, shape and bytes of each tensor of a safetensors file, by name.

    Raises:
        CorruptCheckpointError: the file is missing or no safetensors file.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _digest(content)
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{path} is missing; restore it from a copy") from None
    except (
        ValueError,
        KeyError,
        TypeError,
    ) as error:  # an empty file cannot be mapped, a damaged header not parsed
        raise CorruptCheckpointError(f"{path} is no sound safetensors file: {error}") from error


def _digest(content: mmap.mmap) -> str:
    length = int.from_bytes(content[:_HEADER_LENGTH_BYTES], "little")
    start = _HEADER_LENGTH_BYTES + length
    if start > len(content):
        raise ValueError("its header is cut off")
    header: dict[str, Any] = json.loads(content[_HEADER_LENGTH_BYTES:start])
    header.pop("__metadata__", None)
    digest = xxhash.xxh3_128()
    with memoryview(content) as view:
        for name in sorted(header):
            begin, end = header[name]["data_offsets"]
            if start + end > len(content):
                raise ValueError(f"tensor {name} is cut off")
            digest.update(digest_entry(name, _DTYPES[header[name]["dtype"]], header[name]["shape"]))
            with view[start + begin : start + end] as raw:
                digest.update(raw)
    return digest.hexdigest()


def verify_weights(folder: Path, digest: str) -> None:
    """Check a weight version's folder against its digest.

    Raises:
        CorruptCheckpointError: the tensors differ from what was published; names the file.
    """
    path = folder / WEIGHTS_FILE
    if (found := weights_digest(path)) != digest:
        raise CorruptCheckpointError(
            f"{path} does not hold what was published; restore it from a copy", digest=digest, found=found
        )


def describe_file(path: Path) -> dict[str, Any]:
    """Return {bytes, xxh3_128} of a file, as a manifest holds it."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}


def verify_checkpoint(path: Path, *, only: Collection[str] | None = None) -> dict[str, Any]:
    """Check every file of a checkpoint folder against its manifest, or those in `only`; return the manifest's files.

    Raises:
        CorruptCheckpointError: the manifest or a file is missing or differs; names it.
        IncompatibleFormatError: written by a version this program does not read.
    """
    manifest_path = path / MANIFEST
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        files: dict[str, Any] = manifest["files"]
        found_format = manifest["format"]
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"{manifest_path}: is missing, so the checkpoint is not complete; restore the folder from a copy"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(
            f"{manifest_path}: cannot be parsed; restore the folder from a copy"
        ) from error
    if found_format != FORMAT:
        raise IncompatibleFormatError(f"{manifest_path}: format {found_format}; this program reads {FORMAT}")
    for name, expected in files.items():
        if only is not None and name not in only:
            continue
        file = path / name
        if not file.is_file():
            raise CorruptCheckpointError(f"{file}: is missing; restore the folder from a copy")
        if describe_file(file) != expected:
            raise CorruptCheckpointError(
                f"{file}: size or digest differs from {MANIFEST}; restore the folder from a copy"
            )
    return files
