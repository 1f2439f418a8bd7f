"""What a quickstart run needs before its workers start: task files, a model, enqueued prompts. Every step is idempotent."""

from __future__ import annotations

import json
from dataclasses import dataclass

from strawflow.flow.admit import DEMONSTRATIONS, HELD_OUT, PROMPTS
from strawflow.flow.enqueue import EnqueueRequest, enqueue
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.prompts.row import PromptKeys
from strawflow.prompts.source import PromptSource

QUICKSTART_FILE = "quickstart.json"
TINY, SMOLLM2 = "tiny", "smollm2"
MODELS = (TINY, SMOLLM2)
NUM_HELD_OUT = 400


@dataclass(frozen=True)
class Quickstart:
    """What was asked for; kept in the run's folder."""

    task: str
    seed: int
    model: str = TINY
    num_held_out: int = NUM_HELD_OUT


def prepare_if_quickstart(run: Run) -> None:
    """Make what is still missing of a quickstart run; nothing for any other run."""
    path = run.root / QUICKSTART_FILE
    if path.exists():
        prepare(run, Quickstart(**json.loads(path.read_text(encoding="utf-8"))))


def prepare(run: Run, settings: Quickstart) -> None:
    """Export the task, make the model, enqueue demonstrations, prompts and held-out prompts."""
    from strawflow_workers.quickstart.model import constant_phrases, make_model
    from strawflow_workers.quickstart.smollm2 import make_smollm2
    from strawflow_workers.quickstart.task import export_task

    config = run.config
    num_demonstrations = config.warm_start.steps * config.warm_start.prompts_per_step
    # One epoch holds every step's prompts and some to replace dropped groups.
    num_prompts = config.trainer.steps * config.rollout.prompts_per_step + 500
    files = export_task(
        settings.task,
        settings.seed,
        out_dir=run.root / "data",
        num_train=num_demonstrations + num_prompts,
        num_held_out=settings.num_held_out,
    )
    if not run.model_path.exists() and settings.model == SMOLLM2:
        make_smollm2(run.model_path)
    elif not run.model_path.exists():
        questions = [
            json.loads(line)["prompt"] for line in files.train.read_text("utf-8").splitlines()[:2000]
        ]
        make_model(run.model_path, seed=settings.seed, phrases=constant_phrases(questions))
    with WorkerSession(run, "enqueue") as session:
        sources = [
            (DEMONSTRATIONS, "demo", f"{files.train}@[:{num_demonstrations}]"),
            (PROMPTS, "train", f"{files.train}@[{num_demonstrations}:]"),
            (HELD_OUT, "eval", str(files.held_out)),
        ]
        for dataset_id, purpose, path in sources if num_demonstrations else sources[1:]:
            request = EnqueueRequest(
                dataset_id=dataset_id,
                purpose=purpose,
                source=PromptSource.parse(path),
                keys=PromptKeys(input_key="prompt", label_key="label", metadata_key="metadata"),
            )
            enqueue(session, request)
