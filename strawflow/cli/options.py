"""What many commands share: the RUN argument, --json, and how a run's name becomes a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from strawflow.flow.run import Run

RUNS_FOLDER = Path("runs")

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Folder of the run, or the name of one under ./runs/.")
]
JsonFlag = Annotated[
    bool, typer.Option("--json", envvar="STRAWFLOW_JSON", help="Print JSON; errors too, on stderr.")
]
ConsumerOption = Annotated[str, typer.Option("--consumer", metavar="NAME", help="Which consumer's.")]


def run_folder(run: str) -> Path:
    """Return the folder a RUN argument means: a path as it is, a bare name that is no path under ./runs/.

    Raises:
        ConfigError: it is the address of an object store.
    """
    from strawflow.flow.run import folder_of

    path = folder_of(run)
    if "/" in run or path.exists():
        return path
    return RUNS_FOLDER / path


@contextmanager
def opened(run: str) -> Iterator[Run]:
    """Open a run for one command.

    Raises:
        NotFoundError: there is no run of that name.
        IncompatibleFormatError: its index is of another revision.
    """
    from strawflow.flow.run import open_run

    opened_run = open_run(run_folder(run))
    try:
        yield opened_run
    finally:
        opened_run.close()
