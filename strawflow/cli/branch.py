"""`strawflow branch`: list the run's lines of history, or start one.

`strawflow resume RUN --from CHECKPOINT --branch NAME` starts one too, and the workers on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from strawflow.cli.group import QuickGroup
from strawflow.cli.options import ConsumerOption, JsonFlag, RunArgument, opened
from strawflow.plural import counted

if TYPE_CHECKING:
    from strawflow.flow.branch import NewBranch
    from strawflow.flow.run import Run

app = typer.Typer(cls=QuickGroup, help="List the run's lines of history, or start one.", no_args_is_help=True)


@app.command("list")
def list_branches(run: RunArgument, as_json: JsonFlag = False) -> None:
    """List every branch. Where it started, how far it came, and which one the run is on."""
    from strawflow.cli import output
    from strawflow.flow.branch import branches_of

    with opened(run) as found:
        rows = [
            {
                "branch": branch.branch_id,
                "active": branch.branch_id == found.branch,
                "parent": branch.parent_id,
                "from_checkpoint": branch.from_checkpoint_id,
                "from_step": branch.from_step,
                "position": position,
                "planned": planned,
                "created_at": branch.created_at,
            }
            for branch, position, planned in branches_of(found)
        ]
    if as_json:
        output.print_json(rows)
        return
    output.print_table(tuple(rows[0]), [list(row.values()) for row in rows], empty="no branches")


@app.command()
def create(
    run: RunArgument,
    name: Annotated[str, typer.Argument(help="Name of the new branch; the run goes on there.")],
    from_checkpoint: Annotated[
        str,
        typer.Option(
            "--from",
            help="Checkpoint (its id or its step) to branch off from; see `strawflow checkpoint list`.",
        ),
    ],
    consumer: ConsumerOption = "trainer",
    reuse_trajectories: Annotated[
        bool,
        typer.Option(
            "--reuse-trajectories",
            help="Keep what was sampled but not read by the checkpoint, if its weights are no later.",
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Start a new line of history at a checkpoint, and no worker.

    Every program that opens the run then goes on there.

    Later batches, weights and checkpoints, of all consumers, stay listed under the old branch and are not read. Another
    consumer goes on after the last of its own steps that the new line holds whole, and is offered what it has not read.
    """
    from dataclasses import replace

    from strawflow.cli import output

    with opened(run) as found:
        as_consumer = replace(found, consumer=consumer)
        made = branch_off(as_consumer, from_checkpoint, name, reuse=reuse_trajectories, is_quiet=as_json)
    if as_json:
        output.print_json(made)


def branch_off(run: Run, checkpoint: str, name: str, *, reuse: bool, is_quiet: bool) -> NewBranch:
    """Make a branch and, unless quiet, say what it starts with."""
    from strawflow.cli import output
    from strawflow.flow.branch import create_branch

    made = create_branch(run, checkpoint=checkpoint, name=name, reuse_trajectories=reuse)
    if is_quiet:
        return made
    output.say(
        f"branch {made.branch_id} from {made.from_checkpoint_id}: "
        f"{counted(made.num_pristine, 'group starts', 'groups start')} again, "
        f"{counted(made.num_reused, 'keeps its', 'keep their')} trajectories"
    )
    for consumer, position in made.positions.items():
        if consumer != run.consumer:
            print(f"consumer {consumer} goes on after its step {position}")
    if made.num_again:
        output.say(
            f"{counted(made.num_again, 'group of the line is', 'groups of the line are')} offered to consumers that have not "
            "read it by then"
        )
    if made.num_lost:
        output.say(
            f"{counted(made.num_lost, 'time')} a consumer would have to read a group again that retention has moved to the history "
            "and whose trajectories are gone: it does not get it"
        )
    return made
