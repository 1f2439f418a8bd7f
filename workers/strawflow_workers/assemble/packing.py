"""Packing: trajectories of closed groups to one step's packed rows and plan. Pure: no store, no index, no clock.

1. A group counts with its non-excluded members; baseline and deviation use one reward per member, however many segments its
   rollout has. Each segment is a sequence of its own; all of a rollout have its advantage and stay in one mini-batch, so
   that they share its denominator.
2. Members of a group without signal (equal rewards) have advantage 0 and are left out of the packed rows; the group is
   recorded as dropped with the reason `zero_deviation`.
   Post-processing and conversion by the user's hooks come first: their rewards count here, and their advantages replace ours.
   Which estimator makes advantages is the part of `scoring`, what a token weighs that of `weighing`.
3. With the policy `mask`, tokens of weights staler than the limit are not trained; the rewards of their members count in
   baseline and deviation all the same. A sequence without a token left is filtered with the reason `stale`. With
   `algorithm.mask_truncated` so it is with sequences that were cut off at the longest length.
4. The order of sequences is a permutation keyed by (seed, step); denominators are counted here once and stored, so a
   replay on another parallelism has the same loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from strawflow.config import RunConfig
from strawflow.flow.assemble import BatchPlan, PackedMicroBatch
from strawflow.flow.payload import tensor_column
from strawflow.flow.trajectory import NOT_SAMPLED
from strawflow.index.consumers import Assignment
from strawflow.index.units import Unit
from strawflow.records import BATCH, PLAN
from strawflow_workers.assemble.groups import Group
from strawflow_workers.assemble.scoring import CONVERSION, score
from strawflow_workers.assemble.weighing import Reduction, RolloutSize, weigh
from strawflow_workers.rollout.hooks.load_algorithm import AlgorithmHooks

FAILED_MEMBERS = "failed_members"
STALE = "stale"
TRUNCATED = "truncated"
"""Why a group is sampled afresh or dropped, or a sequence filtered."""


@dataclass(frozen=True)
class PackedSequence:
    """One segment of a member on its way into a batch."""

    unit: Unit
    row: Mapping[str, Any]
    advantage: float | npt.NDArray[np.float32]
    """Of each response token."""
    version_steps: npt.NDArray[np.int32]
    mask: npt.NDArray[np.int8]
    """1 = trained, for each response token."""
    weight: float = 1.0
    """Of each trained token in the loss."""

    @property
    def num_tokens(self) -> int:
        return len(self.row["prompt_tokens"]) + len(self.row["response_tokens"])

    @property
    def num_trained_tokens(self) -> int:
        return int(self.mask.sum())


def build_batch(
    groups: Sequence[Group],
    *,
    step: int,
    objective: str,
    version_steps: Mapping[str, int],
    config: RunConfig,
    hooks: AlgorithmHooks | None = None,
) -> BatchPlan:
    """Compute advantages, order, mini-batches, micro-batches, denominators and plan rows of one step.

    `version_steps` maps the weight version ids in the rows to their steps.
    """
    algorithm, hooks = config.algorithm, hooks or AlgorithmHooks()
    masking = _Masking(
        version_steps,
        oldest=step - 1 - config.rollout.max_staleness if config.assemble.stale == "mask" else None,
        without_truncated=algorithm.mask_truncated and objective != "sft",
    )
    dropped = score(groups, objective, config, num_trained=masking.num_trained, custom=hooks.advantage)
    rollouts, num_masked = _rollouts(groups, dropped, masking)
    order = np.random.Generator(np.random.PCG64([config.run.seed, step])).permutation(len(rollouts))
    num_updates = 1 if objective == "sft" else config.assemble.mini_batches
    minis = [
        [rollouts[i] for i in part]
        for part in np.array_split(order, min(num_updates, len(rollouts)) or 1)
        if len(part)
    ]
    reductions = weigh(
        [_sizes(mini) for mini in minis],
        "token" if objective == "sft" else algorithm.aggregation,
        max_response_tokens=config.rollout.max_response_tokens,
        custom=hooks.reducer,
    )
    max_tokens = config.assemble.max_tokens_per_micro_batch
    micro_batches, placed = _packed(minis, reductions, step=step, max_tokens=max_tokens)
    return BatchPlan(
        step=step,
        objective=objective,
        micro_batches=micro_batches,
        plan=_plan_rows(groups, dropped, placed, step=step, masking=masking),
        denominators=tuple(reduction.denominator for reduction in reductions),
        assignments=[
            Assignment(g.unit.epoch, g.unit.unit_id, "dropped", dropped[g.unit.unit_id])
            if g.unit.unit_id in dropped
            else Assignment(g.unit.epoch, g.unit.unit_id, "trained")
            for g in groups
        ],
        mean_reward=_mean_reward(groups),
        version_ids=frozenset(v for g in groups for row in g.rows for v in row["weight_versions"]),
        max_staleness=max(
            (_staleness(row, version_steps, step) for g in groups for row in g.rows), default=0
        ),
        num_masked_tokens=num_masked,
    )


_Placed = dict[tuple[int, int, int], tuple[int, int]]
"""(unit, member, segment) to (mini-batch, micro-batch)."""


def _key(row: Mapping[str, Any]) -> tuple[int, int, int]:
    return row["unit_id"], row["member"], row["segment"]


@dataclass(frozen=True)
class _Masking:
    """Which tokens of a step are trained."""

    version_steps: Mapping[str, int]
    oldest: int | None
    """Tokens of weights before this step are not; None: none is too old."""
    without_truncated: bool

    def steps_of(self, row: Mapping[str, Any]) -> npt.NDArray[np.int32]:
        """Return the step of the weights that sampled each token, -1 where none did."""
        steps = [self.version_steps[v] for v in row["weight_versions"]]
        return np.array([-1 if at == NOT_SAMPLED else steps[at] for at in row["token_versions"]], np.int32)

    def mask_of(self, row: Mapping[str, Any], steps: npt.NDArray[np.int32]) -> npt.NDArray[np.int8]:
        mask = np.array(row["loss_mask"], np.int8)
        if self.oldest is not None:
            mask[(steps != -1) & (steps < self.oldest)] = 0
        if self.is_cut(row):
            mask[:] = 0
        return mask

    def is_cut(self, row: Mapping[str, Any]) -> bool:
        return self.without_truncated and row["status"] == "truncated"

    def num_trained(self, row: Mapping[str, Any]) -> int:
        """Return how many tokens of a row are trained."""
        return int(self.mask_of(row, self.steps_of(row)).sum())


def _rollouts(
    groups: Sequence[Group], dropped: Mapping[int, str], masking: _Masking
) -> tuple[list[list[PackedSequence]], int]:
    """Return the rollouts that are trained, each with the segments that have a trained token, and the number of stale tokens."""
    rollouts = [
        [
            _sequence(g.unit, row, g.advantage_of(row, float(advantage)), masking)
            for row in rows
            if (row["member"], row["segment"]) not in g.left_out
        ]
        for g in groups
        if g.unit.unit_id not in dropped
        for rows, advantage in zip(g.members, g.advantages, strict=True)
        if rows[0]["status"] != "failed"
    ]
    num_stale = sum(
        sum(s.row["loss_mask"]) - s.num_trained_tokens
        for rollout in rollouts
        for s in rollout
        if not masking.is_cut(s.row)
    )
    kept = [kept for rollout in rollouts if (kept := [s for s in rollout if s.num_trained_tokens])]
    return kept, num_stale


def _sequence(
    unit: Unit, row: Mapping[str, Any], advantage: float | npt.NDArray[np.float32], masking: _Masking
) -> PackedSequence:
    steps = masking.steps_of(row)
    return PackedSequence(unit, row, advantage, steps, masking.mask_of(row, steps))


def _packed(
    minis: Sequence[Sequence[Sequence[PackedSequence]]],
    reductions: Sequence[Reduction],
    *,
    step: int,
    max_tokens: int,
) -> tuple[list[PackedMicroBatch], _Placed]:
    """Return the micro-batches of the mini-batches' rollouts, and where each row lies."""
    micro_batches: list[PackedMicroBatch] = []
    placed: _Placed = {}
    for mini_at, (mini, reduction) in enumerate(zip(minis, reductions, strict=True)):
        weighed = [
            replace(sequence, weight=weight)
            for rollout, weight in zip(mini, reduction.weights, strict=True)
            for sequence in rollout
        ]
        for micro_at, micro in enumerate(_fill(weighed, max_tokens)):
            rows = pack_rows(micro, step=step, mini_batch=mini_at, micro_batch=micro_at)
            micro_batches.append(PackedMicroBatch(mini_at, 0, micro_at, rows))
            placed.update({_key(s.row): (mini_at, micro_at) for s in micro})
    return micro_batches, placed


