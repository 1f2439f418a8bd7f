"""Trainers of several ranks for tests: one process a rank, which goes through several layouts in one process group.

python -m tests.integration.parallel_cases FOLDER   (RANK, WORLD_SIZE and the store's address come from the environment)

The folder holds `cases.json`, a list of cases; rank 0 writes what each came to into `found.json`, and its weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from strawflow.config_parallel import ParallelSection
from strawflow.errors import ConfigError
from strawflow_workers.trainer.batches import MiniBatch, TrainSettings
from strawflow_workers.trainer.megatron import MegatronTrainer
from strawflow_workers.trainer.shares import share_of
from tests.integration.megatron_cases import GRPO, SFT, make_pack

PROBE_LENGTHS = [9, 3, 14]


@dataclass
class Case:
    """One trainer: the model's folder (beside `cases.json`) and how its ranks share it."""

    name: str
    model: str
    parallel: dict[str, Any] = field(default_factory=dict)
    resumes: bool = False
    """Whether to save, go on, load and go on again instead of training all steps."""
    num_steps: int = 3


@dataclass
class Found:
    """What a trainer came to."""

    losses: list[float]
    grad_norms: list[float]
    gaps: list[float]
    num_tokens: list[int]
    logprobs: list[float]
    skipped: int
    weights: str
    """Digest of the exported weights."""


def steps(num_steps: int) -> list[list[MiniBatch]]:
    """Make the batches of a few steps: updates of three and of one micro-batch, sequences of 2 to 40 tokens."""
    rng = np.random.default_rng(11)
    found = []
    for _ in range(num_steps):
        step = []
        for num in (3, 1):
            packs = [make_pack(rng, rng.integers(2, 40, 5).tolist()) for _ in range(num)]
            step.append(MiniBatch(tuple(packs), float(sum(p.loss_mask.sum() for p in packs))))
        found.append(step)
    return found


def broken_step() -> list[MiniBatch]:
    """Make a step with one update whose ratio overflows in one of its two micro-batches alone."""
    rng = np.random.default_rng(5)
    packs = [make_pack(rng, [7, 5]), make_pack(rng, [6, 4])]
    packs[1].rollout_logprobs[np.flatnonzero(packs[1].loss_mask)[0]] = -1e4
    packs[1].advantages[:] = -1.0
    return [MiniBatch(tuple(packs), 10.0)]


@dataclass
class Resumed:
    """What a trainer came to that went on straight, and one that loaded its checkpoint."""

    straight: list[str]
    """Digests of state and weights."""
    resumed: list[str]
    at_once: list[bool]
    """Whether the loaded state was the saved one, and differed before."""
    refusal: str
    """What a trainer of another layout says to the checkpoint."""


def resume(case: Case, folder: Path) -> Resumed:
    """Save after a step, train another, and do so again from the checkpoint with trainers that knew nothing."""
    first, second = steps(2)

    def begin(settings: TrainSettings, **parallel: Any) -> MegatronTrainer:
        return MegatronTrainer(
            folder / case.model, settings, seed=7, parallel=ParallelSection.model_validate(parallel)
        )

    def go_on(trainer: MegatronTrainer) -> list[str]:
        ranks = trainer.ranks
        trainer.train_step(share_of(second, rank=ranks.data_rank, num_ranks=ranks.data_size))
        return [trainer.state_digest(), trainer.weights_digest()]

    trainer, path = begin(GRPO, **case.parallel), folder / f"point-{case.name}"
    ranks = trainer.ranks
    trainer.train_step(share_of(first, rank=ranks.data_rank, num_ranks=ranks.data_size))
    saved = trainer.state_digest()
    trainer.save_checkpoint(path)
    straight = go_on(trainer)
    trainer = begin(SFT, **case.parallel)
    differed = trainer.state_digest() != saved
    trainer.load_checkpoint(path)
    at_once = [trainer.state_digest() == saved, differed]
    resumed = go_on(trainer)
    try:
        begin(GRPO, ranks=ranks.size).load_checkpoint(path)
        refusal = ""
    except ConfigError as error:
        refusal = error.message
    return Resumed(straight, resumed, at_once, refusal)


def train(case: Case, folder: Path, settings: TrainSettings = GRPO) -> Found:
    """Train the steps with this process's rank of the case, and export the weights to `FOLDER/out-NAME`."""
    trainer = MegatronTrainer(
        folder / case.model, settings, seed=1, parallel=ParallelSection.model_validate(case.parallel)
    )
    ranks = trainer.ranks

    def own(step: list[MiniBatch]) -> list[MiniBatch]:
        return share_of(step, rank=ranks.data_rank, num_ranks=ranks.data_size)

    metrics = [trainer.train_step(own(step)) for step in steps(case.num_steps)]
    skipped = trainer.train_step(own(broken_step())).skipped_updates
    probe = make_pack(np.random.default_rng(3), PROBE_LENGTHS, temperature=0.7)
    return Found(
        losses=[m.loss or 0.0 for m in metrics],
        grad_norms=[m.grad_norm or 0.0 for m in metrics],
        gaps=[m.logprob_gap_max or 0.0 for m in metrics],
        num_tokens=[m.num_tokens for m in metrics],
        logprobs=trainer.logprobs(probe).tolist(),
        skipped=skipped,
        weights=trainer.export_hf(folder / f"out-{case.name}"),
    )


@contextmanager
def ranks_running(size: int, *arguments: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start `python -m ARGUMENTS` once for each rank; those still running when the block ends are killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    here = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env={**os.environ, **here, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=Path(__file__).parents[2],
        )
        for rank in range(size)
    ]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def train_in_ranks(folder: Path, size: int, cases: Sequence[Case]) -> dict[str, Found | Resumed]:
    """Go through every case with `size` ranks, one case after the other; return by name what each came to."""
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    with ranks_running(size, "tests.integration.parallel_cases", str(folder)) as running:
        codes = [process.wait(timeout=60 + 40 * len(cases)) for process in running]
    assert codes == [0] * size
    found = json.loads((folder / "found.json").read_text())
    return {
        name: Resumed(**values) if "resumed" in values else Found(**values) for name, values in found.items()
    }


def main(folder: Path) -> None:
    found = {}
    for fields in json.loads((folder / "cases.json").read_text()):
        case = Case(**fields)
        found[case.name] = asdict(resume(case, folder) if case.resumes else train(case, folder))
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
