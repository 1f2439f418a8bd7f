"""Damaging stored bytes, as a failing disk does."""

from __future__ import annotations

from pathlib import Path


def flip(path: Path, position: int, mask: int = 4) -> None:
    """Flip bits of one byte of a file."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ mask]))
