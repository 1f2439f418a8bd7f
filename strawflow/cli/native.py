"""Megatron's own flags on a command line: taken apart here, checked by the trainer's program.

1. A flag that is neither the command's nor a configuration field's may be Megatron's; its values are the words up to the next
   flag, so flags of this kind stand after the name of the run.
2. What a name means and takes is never known here: the program of the trainer asks the installed Megatron.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from strawflow.config import RunConfig

_FLAG = re.compile(r"--[A-Za-z][\w-]*(=.*)?", re.DOTALL)
VERB = "megatron-flags"


def split_native_flags(arguments: Sequence[str], *, own: Collection[str]) -> tuple[list[str], list[str]]:
    """Take the flags that are not the command's `own` out of a command line; returns (Megatron's words, the rest)."""
    taken: list[str] = []
    rest: list[str] = []
    at = 0
    while at < len(arguments):
        word = arguments[at]
        at += 1
        if not _FLAG.fullmatch(word) or word.partition("=")[0] in own:
            rest.append(word)
            continue
        taken.append(word)
        # A negative number is a value: no flag of Megatron's begins with a single dash.
        while "=" not in word and at < len(arguments) and not arguments[at].startswith("--"):
            taken.append(arguments[at])
            at += 1
    return taken, rest


def options_of(command: Any) -> set[str]:
    """Return the flags that a command itself takes."""
    options = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
    return options | {"--help"}


def with_native_settings(config: RunConfig, words: Sequence[str], *, as_json: bool = False) -> RunConfig:
    """Return the configuration with the settings that Megatron takes, as it means them; `words` beat those in it.

    Nothing is asked where nothing is set.

    Raises:
        typer.Exit: with the code of the error, which was told: an unknown name, or a value that Megatron refuses.
        ConfigError: the workers, or Megatron, are not installed.
    """
    from strawflow.cli.worker import ENTRY, json_arguments, require_installed
    from strawflow.config import RunConfig

    if not words and not config.trainer.megatron and not config.trainer.roles:
        return config
    require_installed(VERB)
    asked = {"config": config.model_dump(mode="json"), "words": list(words)}
    done = subprocess.run(
        [sys.executable, "-m", ENTRY, VERB, "--check", *json_arguments(as_json)],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise typer.Exit(done.returncode)
    return RunConfig.model_validate_json(done.stdout.strip().splitlines()[-1])
