"""Megatron's configurations as strawflow makes them: of the model, the optimizer of a stage, and the gradient buffers.

1. Each is made here and nowhere else, so that what is tried when a run is made is what the trainer will be built with.
2. What a run gives of Megatron's own settings lies over these; `native_flags` refuses what may not be laid over.
3. No process group, model or device memory is needed to make one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from strawflow.config import RunConfig
from strawflow.config_parallel import ParallelSection
from strawflow.errors import ConfigError
from strawflow.flow.run import NATIVE_FILE, Run, write_durably
from strawflow_workers.trainer import device, megatron_version
from strawflow_workers.trainer.batches import TrainSettings
from strawflow_workers.trainer.convert import family_of
from strawflow_workers.trainer.native_fields import configuration_classes, native_fields
from strawflow_workers.trainer.native_settings import NativeSettings, effective

ONE_PROCESS = ParallelSection()
STAND_IN: Mapping[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
}
"""Model that settings are tried on while a run has none yet."""


def transformer(
    hf: Mapping[str, Any], native: NativeSettings, parallel: ParallelSection = ONE_PROCESS
) -> Any:
    """Return the TransformerConfig (of an MLA model: MLATransformerConfig) of a Hugging Face configuration.

    Raises:
        ConfigError: the architecture is not supported, its shapes cannot be shared by so many ranks, or Megatron refuses a
            given setting.
    """
    dtype = _dtype(parallel)
    architecture = family_of(hf).config_fields(hf)
    _check_shapes(architecture, parallel)
    on_cuda = device.target().type == "cuda"
    ours = {
        "params_dtype": dtype,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "masked_softmax_fusion": False,
        "perform_initialization": False,
        "use_cpu_initialization": not on_cuda,
        # Megatron's deterministic embedding is for CUDA; the CPU's ordinary one is deterministic and faster.
        "deterministic_mode": on_cuda,
        # Sums over tokens, not means of means: data-parallel ranks add their gradients.
        "calculate_per_token_loss": True,
        **megatron_version.without_cuda_graphs(),
        **architecture,
        **_parallel_fields(parallel, dtype),
    }
    is_mla = bool(ours.get("multi_latent_attention"))
    known, _ = native_fields() if native.values else ({}, ())
    for name in native.values:
        if set(known[name].defaults) == {"MLATransformerConfig"} and not is_mla:
            raise ConfigError(
                f"--{name.replace('_', '-')}: it is a setting of models with multi-latent attention, and this model has none"
            )
    return native.build(
        configuration_classes()["MLATransformerConfig" if is_mla else "TransformerConfig"], ours
    )


def optimizer(
    settings: TrainSettings, native: NativeSettings, parallel: ParallelSection = ONE_PROCESS
) -> Any:
    """Return the OptimizerConfig of a stage.

    Raises:
        ConfigError: Megatron refuses a given setting.
    """
    beta1, beta2 = settings.betas
    ours = {
        "optimizer": "adam",
        "lr": settings.lr,
        "weight_decay": settings.weight_decay,
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "adam_eps": settings.eps,
        "clip_grad": settings.clip_grad,
        "params_dtype": _dtype(parallel),
        "bf16": parallel.precision == "bf16",
        "use_distributed_optimizer": parallel.distributed_optimizer,
        "overlap_param_gather": parallel.overlap_param_gather,
    }
    return native.build(configuration_classes()["OptimizerConfig"], ours)


def gradient_buffers(native: NativeSettings, parallel: ParallelSection = ONE_PROCESS) -> Any:
    """Return the DistributedDataParallelConfig: gradients gather in fp32.

    Raises:
        ConfigError: Megatron refuses a given setting.
    """
    ours = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": parallel.distributed_optimizer,
        "overlap_grad_reduce": parallel.overlap_grad_reduce,
        "overlap_param_gather": parallel.overlap_param_gather,
    }
    return native.build(configuration_classes()["DistributedDataParallelConfig"], ours)


def _dtype(parallel: ParallelSection) -> torch.dtype:
    return torch.bfloat16 if parallel.precision == "bf16" else torch.float32


def _parallel_fields(parallel: ParallelSection, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig that say how the model is spread and what is recomputed."""
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "context_parallel_size": parallel.context,
        "sequence_parallel": parallel.sequence,
    }
    if parallel.pipeline > 1:
        # Packed micro-batches differ in length: stages tell each other the shape first. Megatron refuses that with its
        # default dispatcher of experts, even where there are none.
        fields |= {
            "pipeline_dtype": dtype,
            "variable_seq_lengths": True,
            "moe_token_dispatcher_type": "alltoall",
        }
    if parallel.precision == "bf16":
        fields["bf16"] = True
    match parallel.recompute:
        case "selective":
            fields["recompute_granularity"] = "selective"
        case "full":
            fields |= {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
    return fields


def _check_shapes(architecture: Mapping[str, Any], parallel: ParallelSection) -> None:
    is_special = bool(architecture.get("num_moe_experts") or architecture.get("multi_latent_attention"))
    if is_special and parallel.ranks_of_a_replica > 1:
        raise ConfigError(
            "parallel.tensor, pipeline and context: models with experts or latent attention are trained with data parallelism "
            "alone so far; set them to 1"
        )
    shared = {
        "tensor": ("num_attention_heads", "num_query_groups", "ffn_hidden_size"),
        "pipeline": ("num_layers",),
    }
    for axis, names in shared.items():
        num = getattr(parallel, axis)
        for name in names:
            if (architecture.get(name) or 0) % num:
                raise ConfigError(
                    f"parallel.{axis} {num}: the model has {name} {architecture[name]}, which {num} ranks cannot share equally"
                )


def of_run(config: RunConfig, *, model_path: Path | None = None) -> dict[str, dict[str, Any]]:
    """Return every field of the configurations that a run's trainer is built with, by configuration; optimizer by stage.

    Without `model_path`, or while the run has no model yet, the model's shape is that of a small stand-in.

    Raises:
        ConfigError: Megatron refuses one; names the flag.
    """
    from strawflow_workers.trainer.team import stage_settings

    native = NativeSettings.of(config)
    made = transformer(_shape(model_path or Path(config.model.path)), native, config.parallel)
    objectives = ("sft", "grpo") if config.warm_start.steps else ("grpo",)
    return {
        type(made).__name__: effective(made),
        **{
            f"OptimizerConfig of {objective}": effective(
                optimizer(stage_settings(config, objective), native, config.parallel)
            )
            for objective in objectives
        },
        "DistributedDataParallelConfig": effective(gradient_buffers(native, config.parallel)),
    }


def write_record(run: Run) -> None:
    """Write into the run's folder what its trainer is built with here: Megatron's version, what was given, every field.

    It is the newest start's: another device or version of Megatron may come to other values.
    """
    told = {
        "megatron_core": megatron_version.installed(),
        "given": NativeSettings.of(run.config).values,
        "configurations": of_run(run.config, model_path=run.model_path),
    }
    path, content = run.root / NATIVE_FILE, (json.dumps(told, indent=1) + "\n").encode()
    if not path.exists() or path.read_bytes() != content:
        write_durably(path, content)


def _shape(model_path: Path) -> Mapping[str, Any]:
    path = model_path / "config.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return STAND_IN
    return found