def _sizes(rollouts: Sequence[Sequence[PackedSequence]]) -> list[RolloutSize]:
    return [
        RolloutSize(r[0].unit.unit_id, r[0].row["member"], sum(s.num_trained_tokens for s in r))
        for r in rollouts
    ]


def _fill(sequences: Sequence[PackedSequence], max_tokens: int) -> list[list[PackedSequence]]:
    """Cut a mini-batch into micro-batches of at most `max_tokens`, in order; a longer sequence stands alone."""
    filled: list[list[PackedSequence]] = []
    room = 0
    for sequence in sequences:
        if not filled or sequence.num_tokens > room:
            filled.append([])
            room = max_tokens
        filled[-1].append(sequence)
        room -= sequence.num_tokens
    return filled


def pack_rows(
    sequences: Sequence[PackedSequence], *, step: int, mini_batch: int, micro_batch: int
) -> pa.RecordBatch:
    """Return the packed rows (records.BATCH): arrays aligned to tokens, prompt places 0 (-1 in version_steps)."""
    lengths = [s.num_tokens for s in sequences]
    offsets = np.zeros(len(sequences) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    total = int(offsets[-1])
    tokens = np.zeros(total, np.int32)
    mask = np.zeros(total, np.int8)
    logprobs = np.zeros(total, np.float32)
    advantages = np.zeros(total, np.float32)
    steps = np.full(total, -1, np.int32)
    for s, start, end in zip(sequences, offsets[:-1], offsets[1:], strict=True):
        at = start + len(s.row["prompt_tokens"])
        tokens[start:at] = s.row["prompt_tokens"]
        tokens[at:end] = s.row["response_tokens"]
        mask[at:end] = s.mask
        logprobs[at:end] = s.row["logprobs"]
        advantages[at:end] = s.advantage
        steps[at:end] = s.version_steps

    def listed(values: npt.NDArray[Any], name: str) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=BATCH.field(name).type)

    num = len(sequences)
    columns: dict[str, Any] = {
        "step": np.full(num, step, np.int64),
        "mini_batch": np.full(num, mini_batch, np.int32),
        "slice": np.zeros(num, np.int32),
        "micro_batch": np.full(num, micro_batch, np.int32),
        **{
            name: np.array([s.row[name] for s in sequences], np.int64)
            for name in ("unit_id", "fence", "seq", "member", "segment")
        },
        "tokens": listed(tokens, "tokens"),
        "loss_mask": listed(mask, "loss_mask"),
        "logprobs": listed(logprobs, "logprobs"),
        "advantages": listed(advantages, "advantages"),
        "version_steps": listed(steps, "version_steps"),
        "prompt_length": np.array([len(s.row["prompt_tokens"]) for s in sequences], np.int32),
        "temperature": np.array([s.row["temperature"] for s in sequences], np.float32),
        "reward": np.array([s.row["reward"] for s in sequences], np.float64),
        "loss_weight": pa.array([None if s.weight == 1.0 else s.weight for s in sequences], pa.float32()),
        "tensors": tensor_column([[s.row.get("tensors") for s in sequences]], BATCH.field("tensors").type),
    }
    arrays = [c if isinstance(c := columns[f.name], pa.Array) else pa.array(c).cast(f.type) for f in BATCH]
    return pa.RecordBatch.from_arrays(arrays, schema=BATCH)


