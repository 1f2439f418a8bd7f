"""The trainer of a run with all its ranks: what a stage is trained with, what is read of a batch, and what all ranks do together.

1. The first rank says what comes next, by step and path; each reads its own share of a batch from the store.
2. A batch's packed rows carry all that a step needs; they are used as they lie.
3. Leases, positions and what is recorded are the loop's business (`loop`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from strawflow.config import RunConfig
from strawflow.errors import ConfigError, ConflictError
from strawflow.flow import consume
from strawflow.flow.run import Run
from strawflow.index.batches import Batch, MicroBatchPlace
from strawflow.packs.reader import PackReader
from strawflow_workers.trainer.batch_facts import BatchContent, BatchFacts
from strawflow_workers.trainer.batches import MiniBatch, PackedMicroBatch, TrainSettings
from strawflow_workers.trainer.megatron import MegatronTrainer
from strawflow_workers.trainer.native_settings import NativeSettings
from strawflow_workers.trainer.shares import deal, own_share

WAITING_TOLD_S = 20.0
"""How often the other ranks are told that there is nothing to do; they wait for at most half an hour (torch's own bound)."""


def stage_settings(config: RunConfig, objective: str) -> TrainSettings:
    """Return the optimizer settings of a stage: the supervised warm start or reinforcement learning."""
    t = config.trainer
    betas = (t.adam_beta1, t.adam_beta2)
    if objective == "sft":
        w = config.warm_start
        return TrainSettings(
            objective="sft",
            lr=w.lr,
            lr_warmup_updates=w.lr_warmup_steps,
            betas=betas,
            weight_decay=w.weight_decay,
            clip_grad=t.clip_grad,
            max_grad_norm=config.guard.max_grad_norm,
        )
    return TrainSettings(
        objective="grpo",
        lr=t.lr,
        betas=betas,
        weight_decay=t.weight_decay,
        clip_grad=t.clip_grad,
        max_grad_norm=config.guard.max_grad_norm,
        clip_low=t.clip_low,
        clip_high=t.clip_high,
        algorithm=config.algorithm,
    )


def first_objective(config: RunConfig) -> str:
    return "sft" if config.warm_start.steps else "grpo"


def to_mini_batches(batch: Batch, rows: Iterable[tuple[MicroBatchPlace, pa.RecordBatch]]) -> list[MiniBatch]:
    """Turn packed rows into what the trainer takes, by mini-batch; the list buffers are used as they lie.

    Raises:
        ConfigError: a sequence has tensors: this trainer would train its text as if the images were not there.
    """
    by_mini = micro_batches_of(batch, rows)
    return [
        MiniBatch(tuple(by_mini[at]), denominator)
        for at, denominator in enumerate(batch.denominators)
        if at in by_mini
    ]


def micro_batches_of(
    batch: Batch, rows: Iterable[tuple[MicroBatchPlace, pa.RecordBatch]]
) -> dict[int, list[PackedMicroBatch]]:
    """Return the micro-batches of each mini-batch; raises as `to_mini_batches`."""
    by_mini: dict[int, list[PackedMicroBatch]] = {}
    for place, packed in rows:
        if packed.column("tensors").null_count < packed.num_rows:
            raise ConfigError(
                f"step {batch.step} has sequences with tensors (of images, say), and this trainer trains text models alone; train "
                "these batches with a program of your own (Store.consumer, Batch.tensors)"
            )
        by_mini.setdefault(place.mini_batch, []).append(_to_micro_batch(packed))
    return by_mini


def _to_micro_batch(rows: pa.RecordBatch) -> PackedMicroBatch:
    def values(name: str) -> np.ndarray[Any, Any]:
        return np.asarray(rows.column(name).flatten())

    lengths = np.diff(np.asarray(rows.column("tokens").offsets))
    loss_mask = values("loss_mask").astype(np.float32)
    weights = rows.column("loss_weight")
    if weights.null_count < rows.num_rows:
        loss_mask *= np.repeat(np.asarray(weights.fill_null(1.0)), lengths)
    return PackedMicroBatch(
        tokens=values("tokens"),
        boundaries=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_mask=loss_mask,
        advantages=values("advantages"),
        rollout_logprobs=values("logprobs"),
        temperatures=np.asarray(rows.column("temperature")),
    )


def begin_stage_of(trainer: MegatronTrainer, config: RunConfig, batch: Batch) -> None:
    """Start the batch's stage if it is another than the trainer's."""
    if trainer.settings.objective != batch.objective:
        trainer.begin_stage(stage_settings(config, batch.objective))


def decided(batch: Batch, recorded: Mapping[str, Any] | None) -> list[int] | None:
    """Return which updates were left out when the batch was trained before, by what was recorded; None: it was not."""
    # A batch that was replaced meanwhile is another: nothing was decided about it.
    if recorded is None or recorded.get("batch_digest") != batch.digest:
        return None
    left_out = recorded.get("left_out")
    return None if left_out is None else list(left_out)


def apply_batch(
    trainer: MegatronTrainer,
    config: RunConfig,
    batch: Batch,
    mini_batches: list[MiniBatch],
    *,
    left_out: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Train one step of the stage that was begun; returns the step's metrics.

    `left_out` is what was decided when it was trained before: the same updates are left out.
    """
    metrics = trainer.train_step(
        mini_batches, left_out=left_out, sets_aside=config.guard.on_left_out == "set_aside"
    )
    return {
        **asdict(metrics),
        "objective": batch.objective,
        "mean_reward": batch.mean_reward,
        "num_sequences": batch.num_sequences,
        "max_staleness": batch.max_staleness,
        "batch_digest": batch.digest,
    }


Look = Callable[[Batch, BatchContent], None]


class Team:
    """The trainer of a run with all its ranks. Every rank makes one; the first calls what is to be done, the others are told
    and call the same (follow.follow)."""

    def __init__(self, run: Run, reader: PackReader) -> None:
        """Build this rank's part of the model and join the others."""
        config = run.config
        self._run, self._reader = run, reader
        self.trainer = MegatronTrainer(
            run.model_path,
            stage_settings(config, first_objective(config)),
            seed=config.run.seed,
            threads=config.trainer.threads,
            parallel=config.parallel,
            native=NativeSettings.of(config),
        )
        self.ranks = self.trainer.ranks
        self._told_at = time.monotonic()

    def train(
        self,
        batch: Batch,
        content: BatchContent,
        *,
        recorded: Mapping[str, Any] | None = None,
        look: Look | None = None,
    ) -> dict[str, Any]:
        """Train the batch of one step, of which the first rank has read its share; returns the step's metrics.

        `recorded` are those of an earlier time that it was trained, if it was; `look` is called before anything of it is
        trained.

        Raises:
            CorruptPackError: stored bytes are damaged. ConflictError: another rank finds another batch than the first one.
        """
        left_out = decided(batch, recorded)
        self._tell("train", step=batch.step, digest=batch.digest, left_out=left_out)
        return self._apply(batch, content, left_out, look)

    def train_step(self, step: int, *, digest: str, left_out: list[int] | None) -> None:
        """Train the batch that the first rank named, as it decided."""
        batch = consume.batch_of_step(self._run, step)
        if batch is None or batch.digest != digest:
            raise ConflictError(
                f"rank {self.ranks.rank} finds another batch of step {step} than rank 0 does: {batch and batch.digest}"
            )
        self._apply(batch, self.read(batch), left_out, None)

    def _apply(
        self, batch: Batch, content: BatchContent, left_out: Sequence[int] | None, look: Look | None
    ) -> dict[str, Any]:
        begin_stage_of(self.trainer, self._run.config, batch)
        if look is not None:
            look(batch, content)
        return apply_batch(self.trainer, self._run.config, batch, content.mini_batches, left_out=left_out)

    def read(self, batch: Batch) -> BatchContent:
        """Return this rank's share of a batch as it is trained; from another thread too."""
        facts = BatchFacts(batch.step)
        if self.ranks.data_size == 1:
            rows = list(facts.counted(consume.read_batch(self._run, self._reader, batch)))
            return BatchContent(rows, to_mini_batches(batch, rows), facts)
        own: set[MicroBatchPlace] = set()
        most = []
        for sizes in consume.micro_batch_sizes(self._run, self._reader, batch):
            places = list(sizes)
            dealt = deal(list(sizes.values()), self.ranks.data_size)
            own.update(places[at] for at in dealt[self.ranks.data_rank])
            most.append((places[0].mini_batch, max(map(len, dealt))))
        rows = list(facts.counted(consume.read_batch(self._run, self._reader, batch, only=own)))
        found = micro_batches_of(batch, rows)
        mini_batches = [
            own_share(found.get(mini, []), batch.denominators[mini], num=num) for mini, num in most
        ]
        return BatchContent(rows, mini_batches, facts)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint; raises as MegatronTrainer.load_checkpoint."""
        self._tell("load", path=str(path))
        self.trainer.load_checkpoint(path)

    def save(self, path: Path, *, stands_for: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint; raises as MegatronTrainer.save_checkpoint."""
        self._tell("save", path=str(path))
        self.trainer.save_checkpoint(path, stands_for=stands_for)

    def export(self, path: Path) -> str:
        """Write the weights; raises as MegatronTrainer.export_hf. Returns their digest, to the first rank."""
        self._tell("export", path=str(path))
        return self.trainer.export_hf(path)

    def state_digest(self) -> str:
        """Return the digest of all ranks' state."""
        self._tell("state_digest")
        return self.trainer.state_digest()

    def weights_digest(self) -> str:
        """Return the digest that `export` would return."""
        self._tell("weights_digest")
        return self.trainer.weights_digest()

    def wait(self) -> None:
        """Have the other ranks go on waiting: those that hear nothing for long give up."""
        if time.monotonic() - self._told_at > WAITING_TOLD_S:
            self._tell("wait")

    def end(self) -> None:
        """Have the other ranks end."""
        self._tell("end")

    def _tell(self, verb: str, **fields: Any) -> None:
        if self.ranks.rank == 0:
            self.ranks.tell({"verb": verb, **fields})
            self._told_at = time.monotonic()
