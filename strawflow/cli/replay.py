"""`strawflow replay`: train again from stored batches only."""

from __future__ import annotations

from typing import Annotated

import typer

from strawflow.cli.options import JsonFlag, RunArgument
from strawflow.cli.worker import existing_run, json_arguments, replace_by_worker


def replay(
    run: RunArgument,
    from_step: Annotated[
        int | None, typer.Option(min=1, help="First step to train again; its predecessor needs a checkpoint.")
    ] = None,
    to_step: Annotated[int | None, typer.Option(min=1, help="Last step to train again.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Train stored batches again, without engine or prompts.

    Each step's loss is printed beside the recorded one.
    """
    arguments = [str(existing_run(run))]
    if from_step is not None:
        arguments += ["--from-step", str(from_step)]
    if to_step is not None:
        arguments += ["--to-step", str(to_step)]
    replace_by_worker("replay", [*arguments, *json_arguments(as_json)])
