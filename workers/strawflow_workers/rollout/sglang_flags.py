"""SGLang's own server flags, as the installed SGLang knows them: listed, and checked before a run is made.

1. SGLang's parser is asked in a process of its own, in the environment of a server (its import takes seconds, and on a
   host without CUDA needs the stubs).
2. Flags that the worker sets itself are refused: the run says what is served, and where.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from strawflow.errors import ConfigError
from strawflow_workers.rollout.sglang_server import SglangOptions, launch_environment

OURS = {
    "host": "each engine of a run listens on its own host",
    "port": "a free port is taken at each start",
    "model-path": "engines serve the run's weights; --model.path names the first",
    "weight-version": "the label is that of the run's weights",
    "skip-tokenizer-init": "rollout.stop and rollout.min_response_tokens decide it",
    "tokenizer-path": "engines use the tokenizer of --model.path",
}
"""Flags that are not free, and why."""


@dataclass(frozen=True)
class ServerFlag:
    """One flag of `sglang.launch_server`, without its dashes."""

    name: str
    help: str
    default: str
    choices: tuple[str, ...]
    has_value: bool


def known_flags() -> list[ServerFlag]:
    """Return the flags of the installed SGLang that a run may set.

    Raises:
        ConfigError: SGLang cannot be loaded; quotes why.
    """
    told = json.loads(_asked("list"))
    return [ServerFlag(**{**flag, "choices": tuple(flag["choices"])}) for flag in told]


def check_flags(arguments: Sequence[str]) -> None:
    """Refuse server arguments that the installed SGLang would not take, or that are not free.

    Raises:
        ConfigError: names the flag, and the nearest known one.
    """
    given = [word.removeprefix("--").partition("=")[0] for word in arguments if word.startswith("--")]
    for name in given:
        if name in OURS:
            raise ConfigError(f"--sglang-{name} cannot be set: {OURS[name]}")
    answer = json.loads(_asked("parse", *arguments))
    for name in given:
        if name not in answer["known"]:
            near = difflib.get_close_matches(name, answer["known"], n=1)
            hint = f"; did you mean --sglang-{near[0]}?" if near else ""
            raise ConfigError(f"the installed SGLang has no flag --{name}{hint}")
    if answer["problem"]:
        raise ConfigError(f"SGLang does not take {' '.join(arguments)}: {answer['problem']}")


def _asked(*words: str) -> str:
    """Run this module as a program and return the last line it printed: SGLang prints others before it."""
    environment = launch_environment(
        SglangOptions(model_path=Path("model"), log_path=Path("log")), os.environ
    )
    done = subprocess.run(
        [sys.executable, "-m", __name__, *words], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
        raise ConfigError(f"SGLang could not be asked for its flags: {last}")
    return done.stdout.strip().splitlines()[-1]


def _program(words: Sequence[str]) -> None:
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang", add_help=False)
    ServerArgs.add_cli_args(parser)
    flags = _flags_of(parser)
    if words[0] == "list":
        print(json.dumps([asdict(flag) for flag in flags]))
        return
    said = io.StringIO()
    problem = ""
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_args(["--model-path", "model", *words[1:]])
    except SystemExit:
        problem = said.getvalue().strip().splitlines()[-1].partition("error: ")[2]
    print(json.dumps({"known": [flag.name for flag in flags], "problem": problem}))


def _flags_of(parser: object) -> list[ServerFlag]:
    found = []
    for action in parser._actions:  # type: ignore[attr-defined]  # argparse has no public list of its flags
        for option in action.option_strings:
            name = option.removeprefix("--")
            if option.startswith("--") and name not in OURS:
                about = " ".join((action.help or "").split())
                choices = tuple(str(choice) for choice in action.choices or ())
                found.append(ServerFlag(name, about, str(action.default), choices, action.nargs != 0))
    return found


if __name__ == "__main__":
    _program(sys.argv[1:])
