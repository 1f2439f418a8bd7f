"""The Megatron-core trainer of one process: updates, stages, checkpoints and exports of one model.

1. Model, gradient buffers, schedule, optimizer and learning-rate schedule are Megatron's own; this module
   drives them.
2. The loss of an update is divided by the denominator that came with it; no count made here enters a
   gradient.
3. An update whose loss or gradient norm is not finite changes nothing: not weights, optimizer, or schedule.
4. Same start, batches, device type and thread count: same weights, bit for bit, also across save and load.
5. It knows nothing of the store, leases, or where batches come from. Importing it takes seconds: import it in
   the worker only.
"""

from __future__ import annotations

import functools
import math
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from strawflow.errors import InvalidInputError
from strawflow_workers.trainer import checkpoints, device, forward, state
from strawflow_workers.trainer.batches import MiniBatch, PackedMicroBatch, StepMetrics, TrainSettings
from strawflow_workers.trainer.model import (
    build_model,
    each_hf_tensor,
    export_weights,
    load_weights,
    read_hf_config,
)

with device.importing_megatron():
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func

__all__ = ["MegatronTrainer", "MiniBatch", "PackedMicroBatch", "StepMetrics", "TrainSettings"]

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".index.json", ".pt", ".pth")


@dataclass(frozen=True)
class _Update:
    loss: float
    grad_norm: float
    sums: list[float]
    largest_gap: float
    applied: bool


