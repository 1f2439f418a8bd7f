"""The trainer: leases the consumer, trains planned batches in order, checkpoints, publishes weights.

1. A restart loads the newest committed checkpoint and trains the planned batches after it again, same bytes, same order.
2. A checkpoint commits together with the position it stands for, and before the weights of its step are published, so
   every evaluated version is covered by one.
3. A batch's packed rows carry all that a step needs; no trajectory is read here.
4. With several ranks the first one alone runs this loop: it holds the lease and writes to the index. What comes next is told
   to the others by step and path (`Team`, `follow`); each reads its own share of the batch from the store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from strawflow import faults
from strawflow.config import RunConfig
from strawflow.errors import ConfigError, ConflictError
from strawflow.flow import consume, publish_weights, rescue
from strawflow.flow.admit_evaluation import is_evaluated
from strawflow.flow.consume import Resumption
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.index.batches import Batch, MicroBatchPlace
from strawflow.packs.reader import PackReader
from strawflow_workers.drain import Drain
from strawflow_workers.trainer.batches import MiniBatch, PackedMicroBatch, TrainSettings
from strawflow_workers.trainer.megatron import MegatronTrainer
from strawflow_workers.trainer.shares import deal, own_share
from strawflow_workers.trainer.watch import Watch

log = logging.getLogger(__name__)

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


Rows = list[tuple[MicroBatchPlace, pa.RecordBatch]]
Look = Callable[[Batch, Rows, list[MiniBatch]], None]


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
        )
        self.ranks = self.trainer.ranks
        self.last_read: tuple[Rows, list[MiniBatch]] = ([], [])
        """What this rank read of the batch it trained last."""
        self._told_at = time.monotonic()

    def train(
        self, batch: Batch, *, recorded: Mapping[str, Any] | None = None, look: Look | None = None
    ) -> dict[str, Any]:
        """Train the batch of one step; returns the step's metrics.

        `recorded` are those of an earlier time that it was trained, if it was; `look` is called with what this rank read before
        anything of it is trained.

        Raises:
            CorruptPackError: stored bytes are damaged. ConflictError: this rank finds another batch than the first one.
        """
        left_out = decided(batch, recorded)
        self._tell("train", step=batch.step, digest=batch.digest, left_out=left_out)
        return self._apply(batch, left_out, look)

    def train_step(self, step: int, *, digest: str, left_out: list[int] | None) -> None:
        """Train the batch that the first rank named, as it decided."""
        batch = consume.batch_of_step(self._run, step)
        if batch is None or batch.digest != digest:
            raise ConflictError(
                f"rank {self.ranks.rank} finds another batch of step {step} than rank 0 does: {batch and batch.digest}"
            )
        self._apply(batch, left_out, None)

    def _apply(self, batch: Batch, left_out: Sequence[int] | None, look: Look | None) -> dict[str, Any]:
        self.last_read = self._own_share(batch)
        begin_stage_of(self.trainer, self._run.config, batch)
        if look is not None:
            look(batch, *self.last_read)
        return apply_batch(self.trainer, self._run.config, batch, self.last_read[1], left_out=left_out)

    def _own_share(self, batch: Batch) -> tuple[Rows, list[MiniBatch]]:
        if self.ranks.data_size == 1:
            rows = list(consume.read_batch(self._run, self._reader, batch))
            return rows, to_mini_batches(batch, rows)
        own: set[MicroBatchPlace] = set()
        most = []
        for sizes in consume.micro_batch_sizes(self._run, self._reader, batch):
            places = list(sizes)
            dealt = deal(list(sizes.values()), self.ranks.data_size)
            own.update(places[at] for at in dealt[self.ranks.data_rank])
            most.append((places[0].mini_batch, max(map(len, dealt))))
        rows = list(consume.read_batch(self._run, self._reader, batch, only=own))
        found = micro_batches_of(batch, rows)
        return rows, [own_share(found.get(mini, []), batch.denominators[mini], num=num) for mini, num in most]

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
        team = Team(self._run, self._session.reader)
        resumption = self._take_over(team)
        if resumption is not None:
            self._go_on(team, resumption)
        team.end()

    def _go_on(self, team: Team, resumption: Resumption) -> None:
        if resumption.checkpoint is not None:
            team.load(self._run.root / resumption.checkpoint.path)
            log.info("went on from checkpoint %s", resumption.checkpoint.checkpoint_id)
        if publish_weights.published_version(self._run, resumption.step) is None:
            self._publish(team, resumption, resumption.step)
        self._train(team, resumption)

    def _take_over(self, team: Team) -> Resumption | None:
        while not self._drain.requested:
            self._session.mark_progress()
            team.wait()
            rescue.rescue_expired(self._run)  # the holder may be gone without anyone to say so
            if (found := consume.take_over(self._session)) is not None:
                return found
            self._drain.wait(0.2)
        return None

    def _train(self, team: Team, resumption: Resumption) -> None:
        committed = resumption.step
        watch = Watch(self._session, team.trainer, after_step=committed)
        for step in range(committed + 1, self._config.total_steps + 1):
            batch = self._next_batch(step, team)
            if batch is None:
                return
            faults.at("trainer.before_step")
            metrics = team.train(batch, recorded=watch.recorded.get(step), look=watch.before)
            metrics["disagreement"] = watch.disagreement(batch, metrics)
            faults.at("trainer.after_step")
            consume.record_step(self._session, resumption.role, step=step, metrics=metrics)
            watch.after(batch, *team.last_read, metrics)
            log.info("step %d: loss %s, reward %s", step, metrics["loss"], metrics["mean_reward"])
            if self._is_checkpoint_due(step):
                committed = self._checkpoint(team, resumption, step, committed)
            if step >= self._config.warm_start.steps:
                # Until the warm start ends nobody samples: its weights need no files.
                self._publish(team, resumption, step)
                publish_weights.remove_unneeded_weights(self._session, resumption.role)

    def _next_batch(self, step: int, team: Team) -> Batch | None:
        """Wait for the batch of a step; None when told to drain."""
        while not self._drain.requested:
            self._session.require_live()
            self._session.mark_progress()
            team.wait()
            if (batch := consume.batch_of_step(self._run, step)) is not None:
                return batch
            self._drain.wait(0.05)
        return None

    def _is_checkpoint_due(self, step: int) -> bool:
        config = self._config
        at_interval = step % config.trainer.checkpoint_interval == 0
        ends_stage = step in (config.warm_start.steps, config.total_steps)
        return at_interval or ends_stage or is_evaluated(config, step)

    def _checkpoint(self, team: Team, resumption: Resumption, step: int, committed: int) -> int:
        started = time.monotonic()
        role, state_digest = resumption.role, team.state_digest()
        team.save(
            self._run.root / consume.checkpoint_path(role, step),
            stands_for={**consume.stands_for(self._run, role, step=step), "state_digest": state_digest},
        )
        consume.commit_checkpoint(
            self._session, role, step=step, previous_step=committed, state_digest=state_digest
        )
        log.info("checkpoint of step %d took %.2f s", step, time.monotonic() - started)
        return step

    def _publish(self, team: Team, resumption: Resumption, step: int) -> None:
        digest = team.weights_digest()
        version_id = publish_weights.version_name(self._run, resumption.role, step=step, digest=digest)
        team.export(self._run.root / publish_weights.weights_path(version_id))
        publish_weights.publish_weights(
            self._session, resumption.role, step=step, version_id=version_id, digest=digest
        )
