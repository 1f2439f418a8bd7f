"""The Megatron-core trainer: updates, stages, checkpoints and exports of one model, on this rank and all others at once.

1. Model, gradient buffers, schedule, optimizer and learning-rate schedule are Megatron's own; this module
   drives them.
2. The loss of an update is divided by the denominator that came with it; no count made here enters a
   gradient.
3. An update whose loss or gradient norm is not finite, or whose norm is above the bound of the settings, changes
   nothing: not weights, optimizer, or schedule. Which updates these were can be given, so that a replay decides the same.
4. Same start, batches, device type, thread count and ranks: same weights, bit for bit, also across save and load.
5. Every method is called on every rank in the same order; each rank gives its own share of the micro-batches, and all get
   the same metrics and decisions. What rank 0 alone returns is said there.
6. It knows nothing of the store, leases, or where batches come from. Importing it takes seconds: import it in
   the worker only.
"""

from __future__ import annotations

import functools
import math
import random
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from strawflow.config_algorithm import is_hook
from strawflow.config_parallel import ParallelSection
from strawflow.errors import ConfigError, InvalidInputError
from strawflow_workers.trainer import checkpoints, configurations, device, forward, objective, sharding, state
from strawflow_workers.trainer.batches import MiniBatch, PackedMicroBatch, StepMetrics, TrainSettings
from strawflow_workers.trainer.columns import LogProbs, Models, with_columns
from strawflow_workers.trainer.configurations import ONE_PROCESS
from strawflow_workers.trainer.context import Share
from strawflow_workers.trainer.frozen import FrozenModel
from strawflow_workers.trainer.model import (
    build_model,
    each_hf_tensor,
    export_weights,
    hf_tensors,
    load_weights,
    read_hf_config,
)
from strawflow_workers.trainer.native_settings import NOTHING_GIVEN, NativeSettings
from strawflow_workers.trainer.ranks import from_last_stage, join_ranks