def _staleness(row: Mapping[str, Any], version_steps: Mapping[str, int], step: int) -> int:
    """Return (step - 1) - the step of the oldest weights of the row: 0 is on-policy, also for demonstrations."""
    return max((step - 1 - version_steps[v] for v in row["weight_versions"]), default=0)


def _mean_reward(groups: Sequence[Group]) -> float | None:
    """Each member's reward counts once."""
    rewards = [first["reward"] for g in groups for first, *_ in g.members if first["reward"] is not None]
    return float(np.mean(rewards)) if rewards else None


def _shown(advantage: float | npt.NDArray[np.float32], mask: Sequence[int]) -> float:
    """Return the one number that a plan tells of a row's advantage: their mean over the trained tokens."""
    if isinstance(advantage, float):
        return advantage
    trained = advantage[np.asarray(mask, np.bool_)]
    return float(trained.mean()) if len(trained) else 0.0


def _why_filtered(row: Mapping[str, Any], left_out: frozenset[tuple[int, int]], masking: _Masking) -> str:
    if (row["member"], row["segment"]) in left_out:
        return CONVERSION
    if not row["response_tokens"]:
        return "empty_response"
    if masking.is_cut(row):
        return TRUNCATED
    return STALE if any(row["loss_mask"]) else "masked"


def _plan_rows(
    groups: Sequence[Group],
    dropped: Mapping[int, str],
    placed: _Placed,
    *,
    step: int,
    masking: _Masking,
) -> pa.RecordBatch:
    rows = []
    for group in groups:
        reason = dropped.get(group.unit.unit_id)
        of_rows = [
            (row, advantage)
            for rows_of_member, advantage in zip(group.members, group.advantages, strict=True)
            for row in rows_of_member
        ]
        for row, advantage in of_rows:
            place = placed.get(_key(row))
            excluded = row["status"] == "failed"
            rows.append(
                {
                    **{k: row[k] for k in ("unit_id", "fence", "seq", "member", "segment", "reward")},
                    "step": step,
                    "outcome": "excluded" if excluded else "trained" if place else "filtered",
                    "reason": row["failure"]
                    if excluded
                    else reason or (None if place else _why_filtered(row, group.left_out, masking)),
                    "advantage": None
                    if excluded
                    else _shown(group.advantage_of(row, float(advantage)), row["loss_mask"]),
                    "staleness": _staleness(row, masking.version_steps, step),
                    "num_tokens": len(row["prompt_tokens"]) + len(row["response_tokens"]),
                    "mini_batch": place[0] if place else None,
                    "slice": 0 if place else None,
                    "micro_batch": place[1] if place else None,
                }
            )
    return pa.RecordBatch.from_pylist(rows, schema=PLAN)
