"""Batched attention for SGLang's torch_native backend on a CPU; hooked in by strawflow_sglang_plugin.

SGLang loops over the sequences of a batch in Python: with hundreds of short sequences that loop is most of a step.
Here the sequences are padded to the longest and attended to in one call.

1. Same mathematics: padded places are masked, and the KV slot they would read is slot 0, which is always finite.
2. Batches that would pad to more than `MAX_PADDED_SCORES`, sliding windows, encoders and mixed dtypes take SGLang's own loop.
It imports torch only when called, and nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MAX_PADDED_SCORES = 1 << 18
"""Most (sequence, query, key) places of one padded call; bounds the copied keys and the mask."""


def decode_hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run one decode step batched, or leave it to the original."""
    _, query, output, k_cache, v_cache, req_to_token, rows, seq_lens, *rest = args
    longest = int(seq_lens.max())
    if _is_special(query, k_cache, rest, kwargs) or len(seq_lens) * longest > MAX_PADDED_SCORES:
        return original(*args, **kwargs)
    return decode(query, output, k_cache, v_cache, req_to_token[rows, :longest], seq_lens, kwargs["scaling"])


def extend_hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run one prefill batched, or leave it to the original."""
    _, query, output, k_cache, v_cache, req_to_token, rows, seq_lens, prefix_lens, extend_lens, *rest = args
    longest = int(seq_lens.max())
    padded = len(seq_lens) * longest * int(extend_lens.max())
    if _is_special(query, k_cache, rest, kwargs) or not kwargs["causal"] or padded > MAX_PADDED_SCORES:
        return original(*args, **kwargs)
    slots = req_to_token[rows, :longest]
    return extend(query, output, k_cache, v_cache, slots, prefix_lens, extend_lens, kwargs["scaling"])


def _is_special(query: Any, k_cache: Any, rest: list[Any], kwargs: dict[str, Any]) -> bool:
    return (
        any(value is not None for value in rest)  # encoder lengths
        or kwargs["is_cross_attn"]
        or kwargs["sliding_window_size"] is not None
        or query.dtype != k_cache.dtype
    )


def decode(
    query: Any, output: Any, k_cache: Any, v_cache: Any, slots: Any, seq_lens: Any, scaling: float | None
) -> Any:
    """Attend with one query per sequence.

    query, output: [num_seqs, num_heads, head_dim]; caches: [num_slots, num_kv_heads, head_dim]; slots: [num_seqs, longest]
    (places past a sequence's length hold anything); seq_lens: [num_seqs]. Fills and returns output.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    visible = torch.arange(slots.shape[1]) < seq_lens[:, None]
    slots = slots.masked_fill(~visible, 0).long()
    num_kv_heads = k_cache.shape[1]
    # the query heads that share a key head stand where the queries of one sequence would
    grouped = query.reshape(query.shape[0], num_kv_heads, -1, query.shape[2])
    keys, values = k_cache[slots].transpose(1, 2), v_cache[slots].transpose(1, 2)
    attended = scaled_dot_product_attention(
        grouped, keys, values, attn_mask=visible[:, None, None, :], scale=scaling
    )
    output.copy_(attended.reshape(output.shape))
    return output


def extend(
    query: Any,
    output: Any,
    k_cache: Any,
    v_cache: Any,
    slots: Any,
    prefix_lens: Any,
    extend_lens: Any,
    scaling: float | None,
) -> Any:
    """Attend causally with `extend_lens` new tokens per sequence that follow `prefix_lens` cached ones.

    query, output: [num_new_tokens, num_heads, head_dim], sequence after sequence; the rest as in `decode`.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    places = torch.arange(int(extend_lens.max()))
    is_new = places < extend_lens[:, None]  # [num_seqs, longest_extend]
    keys_at = torch.arange(slots.shape[1])
    last_key = prefix_lens[:, None] + places  # the key of the query's own token
    visible = (
        keys_at[None, None, :]
        <= torch.minimum(last_key, (prefix_lens + extend_lens - 1)[:, None])[:, :, None]
    )
    slots = slots.masked_fill(keys_at >= (prefix_lens + extend_lens)[:, None], 0).long()
    padded = query.new_zeros(*is_new.shape, *query.shape[1:])
    padded[is_new] = query
    attended = scaled_dot_product_attention(
        padded.transpose(1, 2),
        k_cache[slots].transpose(1, 2),
        v_cache[slots].transpose(1, 2),
        attn_mask=visible[:, None],
        scale=scaling,
        enable_gqa=k_cache.shape[1] != query.shape[1],
    )
    output.copy_(attended.transpose(1, 2)[is_new])
    return output
