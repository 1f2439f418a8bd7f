"""Starting workers: this process is replaced by the worker, so signals and the exit code are the worker's own.

It never imports the workers; it looks whether they and what they need are installed, and says which extra is missing.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from strawflow.cli.group import QuickGroup
from strawflow.cli.native import options_of, split_native_flags
from strawflow.cli.options import JsonFlag, RunArgument, run_folder
from strawflow.plural import counted

if TYPE_CHECKING:
    from strawflow.config import RunConfig

ForceFlag = Annotated[
    bool, typer.Option("--force", help="Also if it seems to live; what it hands in later is refused.")
]

ENTRY = "strawflow_workers.entry"

NEEDS: dict[str, tuple[tuple[str, str], ...]] = {
    "rollout": (("aiohttp", "rollout"),),
    "reward": (("aiohttp", "rollout"),),
    "hook": (("aiohttp", "rollout"),),
    "assemble": (),
    "train": (("torch", "trainer"), ("megatron.core", "trainer")),
    "supervise": (("torch", "trainer"), ("megatron.core", "trainer")),
    "replay": (("torch", "trainer"), ("megatron.core", "trainer")),
    "sglang-flags": (("sglang", "rollout"),),
    "router-flags": (("sglang_router", "rollout"),),
    "megatron-flags": (("torch", "trainer"), ("megatron.core", "trainer")),
    "quickstart": (
        ("torch", "trainer"),
        ("megatron.core", "trainer"),
        ("sglang", "rollout"),
        ("reasoning_gym", "rollout"),
    ),
}
"""Per verb: modules that must be there, and the extra that brings each."""

# --json on a worker decides how an error before its start is told; the worker itself logs.
app = typer.Typer(
    cls=QuickGroup,
    help="Run one worker of a run here; list and fence those of a run.",
    no_args_is_help=True,
)


def replace_by_worker(verb: str, arguments: Sequence[str]) -> NoReturn:
    """Turn this process into `python -m strawflow_workers.entry VERB ...`.

    Raises:
        ConfigError: the workers, or what this one needs, are not installed.
    """
    require_installed(verb)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", ENTRY, verb, *arguments])


def check_engine_flags(config: RunConfig, *, given: Sequence[str]) -> None:
    """Refuse flags of engines (`given` for all, or in the topology) and router that the installed SGLang would not take.

    Raises:
        typer.Exit: with the code of the error, which was told.
        ConfigError: the workers, or SGLang, are not installed; a flag of the router is given and no engine stands behind one.
    """
    from strawflow.topology import Topology, as_arguments, placements

    rollout, topology = config.rollout, config.rollout.topology
    placed = placements(topology) if isinstance(topology, Topology) else ()
    of_router = rollout.router_args
    if isinstance(topology, Topology):
        of_router = (*of_router, *as_arguments(topology.router))
    if of_router:
        if not any(p.is_routed for p in placed):
            from strawflow.errors import ConfigError

            raise ConfigError(
                "rollout.router_args: no engine of this run stands behind a router; a topology with prefill and decode groups, "
                "or with engines_per_worker above 1, has one"
            )
        _check_flags("router-flags", of_router)
    if rollout.engine != "sglang":
        return
    lines = {tuple(given): ""}
    for placement in placed:
        for plan in placement.engines:
            lines.setdefault(
                plan.arguments,
                f"the topology's model {placement.model!r}, overrides of a {plan.worker_type} server group: ",
            )
    for arguments, place in lines.items():
        if arguments:
            _check_flags("sglang-flags", arguments, place=place)


def _check_flags(verb: str, arguments: Sequence[str], *, place: str = "") -> None:
    require_installed(verb)
    done = subprocess.run(
        [sys.executable, "-m", ENTRY, verb, "--place", place, "--check", *arguments], check=False
    )
    if done.returncode != 0:
        raise typer.Exit(done.returncode)


def require_installed(verb: str) -> None:
    """Refuse a worker that cannot start here.

    Raises:
        ConfigError: the workers, or what this one needs, are not installed.
    """
    _require("strawflow_workers", "rollout,trainer", verb)
    for module, extra in NEEDS[verb]:
        _require(module, extra, verb)


def existing_run(run: str) -> Path:
    """Return the absolute folder of a run that exists.

    Raises:
        NotFoundError: there is none.
    """
    from strawflow.errors import NotFoundError

    folder = run_folder(run).resolve()
    # What flow.run.is_run asks, without loading the index for it.
    if not (folder / "config.json").exists():
        raise NotFoundError(f"{folder} is no run: it has no config.json; see `strawflow run list`")
    return folder


def json_arguments(as_json: bool) -> list[str]:
    return ["--json"] if as_json else []


def _require(module: str, extra: str, verb: str) -> None:
    from strawflow.errors import ConfigError

    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name is missing
        found = False
    if not found:
        raise ConfigError(
            f"{verb} needs {module}, which is not installed; install it with pip install 'strawflow[{extra}]'"
        )


@app.command()
def rollout(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="The run.")] = None,
    engine_url: Annotated[
        str | None, typer.Option(help="An engine that runs already, for this worker alone; none is started.")
    ] = None,
    help_sglang: Annotated[
        bool, typer.Option("--help-sglang", help="List the flags of the installed SGLang's server, and stop.")
    ] = False,
    help_router: Annotated[
        bool, typer.Option("--help-router", help="List the flags of the installed router, and stop.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Lease prompt groups, generate, score, store trajectories."""
    if help_sglang or help_router:
        replace_by_worker("sglang-flags" if help_sglang else "router-flags", json_arguments(as_json))
    if run is None:
        from strawflow.errors import InvalidInputError

        raise InvalidInputError("name the run: strawflow worker rollout RUN")
    of_engine = [] if engine_url is None else ["--engine-url", engine_url]
    replace_by_worker("rollout", [str(existing_run(run)), *of_engine])


