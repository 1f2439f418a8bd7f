"""`strawflow reward`: try a reward by hand. The rewards are the workers': this process is replaced by one of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from strawflow.cli.group import QuickGroup
from strawflow.cli.options import JsonFlag
from strawflow.cli.worker import json_arguments, replace_by_worker

app = typer.Typer(cls=QuickGroup, help="Try a reward on samples.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Take what stands before the verb."""


@app.command()
def check(
    spec: Annotated[
        str, typer.Argument(help="A reward, as rollout.reward takes it; see the README's table.")
    ],
    file: Annotated[
        Path,
        typer.Option(
            help="JSONL; a row has 'response', or 'responses' of a group, and prompt, label, metadata."
        ),
    ],
    shape: Annotated[Literal["raw", "exact"], typer.Option(help="As rollout.reward_shape.")] = "raw",
    post_process: Annotated[str, typer.Option(help="As rollout.reward_post_process.")] = "",
    row_reward: Annotated[
        list[str] | None, typer.Option(help="As one of rollout.row_rewards; may be given again.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="As rollout.reward_timeout_s.")] = 10.0,
    processes: Annotated[int, typer.Option(min=1, help="As rollout.reward_processes.")] = 1,
    as_json: JsonFlag = False,
) -> None:
    """Score the samples of a file, without engines and without a run.

    Score, reward or failure of each is printed, and how many failed.
    """
    from strawflow.errors import ConfigError
    from strawflow.reward_names import parse_reward

    parse_reward(spec)
    if post_process and parse_reward(post_process).kind != "function":
        raise ConfigError(f"--post-process {post_process!r} is no function; write package.module:function")
    arguments = [spec, "--file", str(file), "--shape", shape, "--post-process", post_process]
    for name in row_reward or ():
        parse_reward(name)
        arguments += ["--row-reward", name]
    arguments += ["--timeout-s", str(timeout_s), "--processes", str(processes)]
    replace_by_worker("reward", [*arguments, *json_arguments(as_json)])
