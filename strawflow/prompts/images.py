"""Images of a prompt row: from what a file says of them to the bytes that are stored.

1. The bytes are those of the image file, unchanged; nothing is decoded here.
2. A path is read when the row is enqueued, relative to the folder of the prompt file. Later nothing depends on that file.
3. An image that is missing, empty or unreadable makes a bad row, which names it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path


class BadImageError(ValueError):
    """An image that cannot be had; `reason` is a stable word."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def read_images(value: object, *, key: str, folder: Path) -> tuple[bytes, ...] | None:
    """Return the images of a row's field: one, a list of them, or null; None without any.

    An image is a path, a `data:...;base64,` address, bytes (columnar files), or `{"bytes": ..., "path": ...}` as Hugging Face
    data sets have it.

    Raises:
        BadImageError: one cannot be had, or is something else.
    """
    if value is None or value == []:
        return None
    many = value if isinstance(value, list | tuple) else [value]
    return tuple(_image(one, f"{key}[{place}]", folder) for place, one in enumerate(many))


def _image(value: object, where: str, folder: Path) -> bytes:
    if isinstance(value, dict) and ("bytes" in value or "path" in value):
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if isinstance(value, str):
        found = _decoded(value, where) if value.startswith("data:") else _read(value, where, folder)
    elif isinstance(value, bytes):
        found = value
    elif value is None:
        raise BadImageError("missing_image", f"{where} is null; give the image, or leave it out of the list")
    else:
        raise BadImageError(
            "wrong_type",
            f"{where} is of type {type(value).__name__}; it must be a path, a data: address or bytes",
        )
    if not found:
        raise BadImageError("missing_image", f"{where} has no bytes")
    return found


def _read(path: str, where: str, folder: Path) -> bytes:
    place = folder / path
    try:
        return place.read_bytes()
    except FileNotFoundError:
        raise BadImageError(
            "missing_image",
            f"{where}: there is no file {place}; paths are relative to the prompt file's folder",
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise BadImageError("missing_image", f"{where}: {place} cannot be read: {error}") from error


def _decoded(address: str, where: str) -> bytes:
    head, comma, body = address.partition(",")
    if not comma or not head.endswith(";base64"):
        raise BadImageError("wrong_type", f"{where} is a data: address other than data:...;base64,...")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadImageError("wrong_type", f"{where} is no base64: {error}") from error


_KINDS = ((b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"), (b"BM", "bmp"))


def data_address(image: bytes) -> str:
    """Return an image as a `data:` address, which `read_images` and SGLang read to the same bytes."""
    kind = next(
        (f"image/{name}" for head, name in _KINDS if image.startswith(head)), "application/octet-stream"
    )
    return f"data:{kind};base64,{base64.b64encode(image).decode('ascii')}"


def num_bytes(images: Sequence[bytes] | None) -> int:
    """Return how many bytes the images have together."""
    return sum(len(image) for image in images or ())
