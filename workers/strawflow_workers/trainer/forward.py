"""One forward pass over a packed micro-batch: what goes in, the log-probabilities that come out.

1. The last token of a sequence predicts nothing and is not sent through the model; row j of the input
   predicts one known token.
2. Logits are divided by the temperature of their sequence before the softmax, as when the token was sampled.
3. Only rows whose token is trained reach the softmax, so masked entries can hold anything.
4. It knows nothing of losses (`objective` makes them of it), optimizers, checkpoints or where batches come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from strawflow_workers.trainer.attention import PackedSequences, describe
from strawflow_workers.trainer.batches import PackedMicroBatch
from strawflow_workers.trainer.context import Share, describe_shared, own_tokens
from strawflow_workers.trainer.device import importing_megatron

with importing_megatron():
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

NO_TOKEN = -1e9
"""Logit of what pads the vocabulary: its probability is 0 in every type, and it is finite."""


@dataclass(frozen=True)
class Prepared:
    """A micro-batch as the model takes it. n rows of the input are read out: those that predict a wanted
    token."""

    tokens: Tensor
    """int64 [1, T - S]"""
    packed: PackedSequences
    rows: Tensor
    """int64 [n], rising"""
    targets: Tensor
    """int64 [n]"""
    temperatures: Tensor | None
    """float32 [n, 1], None where all are 1"""
    weights: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    """float32 [n], like the two before"""
    old_logprobs: Tensor | None
    reference_logprobs: Tensor | None
    """float32 [n]; None as in the micro-batch"""
    lengths: Tensor
    """int64 [S]: how many of the rows belong to each sequence"""
    positions: npt.NDArray[np.int64]
    """[n]: place of each target in the arrays of the micro-batch"""
    columns: int | None = None
    """Columns of the logits that stand for tokens, None: all; those after them pad the vocabulary."""


def prepare(
    batch: PackedMicroBatch,
    *,
    device: torch.device,
    every_token: bool = False,
    share: Share = Share(),  # noqa: B008 - frozen
) -> Prepared:
    """Lay out this rank's share of a micro-batch; rows read out are those of trained tokens, or of every token that is
    predicted."""
    predicts = np.ones(batch.tokens.size, dtype=bool)
    predicts[batch.boundaries[1:] - 1] = False
    targets = np.flatnonzero(predicts) + 1
    rows = np.arange(targets.size) if every_token else np.flatnonzero(batch.loss_mask[targets] != 0)
    # Each sequence lost one token; one that had a single token lost itself, hence `unique`.
    boundaries = np.unique(batch.boundaries - np.arange(batch.boundaries.size, dtype=np.int32)).astype(
        np.int32
    )
    tokens = batch.tokens[predicts]
    if not share.is_whole:
        own = own_tokens(boundaries, share)
        boundaries, places = own.boundaries, own.place_of_token(tokens.size)[rows]
        targets, rows = targets[rows[places >= 0]], places[places >= 0]
        tokens = np.where(own.token_of_place >= 0, tokens[own.token_of_place], 0)
        positions = targets
    else:
        positions = targets[rows]
    lengths = np.diff(batch.boundaries)
    temperatures = np.repeat(batch.temperatures, lengths)[positions]

    owners = np.searchsorted(batch.boundaries, positions, side="right") - 1

    def on_device(values: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=dtype)

    def column(values: npt.NDArray[np.float32] | None) -> Tensor | None:
        return None if values is None else on_device(values[positions], torch.float32)

    return Prepared(
        tokens=on_device(tokens, torch.int64)[None],
        packed=describe(boundaries, device=device)
        if share.num_ranks == 1
        else describe_shared(boundaries, share, device=device),
        rows=on_device(rows, torch.int64),
        targets=on_device(batch.tokens[positions], torch.int64),
        temperatures=None if (temperatures == 1).all() else on_device(temperatures, torch.float32)[:, None],
        weights=on_device(batch.loss_mask[positions], torch.float32),
        advantages=on_device(batch.advantages[positions], torch.float32),
        rollout_logprobs=on_device(batch.rollout_logprobs[positions], torch.float32),
        old_logprobs=column(batch.old_logprobs),
        reference_logprobs=column(batch.reference_logprobs),
        lengths=on_device(np.bincount(owners, minlength=lengths.size), torch.int64),
        positions=positions,
        columns=share.columns,
    )


def run_model(model: Any, prepared: Prepared) -> Tensor:
    """Return logits [1, T - S, vocabulary of this rank]."""
    logits: Tensor = model(
        input_ids=prepared.tokens, position_ids=None, attention_mask=None, packed_seq_params=prepared.packed
    )
    return logits


def wanted_logits(logits: Tensor, prepared: Prepared) -> Tensor:
    """Return logits / temperature of the rows that are read out, float32 [n, vocabulary of this rank]."""
    wanted = logits[0].index_select(0, prepared.rows).float()
    if prepared.temperatures is not None:
        wanted = wanted / prepared.temperatures
    if prepared.columns is not None:
        wanted[:, prepared.columns :] = NO_TOKEN
    return wanted


def token_logprobs(logits: Tensor, prepared: Prepared) -> Tensor:
    """Return log-softmax(logits / temperature) of the wanted tokens, float32 [n]; right for a split
    vocabulary too."""
    return logprobs_of(wanted_logits(logits, prepared), prepared)


def logprobs_of(wanted: Tensor, prepared: Prepared) -> Tensor:
    """Return log-softmax of the targets, float32 [n], from `wanted_logits`, which are used up: the values may
    be overwritten."""
    negative: Tensor = vocab_parallel_cross_entropy(wanted, prepared.targets)
    return -negative
