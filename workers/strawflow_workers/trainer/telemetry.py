"""What a step is measured by beside its loss, and where that goes.

1. The metrics of a step are stored in the index; sinks get what was stored.
2. `read_wait_s` is the time a trainer that could have trained waited for the rows of a batch that was planned; `plan_wait_s` the time
   before, until it was planned: then the rollout was slower than the trainer. Shares are of the whole step, waits included.
3. With several data-parallel ranks lengths, rates and MFU are those of the first one's share of the batch.
4. It takes no part in training: without it the weights are the same.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from strawflow.flow import history
from strawflow.flow.run import Run
from strawflow_workers.trainer import configurations, flops
from strawflow_workers.trainer.batch_facts import BatchContent
from strawflow_workers.trainer.feed import Served
from strawflow_workers.trainer.model import read_hf_config
from strawflow_workers.trainer.native_settings import NativeSettings
from strawflow_workers.trainer.profiler import StepProfiler
from strawflow_workers.trainer.sinks import open_sinks


class Telemetry(AbstractContextManager["Telemetry"]):
    """Metrics, sinks and profiler of one trainer."""

    def __init__(self, run: Run) -> None:
        """Open what the run asks for.

        Raises:
            ConfigError: a sink cannot start; names the setting.
        """
        self._run = run
        self._open = ExitStack()
        self._sinks = self._open.enter_context(open_sinks(run))
        self.profiler = self._open.enter_context(
            StepProfiler(run.config.trainer.profile_steps, run.root / "profiles")
        )
        hf = read_hf_config(run.model_path)
        model = configurations.transformer(hf, NativeSettings.of(run.config), run.config.parallel)
        self._num_devices = run.config.parallel.ranks_of_a_replica
        self._work = flops.work_of(model, vocab_size=int(hf["vocab_size"]))
        self._peak = _peak(run.config.trainer.peak_tflops, model.params_dtype)

    def __exit__(self, *raised: Any) -> None:
        self._open.__exit__(*raised)

    def catch_up(self, step: int) -> None:
        """Give the sinks what they lack of the steps up to the one that training goes on after."""
        self._sinks.catch_up(history.steps(self._run), up_to=step)

    def measured(
        self, served: Served[BatchContent], metrics: dict[str, Any], *, plan_wait_s: float
    ) -> dict[str, Any]:
        """Return the metrics of a step with what else is measured of it; `metrics` are the trainer's."""
        facts, seconds = served.content.facts, float(metrics["seconds"])
        told = facts.metrics()
        whole = seconds + served.read_wait_s + plan_wait_s
        work = flops.step_flops(self._work, facts.all_lengths)
        return {
            **metrics,
            **told,
            "reward_by_set": history.rewards_by_set(self._run, served.batch),
            "tokens_per_second": told["total_tokens"] / seconds if seconds > 0 else None,
            "flops": work,
            "mfu": flops.mfu(work, seconds, num_devices=self._num_devices, peak=self._peak),
            "plan_wait_s": plan_wait_s,
            "read_wait_s": served.read_wait_s,
            "read_wait_share": served.read_wait_s / whole if whole > 0 else 0.0,
        }

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Give the sinks a step that the index holds."""
        self._sinks.write(step, metrics)


def _peak(tflops: float, dtype: torch.dtype) -> float | None:
    if tflops:
        return tflops * 1e12
    if not torch.cuda.is_available():
        return None  # what a CPU could do is not told by its name
    return flops.peak_of(torch.cuda.get_device_name(), str(dtype).removeprefix("torch."))
