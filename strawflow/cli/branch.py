"""`strawflow branch`: list the run's lines of history. New ones start with `strawflow resume RUN --from CHECKPOINT`."""

from __future__ import annotations

import typer

from strawflow.cli.group import QuickGroup
from strawflow.cli.options import JsonFlag, RunArgument

app = typer.Typer(cls=QuickGroup, help="List the run's lines of history.", no_args_is_help=True)


@app.command("list")
def list_branches(run: RunArgument, as_json: JsonFlag = False) -> None:
    """List every branch: where it started, how far it came, and which one the run is on."""
    from contextlib import closing

    from strawflow.cli import output
    from strawflow.cli.options import run_folder
    from strawflow.flow.branch import branches_of
    from strawflow.flow.run import open_run

    with closing(open_run(run_folder(run))) as found:
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
