"""Floating-point operations of a training step, and the share of what the devices could do (MFU). Pure functions.

1. Counted is what the model needs, not what was computed: recomputed activations, padding and the optimizer count nothing.
2. The formula is told from Megatron's configuration of the model, so it is the same whatever ranks share the work.
3. Where the peak of a device is not known, there is no share.

Source: Chowdhery et al. 2022, "PaLM", appendix B (model FLOPs utilization): 6 for each multiplied weight and token, forward and
backward, and 12 L H Q T for attention. Attention here is causal and does not cross packed sequences: half of it, with the
length of each sequence for T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PEAKS: Sequence[tuple[str, dict[str, float]]] = (
    ("H100 PCIe", {"bfloat16": 756e12, "float32": 51e12}),
    ("H200", {"bfloat16": 989e12, "float32": 67e12}),
    ("H100", {"bfloat16": 989e12, "float32": 67e12}),
    ("A100", {"bfloat16": 312e12, "float32": 19.5e12}),
)
"""By part of the device's name and type of the parameters: dense operations a second, from NVIDIA's data sheets. float32 is told
without TF32, which torch leaves off unless asked."""


@dataclass(frozen=True)
class ModelWork:
    """What one token and one pair of tokens cost."""

    weights_per_token: float
    """Weights that a token is multiplied with: of routed experts those it goes to; no embedding look-up."""
    attention_width: float
    """Sum over layers of heads x (elements of a key + elements of a value)."""


def work_of(config: Any, *, vocab_size: int) -> ModelWork:
    """Return the work of a model from Megatron's TransformerConfig, or MLATransformerConfig."""
    h, heads, layers = config.hidden_size, config.num_attention_heads, config.num_layers
    if getattr(config, "multi_latent_attention", False):
        key, value = config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
        queries = (h + heads * key) * config.q_lora_rank if config.q_lora_rank else h * heads * key
        latent = h * (config.kv_lora_rank + config.qk_pos_emb_head_dim)
        spread = config.kv_lora_rank * heads * (config.qk_head_dim + value)
        attention = queries + latent + spread + heads * value * h
    else:
        key = value = config.kv_channels
        attention = h * key * (heads + 2 * config.num_query_groups) + heads * value * h
    per_neuron = (3 if config.gated_linear_unit else 2) * h
    dense = per_neuron * config.ffn_hidden_size
    num_sparse = _num_sparse_layers(config)
    sparse = 0.0
    if num_sparse:
        shared = config.moe_shared_expert_intermediate_size or 0
        routed = config.moe_router_topk * config.moe_ffn_hidden_size
        sparse = per_neuron * (routed + shared) + h * config.num_moe_experts
    weights = layers * attention + (layers - num_sparse) * dense + num_sparse * sparse + h * vocab_size
    return ModelWork(float(weights), float(layers * heads * (key + value)))


def _num_sparse_layers(config: Any) -> int:
    if not config.num_moe_experts:
        return 0
    every = config.moe_layer_freq
    if isinstance(every, int):
        return sum(1 for layer in range(config.num_layers) if layer % every == 0)
    return sum(every)


def step_flops(work: ModelWork, lengths: npt.NDArray[np.int64]) -> float:
    """Return the operations of one forward and backward pass over sequences of these lengths [S] in tokens."""
    lengths = lengths.astype(np.float64)
    return float(6 * work.weights_per_token * lengths.sum() + 3 * work.attention_width * (lengths**2).sum())


def peak_of(device_name: str, dtype: str) -> float | None:
    """Return the operations a second that a device can do with parameters of a type; None: not known."""
    for part, by_dtype in PEAKS:
        if part in device_name:
            return by_dtype.get(dtype)
    return None


def mfu(flops: float, seconds: float, *, num_devices: int, peak: float | None) -> float | None:
    """Return the share of the devices' peak: flops / (seconds x devices x peak); None without a peak."""
    return flops / (seconds * num_devices * peak) if peak and seconds > 0 else None
