"""The trainer: leases the consumer, trains planned batches in order, checkpoints, publishes weights.

1. A restart loads the newest committed checkpoint and trains the planned batches after it again, same bytes, same order.
2. A checkpoint commits together with the position it stands for, and before the weights of its step are published, so
   every evaluated version is covered by one.
3. A batch's packed rows carry all that a step needs; no trajectory is read here.
4. With several ranks the first one alone runs this loop: it holds the lease and writes to the index (`team`, `follow`).
5. The next batch is read while one is trained; what is trained, and in which order, is the same.
"""

from __future__ import annotations

import functools
import logging
import time

from strawflow import faults
from strawflow.flow import consume, publish_weights, rescue
from strawflow.flow.admit_evaluation import is_evaluated
from strawflow.flow.consume import Resumption
from strawflow.flow.session import WorkerSession
from strawflow.index.batches import Batch
from strawflow_workers.drain import Drain
from strawflow_workers.trainer import configurations
from strawflow_workers.trainer.feed import BatchFeed
from strawflow_workers.trainer.team import Team
from strawflow_workers.trainer.telemetry import Telemetry
from strawflow_workers.trainer.watch import Watch

log = logging.getLogger(__name__)


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
        configurations.write_record(self._run)
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
        with (
            Telemetry(self._run) as telemetry,
            BatchFeed(functools.partial(consume.batch_of_step, self._run), team.read) as feed,
        ):
            telemetry.catch_up(resumption.step)
            for step in range(committed + 1, self._config.total_steps + 1):
                asked = time.monotonic()
                batch = self._next_batch(step, team)
                if batch is None:
                    return
                plan_wait_s = time.monotonic() - asked
                faults.at("trainer.before_step")
                served = feed.content_of(batch)
                if step < self._config.total_steps:
                    feed.read_ahead(step + 1)
                with telemetry.profiler.step(step):
                    recorded = watch.recorded.get(step)
                    applied = team.train(batch, served.content, recorded=recorded, look=watch.before)
                applied["disagreement"] = watch.disagreement(batch, applied)
                faults.at("trainer.after_step")
                metrics = telemetry.measured(served, applied, plan_wait_s=plan_wait_s)
                consume.record_step(self._session, resumption.role, step=step, metrics=metrics)
                telemetry.write(step, metrics)
                watch.after(batch, served.content, metrics)
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
