"""`strawflow hook`: try a hook by hand. Hooks run in the workers: this process is replaced by one of theirs."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from strawflow.cli.group import QuickGroup
from strawflow.cli.options import JsonFlag
from strawflow.cli.worker import json_arguments, replace_by_worker

app = typer.Typer(
    cls=QuickGroup, help="Try a function of yours that the rollout path calls.", no_args_is_help=True
)


@app.callback()
def root() -> None:
    """Take what stands before the verb."""


@app.command()
def check(
    path: Annotated[str, typer.Argument(help="The hook, package.module:function, as its setting takes it.")],
    kind: Annotated[
        Literal[
            "generate",
            "generate_groups",
            "sample_filter",
            "group_filter",
            "post_process",
            "convert",
            "log",
            "curriculum",
            "data_source",
            "advantage",
            "reducer",
            "loss",
        ]
        | None,
        typer.Option(help="What it is; left out, its parameters tell."),
    ] = None,
    sets: Annotated[
        str, typer.Option(metavar="NAME,...", help="Prompt sets that a curriculum is told of.")
    ] = "easy,hard",
    as_json: JsonFlag = False,
) -> None:
    """Test a function of yours against its contract.

    It is imported, called, and its answers stored as a worker would. Needs no engine and no run; exits 0 when all holds.
    """
    of_kind = [] if kind is None else ["--kind", kind]
    replace_by_worker("hook", [path, *of_kind, "--sets", sets, *json_arguments(as_json)])
