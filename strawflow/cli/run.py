"""`strawflow run`: create runs, list them, show their settings."""

from __future__ import annotations

import json
import os
import shlex
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from strawflow.cli.fields import (
    ENGINE_PREFIX,
    ROUTER_PREFIX,
    commented_toml,
    field_helps,
    refuse_shared_names,
    split_engine_flags,
    split_field_flags,
)
from strawflow.cli.group import QuickGroup
from strawflow.cli.native import options_of, split_native_flags, with_native_settings
from strawflow.cli.options import RUNS_FOLDER, JsonFlag, RunArgument, opened, run_folder

if TYPE_CHECKING:
    from strawflow.config import RunConfig

app = typer.Typer(cls=QuickGroup, help="Create runs, list them, show their settings.", no_args_is_help=True)

_FLAGS = "strawflow.field_flags"
_OF_ENGINE = "strawflow.engine_flags"
_NATIVE = "strawflow.native_flags"
PASSED_ON = {ENGINE_PREFIX: "rollout.engine_args", ROUTER_PREFIX: "rollout.router_args"}
"""Prefixes of the flags of other programs, and the field that keeps each."""


class CreateCommand(TyperCommand):
    """`run create`, which also takes every configuration field as a flag and lists them in its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        taken = {}
        rest = args
        for prefix, field in PASSED_ON.items():
            taken[field], rest = split_engine_flags(rest, prefix=prefix)
        flags, rest = split_field_flags(rest)
        for prefix, field in PASSED_ON.items():
            if taken[field]:
                if field in flags:
                    from strawflow.errors import InvalidInputError

                    raise InvalidInputError(f"give --{field} or {prefix} flags, not both")
                flags[field] = json.dumps(taken[field])
        ctx.meta[_FLAGS], ctx.meta[_OF_ENGINE] = flags, taken["rollout.engine_args"]
        ctx.meta[_NATIVE], rest = split_native_flags(rest, own=options_of(self))
        refuse_shared_names(ctx.meta[_NATIVE])
        return super().parse_args(ctx, rest)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        formatter.write(
            "\nConfiguration fields: a flag --section.field, a variable STRAWFLOW_SECTION_FIELD, "
            "or a TOML [section]. A flag may leave out the section where no other has the field: --max-staleness 2.\n"
            "Flags of SGLang's server: --sglang-ITS-OWN-NAME [VALUE ...], after the name of the run; `strawflow worker "
            "rollout --help-sglang` lists them. Those of its router, for a topology that has one: --router-ITS-OWN-NAME; "
            "--help-router.\n"
            "Megatron's own settings: --ITS-OWN-NAME [VALUE ...], switches as --NAME or --no-NAME, after the name of the run; "
            "`strawflow worker train --help-megatron` lists them.\n\n"
        )
        for field in field_helps():
            formatter.write(f"  --{field.name} <{field.kind}>  [default: {_shown(field.default)}]\n")
            if field.doc:
                formatter.write(f"      {field.doc}\n")


@app.command(cls=CreateCommand)
def create(
    ctx: typer.Context,
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Folder to create; a bare name is made under ./runs/.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file of the run; flags and variables beat it.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Remove a run that is there, with all it holds.")
    ] = False,
    print_config: Annotated[
        bool,
        typer.Option("--print-config", help="Print a TOML file with every field at its default, and stop."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Create a run: its folder, its index, its configuration. Takes every field as --section.field VALUE."""
    from strawflow.cli import output
    from strawflow.cli.worker import check_engine_flags
    from strawflow.config import load_config, refuse_deadlocks, refuse_senseless, with_found_model
    from strawflow.errors import InvalidInputError
    from strawflow.flow.run import create_run

    if print_config:
        if as_json:
            output.print_json(
                [
                    {
                        "name": f.name,
                        "kind": f.kind,
                        "default": f.default,
                        "variable": f.variable,
                        "doc": f.doc,
                    }
                    for f in field_helps()
                ]
            )
        else:
            print(commented_toml(), end="")
        return
    if run is None:
        after = "; flags of Megatron come after it" if ctx.meta[_NATIVE] else ""
        raise InvalidInputError(f"name the run to create: strawflow run create RUN{after}")
    resolved = with_found_model(load_config(config, flags=ctx.meta[_FLAGS], environ=os.environ))
    refuse_deadlocks(resolved)
    refuse_senseless(resolved)
    check_engine_flags(resolved, given=ctx.meta[_OF_ENGINE])
    resolved = with_native_settings(resolved, ctx.meta[_NATIVE], as_json=as_json)
    made = create_run(run_folder(run), resolved, fresh=fresh)
    steps = next_steps(run, resolved)
    if as_json:
        shown = resolved.model_dump(mode="json")
        index_url = made.index.shown_url
        output.print_json({"root": made.root, "index_url": index_url, "config": shown, "next": steps})
    else:
        print(f"created {made.root}")
        print("next:")
        for step in steps:
            print(f"  {step}")
    made.close()


