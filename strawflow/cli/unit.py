"""`strawflow unit`: the prompt groups of a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from strawflow.cli.group import QuickGroup
from strawflow.cli.options import JsonFlag, RunArgument, opened
from strawflow.cli.worker import ForceFlag, fence_off
from strawflow.plural import counted

if TYPE_CHECKING:
    from strawflow.flow.status import UnitDetail

app = typer.Typer(
    cls=QuickGroup, help="List prompt groups, open one, or offer failed ones again.", no_args_is_help=True
)

StateName = Literal["ready", "leased", "completed", "failed"]
PurposeName = Literal["train", "demo", "eval"]


@app.command("list")
def list_units(
    run: RunArgument,
    state: Annotated[StateName | None, typer.Option(help="Only units in this state.")] = None,
    purpose: Annotated[PurposeName | None, typer.Option(help="Only units of this purpose.")] = None,
    last: Annotated[bool, typer.Option("--last", help="The newest first, not the oldest.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="How many at most, in order of admission.")] = 100,
    as_json: JsonFlag = False,
) -> None:
    """List units."""
    from strawflow.cli import output
    from strawflow.index import datasets, units
    from strawflow.states import UnitState

    with opened(run) as found, found.index.read() as connection:
        wanted = None if state is None else UnitState(state)
        listed = units.listed(
            connection, found.branch, state=wanted, purpose=purpose, newest_first=last, limit=limit
        )
        dataset_of = datasets.of_segments(connection, (u.segment_id for u in listed))
    if as_json:
        output.print_json([{**asdict(u), "dataset": dataset_of[u.segment_id]} for u in listed])
        return
    output.print_table(
        (
            "unit",
            "purpose",
            "profile",
            "dataset",
            "epoch",
            "position",
            "state",
            "attempts",
            "reward",
            "tokens",
            "last error",
        ),
        [
            (
                u.unit_id,
                u.purpose,
                u.profile,
                dataset_of[u.segment_id],
                u.epoch,
                u.position,
                u.state,
                u.attempts,
                u.mean_reward,
                u.num_tokens,
                output.clipped(u.last_error, 60),
            )
            for u in listed
        ],
        empty="no such units",
    )
    if len(listed) == limit:
        print(f"the {'last' if last else 'first'} {limit}; --limit shows more")


@app.command()
def show(
    run: RunArgument, unit: Annotated[int, typer.Argument(help="Id of the unit.")], as_json: JsonFlag = False
) -> None:
    """Open one unit: prompt, trajectories, fate, events.

    Damage is told in place of what it hit, and the exit code is 11 then.
    """
    from strawflow.cli import output
    from strawflow.errors import CorruptPackError
    from strawflow.flow.status import unit_detail

    with opened(run) as found:
        detail = unit_detail(found, unit)
    if as_json:
        output.print_json(detail)
    else:
        _print(detail)
    if detail.prompt_damage is not None or detail.damage is not None:
        raise typer.Exit(CorruptPackError.exit_code)


@app.command()
def retry(
    run: RunArgument,
    unit: Annotated[
        int | None, typer.Argument(help="Id of a failed unit; every failed unit if left out.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Offer failed units again. Attempts start afresh; one already recorded as dropped stays dropped."""
    from strawflow.cli import output
    from strawflow.flow.retry import retry_failed, retry_unit

    with opened(run) as found:
        retried = retry_failed(found) if unit is None else [retry_unit(found, unit).unit_id]
    if as_json:
        output.print_json({"retried": retried})
    else:
        num = len(retried)
        print(f"{counted(num, 'unit is', 'units are')} ready again" if retried else "no failed unit to retry")


@app.command()
def release(
    run: RunArgument,
    worker: Annotated[
        str, typer.Option("--worker", help="Session whose units are given back (`strawflow worker list`).")
    ],
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Give back what a dead worker holds, at once. Refused for one that lives. Same as `worker fence`."""
    fence_off(run, worker, force=force, as_json=as_json)


def _print(detail: UnitDetail) -> None:
    from strawflow.cli import output

    u = detail.unit
    output.say(
        f"unit {u.unit_id}: {u.purpose}, {u.state}, fence {u.fence}, {counted(u.attempts, 'attempt')}, "
        f"{counted(u.crashes, 'crash', 'crashes')}, "
        f"epoch {u.epoch}, row {u.position} of segment {u.segment_id} of dataset {detail.dataset}"
    )
    if detail.is_retired:
        output.say(
            "retired: it left the index, this is what the history holds of it; its trajectories are gone"
        )
    if u.session_id:
        print(f"leased to {u.session_id}")
    if u.last_error:
        output.say(f"last error: {u.last_error}")
    if detail.prompt is None:
        output.say(f"DAMAGED prompt: {detail.prompt_damage}")
    else:
        output.say(f"prompt: {output.clipped(detail.prompt['prompt'], 300)}")
        output.say(f"label: {output.clipped(detail.prompt['label'], 120) or '-'}")
        output.say(f"from {detail.prompt['source']}, line {detail.prompt['source_line']}")
    for fate in detail.fates:
        where = "" if fate["step"] is None else f" in step {fate['step']}"
        print(
            f"{fate['consumer']}: {fate['outcome']}{where}{': ' + fate['reason'] if fate['reason'] else ''}"
        )
    output.print_table(
        ("member", "status", "reward", "tokens", "finish", "response or failure"),
        [
            (
                f"{m['member']}.{m['segment']}" if m["segment"] else m["member"],
                m["status"],
                m["reward"],
                m["num_response_tokens"],
                m["finish_reason"],
                output.clipped(m["failure"] or m["response_text"], 80),
            )
            for m in detail.members
        ],
        empty="no accepted trajectories"
        if detail.damage is None
        else f"DAMAGED trajectories: {detail.damage}",
    )
    for event in detail.events:
        print(f"{event['at']}  {event['name']}  {event['session_id'] or ''}")
