"""How each worker process starts, drains and exits: `python -m strawflow_workers.entry VERB RUN [options]`.

Exit codes: 0 finished or drained; an error's own code otherwise. A worker whose session was lost, or whose engine died,
exits with that error's code and is started again by its supervisor with a new session.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from strawflow.errors import ConfigError, InvalidInputError, StrawflowError
from strawflow.parentage import die_with_parent

if TYPE_CHECKING:
    from strawflow.flow.session import WorkerSession
    from strawflow_workers.drain import Drain


WORKERS = ("rollout", "engine", "assemble", "train")


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return the process's exit code."""
    signal.signal(signal.SIGINT, _leave)  # until a worker knows how to drain
    arguments = _parser().parse_args(argv)
    if getattr(arguments, "die_with_parent", None) is not None:
        die_with_parent(arguments.die_with_parent)  # before the imports below, which take seconds
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    for chatty in ("alembic", "megatron", "matplotlib"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        return VERBS[arguments.verb](arguments)
    except StrawflowError as error:
        if arguments.verb in WORKERS and isinstance(error, ConfigError | InvalidInputError):
            # What the user is to mend says so in its message; a traceback would bury it.
            logging.getLogger(__name__).error("the worker ends: %s", error)
        elif arguments.verb in WORKERS:
            logging.getLogger(__name__).exception("the worker ends")
        elif arguments.json:
            shown = {"error": {"kind": error.kind, "message": error.message, "facts": error.facts}}
            print(json.dumps(shown, default=str), file=sys.stderr)
        else:
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m strawflow_workers.entry", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in WORKERS:
        worker = verbs.add_parser(verb)
        worker.add_argument("run", type=Path)
        worker.add_argument("--die-with-parent", type=int, metavar="PID", help="end when this parent does")
        if verb == "rollout":
            worker.add_argument("--engine-url", help="use this running engine instead of starting one")
        if verb == "train":
            worker.add_argument("--native", nargs=argparse.REMAINDER, default=[], metavar="MEGATRON_FLAG")
        if verb in ("rollout", "engine"):
            worker.add_argument(
                "--slot", type=int, metavar="ID", help="be the worker of this engine of the run"
            )
    supervise = verbs.add_parser("supervise")
    supervise.add_argument("run", type=Path)
    supervise.add_argument("--json", action="store_true")
    replay = verbs.add_parser("replay")
    replay.add_argument("run", type=Path)
    replay.add_argument("--from-step", type=int)
    replay.add_argument("--to-step", type=int)
    replay.add_argument("--json", action="store_true")
    for verb in ("sglang-flags", "router-flags"):
        flags = verbs.add_parser(verb)
        flags.add_argument("--json", action="store_true")
        flags.add_argument(
            "--place", default="", help="where the arguments to check were found, for the error"
        )
        flags.add_argument(
            "--check", nargs=argparse.REMAINDER, help="arguments to check instead of listing all"
        )
    native = verbs.add_parser("megatron-flags")
    native.add_argument("--json", action="store_true")
    native.add_argument(
        "--check", action="store_true", help="check a configuration and flags given as JSON on stdin"
    )
    reward = verbs.add_parser("reward")
    reward.add_argument("spec")
    reward.add_argument("--file", type=Path, required=True)
    reward.add_argument("--shape", default="raw")
    reward.add_argument("--post-process", default="")
    reward.add_argument("--row-reward", action="append", default=[])
    reward.add_argument("--timeout-s", type=float, default=10.0)
    reward.add_argument("--processes", type=int, default=1)
    reward.add_argument("--json", action="store_true")
    hook = verbs.add_parser("hook")
    hook.add_argument("path")
    hook.add_argument("--kind")
    hook.add_argument("--sets", default="easy,hard")
    hook.add_argument("--json", action="store_true")
    quickstart = verbs.add_parser("quickstart")
    quickstart.add_argument("--run", type=Path)
    quickstart.add_argument("--seed", type=int, default=0)
    quickstart.add_argument("--model", default="tiny")
    quickstart.add_argument("--steps", type=int)
    quickstart.add_argument("--task")
    quickstart.add_argument("--threads", type=int, default=1)
    quickstart.add_argument("--fresh", action="store_true")
    quickstart.add_argument("--json", action="store_true")
    quickstart.add_argument("--native", nargs=argparse.REMAINDER, default=[], metavar="MEGATRON_FLAG")
    return parser


def _work(kind: str, arguments: argparse.Namespace, body: Callable[..., None]) -> int:
    from strawflow.flow.run import open_run
    from strawflow.flow.session import WorkerSession
    from strawflow_workers.drain import Drain

    drain = Drain()
    drain.on_signals()
    run = open_run(arguments.run)
    try:
        with WorkerSession(run, kind) as session:
            body(session, drain)
    finally:
        run.close()
    return 0


def _rollout(arguments: argparse.Namespace) -> int:
    from strawflow_workers.rollout.loop import RolloutLoop

    def work(session: WorkerSession, drain: Drain) -> None:
        asyncio.run(
            RolloutLoop(session, drain, engine_url=arguments.engine_url, slot_id=arguments.slot).run()
        )

    return _work("rollout", arguments, work)


def _engine(arguments: argparse.Namespace) -> int:
    from strawflow_workers.rollout.frozen_engine import serve_frozen

    return _work(
        "engine", arguments, lambda session, drain: serve_frozen(session, drain, slot_id=arguments.slot)
    )


def _assemble(arguments: argparse.Namespace) -> int:
    from strawflow_workers.assemble.loop import AssemblerLoop

    return _work("assemble", arguments, lambda session, drain: AssemblerLoop(session, drain).run())


def _train(arguments: argparse.Namespace) -> int:
    def work(session: WorkerSession, drain: Drain) -> None:
        from strawflow_workers.trainer.loop import TrainerLoop

        TrainerLoop(session, drain).run()

    if arguments.native:
        from strawflow.flow.run import open_run
        from strawflow_workers.trainer.native_flags import require_same

        run = open_run(arguments.run)
        run.close()
        require_same(run.config, arguments.native)
    return _as_ranks(arguments.run, lambda: _work("train", arguments, work))


def _as_ranks(root: Path, first: Callable[[], int]) -> int:
    """Run the trainer of a run with all its ranks; `first` is what the first of them does."""
    from strawflow.flow.run import stored_config
    from strawflow_workers.trainer.launch import ranks_of

    with ranks_of(root, stored_config(root).parallel) as rank:
        if rank == 0:
            return first()
        from strawflow_workers.trainer.follow import follow

        return follow(root)


def _supervise(arguments: argparse.Namespace) -> int:
    from strawflow_workers.supervisor import resume

    return resume(arguments.run, as_json=arguments.json)


def _replay(arguments: argparse.Namespace) -> int:
    def first() -> int:
        from strawflow_workers.trainer.replay import replay_command

        return replay_command(
            arguments.run, from_step=arguments.from_step, to_step=arguments.to_step, as_json=arguments.json
        )

    return _as_ranks(arguments.run, first)


def _flags(arguments: argparse.Namespace) -> int:
    from strawflow_workers.rollout import sglang_flags

    program = sglang_flags.SERVER if arguments.verb == "sglang-flags" else sglang_flags.ROUTER
    if arguments.check is not None:
        sglang_flags.check_flags(arguments.check, program, place=arguments.place)
        return 0
    found = sglang_flags.known_flags(program)
    if arguments.json:
        print(json.dumps([asdict(flag) for flag in found]))
        return 0
    for flag in found:
        value = " VALUE" if flag.has_value else ""
        print(f"  {program.prefix}{flag.name}{value}  [default: {flag.default}]")
        for line in textwrap.wrap(flag.help, 116):
            print(f"      {line}")
    return 0


def _megatron_flags(arguments: argparse.Namespace) -> int:
    from strawflow_workers.trainer import native_flags

    return native_flags.command(check=arguments.check, as_json=arguments.json)


def _reward(arguments: argparse.Namespace) -> int:
    from strawflow_workers.rollout.rewards.check import check_command
    from strawflow_workers.rollout.rewards.scorer import ScorerOptions
    from strawflow_workers.rollout.rewards.spec import RewardSpec

    options = ScorerOptions(
        spec=RewardSpec(
            arguments.spec,
            arguments.shape,
            row_rewards=tuple(arguments.row_reward),
            post_process=arguments.post_process,
        ),
        num_processes=arguments.processes,
        timeout_s=arguments.timeout_s,
    )
    return check_command(arguments.file, options, as_json=arguments.json)


def _hook(arguments: argparse.Namespace) -> int:
    from strawflow_workers.rollout.hooks.check import check_command

    return check_command(arguments)


def _quickstart(arguments: argparse.Namespace) -> int:
    from strawflow_workers.quickstart.program import quickstart

    return quickstart(arguments)


VERBS: dict[str, Callable[[argparse.Namespace], int]] = {
    "rollout": _rollout,
    "engine": _engine,
    "assemble": _assemble,
    "train": _train,
    "supervise": _supervise,
    "replay": _replay,
    "sglang-flags": _flags,
    "router-flags": _flags,
    "megatron-flags": _megatron_flags,
    "reward": _reward,
    "hook": _hook,
    "quickstart": _quickstart,
}

if __name__ == "__main__":
    sys.exit(main())
