"""Models that are never trained: a reference to stay near, a teacher to learn from. They tell log-probabilities, and no more.

1. Weights come from a Hugging Face folder and never change; nothing of them is in a checkpoint of the run.
2. Each is whole on every rank; where the trained model is shared out by more than data parallelism, they are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from strawflow.errors import ConfigError
from strawflow_workers.trainer import device, forward
from strawflow_workers.trainer.batches import PackedMicroBatch
from strawflow_workers.trainer.model import build_model, load_weights, read_hf_config

with device.importing_megatron():
    from megatron.core import parallel_state


class FrozenModel:
    """One of them. The process group must be there, and the caller on the trainer's device."""

    def __init__(self, hf_dir: Path, *, vocab_size: int, setting: str) -> None:
        """Load the model.

        Raises:
            ConfigError: its vocabulary is not that of the trained model, or that is shared out. Others as of
            MegatronTrainer.
        """
        if (
            parallel_state.get_model_parallel_group().size()
            * parallel_state.get_context_parallel_world_size()
            > 1
        ):
            raise ConfigError(
                f"{setting}: a frozen model beside the trained one is not shared out by tensor, pipeline or context parallelism yet; "
                "train with data parallelism alone, or without it"
            )
        config: dict[str, Any] = read_hf_config(hf_dir)
        if int(config["vocab_size"]) != vocab_size:
            raise ConfigError(
                f"{setting}: the model of {hf_dir} has a vocabulary of {config['vocab_size']}, the trained one {vocab_size}; "
                "its log-probabilities would be of other tokens"
            )
        self._model = build_model(config)
        load_weights(self._model, config, hf_dir)
        self._model.requires_grad_(False)
        self._model.eval()

    def logprobs(self, micro_batch: PackedMicroBatch) -> npt.NDArray[np.float32]:
        """Return float32 [T]: log-probability of each trained token given those before it, 0 for the others."""
        prepared = forward.prepare(micro_batch, device=device.target())
        with device.trainer_device(), torch.no_grad():
            found = forward.token_logprobs(forward.run_model(self._model, prepared), prepared)
        result = np.zeros(micro_batch.tokens.size, dtype=np.float32)
        result[prepared.positions] = found.cpu().numpy()
        return result