@app.command()
def assemble(run: RunArgument, as_json: JsonFlag = False) -> None:
    """Plan batches from completed groups."""
    replace_by_worker("assemble", [str(existing_run(run))])


_NATIVE = "strawflow.native_flags"


class TrainCommand(TyperCommand):
    """`worker train`, which also takes Megatron's own flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_NATIVE], rest = split_native_flags(args, own=options_of(self))
        return super().parse_args(ctx, rest)


@app.command(cls=TrainCommand)
def train(
    ctx: typer.Context,
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="The run.")] = None,
    help_megatron: Annotated[
        bool,
        typer.Option("--help-megatron", help="List the settings of the installed Megatron, and stop."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Train planned batches in order, checkpoint, publish weights.

    Megatron's own flags may be given as they were when the run was created; others are refused.
    """
    if help_megatron:
        replace_by_worker("megatron-flags", json_arguments(as_json))
    if run is None:
        from strawflow.errors import InvalidInputError

        raise InvalidInputError("name the run: strawflow worker train RUN")
    native = ctx.meta[_NATIVE]
    replace_by_worker("train", [str(existing_run(run)), *(["--native", *native] if native else [])])


@app.command("list")
def list_workers(
    run: RunArgument,
    all_of_them: Annotated[
        bool, typer.Option("--all", help="Also those that ended or were lost, newest last.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """List worker sessions. Where each runs, how long its lease still holds, what it holds."""
    from strawflow.cli import output
    from strawflow.cli.options import opened
    from strawflow.flow.fence import workers_of

    with opened(run) as found:
        listed = workers_of(found, live_only=not all_of_them)
    if as_json:
        output.print_json(listed)
        return
    output.print_table(
        ("session", "kind", "host", "pid", "state", "process", "lease left", "units", "role"),
        [
            (
                w.session_id,
                w.kind,
                w.host,
                w.pid,
                w.state,
                w.process,
                f"{w.expires_in_s:.0f} s" if w.state == "live" else "-",
                w.num_units,
                ", ".join(w.roles) or "-",
            )
            for w in listed
        ],
        empty="no workers",
        optional=("kind",),  # the session's name begins with it
    )


@app.command()
def fence(
    run: RunArgument,
    session: Annotated[str, typer.Argument(help="Id of the worker session (`strawflow worker list`).")],
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Declare a worker lost at once. Its units are ready again, its roles free, its late writes refused."""
    fence_off(run, session, force=force, as_json=as_json)


def fence_off(run: str, session: str, *, force: bool, as_json: bool) -> None:
    """Fence a worker session off and say how many units that made ready."""
    from strawflow.cli import output
    from strawflow.cli.options import opened
    from strawflow.flow import fence as fencing

    with opened(run) as found:
        num_units = fencing.fence(found, session, force=force)
    if as_json:
        output.print_json({"worker": session, "released": num_units})
    else:
        output.say(f"{session} is fenced off; {counted(num_units, 'unit is', 'units are')} ready again")
