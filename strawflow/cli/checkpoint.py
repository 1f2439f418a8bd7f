"""`strawflow checkpoint`: the committed checkpoints of a run's consumers."""

from __future__ import annotations

import typer

from strawflow.cli.group import QuickGroup
from strawflow.cli.options import ConsumerOption, JsonFlag, RunArgument, opened

app = typer.Typer(cls=QuickGroup, help="List checkpoints.", no_args_is_help=True)


@app.command("list")
def list_checkpoints(run: RunArgument, consumer: ConsumerOption = "", as_json: JsonFlag = False) -> None:
    """List the committed checkpoints of the run's branch.

    Those of what the branch started from as well, of all consumers unless one is named.
    """
    from strawflow.cli import output
    from strawflow.flow.history import checkpoints_of

    with opened(run) as found:
        listed = checkpoints_of(found, consumer=consumer or None)
    if as_json:
        output.print_json(listed)
        return
    output.print_table(
        ("checkpoint", "consumer", "step", "branch", "made at", "files", "pinned"),
        [
            (
                c.checkpoint_id,
                c.consumer,
                c.step,
                c.branch_id,
                output.clock_time(c.created_at),
                c.files,
                "yes" if c.pinned else "-",
            )
            for c in listed
        ],
        empty="no checkpoint is committed yet",
    )