class MegatronTrainer:
    """Train one model. `settings` belong to a stage; `begin_stage` starts another with a fresh optimizer."""

    def __init__(self, hf_dir: Path, settings: TrainSettings, *, seed: int, threads: int = 1) -> None:
        """Build the model from a Hugging Face directory (config, weights, tokenizer files).

        Raises:
            NotFoundError, ConfigError, InvalidInputError: the directory is incomplete or describes something
            unsupported.
        """
        self.settings = settings
        self.stage = 0
        self._hf_dir, self._hf, self._seed = Path(hf_dir), read_hf_config(Path(hf_dir)), seed
        device.prepare_process(threads=threads)
        with device.trainer_device():
            _join_ranks(seed)
            core = build_model(self._hf)
            load_weights(core, self._hf, self._hf_dir)
            self._model = _data_parallel(core)
            self._begin(settings)

    def begin_stage(self, settings: TrainSettings) -> None:
        """Go on with the same weights under new settings: fresh optimizer state, learning-rate schedule from
        its start."""
        self.stage += 1
        with device.trainer_device():
            self._begin(settings)

    def _begin(self, settings: TrainSettings) -> None:
        self.settings = settings
        self._optimizer = _make_optimizer(settings, self._model)
        self._schedule = _make_schedule(settings, self._optimizer)

    @property
    def updates(self) -> int:
        """Updates applied in this stage."""
        return int(self._schedule.num_steps)

    def train_step(self, mini_batches: Sequence[MiniBatch]) -> StepMetrics:
        """Apply one update for each mini-batch, in order. Those that are not finite are left out and
        counted."""
        started = time.monotonic()
        with device.trainer_device():
            updates = [self._update(mini_batch) for mini_batch in mini_batches]
        return _summarise(updates, self.settings, lr=self._lr(), seconds=time.monotonic() - started)

    def logprobs(self, micro_batch: PackedMicroBatch) -> npt.NDArray[np.float32]:
        """Return float32 [T]: log-probability of each token given those before it, 0 for the first of a
        sequence."""
        prepared = self._prepare(micro_batch, every_token=True)
        with device.trainer_device(), torch.no_grad():
            found = forward.token_logprobs(forward.run_model(self._model, prepared), prepared)
        result = np.zeros(micro_batch.tokens.size, dtype=np.float32)
        result[prepared.positions] = found.cpu().numpy()
        return result

    def state_digest(self) -> str:
        """Return the digest over every tensor a checkpoint would hold: parameters, optimizer, random
        generators."""
        return checkpoints.tensors_digest(self._rank_state().tensors)

    def weights_digest(self) -> str:
        """Return the digest that `export_hf` would return."""
        digest = checkpoints.TensorsDigest()
        for name, tensor in each_hf_tensor(self._model.module, self._hf):
            digest.add(name, tensor)
        return digest.hexdigest()

    def export_hf(self, out_dir: Path) -> str:
        """Write the weights as a new Hugging Face directory, durable when this returns; return the digest of
        its tensors.

        Raises:
            AlreadyExistsError: `out_dir` exists.
            StorageError: it could not be written; nothing appeared under that name.
        """
        with checkpoints.new_directory(Path(out_dir)) as partial:
            digest = export_weights(self._model.module, self._hf, partial / "model.safetensors")
            for path in self._hf_dir.iterdir():
                if (
                    path.is_file()
                    and not path.name.startswith(".")
                    and not path.name.endswith(_WEIGHT_SUFFIXES)
                ):
                    shutil.copyfile(path, partial / path.name)
        return digest

    def save_checkpoint(self, path: Path, *, stands_for: Mapping[str, Any] | None = None) -> None:
        """Write all state as a new directory, durable when this returns; its manifest says what it stands for.

        Raises:
            AlreadyExistsError: `path` exists.
            StorageError: it could not be written; nothing appeared under that name.
        """
        checkpoints.write_rank_state(Path(path), self._rank_state(), stands_for=stands_for)

    def load_checkpoint(self, path: Path) -> None:
        """Take over all state of a checkpoint, its stage and settings included. On error this trainer is
        unchanged.

        Raises:
            CorruptCheckpointError: a file is missing or differs from the manifest, or does not fit this
            model. IncompatibleFormatError: written by a version this program does not read.
        """
        found = checkpoints.read_rank_state(Path(path))
        state.check_fits(found, self._model.module, path=Path(path))
        self.stage = int(found.values["stage"])
        with device.trainer_device():
            self._begin(TrainSettings(**found.values["settings"]))
            state.restore(found, self._model.module, self._optimizer)
            self._schedule.num_steps = int(found.values["updates"])
            self._schedule.step(0)

    def _rank_state(self) -> checkpoints.RankState:
        values = {
            "stage": self.stage,
            "settings": self.settings.as_dict(),
            "updates": self.updates,
            "schedule": self._schedule.state_dict(),
            "seed": self._seed,
        }
        return state.collect(self._model.module, self._optimizer, values)

    def _update(self, mini_batch: MiniBatch) -> _Update:
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        sums, largest_gap = self._forward_backward(mini_batch)
        self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        loss = sums[forward.LOSS] / mini_batch.denominator
        applied = math.isfinite(loss) and math.isfinite(grad_norm)
        if applied:
            self._schedule.step(1)
            if self.settings.clip_grad > 0:
                clip_grad_by_total_norm_fp32(
                    self._optimizer.get_parameters(), self.settings.clip_grad, grad_norm
                )
            self._optimizer.step_with_ready_grads()
        return _Update(loss, grad_norm, sums, largest_gap, applied)

    def _forward_backward(self, mini_batch: MiniBatch) -> tuple[list[float], float]:
        """Leave the gradient of the update in the buffers; return the sums and the largest gap over all its
        micro-batches."""
        prepared = [self._prepare(micro_batch) for micro_batch in mini_batch.micro_batches]
        results = get_forward_backward_func()(
            forward_step_func=functools.partial(
                _forward_step, settings=self.settings, denominator=mini_batch.denominator
            ),
            data_iterator=iter(prepared),
            model=[self._model],
            num_microbatches=len(prepared),
            seq_length=max(item.tokens.size(1) for item in prepared),
            micro_batch_size=1,
        )
        sums = torch.stack([result["sums"] for result in results]).sum(0)
        largest = torch.stack([result["largest_gap"] for result in results]).amax(0)
        if parallel_state.get_data_parallel_world_size() > 1:
            group = parallel_state.get_data_parallel_group()
            dist.all_reduce(sums, group=group)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return sums.tolist(), float(largest)

    def _prepare(self, micro_batch: PackedMicroBatch, *, every_token: bool = False) -> forward.Prepared:
        tokens, size = micro_batch.tokens, int(self._hf["vocab_size"])
        if tokens.min() < 0 or tokens.max() >= size:
            # A target outside the vocabulary would not fail: its log-probability would just be wrong.
            raise InvalidInputError(
                f"tokens: from {tokens.min()} to {tokens.max()}; this model's vocabulary has {size}"
            )
        return forward.prepare(micro_batch, device=device.target(), every_token=every_token)

    def _lr(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])


