"""`strawflow batch`: the planned batches of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from strawflow.cli.group import QuickGroup
from strawflow.cli.options import ConsumerOption, JsonFlag, RunArgument, opened
from strawflow.plural import counted

if TYPE_CHECKING:
    from strawflow.flow.status import BatchDetail

app = typer.Typer(cls=QuickGroup, help="List batches, or open one.", no_args_is_help=True)


@app.command("list")
def list_batches(
    run: RunArgument,
    last: Annotated[int | None, typer.Option(min=1, help="Only the newest so many.")] = None,
    consumer: ConsumerOption = "trainer",
    as_json: JsonFlag = False,
) -> None:
    """List the planned batches in step order."""
    from strawflow.cli import output
    from strawflow.index import batches

    with opened(run) as found, found.index.read() as connection:
        listed = batches.listed(connection, found.branch, consumer)
    if last is not None:
        listed = listed[-last:]
    if as_json:
        output.print_json(listed)
        return
    output.print_table(
        (
            "step",
            "objective",
            "state",
            "units",
            "sequences",
            "tokens",
            "reward",
            "staleness",
            "planned at",
            "digest",
        ),
        [
            (
                b.step,
                b.objective,
                b.state,
                b.num_units,
                b.num_sequences,
                b.num_tokens,
                b.mean_reward,
                b.max_staleness,
                output.clock_time(b.planned_at),
                b.digest[:12],
            )
            for b in listed
        ],
        empty="no batch is planned yet",
        optional=("digest",),
    )


@app.command()
def show(
    run: RunArgument,
    step: Annotated[int | None, typer.Argument(min=1, help="The newest planned step if left out.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Open one batch: each member's fate, and where the rows lie.

    A fate comes with its reason, reward, staleness and lengths.

    Damage is told in place of what it hit, and the exit code is 11 then.
    """
    from strawflow.cli import output
    from strawflow.errors import CorruptPackError, NotFoundError
    from strawflow.flow.status import batch_detail
    from strawflow.index import consumers

    with opened(run) as found:
        if step is None:
            with found.index.read() as connection:
                step = consumers.find(connection, found.branch, found.consumer).planned
            if step == 0:
                raise NotFoundError("no batch is planned yet; `strawflow status` says what the run waits for")
        detail = batch_detail(found, step)
    if as_json:
        output.print_json(detail)
    else:
        _print(detail)
    if detail.damage is not None or any(m["damage"] is not None for m in detail.micro_batches):
        raise typer.Exit(CorruptPackError.exit_code)


def _print(detail: BatchDetail) -> None:
    from strawflow.cli import output

    b = detail.batch
    output.say(
        f"step {b.step}: {b.objective}, {b.state}, {counted(b.num_units, 'unit')}, {counted(b.num_sequences, 'sequence')}, "
        f"{counted(b.num_tokens, 'token')}, mean reward {output.cell(b.mean_reward)}, staleness up to {b.max_staleness}"
    )
    output.say(f"planned {b.planned_at} under fence {b.fence}; digest {b.digest}")
    if b.denominators:
        output.say(f"loss denominators {', '.join(output.cell(d) for d in b.denominators)}")
    names = (
        "unit_id",
        "member",
        "outcome",
        "reason",
        "reward",
        "advantage",
        "staleness",
        "num_tokens",
        "prompt_length",
        "response_length",
        "mini_batch",
        "micro_batch",
    )
    if detail.damage is None:
        members = [
            [f"{m['member']}.{m['segment']}" if n == "member" and m["segment"] else m[n] for n in names]
            for m in detail.members
        ]
        output.print_table(names, members, empty="the plan is empty")
    else:
        print(f"DAMAGED plan, so only the fate of each unit is told: {detail.damage}")
        fates = [(u["unit_id"], u["outcome"], u["reason"]) for u in detail.units]
        output.print_table(("unit", "outcome", "reason"), fates, empty="no units")
    columns = (
        "mini_batch",
        "slice",
        "micro_batch",
        "num_sequences",
        "num_tokens",
        "path",
        "offset",
        "length",
    )
    output.print_table(
        columns, [[m[name] for name in columns] for m in detail.micro_batches], empty="no packed rows"
    )
    for m in detail.micro_batches:
        if m["damage"] is not None:
            place = f"{m['mini_batch']}, slice {m['slice']}, micro-batch {m['micro_batch']}"
            print(f"DAMAGED mini-batch {place}: {m['damage']}")
