"""The flags of SGLang's server and of its router, as the installed ones know them: listed, and checked before a run is made.

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
from collections.abc import Mapping, Sequence
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
"""Flags of the server that are not free, and why."""
OURS_OF_ROUTER = {
    "host": "it listens on the host of its worker",
    "port": "a free port is taken at each start",
    "worker-urls": "the engines behind it are those of the topology",
    "pd-disaggregation": "the worker types of the topology decide it",
    "prefill": "the engines behind it are those of the topology",
    "decode": "the engines behind it are those of the topology",
    "disable-retries": "a group's attempts are counted by the run",
    "prometheus-host": "it listens on the host of its worker",
    "prometheus-port": "a free port is taken at each start",
}


@dataclass(frozen=True)
class Program:
    """A program whose flags a run may set."""

    name: str
    prefix: str
    """Of its flags on our command line."""
    ours: Mapping[str, str]


SERVER = Program("SGLang", "--sglang-", OURS)
ROUTER = Program("SGLang's router", "--router-", OURS_OF_ROUTER)


@dataclass(frozen=True)
class ServerFlag:
    """One flag, without its dashes."""

    name: str
    help: str
    default: str
    choices: tuple[str, ...]
    has_value: bool


def known_flags(program: Program = SERVER) -> list[ServerFlag]:
    """Return the flags of an installed program that a run may set.

    Raises:
        ConfigError: it cannot be loaded; quotes why.
    """
    told = json.loads(_asked(program, "list"))
    return [ServerFlag(**{**flag, "choices": tuple(flag["choices"])}) for flag in told]


def check_flags(arguments: Sequence[str], program: Program = SERVER, *, place: str = "") -> None:
    """Refuse arguments that the installed program would not take, or that are not free; `place` begins each error.

    Raises:
        ConfigError: names the flag, and the nearest known one.
    """
    given = [word.removeprefix("--").partition("=")[0] for word in arguments if word.startswith("--")]
    for name in given:
        if name in program.ours:
            raise ConfigError(f"{place}{program.prefix}{name} cannot be set: {program.ours[name]}")
    answer = json.loads(_asked(program, "parse", *arguments))
    for name in given:
        if name not in answer["known"]:
            near = difflib.get_close_matches(name, answer["known"], n=1)
            hint = f"; did you mean {program.prefix}{near[0]}?" if near else ""
            raise ConfigError(
                f"{place}the installed {program.name.removeprefix(_POSSESSIVE)} has no flag --{name}{hint}"
            )
    if answer["problem"]:
        raise ConfigError(f"{place}{program.name} does not take {' '.join(arguments)}: {answer['problem']}")


_POSSESSIVE = "SGLang's "


def _asked(program: Program, *words: str) -> str:
    """Run this module as a program and return the last line it printed: SGLang prints others before it."""
    environment = launch_environment(
        SglangOptions(model_path=Path("model"), log_path=Path("log")), os.environ
    )
    done = subprocess.run(
        [sys.executable, "-m", __name__, program.prefix, *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
        raise ConfigError(f"{program.name} could not be asked for its flags: {last}")
    return done.stdout.strip().splitlines()[-1]


def _program(words: Sequence[str]) -> None:
    import argparse

    parser = argparse.ArgumentParser(prog="sglang", add_help=False)
    program = ROUTER if words[0] == ROUTER.prefix else SERVER
    if program is ROUTER:
        from sglang_router.router_args import RouterArgs

        RouterArgs.add_cli_args(parser, use_router_prefix=False)
    else:
        from sglang.srt.server_args import ServerArgs

        ServerArgs.add_cli_args(parser)
    required = ["--model-path", "model"] if program is SERVER else []
    flags = _flags_of(parser, program.ours)
    words = words[1:]
    if words[0] == "list":
        print(json.dumps([asdict(flag) for flag in flags]))
        return
    said = io.StringIO()
    problem = ""
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_args([*required, *words[1:]])
    except SystemExit:
        problem = said.getvalue().strip().splitlines()[-1].partition("error: ")[2]
    print(json.dumps({"known": [flag.name for flag in flags], "problem": problem}))


def _flags_of(parser: object, ours: Mapping[str, str]) -> list[ServerFlag]:
    found = []
    for action in parser._actions:  # type: ignore[attr-defined]  # argparse has no public list of its flags
        for option in action.option_strings:
            name = option.removeprefix("--")
            if option.startswith("--") and name not in ours:
                about = " ".join((action.help or "").split())
                choices = tuple(str(choice) for choice in action.choices or ())
                found.append(ServerFlag(name, about, str(action.default), choices, action.nargs != 0))
    return found


if __name__ == "__main__":
    _program(sys.argv[1:])
