"""`strawflow resume`: go on with a run on this host, whatever ended it, or branch off from an older checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from strawflow.cli.options import JsonFlag, RunArgument
from strawflow.cli.worker import existing_run, json_arguments, replace_by_worker


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
    """Start all workers of a run here and keep them running until its last step; goes on after any crash.

    With --from and --branch a new line of history starts at that checkpoint: later batches, weights and checkpoints
    stay listed under the old branch and are not read.
    """
    folder = existing_run(run)
    if bool(from_checkpoint) != bool(branch) or (reuse_trajectories and not branch):
        from strawflow.errors import InvalidInputError

        raise InvalidInputError(
            "a new branch needs both: strawflow resume RUN --from CHECKPOINT --branch NAME"
        )
    if branch:
        from contextlib import closing

        from strawflow.flow.branch import create_branch
        from strawflow.flow.run import open_run

        with closing(open_run(folder)) as found:
            made = create_branch(
                found, checkpoint=from_checkpoint, name=branch, reuse_trajectories=reuse_trajectories
            )
        if not as_json:
            print(
                f"branch {made.branch_id} from {made.from_checkpoint_id}: {made.num_pristine} groups start again, "
                f"{made.num_reused} keep their trajectories"
            )
    replace_by_worker("supervise", [str(folder), *json_arguments(as_json)])
