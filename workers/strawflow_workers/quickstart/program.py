"""The quickstart: a small model gets better at a real task, every byte of the run durable.

With `--model smollm2` a pretrained one goes through the same loop: few small steps on a CPU, for patience; larger ones on a GPU.

1. The folder becomes a run first; what it needs (task files, model, enqueued prompts) is then prepared by idempotent
   steps, so a kill during preparation is mended by `strawflow resume`.
2. The settings are those with which a 2.4-million-parameter model learns in minutes on two cores, and for the pretrained
   model those that two cores, or a GPU, can bear.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strawflow.config import RunConfig
from strawflow.errors import InvalidInputError
from strawflow.flow.run import create_run
from strawflow_workers.quickstart.prepare import QUICKSTART_FILE, SMOLLM2, Quickstart
from strawflow_workers.quickstart.smollm2 import packaged_gguf
from strawflow_workers.quickstart.task import task_named, task_names
from strawflow_workers.supervisor import resume

DEFAULT_RUN = Path("runs/quickstart")


@dataclass(frozen=True)
class Scale:
    """How much of everything a model gets."""

    steps: int
    num_held_out: int
    sections: Mapping[str, Mapping[str, Any]]
    """Fields of the run's configuration, by section."""


_TINY = Scale(
    steps=60,
    num_held_out=400,
    sections={
        "warm_start": {"steps": 60, "prompts_per_step": 32},
        "rollout": {"prompts_per_step": 32, "samples_per_prompt": 8, "reward_shape": "exact"},
        "trainer": {"checkpoint_interval": 10},
    },
)
_SMOLLM2_ON_CPU = Scale(
    steps=8,
    num_held_out=16,
    sections={
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "reward_shape": "raw"},
        "assemble": {"mini_batches": 1, "max_tokens_per_micro_batch": 1024},
        "trainer": {"lr": 5e-6, "checkpoint_interval": 4},
        "eval": {"samples_per_prompt": 1},
    },
)
_SMOLLM2_ON_CUDA = Scale(
    steps=100,
    num_held_out=200,
    sections={
        "rollout": {"prompts_per_step": 32, "samples_per_prompt": 8, "reward_shape": "raw"},
        "assemble": {"mini_batches": 1, "max_tokens_per_micro_batch": 8192},
        "trainer": {"lr": 5e-6, "checkpoint_interval": 25},
    },
)


def quickstart(arguments: argparse.Namespace) -> int:
    """Create the run, prepare it and run it to its end; returns the process's exit code.

    Raises:
        AlreadyExistsError: the folder holds a run and --fresh was not given.
        InvalidInputError: no such task, or none for this model.
        ConfigError: what the model is made of is not installed.
    """
    root = arguments.run or DEFAULT_RUN
    scale = _scale(arguments.model)
    settings = Quickstart(
        task=_task(arguments.task, arguments.model),
        seed=arguments.seed,
        model=arguments.model,
        num_held_out=scale.num_held_out,
    )
    config = quickstart_config(settings, steps=arguments.steps or scale.steps, threads=arguments.threads)
    if arguments.native:
        from strawflow_workers.trainer.native_flags import checked_apart

        config = checked_apart(config, arguments.native)
    asked = (json.dumps(settings.__dict__) + "\n").encode()
    run = create_run(root, config, fresh=arguments.fresh, files={QUICKSTART_FILE: asked})
    if not arguments.json:
        print(
            f"run {run.root}: model {settings.model}, task {settings.task}, seed {settings.seed}",
            file=sys.stderr,
        )
    run.close()
    return resume(root, as_json=arguments.json)


def _scale(model: str) -> Scale:
    if model != SMOLLM2:
        return _TINY
    packaged_gguf()  # what is missing is told before a run is made
    # As SglangOptions finds it: torch would take seconds to ask.
    return _SMOLLM2_ON_CUDA if Path("/dev/nvidiactl").exists() else _SMOLLM2_ON_CPU


def _task(name: str | None, model: str) -> str:
    names = task_names(chat=model == SMOLLM2)
    if name is not None and task_named(name).name not in names:
        raise InvalidInputError(f"task {name!r} is not for model {model!r}; for it are {', '.join(names)}")
    return name or names[0]


def quickstart_config(settings: Quickstart, *, steps: int, threads: int) -> RunConfig:
    """Return the run's configuration for a task and a model."""
    task, sections = task_named(settings.task), _scale(settings.model).sections
    return RunConfig.model_validate(
        {
            **sections,
            "run": {"seed": settings.seed},
            "model": {"path": "model"},
            "data": {
                "prompts": "data/train.jsonl",
                **({"demonstrations": "data/train.jsonl"} if "warm_start" in sections else {}),
                "held_out": "data/held_out.jsonl",
            },
            "rollout": {
                **sections["rollout"],
                "max_response_tokens": task.max_response_tokens,
                "reward": f"reasoning_gym:{task.dataset}",
            },
            "trainer": {**sections["trainer"], "steps": steps, "threads": threads},
        }
    )
