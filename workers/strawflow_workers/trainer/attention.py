"""Causal attention over packed sequences, as the core attention of a Megatron layer (thd format), in plain
torch.

1. A token attends to itself and to earlier tokens of its own sequence, nothing else.
2. The arrangement (`Layout`) depends on the boundaries alone; a batch makes it once and all layers share it.
3. Arranging changes no value: short sequences of like length are padded into one call, long ones go alone,
   and both give what one call for each sequence gives (up to the kernel's rounding).
4. It knows nothing of position embeddings or losses; sequences that ranks share are attended by `context`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from strawflow_workers.trainer.device import importing_megatron

with importing_megatron():
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.module import MegatronModule

LONGEST_SHARED = 256
"""Sequences above this length get a call of their own: padding them costs more than the call."""

SMALLEST_CLASS = 16
"""Sequences up to this length share one call whatever their lengths: a call costs more than such padding."""


@dataclass(frozen=True)
class Layout:
    """How the T tokens of a pack lie in P slots: the padded rectangles (count, length), one after the
    other."""

    rectangles: tuple[tuple[int, int], ...]
    token_of_slot: Tensor
    """int64 [P]: a padding slot repeats the last token of its sequence, so that it holds finite values."""
    slot_of_token: Tensor
    """int64 [T]"""

    @cached_property
    def is_pack_order(self) -> bool:
        """Whether slots are the tokens in order, so that nothing need be moved."""
        same_size = self.token_of_slot.numel() == self.slot_of_token.numel()
        return same_size and bool((self.token_of_slot[1:] > self.token_of_slot[:-1]).all())

    @cached_property
    def padding(self) -> Tensor | None:
        """bool [P, 1, 1] over slots that hold no token, None if there are none."""
        if self.token_of_slot.numel() == self.slot_of_token.numel():
            return None
        mask = torch.ones_like(self.token_of_slot, dtype=torch.bool)
        mask[self.slot_of_token] = False
        return mask[:, None, None]


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a pack, with the layout its attention uses."""

    layout: Layout | None = None


def thd_fields(boundaries: npt.NDArray[np.int32], *, device: torch.device) -> dict[str, Any]:
    """Return the fields of Megatron's PackedSeqParams for sequences that end at `boundaries` (int32 [S+1], from 0 to T)."""
    ends = torch.from_numpy(np.ascontiguousarray(boundaries, dtype=np.int32)).to(device)
    longest = int(np.diff(boundaries).max())
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": ends,
        "cu_seqlens_kv": ends,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }


def describe(boundaries: npt.NDArray[np.int32], *, device: torch.device) -> PackedSequences:
    """Describe a pack of non-empty sequences whose ends are `boundaries` (int32 [S+1], from 0 to T)."""
    return PackedSequences(
        **thd_fields(boundaries, device=device),
        layout=arrange(boundaries, device=device),
    )


def length_classes(lengths: npt.NDArray[np.int64]) -> list[list[int]]:
    """Return which sequences share a rectangle: those of like lengths, each long one alone."""
    classes: dict[int, list[int]] = {}
    for index, length in enumerate(lengths.tolist()):
        key = _length_class(length) if length <= LONGEST_SHARED else -1 - index
        classes.setdefault(key, []).append(index)
    return list(classes.values())


def arrange(boundaries: npt.NDArray[np.int32], *, device: torch.device) -> Layout:
    """Choose rectangles for the sequences: one for each class of like lengths, one alone for each long
    sequence."""
    starts, lengths = boundaries[:-1].astype(np.int64), np.diff(boundaries).astype(np.int64)
    rectangles, slots = [], []
    slot_of_token = np.empty(int(boundaries[-1]), dtype=np.int64)
    used = 0
    for members in length_classes(lengths):
        width = int(lengths[members].max())
        column = np.arange(width)
        tokens = starts[members, None] + np.minimum(column, lengths[members, None] - 1)
        real = column < lengths[members, None]
        slot_of_token[tokens[real]] = used + np.flatnonzero(real)
        rectangles.append((len(members), width))
        slots.append(tokens.ravel())
        used += tokens.size
    return Layout(
        rectangles=tuple(rectangles),
        token_of_slot=torch.from_numpy(np.concatenate(slots)).to(device),
        slot_of_token=torch.from_numpy(slot_of_token).to(device),
    )


def _length_class(length: int) -> int:
    """Return the smallest of 16, 24, 32, 48, 64, 96, ... that is not below: at most half of a row is padding
    above 16."""
    bound = SMALLEST_CLASS
    while bound < length:
        bound = bound * 3 // 2 if bound & (bound - 1) == 0 else bound * 4 // 3
    return bound


class _ToSlots(torch.autograd.Function):
    """Spread tokens over slots. Causality keeps gradients of padding slots at zero, so the way back is a
    plain pick."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return values.index_select(0, layout.token_of_slot)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.layout.slot_of_token), None


class _ToTokens(torch.autograd.Function):
    """Pick tokens from slots; what lies in padding slots is dropped and gets gradient zero."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return values.index_select(0, layout.slot_of_token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        spread = grads[0].index_select(0, ctx.layout.token_of_slot)
        padding = ctx.layout.padding
        return (spread if padding is None else spread.masked_fill_(padding, 0.0)), None


def attend(query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, scale: float | None) -> Tensor:
    """Attend within each sequence: query [T, heads, d], key and value [T, kv heads, d] -> [T, heads, d]."""
    if not layout.is_pack_order:
        query, key, value = (_apply(_ToSlots, x, layout) for x in (query, key, value))
    parts, used = [], 0
    for count, width in layout.rectangles:
        span = slice(used, used + count * width)
        rows = (x[span].view(count, width, *x.shape[1:]) for x in (query, key, value))
        parts.append(_attend_rows(*rows, scale=scale).flatten(0, 1))
        used = span.stop
    slots = parts[0] if len(parts) == 1 else torch.cat(parts)
    return slots if layout.is_pack_order else _apply(_ToTokens, slots, layout)


def _apply(function: Any, values: Tensor, layout: Layout) -> Tensor:
    result: Tensor = function.apply(values, layout)
    return result


def _attend_rows(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
    """Attend causally in each row of a batch [rows, length, heads, d]."""
    grouped = query.size(2) != key.size(2)
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        is_causal=True,
        scale=scale,
        enable_gqa=grouped,
    )
    return out.transpose(1, 2)


class PackedCausalAttention(MegatronModule):  # type: ignore[misc]
    """The `core_attention` of a Megatron layer spec: causal, packed (thd) or batched (sbhd), without
    dropout."""

    def __init__(
        self, config: Any, *_layer_number_and_types: Any, softmax_scale: float | None = None, **_rest: Any
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout:
            raise ValueError("attention_dropout must be 0: packed attention has no dropout")
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_mask: Any,
        packed_seq_params: Any = None,
        **_rest: Any,
    ) -> Tensor:
        """Return [T, heads * d] for a pack, [s, b, heads * d] for a batch of equally long sequences."""
        if packed_seq_params is None:
            rows = (x.transpose(0, 1) for x in (query, key, value))
            return _attend_rows(*rows, scale=self._scale).transpose(0, 1).flatten(2)
        across = getattr(packed_seq_params, "across", None)
        if across is not None:
            from strawflow_workers.trainer.context import attend_across

            return attend_across(query, key, value, across, scale=self._scale).flatten(1)
        layout = getattr(packed_seq_params, "layout", None)
        if layout is None:
            layout = arrange(packed_seq_params.cu_seqlens_q.cpu().numpy(), device=query.device)
        return attend(query, key, value, layout, scale=self._scale).flatten(1)
