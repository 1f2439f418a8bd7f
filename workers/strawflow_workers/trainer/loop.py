"""The trainer: leases the consumer, trains planned batches in order, checkpoints, publishes weights.

1. A restart loads the newest committed checkpoint and trains the planned batches after it again, same bytes, same order.
2. A checkpoint commits together with the position it stands for, and before the weights of its step are published, so
   every evaluated version is covered by one.
3. A batch's packed rows carry all that a step needs; no trajectory is read here.
4. The next batch is read while one is trained; what is trained, and in which order, is the same.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa

from strawflow import faults
from strawflow.config import RunConfig
from strawflow.errors import ConfigError
from strawflow.flow import consume, publish_weights, rescue
from strawflow.flow.admit_evaluation import is_evaluated
from strawflow.flow.consume import Resumption
from strawflow.flow.session import WorkerSession
from strawflow.index.batches import Batch, MicroBatchPlace
from strawflow_workers.drain import Drain
from strawflow_workers.trainer import configurations
from strawflow_workers.trainer.batch_facts import BatchFacts
from strawflow_workers.trainer.batches import MiniBatch, PackedMicroBatch, TrainSettings
from strawflow_workers.trainer.feed import BatchFeed
from strawflow_workers.trainer.megatron import MegatronTrainer
from strawflow_workers.trainer.native_settings import NativeSettings
from strawflow_workers.trainer.telemetry import BatchContent, Telemetry

log = logging.getLogger(__name__)


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
        )
    return TrainSettings(
        objective="grpo",
        lr=t.lr,
        betas=betas,
        weight_decay=t.weight_decay,
        clip_grad=t.clip_grad,
        clip_low=t.clip_low,
        clip_high=t.clip_high,
    )


def first_objective(config: RunConfig) -> str:
    return "sft" if config.warm_start.steps else "grpo"


def to_mini_batches(batch: Batch, rows: Iterable[tuple[MicroBatchPlace, pa.RecordBatch]]) -> list[MiniBatch]:
    """Turn packed rows into what the trainer takes, by mini-batch; the list buffers are used as they lie.

    Raises:
        ConfigError: a sequence has tensors: this trainer would train its text as if the images were not there.
    """
    by_mini: dict[int, list[PackedMicroBatch]] = {}
    for place, packed in rows:
        if packed.column("tensors").null_count < packed.num_rows:
            raise ConfigError(
                f"step {batch.step} has sequences with tensors (of images, say), and this trainer trains text models alone; train "
                "these batches with a program of your own (Store.consumer, Batch.tensors)"
            )
        by_mini.setdefault(place.mini_batch, []).append(_to_micro_batch(packed))
    return [
        MiniBatch(tuple(by_mini[at]), denominator)
        for at, denominator in enumerate(batch.denominators)
        if at in by_mini
    ]


def _to_micro_batch(rows: pa.RecordBatch) -> PackedMicroBatch:
    def values(name: str) -> np.ndarray[Any, Any]:
        return np.asarray(rows.column(name).flatten())

    lengths = np.diff(np.asarray(rows.column("tokens").offsets))
    return PackedMicroBatch(
        tokens=values("tokens"),
        boundaries=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_mask=values("loss_mask").astype(np.float32),
        advantages=values("advantages"),
        rollout_logprobs=values("logprobs"),
        temperatures=np.asarray(rows.column("temperature")),
    )


def apply_batch(
    trainer: MegatronTrainer, config: RunConfig, batch: Batch, mini_batches: list[MiniBatch]
) -> dict[str, Any]:
    """Train one step, starting the batch's stage first if it is another; returns the step's metrics."""
    if trainer.settings.objective != batch.objective:
        trainer.begin_stage(stage_settings(config, batch.objective))
    metrics = trainer.train_step(mini_batches)
    return {
        **asdict(metrics),
        "objective": batch.objective,
        "mean_reward": batch.mean_reward,
        "num_sequences": batch.num_sequences,
        "max_staleness": batch.max_staleness,
    }


class TrainerLoop:
    """Train until the last step is committed or the worker is told to drain."""

    def __init__(self, session: WorkerSession, drain: Drain) -> None:
        self._session, self._drain = session, drain
        self._run = session.run
        self._config = session.run.config

    def run(self) -> None:
        """Work until done.

        Raises:
            LeaseLostError: another session took over; start again.
            CorruptCheckpointError, CorruptPackError: stored bytes are damaged; restore them.
        """
        # Building the model takes seconds: do it before taking the role, so that a standby is quick.
        trainer = self._build()
        resumption = self._take_over()
        if resumption is None:
            return
        configurations.write_record(self._run)
        if resumption.checkpoint is not None:
            trainer.load_checkpoint(self._run.root / resumption.checkpoint.path)
            log.info("went on from checkpoint %s", resumption.checkpoint.checkpoint_id)
        if publish_weights.published_version(self._run, resumption.step) is None:
            self._publish(trainer, resumption, resumption.step)
        self._train(trainer, resumption)

    def _build(self) -> MegatronTrainer:
        config = self._config
        return MegatronTrainer(
            self._run.model_path,
            stage_settings(config, first_objective(config)),
            seed=config.run.seed,
            threads=config.trainer.threads,
            native=NativeSettings.of(config),
        )

    def _take_over(self) -> Resumption | None:
        while not self._drain.requested:
            self._session.mark_progress()
            rescue.rescue_expired(self._run)  # the holder may be gone without anyone to say so
            if (found := consume.take_over(self._session)) is not None:
                return found
            self._drain.wait(0.2)
        return None

    def _train(self, trainer: MegatronTrainer, resumption: Resumption) -> None:
        committed = resumption.step
        with (
            Telemetry(self._run) as telemetry,
            BatchFeed(functools.partial(consume.batch_of_step, self._run), self._read) as feed,
        ):
            telemetry.catch_up(resumption.step)
            for step in range(committed + 1, self._config.total_steps + 1):
                asked = time.monotonic()
                batch = self._next_batch(step)
                if batch is None:
                    return
                plan_wait_s = time.monotonic() - asked
                faults.at("trainer.before_step")
                served = feed.content_of(batch)
                if step < self._config.total_steps:
                    feed.read_ahead(step + 1)
                with telemetry.profiler.step(step):
                    applied = apply_batch(trainer, self._config, batch, served.content.mini_batches)
                faults.at("trainer.after_step")
                metrics = telemetry.measured(served, applied, plan_wait_s=plan_wait_s)
                consume.record_step(self._session, resumption.role, step=step, metrics=metrics)
                telemetry.write(step, metrics)
                log.info("step %d: loss %s, reward %s", step, metrics["loss"], metrics["mean_reward"])
                if self._is_checkpoint_due(step):
                    committed = self._checkpoint(trainer, resumption, step, committed)
                if step >= self._config.warm_start.steps:
                    # Until the warm start ends nobody samples: its weights need no files.
                    self._publish(trainer, resumption, step)
                    publish_weights.remove_unneeded_weights(self._session, resumption.role)

    def _read(self, batch: Batch) -> BatchContent:
        """Return a batch as it is trained; from the feed's thread too."""
        facts = BatchFacts(batch.step)
        rows = consume.read_batch(self._run, self._session.reader, batch)
        return BatchContent(to_mini_batches(batch, facts.counted(rows)), facts)

    def _next_batch(self, step: int) -> Batch | None:
        """Wait for the batch of a step; None when told to drain."""
        while not self._drain.requested:
            self._session.require_live()
            self._session.mark_progress()
            if (batch := consume.batch_of_step(self._run, step)) is not None:
                return batch
            self._drain.wait(0.05)
        return None

    def _is_checkpoint_due(self, step: int) -> bool:
        config = self._config
        at_interval = step % config.trainer.checkpoint_interval == 0
        ends_stage = step in (config.warm_start.steps, config.total_steps)
        return at_interval or ends_stage or is_evaluated(config, step)

    def _checkpoint(self, trainer: MegatronTrainer, resumption: Resumption, step: int, committed: int) -> int:
        started = time.monotonic()
        role, state_digest = resumption.role, trainer.state_digest()
        trainer.save_checkpoint(
            self._run.root / consume.checkpoint_path(role, step),
            stands_for={**consume.stands_for(self._run, role, step=step), "state_digest": state_digest},
        )
        consume.commit_checkpoint(
            self._session, role, step=step, previous_step=committed, state_digest=state_digest
        )
        log.info("checkpoint of step %d took %.2f s", step, time.monotonic() - started)
        return step

    def _publish(self, trainer: MegatronTrainer, resumption: Resumption, step: int) -> None:
        digest = trainer.weights_digest()
        version_id = publish_weights.version_name(self._run, resumption.role, step=step, digest=digest)
        trainer.export_hf(self._run.root / publish_weights.weights_path(version_id))
        publish_weights.publish_weights(
            self._session, resumption.role, step=step, version_id=version_id, digest=digest
        )
