"""`strawflow events`: the event log of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from strawflow.cli.options import JsonFlag, RunArgument, opened


def events(
    run: RunArgument,
    limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 50,
    name: Annotated[str, typer.Option(help="Only names that start so, e.g. `unit.`.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Show what happened, newest first. What retention moved out of the index is shown as well."""
    import json

    from strawflow.cli import output
    from strawflow.flow.retire import latest_events

    with opened(run) as found:
        rows = latest_events(found, limit=limit, name_prefix=name)
    if as_json:
        output.print_json(rows)
        return
    output.print_table(
        ("id", "at", "event", "session", "unit", "facts"),
        [
            (
                r["event_id"],
                output.clock_time(r["at"]),
                r["name"],
                r["session_id"],
                r["unit_id"],
                output.clipped(json.dumps(r["facts"]), 90),
            )
            for r in rows
        ],
        empty="no events",
    )
