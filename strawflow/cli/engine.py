"""`strawflow engine`: the engines of a run, which may come and go while it goes on.

What is decided here is a row in the index; the supervisor of the run and the workers follow within seconds.
"""

from __future__ import annotations

from typing import Annotated

import typer

from strawflow.cli.group import QuickGroup
from strawflow.cli.options import JsonFlag, RunArgument, opened
from strawflow.plural import counted
from strawflow.states import EngineState

app = typer.Typer(cls=QuickGroup, help="List a run's engines; let some come and go.", no_args_is_help=True)

EngineArgument = Annotated[
    int, typer.Argument(metavar="ID", help="Number of the engine (`strawflow engine list`).")
]


@app.command("list")
def list_engines(
    run: RunArgument,
    all_of_them: Annotated[bool, typer.Option("--all", help="Also those that are gone.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the engines that a run wants. What each serves, its state, what it has in flight, its last error."""
    from strawflow.cli import output
    from strawflow.flow.engines import standing
    from strawflow.topology import POLICY

    with opened(run) as found:
        listed = standing(found, with_gone=all_of_them)
    if as_json:
        output.print_json(listed)
        return
    output.print_table(
        (
            "engine",
            "model",
            "url",
            "state",
            "serves",
            "units in flight",
            "tokens/s",
            "garbage",
            "last error",
        ),
        [
            (
                e.slot_id,
                e.model,
                e.url or "not started",
                e.state.value,
                e.version_id or ("nothing yet" if e.model == POLICY else "its own"),
                e.num_units,
                None if e.tokens_per_s is None else round(e.tokens_per_s),
                e.num_garbage,
                output.clipped(e.last_error, 90),
            )
            for e in listed
        ],
        empty="no engines; `strawflow resume` starts those of the configuration, `strawflow engine add` others",
        optional=("model", "garbage"),
    )


@app.command()
def add(
    run: RunArgument,
    url: Annotated[
        str | None, typer.Option(help="An engine that runs already, wherever it can read the run's weights.")
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="So many of the run's own, on the supervisor's host.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Add an engine by its address, or some of the run's own. The supervisor starts a rollout worker for each.

    One that is in quarantine, given by its address again, is released.
    """
    from strawflow.cli import output
    from strawflow.errors import InvalidInputError
    from strawflow.flow import engines

    if (url is None) == (count is None):
        raise InvalidInputError(
            "say which: --url http://HOST:PORT for one that runs, or --count N for our own"
        )
    with opened(run) as found:
        added = engines.add(found, url=url, count=count or 1)
    if as_json:
        output.print_json({"added": added})
    else:
        numbers = ", ".join(str(slot_id) for slot_id in added)
        output.say(f"{counted(len(added), 'engine is', 'engines are')} wanted: {numbers}")


@app.command()
def drain(run: RunArgument, engine: EngineArgument, as_json: JsonFlag = False) -> None:
    """Let an engine leave. It is granted nothing more; what it has in flight is parked and goes on elsewhere."""
    from strawflow.flow import engines

    with opened(run) as found:
        state = engines.drain(found, engine)
    _say(engine, state, f"is {state.value}", as_json=as_json)


@app.command()
def remove(run: RunArgument, engine: EngineArgument, as_json: JsonFlag = False) -> None:
    """Take an engine out at once. What it has in flight goes back as it was last saved, the attempts refunded."""
    from strawflow.flow import engines

    with opened(run) as found:
        engines.remove(found, engine)
    _say(engine, EngineState.GONE, "is gone", as_json=as_json)


@app.command()
def release(run: RunArgument, engine: EngineArgument, as_json: JsonFlag = False) -> None:
    """Try an engine in quarantine again now. It serves once it has answered some probes soundly."""
    from strawflow.flow import engines

    with opened(run) as found:
        engines.release(found, engine)
    _say(engine, EngineState.STARTING, "is tried again", as_json=as_json)


def _say(engine: int, state: EngineState, words: str, *, as_json: bool) -> None:
    """Tell what became of an engine."""
    from strawflow.cli import output

    if as_json:
        output.print_json({"engine": engine, "state": state.value})
    else:
        output.say(f"engine {engine} {words}")