def _join_ranks(seed: int) -> None:
    device.join_process_group()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _data_parallel(core: Any) -> Any:
    """Wrap the model so that gradients gather in contiguous fp32 buffers and are summed over data-parallel
    ranks."""
    model = DistributedDataParallel(
        core.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), core
    )
    core.config.finalize_model_grads_func = _finalize_by_planned_denominator
    return model


def _finalize_by_planned_denominator(model: list[Any], _num_tokens: Tensor | None, **options: Any) -> None:
    """Reduce gradients as Megatron does, without its division by counted tokens: the loss was divided
    already."""
    finalize_model_grads(model, None, **options)


def _make_optimizer(settings: TrainSettings, model: Any) -> Any:
    beta1, beta2 = settings.betas
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        params_dtype=torch.float32,
    )
    with device.without_megatron_warnings():
        return get_megatron_optimizer(config, [model])


def _make_schedule(settings: TrainSettings, optimizer: Any) -> Any:
    """Linear warm-up, then constant; the schedule is stepped before each update, so the first one has a rate
    above 0."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=0.0,
        lr_warmup_steps=settings.lr_warmup_updates,
        lr_decay_steps=settings.lr_warmup_updates + 1,
        lr_decay_style="constant",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def _forward_step(
    batches: Iterator[forward.Prepared], model: Any, *, settings: TrainSettings, denominator: float
) -> tuple[Tensor, Any]:
    """Give Megatron's schedule the output of one micro-batch and the function that turns it into a loss."""
    prepared = next(batches)
    return forward.run_model(model, prepared), functools.partial(_loss, prepared, settings, denominator)


def _loss(
    prepared: forward.Prepared, settings: TrainSettings, denominator: float, logits: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    loss, sums, largest = forward.loss_and_sums(logits, prepared, settings)
    # The schedule wants a token count; the gradient does not use it.
    count = torch.tensor(prepared.rows.numel(), dtype=torch.int)
    return loss / denominator, count, {"sums": sums, "largest_gap": largest}


def _summarise(updates: list[_Update], settings: TrainSettings, *, lr: float, seconds: float) -> StepMetrics:
    applied = [update for update in updates if update.applied]
    num_tokens = int(sum(update.sums[forward.TOKENS] for update in updates))
    trained = sum(update.sums[forward.TOKENS] for update in applied)
    is_policy = settings.objective == "grpo"
    first = updates[0] if updates else None
    first_tokens = first.sums[forward.TOKENS] if first else 0.0

    def share(place: int) -> float | None:
        return sum(update.sums[place] for update in applied) / trained if is_policy and trained else None

    return StepMetrics(
        loss=sum(update.loss for update in applied) / len(applied) if applied else None,
        grad_norm=sum(update.grad_norm for update in applied) / len(applied) if applied else None,
        num_tokens=num_tokens,
        clip_fraction=share(forward.CLIPPED),
        kl=share(forward.KL),
        logprob_gap_mean=first.sums[forward.GAP] / first_tokens
        if is_policy and first and first_tokens
        else None,
        logprob_gap_max=first.largest_gap if is_policy and first and first_tokens else None,
        lr=lr,
        skipped_updates=len(updates) - len(applied),
        seconds=seconds,
    )