with device.importing_megatron():
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        finalize_model_grads,
    )
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

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

    def __init__(
        self,
        hf_dir: Path,
        settings: TrainSettings,
        *,
        seed: int,
        threads: int = 1,
        parallel: ParallelSection = ONE_PROCESS,
        native: NativeSettings = NOTHING_GIVEN,
    ) -> None:
        """Build this rank's part of the model from a Hugging Face directory (config, weights, tokenizer files).

        `native` are Megatron's own settings that lie over ours.

        Raises:
            NotFoundError, ConfigError, InvalidInputError: the directory is incomplete or describes something
            unsupported, or Megatron refuses a given setting.
        """
        self._native = native
        self.settings = settings
        self.stage = 0
        self._hf_dir, self._hf, self._seed = Path(hf_dir), read_hf_config(Path(hf_dir)), seed
        self._parallel = parallel
        device.prepare_process(threads=threads)
        with device.trainer_device():
            self.ranks = join_ranks(parallel)
            _seed_generators(seed)
            self._core = build_model(self._hf, parallel, native)
            load_weights(self._core, self._hf, self._hf_dir)
            self._model = _data_parallel(self._core, parallel, native)
            self._frozen: dict[str, FrozenModel] = {}
            self._begin(settings)
        self._share = _share(parallel, vocabulary=int(self._hf["vocab_size"]))

    def begin_stage(self, settings: TrainSettings) -> None:
        """Go on with the same weights under new settings: fresh optimizer state, learning-rate schedule from
        its start."""
        self.stage += 1
        with device.trainer_device():
            self._begin(settings)

    def _begin(self, settings: TrainSettings) -> None:
        self.settings = settings
        objective.require_loss(settings)
        _refuse_split_sequences(settings, self._parallel)
        self._models = self._models_for(settings)
        config = configurations.optimizer(settings, self._native, self._parallel)
        self._optimizer = _make_optimizer(config, self._model)
        self._schedule = _make_schedule(settings, self._optimizer)

    @property
    def dtype(self) -> str:
        """Type of the checkpoint's weights, as its config.json names it."""
        return str(self._hf.get("dtype") or self._hf.get("torch_dtype") or "float32").removeprefix("torch.")

    def _models_for(self, settings: TrainSettings) -> Models:
        """Return who tells the log-probabilities that a step needs beside those of its own passes."""
        a = settings.algorithm
        reference = a.reference or str(self._hf_dir) if a.needs_reference else ""
        return Models(
            functools.partial(self.logprobs, every_token=False),
            self._frozen_model("reference", reference),
            self._frozen_model("teacher", a.teacher),
        )

    def _frozen_model(self, role: str, hf_dir: str) -> LogProbs | None:
        if not hf_dir:
            return None
        if hf_dir not in self._frozen:
            size = int(self._hf["vocab_size"])
            self._frozen[hf_dir] = FrozenModel(Path(hf_dir), vocab_size=size, setting=f"algorithm.{role}")
        return self._frozen[hf_dir].logprobs

    @property
    def updates(self) -> int:
        """Updates applied in this stage."""
        return int(self._schedule.num_steps)

    def train_step(
        self,
        mini_batches: Sequence[MiniBatch],
        *,
        left_out: Collection[int] | None = None,
        sets_aside: bool = False,
    ) -> StepMetrics:
        """Apply one update for each mini-batch, in order, of which this rank is given its share (`shares`). Those that are
        not finite, or too large, are left out and counted.

        `left_out` is what was decided before: these are left out, and of the others what is not finite alone. With
        `sets_aside`, all that come after one that is left out are left out as well.
        """
        started = time.monotonic()
        mini_batches = with_columns(mini_batches, self.settings.algorithm, self._models)
        updates: list[_Update] = []
        with device.trainer_device():
            for at, mini_batch in enumerate(mini_batches):
                bound = self.settings.max_grad_norm or math.inf
                if left_out is not None:
                    bound = -1.0 if at in left_out else math.inf
                elif sets_aside and not all(update.applied for update in updates):
                    bound = -1.0
                updates.append(self._update(mini_batch, max_norm=bound))
        return _summarise(updates, self.settings, lr=self._lr(), seconds=time.monotonic() - started)

    def logprobs(self, micro_batch: PackedMicroBatch, *, every_token: bool = True) -> npt.NDArray[np.float32]:
        """Return float32 [T]: log-probability of each token given those before it, 0 for the first of a
        sequence and, without `every_token`, for those that are not trained."""
        prepared = self._prepare(micro_batch, every_token=every_token)
        with device.trainer_device(), torch.no_grad():
            found = self._run_schedule([prepared], _read_out, forward_only=True)
        if self.ranks.size > 1:
            return self._gathered_logprobs(micro_batch.tokens.size, prepared, found)
        result = np.zeros(micro_batch.tokens.size, dtype=np.float32)
        result[prepared.positions] = found[0]["logprobs"].cpu().numpy()
        return result

    def _gathered_logprobs(
        self, num_tokens: int, prepared: forward.Prepared, found: list[dict[str, Tensor]]
    ) -> npt.NDArray[np.float32]:
        """Put together what context-parallel ranks of the last stage read out, for all ranks."""
        values: Tensor | None = None
        if found:
            values = torch.zeros(num_tokens, dtype=torch.float64, device=device.target())
            values[torch.from_numpy(prepared.positions)] = found[0]["logprobs"].double()
            dist.all_reduce(values, group=parallel_state.get_context_parallel_group())
        if self._parallel.pipeline > 1:
            values = from_last_stage(values)
        assert values is not None
        return values.cpu().numpy().astype(np.float32)

    def state_digest(self) -> str:
        """Return the digest over every tensor a checkpoint would hold: parameters, optimizer, random generators; with
        several ranks over the digests of all, in their order."""
        own = checkpoints.tensors_digest(self._rank_state().tensors)
        return checkpoints.digest_of_ranks([found["digest"] for found in self.ranks.collect({"digest": own})])

    def weights_digest(self) -> str:
        """Return the digest that `export_hf` would return: on rank 0; it says nothing on the others."""
        self._finish_gathering()
        if self.ranks.size > 1:
            return checkpoints.tensors_digest(hf_tensors(self._core, self._hf, self.ranks))
        digest = checkpoints.TensorsDigest()
        for name, tensor in each_hf_tensor(self._core, self._hf):
            digest.add(name, tensor)
        return digest.hexdigest()

    def _finish_gathering(self) -> None:
        """Have every rank hold the updated weights now: with overlap they are gathered by the next forward pass."""
        if self._model.ddp_config.overlap_param_gather:
            self._model.start_param_sync(force_sync=True)

    def export_hf(self, out_dir: Path) -> str:
        """Write the weights as a new Hugging Face directory, durable when this returns on rank 0; return the digest of its
        tensors there. The other ranks take part and write nothing.

        Raises:
            AlreadyExistsError: `out_dir` exists.
            StorageError: it could not be written; nothing appeared under that name.
        """
        self._finish_gathering()
        if self.ranks.rank > 0:
            hf_tensors(self._core, self._hf, self.ranks)
            return ""
        with checkpoints.new_directory(Path(out_dir)) as partial:
            digest = export_weights(self._core, self._hf, self.ranks, partial / "model.safetensors")
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
        checkpoints.write_rank_state(Path(path), self._rank_state(), self.ranks, stands_for=stands_for)

    def load_checkpoint(self, path: Path) -> None:
        """Take over all state of a checkpoint, its stage and settings included. On error this trainer is
        unchanged.

        Raises:
            CorruptCheckpointError: a file is missing or differs from the manifest, or does not fit this
            model. IncompatibleFormatError: written by a version this program does not read.
        """
        found = checkpoints.read_rank_state(Path(path), self.ranks)
        state.check_fits(found, self._core, path=Path(path))
        self.stage = int(found.values["stage"])
        with device.trainer_device():
            self._begin(TrainSettings(**found.values["settings"]))
            state.restore(found, self._core, self._optimizer)
            self._schedule.num_steps = int(found.values["updates"])
            self._schedule.step(0)

    def _rank_state(self) -> checkpoints.RankState:
        self._finish_gathering()
        values = {
            "stage": self.stage,
            "settings": self.settings.as_dict(),
            "updates": self.updates,
            "schedule": self._schedule.state_dict(),
            "seed": self._seed,
        }
        return state.collect(self._core, self._optimizer, values)

    def _update(self, mini_batch: MiniBatch, *, max_norm: float) -> _Update:
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        sums, largest_gap = self._forward_backward(mini_batch)
        self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        loss = sums[objective.LOSS] / mini_batch.denominator
        # All ranks have the same loss and norm; were it otherwise, none may step alone.
        applied = self.ranks.all_agree(
            math.isfinite(loss) and math.isfinite(grad_norm) and grad_norm <= max_norm
        )
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
        read_out = functools.partial(_loss, settings=self.settings, denominator=mini_batch.denominator)
        results = self._run_schedule(prepared, read_out)
        sums = torch.stack([result["sums"] for result in results]).sum(0) if results else None
        largest = torch.stack([result["largest_gap"] for result in results]).amax(0) if results else None
        sums, largest = self.ranks.reduce_statistics(sums, largest)
        return sums.tolist(), float(largest)

    def _run_schedule(
        self, prepared: list[forward.Prepared], read_out: Callable[..., Any], *, forward_only: bool = False
    ) -> list[dict[str, Tensor]]:
        """Run Megatron's schedule; return what `read_out` said of each micro-batch, nothing before the last stage."""
        results: list[dict[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=functools.partial(_forward_step, read_out=read_out),
            data_iterator=iter(prepared),
            model=[self._model],
            num_microbatches=len(prepared),
            seq_length=max(item.tokens.size(1) for item in prepared),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return results

    def _prepare(self, micro_batch: PackedMicroBatch, *, every_token: bool = False) -> forward.Prepared:
        tokens, size = micro_batch.tokens, int(self._hf["vocab_size"])
        if tokens.min() < 0 or tokens.max() >= size:
            # A target outside the vocabulary would not fail: its log-probability would just be wrong.
            raise InvalidInputError(
                f"tokens: from {tokens.min()} to {tokens.max()}; this model's vocabulary has {size}"
            )
        return forward.prepare(
            micro_batch, device=device.target(), every_token=every_token, share=self._share
        )

    def _lr(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _refuse_split_sequences(settings: TrainSettings, parallel: ParallelSection) -> None:
    """Raise ConfigError for losses that look at whole sequences where context-parallel ranks have parts of them."""
    a = settings.algorithm
    looks_at_whole = a.loss == "gspo" or is_hook(a.loss) or a.mismatch not in ("none", "token")
    if parallel.context > 1 and settings.objective == "grpo" and looks_at_whole:
        raise ConfigError(
            f"parallel.context {parallel.context}: algorithm.loss {a.loss} with algorithm.mismatch {a.mismatch} looks at whole "
            "sequences, which context-parallel ranks do not have; set parallel.context to 1"
        )


def _share(parallel: ParallelSection, *, vocabulary: int) -> Share:
    """Return what this rank has of every pack and of the vocabulary."""
    own = sharding.padded_vocabulary(vocabulary, parallel.tensor) // parallel.tensor
    real = max(0, min(own, vocabulary - own * parallel_state.get_tensor_model_parallel_rank()))
    return Share(
        num_ranks=parallel.context,
        rank=parallel_state.get_context_parallel_rank(),
        multiple=parallel.tensor if parallel.sequence else 1,
        columns=None if real == own else real,
    )


def _data_parallel(core: Any, parallel: ParallelSection, native: NativeSettings) -> Any:
    """Wrap the model so that gradients gather in contiguous fp32 buffers and are summed over data-parallel
    ranks."""
    wrapped = Float16Module(core.config, core) if parallel.precision == "bf16" else core
    config = configurations.gradient_buffers(native, parallel)
    model = DistributedDataParallel(core.config, config, wrapped)
    core.config.finalize_model_grads_func = _finalize_by_planned_denominator
    if config.overlap_grad_reduce:
        core.config.no_sync_func = model.no_sync  # gradients travel with the last micro-batch, not with each
    return model


def _finalize_by_planned_denominator(model: list[Any], _num_tokens: Tensor | None, **options: Any) -> None:
    """Reduce gradients as Megatron does, without its division by counted tokens: the loss was divided
    already."""
    finalize_model_grads(model, None, **options)


def _make_optimizer(config: Any, model: Any) -> Any:
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
    batches: Iterator[forward.Prepared], model: Any, *, read_out: Callable[..., Any]
) -> tuple[Tensor, Any]:
    """Give Megatron's schedule the output of one micro-batch and the function that turns it into a loss."""
    prepared = next(batches)
    return forward.run_model(model, prepared), functools.partial(read_out, prepared)


def _loss(
    prepared: forward.Prepared, logits: Tensor, *, settings: TrainSettings, denominator: float
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    loss, sums, largest = objective.loss_and_sums(logits, prepared, settings)
    # The schedule wants a token count; the gradient does not use it.
    count = torch.tensor(prepared.rows.numel(), dtype=torch.int)
    return loss / denominator, count, {"sums": sums, "largest_gap": largest}


def _read_out(prepared: forward.Prepared, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Stand for a loss where only the log-probabilities are wanted."""
    count = torch.tensor(prepared.rows.numel(), dtype=torch.int)
    return logits.new_zeros(()), count, {"logprobs": forward.token_logprobs(logits, prepared)}


def _summarise(updates: list[_Update], settings: TrainSettings, *, lr: float, seconds: float) -> StepMetrics:
    applied = [update for update in updates if update.applied]
    num_tokens = int(sum(update.sums[objective.TOKENS] for update in updates))
    trained = sum(update.sums[objective.TOKENS] for update in applied)
    is_policy = settings.objective == "grpo"
    a = settings.algorithm
    first = updates[0] if updates else None
    first_tokens = first.sums[objective.TOKENS] if first else 0.0

    def share(place: int, *, asked: bool = True) -> float | None:
        if not (is_policy and trained and asked):
            return None
        return sum(update.sums[place] for update in applied) / trained

    return StepMetrics(
        loss=sum(update.loss for update in applied) / len(applied) if applied else None,
        grad_norm=sum(update.grad_norm for update in applied) / len(applied) if applied else None,
        num_tokens=num_tokens,
        clip_fraction=share(objective.CLIPPED),
        kl=share(objective.KL),
        logprob_gap_mean=first.sums[objective.GAP] / first_tokens
        if is_policy and first and first_tokens
        else None,
        logprob_gap_max=first.largest_gap if is_policy and first and first_tokens else None,
        entropy=share(objective.ENTROPY, asked=bool(a.entropy_coefficient or a.measure_entropy)),
        reference_kl=share(objective.REFERENCE_KL, asked=a.kl == "loss"),
        corrected_fraction=share(objective.CORRECTED, asked=a.mismatch != "none"),
        lr=lr,
        skipped_updates=len(updates) - len(applied),
        left_out=tuple(at for at, update in enumerate(updates) if not update.applied),
        seconds=seconds,
    )