@app.command("list")
def list_runs(
    folder: Annotated[Path, typer.Argument(help="Where the runs lie.")] = RUNS_FOLDER,
    as_json: JsonFlag = False,
) -> None:
    """List the runs of a folder with where they stand."""
    from strawflow.cli import output

    rows = [_standing(path.parent) for path in sorted(folder.glob("*/config.json"))]
    if as_json:
        output.print_json(rows)
        return
    names = ("name", "stage", "position", "planned", "total", "live_sessions", "problem")
    output.print_table(names, [[r[name] for name in names] for r in rows], empty=f"no runs in {folder}")


@app.command()
def show(run: RunArgument, as_json: JsonFlag = False) -> None:
    """Show a run's settings, and what its trainer was built with.

    As text those that are not the default; as JSON all of them, and every field of Megatron's configurations as the trainer was last built with it.
    """
    from strawflow.cli import output
    from strawflow.flow.run import NATIVE_FILE

    with opened(run) as found:
        config = found.config.model_dump(mode="json")
        path = found.root / NATIVE_FILE
        built = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if as_json:
        output.print_json({"root": found.root, "config": config, "trainer_built_with": built})
        return
    print(f"{found.root}")
    for field in field_helps():
        section, name = field.name.split(".", 1)
        value = config[section][name]
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        if value != default:
            print(f"  {field.name} = {json.dumps(value, ensure_ascii=False)}")
    if built is None:
        print("the trainer has not started yet: what Megatron makes of its settings is not known")
        return
    print(f"trainer built with megatron-core {built['megatron_core']}")
    for configuration, fields in built["configurations"].items():
        for name in built["given"]:
            if name in fields:
                print(f"  {configuration}.{name} = {json.dumps(fields[name])}")


def next_steps(run: str, config: RunConfig) -> list[str]:
    """Return the commands that come after creating a run, in order, quoted for a shell: `FILE@[:5]` is a pattern to one."""
    steps = []
    wanted = (
        *((one.name, one.path, True) for one in config.prompt_sets() if not one.source),
        ("demonstrations", config.data.demonstrations, config.warm_start.steps > 0),
        ("held_out", config.data.held_out, False),
        *((dataset.name, dataset.prompts, True) for dataset in config.eval.datasets),
    )
    for dataset, path, is_needed in wanted:
        if path or is_needed:
            steps.append(["strawflow", "enqueue", run, path or "FILE", "--dataset", dataset])
    return [
        shlex.join(step)
        for step in (*steps, ["strawflow", "resume", run], ["strawflow", "status", run, "--watch"])
    ]


def _standing(root: Path) -> dict[str, Any]:
    """Return a run's line in the list; a run that cannot be opened is shown with the reason, not left out."""
    from strawflow.errors import StrawflowError
    from strawflow.flow.run import open_run
    from strawflow.flow.status import progress_of

    row: dict[str, Any] = {"name": root.name, "root": str(root)}
    try:
        with closing(open_run(root)) as run:
            progress, live = progress_of(run)
    except StrawflowError as error:
        empty = dict.fromkeys(("stage", "position", "trained", "planned", "total", "live_sessions"))
        return {**row, **empty, "problem": str(error)}
    return {
        **row,
        "stage": progress.stage,
        "position": progress.position,
        "trained": progress.trained,
        "planned": progress.planned,
        "total": progress.total,
        "live_sessions": live,
        "problem": None,
    }


def _shown(default: Any) -> str:
    if isinstance(default, tuple | list | dict):
        return "[]" if isinstance(default, tuple | list) else "{}"
    if isinstance(default, bool):
        return str(default).lower()
    return repr(default) if default == "" else str(default)
