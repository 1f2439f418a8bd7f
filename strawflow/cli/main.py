"""The `strawflow` program: puts the nouns together and turns errors into one line and an exit code.

1. A StrawflowError is one line (or one JSON document) on stderr and its own exit code; STRAWFLOW_DEBUG=1 adds the traceback.
2. Usage errors exit 2, Ctrl-C 130, an unknown exception shows its traceback and exits 1.
3. Every option has a variable: STRAWFLOW_, the command's words and the option's name.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

import strawflow
from strawflow.cli import (
    batch,
    branch,
    checkpoint,
    engine,
    enqueue,
    eval,
    events,
    hook,
    index,
    quickstart,
    replay,
    resume,
    reward,
    run,
    status,
    storage,
    unit,
    worker,
)
from strawflow.cli.group import QuickGroup
from strawflow.cli.output import print_error, print_json
from strawflow.errors import InvalidInputError, StrawflowError

app = typer.Typer(
    name="strawflow",
    cls=QuickGroup,
    help="Durable data plane and workflow engine of LLM reinforcement-learning post-training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich costs half of the time that --help may take
    context_settings={"auto_envvar_prefix": "STRAWFLOW"},
)
app.command(cls=quickstart.QuickstartCommand)(quickstart.quickstart)
app.add_typer(run.app, name="run")
app.command()(enqueue.enqueue)
app.add_typer(worker.app, name="worker")
app.add_typer(engine.app, name="engine")
app.command()(resume.resume)
app.command()(status.status)
app.add_typer(branch.app, name="branch")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(batch.app, name="batch")
app.add_typer(unit.app, name="unit")
app.add_typer(eval.app, name="eval")
app.command()(replay.replay)
app.add_typer(reward.app, name="reward")
app.add_typer(hook.app, name="hook")
app.add_typer(index.app, name="index")
app.add_typer(storage.app, name="storage")
app.command()(events.events)


def _show_version(wanted: bool) -> None:
    if wanted:
        if wants_json(sys.argv[1:]):
            print_json({"version": strawflow.__version__})
        else:
            print(f"strawflow {strawflow.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            # The automatic name, STRAWFLOW_VERSION, is one that images set for other reasons.
            envvar="STRAWFLOW_PRINT_VERSION",
            callback=_show_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="STRAWFLOW_JSON", hidden=True, help="For --version.")
    ] = False,
) -> None:
    """Take what stands before the first word."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and end the process with its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    as_json = wants_json(arguments)
    command = typer.main.get_command(app)
    try:
        # Outside standalone mode usage errors come here too: JSON is asked for, so JSON is what they give.
        code = command.main(args=arguments, prog_name="strawflow", standalone_mode=not as_json)
    except StrawflowError as error:
        _report(error, as_json=as_json)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if not (as_json and hasattr(error, "format_message")):
            raise
        _report(InvalidInputError(error.format_message()), as_json=True)
        sys.exit(InvalidInputError.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def wants_json(arguments: Sequence[str]) -> bool:
    """Tell whether errors, which may come before any option is parsed, are to be JSON."""
    return "--json" in arguments or os.environ.get("STRAWFLOW_JSON", "").lower() in ("1", "true", "yes", "on")


def _report(error: StrawflowError, *, as_json: bool) -> None:
    if os.environ.get("STRAWFLOW_DEBUG") == "1":
        traceback.print_exception(error)
    print_error(error, as_json=as_json)


if __name__ == "__main__":
    main()
