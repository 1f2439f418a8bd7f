"""The quickstart: a small model gets better at a real task, every byte of the run durable.

1. The folder becomes a run first; what it needs (task files, model, enqueued prompts) is then prepared by idempotent
   steps, so a kill during preparation is mended by `strawflow resume`.
2. The settings are those with which a 2.4-million-parameter model learns in minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from strawflow.config import RunConfig
from strawflow.flow.run import create_run
from strawflow_workers.quickstart.prepare import QUICKSTART_FILE, Quickstart
from strawflow_workers.quickstart.task import task_named
from strawflow_workers.supervisor import resume

DEFAULT_RUN = Path("runs/quickstart")


def quickstart(arguments: argparse.Namespace) -> int:
    """Create the run, prepare it and run it to its end; returns the process's exit code.

    Raises:
        AlreadyExistsError: the folder holds a run and --fresh was not given.
        InvalidInputError: no such task.
    """
    root = arguments.run or DEFAULT_RUN
    settings = Quickstart(task=arguments.task, seed=arguments.seed)
    config = quickstart_config(settings, steps=arguments.steps, threads=arguments.threads)
    if arguments.native:
        from strawflow_workers.trainer.native_flags import checked_apart

        config = checked_apart(config, arguments.native)
    asked = (json.dumps(settings.__dict__) + "\n").encode()
    run = create_run(root, config, fresh=arguments.fresh, files={QUICKSTART_FILE: asked})
    if not arguments.json:
        print(f"run {run.root}: task {settings.task}, seed {settings.seed}", file=sys.stderr)
    run.close()
    return resume(root, as_json=arguments.json)


def quickstart_config(settings: Quickstart, *, steps: int, threads: int) -> RunConfig:
    """Return the run's configuration for a task."""
    task = task_named(settings.task)
    return RunConfig.model_validate(
        {
            "run": {"seed": settings.seed},
            "model": {"path": "model"},
            "data": {
                "prompts": "data/train.jsonl",
                "demonstrations": "data/train.jsonl",
                "held_out": "data/held_out.jsonl",
            },
            "warm_start": {"steps": 60, "prompts_per_step": 32},
            "rollout": {
                "prompts_per_step": 32,
                "samples_per_prompt": 8,
                "max_response_tokens": task.max_response_tokens,
                "reward": f"reasoning_gym:{task.dataset}",
                "reward_shape": "exact",
            },
            "trainer": {"steps": steps, "checkpoint_interval": 10, "threads": threads},
        }
    )
