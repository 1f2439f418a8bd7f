"""Context parallelism over packed sequences: which tokens of a pack a rank has, and attention across the ranks.

1. Each sequence is padded to a multiple of twice the context-parallel ranks and cut into as many equal chunks; rank r has
   chunk r and chunk r from the end, so that all have equally much of the causal triangle. Megatron's rotary embedding
   counts on this order. Source: Llama 3 (Dubey et al. 2024), section 3.3.2.
2. Padding stands at the end of its sequence: causal attention never shows it to a token, and no loss reads it.
3. Keys and values are gathered from all ranks, queries stay; gradients of the gathered are added up and scattered back.
4. Without context parallelism this module only pads packs to a length that sequence parallelism can share.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from strawflow_workers.trainer.attention import PackedSequences, length_classes, thd_fields
from strawflow_workers.trainer.device import importing_megatron

with importing_megatron():
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


@dataclass(frozen=True)
class Share:
    """What a rank has of every pack."""

    num_ranks: int = 1
    """Context-parallel ranks."""
    rank: int = 0
    multiple: int = 1
    """The tokens that a rank has must be a multiple of this: sequence parallelism shares them once more."""
    columns: int | None = None
    """Columns of this rank's logits that stand for tokens; the rest pads the vocabulary. None: all."""

    @property
    def is_whole(self) -> bool:
        """Whether packs are taken as they are."""
        return self.num_ranks == 1 and self.multiple == 1


@dataclass(frozen=True)
class OwnTokens:
    """The tokens of one pack that a rank has."""

    token_of_place: npt.NDArray[np.int64]
    """[T of this rank]: place in the pack, -1 for padding."""
    boundaries: npt.NDArray[np.int32]
    """[S+1]: ends of the padded sequences, over all ranks."""

    def place_of_token(self, num_tokens: int) -> npt.NDArray[np.int64]:
        """Return for each token of the pack where this rank has it, -1 if it has not."""
        places = np.full(num_tokens, -1, np.int64)
        real = np.flatnonzero(self.token_of_place >= 0)
        places[self.token_of_place[real]] = real
        return places


