"""The kinds of layer parts that families are put together from: their names, and the fields of Megatron that choose them.

1. Each kind is written once: attention with grouped queries, latent attention, the gated MLP, routed and shared experts.
2. What Megatron computes otherwise than transformers for some values is refused by field and value.
Which kinds a family has is its own business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strawflow.errors import ConfigError
from strawflow_workers.trainer.convert.decoder import Hf, Names, head_dim, num_groups

_QKV = ("q_proj", "k_proj", "v_proj")

GROUPED_ATTENTION: Names = {
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{part}.weight" for part in _QKV),
}
QKV_BIASES: Names = {
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{part}.bias" for part in _QKV),
}
HEAD_NORMS: Names = {
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
}
LATENT_ATTENTION: Names = {
    "self_attention.linear_q_proj.weight": ("self_attn.q_proj.weight",),
    "self_attention.linear_q_down_proj.weight": ("self_attn.q_a_proj.weight",),
    "self_attention.q_layernorm.weight": ("self_attn.q_a_layernorm.weight",),
    "self_attention.linear_q_up_proj.weight": ("self_attn.q_b_proj.weight",),
    "self_attention.linear_kv_down_proj.weight": ("self_attn.kv_a_proj_with_mqa.weight",),
    "self_attention.kv_layernorm.weight": ("self_attn.kv_a_layernorm.weight",),
    "self_attention.linear_kv_up_proj.weight": ("self_attn.kv_b_proj.weight",),
}
GATED_MLP: Names = {
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
ROUTED_EXPERTS: Names = {
    "mlp.router.weight": ("mlp.gate.weight",),
    "mlp.experts.local_experts.#.linear_fc1.weight": (
        "mlp.experts.#.gate_proj.weight",
        "mlp.experts.#.up_proj.weight",
    ),
    "mlp.experts.local_experts.#.linear_fc2.weight": ("mlp.experts.#.down_proj.weight",),
}
SHARED_EXPERTS: Names = {
    "mlp.router.expert_bias": ("mlp.gate.e_score_correction_bias",),
    "mlp.shared_experts.linear_fc1.weight": (
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    ),
    "mlp.shared_experts.linear_fc2.weight": ("mlp.shared_experts.down_proj.weight",),
}
"""Experts that see every token, and the bias by which routing is balanced without a loss: families have both or neither."""


def grouped_attention(hf: Hf, *, head_norms: bool = False, qkv_biases: bool = False) -> dict[str, Any]:
    """Return the fields of attention with grouped queries."""
    return {
        "num_query_groups": num_groups(hf),
        "kv_channels": head_dim(hf),
        "qk_layernorm": head_norms,
        "add_qkv_bias": qkv_biases,
    }


def latent_attention(hf: Hf) -> dict[str, Any]:
    """Return the fields of multi-head latent attention but those of its rotary embedding.

    Raises:
        ConfigError: the two inner norms would have another epsilon than transformers gives them (1e-6, whatever
            `rms_norm_eps` says).
    """
    if hf["rms_norm_eps"] != 1e-6:
        raise ConfigError(
            f"config.json: rms_norm_eps={hf['rms_norm_eps']!r} is not supported with latent attention; it must be 1e-06, "
            "which the norms of its latents have"
        )
    return {
        "multi_latent_attention": True,
        "q_lora_rank": hf.get("q_lora_rank"),
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "num_query_groups": hf["num_attention_heads"],
        "qk_layernorm": True,
        "add_qkv_bias": False,
    }


def routed_experts(hf: Hf, *, num_experts: int, is_sparse: Sequence[bool]) -> dict[str, Any]:
    """Return the fields of experts chosen by softmax. `is_sparse` says of each layer whether it has experts.

    No load-balancing loss is added: the objective is the one of the run.
    """
    chosen, normalised = hf["num_experts_per_tok"], bool(hf.get("norm_topk_prob", False))
    if chosen == 1 and normalised:
        raise ConfigError(
            "config.json: norm_topk_prob=True is not supported with num_experts_per_tok=1: the router would have no gradient"
        )
    return {
        **_experts(hf, num_experts=num_experts, is_sparse=is_sparse),
        "moe_router_score_function": "softmax",
        # The softmax over the chosen ones alone is the softmax over all, normalised.
        "moe_router_pre_softmax": not normalised,
    }


def biased_experts(hf: Hf) -> dict[str, Any]:
    """Return the fields of experts chosen by sigmoid and correction bias, with shared experts, after
    `first_k_dense_replace` dense layers.

    The bias stays as it is: in pre-training it was moved towards an even load after each update, which here would
    change the policy beside the objective.

    Raises:
        ConfigError: weights of the chosen experts are not normalised; groups are ranked in another way; there are no
            shared experts.
    """
    chosen = hf["num_experts_per_tok"]
    if bool(hf.get("norm_topk_prob", True)) != (chosen > 1):
        raise ConfigError(
            f"config.json: norm_topk_prob={hf.get('norm_topk_prob')!r} is not supported with num_experts_per_tok={chosen}; "
            f"it must be {chosen > 1}"
        )
    if not hf.get("n_shared_experts"):
        raise ConfigError(
            f"config.json: n_shared_experts={hf.get('n_shared_experts')!r} is not supported; there must be one"
        )
    num_dense = hf.get("first_k_dense_replace") or 0
    return {
        **_experts(
            hf,
            num_experts=hf["n_routed_experts"],
            is_sparse=[layer >= num_dense for layer in range(hf["num_hidden_layers"])],
        ),
        **_groups(hf),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": hf["moe_intermediate_size"] * hf["n_shared_experts"],
    }


def _experts(hf: Hf, *, num_experts: int, is_sparse: Sequence[bool]) -> dict[str, Any]:
    return {
        "num_moe_experts": num_experts,
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_layer_freq": [int(sparse) for sparse in is_sparse],
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
    }


def _groups(hf: Hf) -> dict[str, Any]:
    """Return the fields that limit a token's experts to some groups; none where all groups may be chosen."""
    num, kept, chosen = hf.get("n_group") or 1, hf.get("topk_group") or 1, hf["num_experts_per_tok"]
    if kept == num:
        return {}
    if chosen // kept != 2:
        raise ConfigError(
            f"config.json: topk_group={kept} of n_group={num} is not supported with num_experts_per_tok={chosen}: Megatron "
            f"ranks a group by its best {chosen // kept}, the model by its best 2; only topk_group={chosen // 2} is"
        )
    return {"moe_router_num_groups": num, "moe_router_group_topk": kept}
