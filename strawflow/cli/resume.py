"""`strawflow resume`: go on with a run on this host, whatever ended it, or branch off from an older checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from strawflow.cli.options import JsonFlag, RunArgument, opened
from strawflow.cli.worker import existing_run, json_arguments, replace_by_worker, require_installed


def resume(
    run: RunArgument,
    from_checkpoint: Annotated[
        str, typer.Option("--from", help="Checkpoint (its id or its step) to branch off from.")
    ] = "",
    branch: Annotated[
        str, typer.Option("--branch", help="Name of the new branch; the run goes on there.")
    ] = "",
    reuse_trajectories: Annotated[
        bool,
        typer.Option(
            "--reuse-trajectories",
            help="Keep what was sampled but not trained by the checkpoint, if its weights are no later.",
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Run all workers of a run here until its last step.

    It goes on after any crash, and keeps the workers running.

    With --from and --branch a new line of history starts at that checkpoint: later batches, weights and checkpoints
    stay listed under the old branch and are not read. `strawflow branch create` makes it and starts nobody.
    """
    folder = existing_run(run)
    if bool(from_checkpoint) != bool(branch) or (reuse_trajectories and not branch):
        from strawflow.errors import InvalidInputError

        raise InvalidInputError(
            "a new branch needs both: strawflow resume RUN --from CHECKPOINT --branch NAME"
        )
    if branch:
        from strawflow.cli.branch import branch_off
        from strawflow.flow import inputs

        # What stands in the way of the workers is told before there is a branch, not after.
        with opened(run) as found:
            inputs.require(found)
            require_installed("supervise")
            branch_off(found, from_checkpoint, branch, reuse=reuse_trajectories, is_quiet=as_json)
    replace_by_worker("supervise", [str(folder), *json_arguments(as_json)])