def own_tokens(boundaries: npt.NDArray[np.int32], share: Share) -> OwnTokens:
    """Pad the sequences that end at `boundaries` (int32 [S+1], from 0 to T) and return what this rank has of them."""
    lengths = np.diff(boundaries).astype(np.int64)
    unit = 2 * share.num_ranks if share.num_ranks > 1 else 1
    padded = -(-lengths // unit) * unit
    padded[-1] += -int(padded.sum()) % int(np.lcm(unit, share.num_ranks * share.multiple))
    ends = np.concatenate([[0], np.cumsum(padded)])
    tokens = np.full(int(ends[-1]), -1, np.int64)
    for start, end, first in zip(boundaries[:-1], boundaries[1:], ends[:-1], strict=True):
        tokens[first : first + end - start] = np.arange(start, end)
    return OwnTokens(tokens[_own_places(ends, share)], ends.astype(np.int32))


def _own_places(
    ends: npt.NDArray[np.int64], share: Share, *, rank: int | None = None
) -> npt.NDArray[np.int64]:
    """Return which places of the padded pack a rank has, in its order."""
    if share.num_ranks == 1:
        return np.arange(ends[-1])
    at = share.rank if rank is None else rank
    parts = []
    for start, end in itertools.pairwise(ends.tolist()):
        chunk = (end - start) // (2 * share.num_ranks)
        parts.append(np.arange(start + at * chunk, start + (at + 1) * chunk))
        parts.append(np.arange(end - (at + 1) * chunk, end - at * chunk))
    return np.concatenate(parts)


@dataclass(frozen=True)
class Rectangle:
    """Sequences of like lengths that one call attends: n of them, q queries and k keys wide."""

    queries: Tensor
    """int64 [n, q]: place among this rank's tokens; past a sequence's end its last one is repeated."""
    keys: Tensor
    """int64 [n, k]: place among the gathered tokens of all ranks, as well."""
    mask: Tensor
    """bool [n, 1, q, k]: which key a query sees."""


@dataclass(frozen=True)
class AcrossRanks:
    """How attention runs over a pack that context-parallel ranks share."""

    rectangles: tuple[Rectangle, ...]
    slot_of_token: Tensor
    """int64 [T of this rank]: place in the rectangles' queries, one after the other."""


def arrange_across(boundaries: npt.NDArray[np.int32], share: Share, *, device: torch.device) -> AcrossRanks:
    """Arrange the attention of this rank over padded sequences that end at `boundaries` (over all ranks)."""
    ends = boundaries.astype(np.int64)
    own_total = int(ends[-1]) // share.num_ranks
    # Gathered tokens lie rank after rank; where each place of the padded pack is among them:
    gathered = np.empty(int(ends[-1]), np.int64)
    for rank in range(share.num_ranks):
        gathered[_own_places(ends, share, rank=rank)] = rank * own_total + np.arange(own_total)
    own = _own_places(ends, share)
    own_ends = ends // share.num_ranks
    slot_of_token = np.empty(own_total, np.int64)
    rectangles, used = [], 0
    for members in length_classes(np.diff(ends)):
        starts, lengths = ends[members], np.diff(ends)[members]
        queries, keys = _spread(own_ends[members], lengths // share.num_ranks), _spread(starts, lengths)
        query_at, key_at = own[queries.place], keys.place
        mask = (key_at[:, None, :] <= query_at[:, :, None]) & keys.real[:, None, :]
        slot_of_token[queries.place[queries.real]] = used + np.flatnonzero(queries.real)
        used += queries.place.size
        rectangles.append(
            Rectangle(
                queries=torch.from_numpy(queries.place).to(device),
                keys=torch.from_numpy(gathered[key_at]).to(device),
                mask=torch.from_numpy(mask[:, None]).to(device),
            )
        )
    return AcrossRanks(tuple(rectangles), torch.from_numpy(slot_of_token).to(device))


@dataclass(frozen=True)
class _Spread:
    place: npt.NDArray[np.int64]
    real: npt.NDArray[np.bool_]


def _spread(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> _Spread:
    """Lay sequences into a rectangle [n, longest]; `real` is False where one has ended and its last place is repeated."""
    column = np.arange(int(lengths.max()))
    place = starts[:, None] + np.minimum(column, lengths[:, None] - 1)
    return _Spread(place, column < lengths[:, None])


def attend_across(
    query: Tensor, key: Tensor, value: Tensor, arranged: AcrossRanks, *, scale: float | None
) -> Tensor:
    """Attend within each sequence over all ranks' keys: query [T, heads, d] -> [T, heads, d of value], this rank's T."""
    group = parallel_state.get_context_parallel_group()
    keys, values = (gather_from_sequence_parallel_region(x.contiguous(), group=group) for x in (key, value))
    parts = []
    for each in arranged.rectangles:
        q, k, v = (
            x.index_select(0, place.flatten()).view(*place.shape, *x.shape[1:]).transpose(1, 2)
            for x, place in ((query, each.queries), (keys, each.keys), (values, each.keys))
        )
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=each.mask, scale=scale, enable_gqa=q.size(1) != k.size(1)
        )
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).index_select(0, arranged.slot_of_token)


@dataclass
class SharedSequences(PackedSequences):  # type: ignore[misc]
    """Megatron's description of a pack that context-parallel ranks share."""

    across: AcrossRanks | None = None


def describe_shared(
    boundaries: npt.NDArray[np.int32], share: Share, *, device: torch.device
) -> SharedSequences:
    """Describe a pack of padded sequences that end at `boundaries` (int32 [S+1], over all ranks)."""
    return SharedSequences(
        **thd_fields(boundaries, device=device),
        across=arrange_across(boundaries, share, device=device),
    )
