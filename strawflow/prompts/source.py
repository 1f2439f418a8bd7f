"""What a prompt file is: its path, the slice of it that is wanted, its container and its compression.

1. `path@[a:b]` means Python slice semantics over records; a file whose own name ends like that is taken as it is.
2. The container and the compression come from the suffixes alone, so the same name always reads the same way.
3. This module opens nothing but the directory entry of the path; it does not know what a record is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from strawflow.errors import InvalidInputError, NotFoundError

Container = Literal["json_lines", "parquet", "arrow"]
Compression = Literal["gzip", "zstd"]

_CONTAINERS: dict[str, Container] = {
    ".jsonl": "json_lines",
    ".ndjson": "json_lines",
    ".json-lines": "json_lines",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}

_SLICED = re.compile(r"(?P<path>.+)@\[(?P<slice>[^\[\]]*)\]", re.DOTALL)
_BOUNDS = re.compile(r"\s*(?P<start>-?\d+)?\s*:\s*(?P<stop>-?\d+)?\s*")


@dataclass(frozen=True)
class PromptSource:
    """A prompt file and the slice of its records that is wanted (None: that end is open)."""

    path: Path
    start: int | None = None
    stop: int | None = None
    name: str | None = None
    """What rows and messages call it; None: its path. For rows that came by no file and only pass through one."""

    @classmethod
    def parse(cls, text: str) -> PromptSource:
        """Parse `path` or `path@[a:b]`.

        Raises:
            InvalidInputError: the part after `@[` is not a slice.
        """
        match = _SLICED.fullmatch(text)
        if match is None or Path(text).is_file():
            return cls(Path(text))
        bounds = _BOUNDS.fullmatch(match["slice"])
        if bounds is None:
            raise InvalidInputError(
                f"{text}: '[{match['slice']}]' is not a slice of records; write path@[a:b] with whole numbers, "
                f"either of which may be left out or negative (no step)"
            )
        start, stop = bounds["start"], bounds["stop"]
        return cls(
            Path(match["path"]),
            start=None if start is None else int(start),
            stop=None if stop is None else int(stop),
        )

    @property
    def shown(self) -> str:
        """The file as a row and a message name it, without the slice."""
        return self.name or str(self.path)

    @property
    def folder(self) -> Path:
        """What paths in the file are relative to: its folder; where rows came by no file, where the program was started."""
        return self.path.parent if self.name is None else Path()

    def __str__(self) -> str:
        if self.start is None and self.stop is None:
            return self.shown
        start = "" if self.start is None else self.start
        stop = "" if self.stop is None else self.stop
        return f"{self.shown}@[{start}:{stop}]"

    @property
    def needs_count(self) -> bool:
        """Whether the slice cannot be resolved without the number of records."""
        return any(bound is not None and bound < 0 for bound in (self.start, self.stop))

    def resolve(self, num_records: int | None) -> tuple[int, int | None]:
        """Return (first record, record to stop before or None for the end), both counted from 0.

        `num_records` may be None unless `needs_count`.
        """
        if num_records is not None:
            start, stop, _ = slice(self.start, self.stop).indices(num_records)
            return start, stop
        if self.needs_count:
            raise ValueError(f"{self}: a negative bound needs the number of records")
        return self.start or 0, self.stop

    def layout(self) -> tuple[Container, Compression | None]:
        """Return the container and the compression that the suffixes name.

        Raises:
            InvalidInputError: a suffix this reader does not know.
        """
        suffixes = [suffix.lower() for suffix in self.path.suffixes]
        compression = _COMPRESSIONS.get(suffixes[-1]) if suffixes else None
        if compression is not None:
            suffixes.pop()
        container = _CONTAINERS.get(suffixes[-1]) if suffixes else None
        if container is None:
            known = ", ".join(_CONTAINERS)
            raise InvalidInputError(
                f"{self.path}: not a known prompt file; the name must end in one of {known}, "
                f"each also with {' or '.join(_COMPRESSIONS)} behind it"
            )
        return container, compression

    def check_exists(self) -> None:
        """Raise NotFoundError or InvalidInputError when the path is no readable kind of file."""
        if self.path.is_file():
            return
        if self.path.exists():
            raise InvalidInputError(f"{self.path} is not a regular file; name one prompt file")
        raise NotFoundError(f"prompt file {self.path} does not exist")
