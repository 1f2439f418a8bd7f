"""Tiny random checkpoints of every model family, made by transformers, with all weights away from their initial values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 96


@dataclass(frozen=True)
class Case:
    """One checkpoint: transformers' names of its classes begin with `name`."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def make(self, directory: Path, *, seed: int = 0) -> Any:
        """Write the checkpoint in fp32; return transformers' model."""
        torch.manual_seed(seed)
        config = getattr(transformers, f"{self.name}Config")(**{**_COMMON, **self.fields})
        model = getattr(transformers, f"{self.name}ForCausalLM")(config).float().eval()
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.add_(torch.randn_like(tensor) * 0.1)
            for name, tensor in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    tensor.add_(torch.randn_like(tensor) * 0.1)
        model.save_pretrained(directory)
        return model


_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_ROUTED = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_BIASED = {**_ROUTED, "n_routed_experts": 8, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rms_norm_eps": 1e-6,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32,
    "beta_slow": 1,
}

CASES: Mapping[str, Case] = {
    "llama, tied": Case("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama3, scaled": Case(
        "Llama",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "qwen2, tied": Case("Qwen2", {"tie_word_embeddings": True}),
    "qwen2": Case("Qwen2", {"num_key_value_heads": 1}),
    "qwen3": Case("Qwen3", {"head_dim": 16}),
    "qwen3_moe": Case("Qwen3Moe", {**_ROUTED, "head_dim": 16, "num_experts": 4, "norm_topk_prob": True}),
    "qwen3_moe, partly dense, tied": Case(
        "Qwen3Moe",
        {
            **_ROUTED,
            "head_dim": 8,
            "num_experts": 4,
            "norm_topk_prob": False,
            "mlp_only_layers": [0],
            "num_hidden_layers": 3,
            "decoder_sparse_step": 1,
            "tie_word_embeddings": True,
        },
    ),
    "glm4": Case("Glm4", {"head_dim": 16, "rms_norm_eps": 1e-5}),
    "glm4, tied, no biases": Case(
        "Glm4", {"head_dim": 8, "attention_bias": False, "tie_word_embeddings": True}
    ),
    "glm4_moe": Case(
        "Glm4Moe",
        {**_BIASED, "head_dim": 16, "attention_bias": True, "use_qk_norm": True, "n_shared_experts": 1},
    ),
    "glm4_moe, tied": Case("Glm4Moe", {**_BIASED, "head_dim": 8, "tie_word_embeddings": True}),
    "deepseek_v3": Case(
        "DeepseekV3",
        {
            **_BIASED,
            **_LATENT,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "n_shared_experts": 2,
            "num_hidden_layers": 3,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek_v3, yarn without mscale, one group": Case(
        "DeepseekV3",
        {**_BIASED, **_LATENT, "n_group": 1, "topk_group": 1, "rope_parameters": _YARN},
    ),
    "deepseek_v3, whole queries, tied": Case(
        "DeepseekV3",
        {
            **_BIASED,
            **_LATENT,
            "q_lora_rank": None,
            "n_group": 2,
            "topk_group": 1,
            "tie_word_embeddings": True,
        },
    ),
}
