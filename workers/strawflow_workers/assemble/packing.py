"""Packing: trajectories of closed groups to one step's packed rows and plan. Pure: no store, no index, no clock.

1. A group counts with its non-excluded members; baseline and deviation use one reward per member, however many segments its
   rollout has. Each segment is a sequence of its own; all of a rollout have its advantage and stay in one mini-batch, so
   that they share its denominator.
2. Members of a group without signal (equal rewards) have advantage 0 and are left out of the packed rows; the group is
   recorded as dropped with the reason `zero_deviation`.
   Post-processing and conversion by the user's hooks come first: their rewards count here, and their advantages replace ours.
3. With the policy `mask`, tokens of weights staler than the limit are not trained; the rewards of their members count in
   baseline and deviation all the same. A sequence without a token left is filtered with the reason `stale`.
4. The order of sequences is a permutation keyed by (seed, step); denominators are counted here once and stored, so a
   replay on another parallelism has the same loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from strawflow.config import RunConfig
from strawflow.flow.assemble import BatchPlan, PackedMicroBatch
from strawflow.flow.payload import arrays_of, tensor_column
from strawflow.flow.trajectory import NOT_SAMPLED
from strawflow.index.consumers import Assignment
from strawflow.index.units import Unit
from strawflow.records import BATCH, PLAN
from strawflow_workers.rollout.hooks.converted import Shaped
from strawflow_workers.trainer.advantages import grpo_advantages

FAILED_MEMBERS = "failed_members"
ZERO_DEVIATION = "zero_deviation"
STALE = "stale"
CONVERSION = "conversion"
"""Why a group is sampled afresh or dropped, or a sequence filtered."""

Row = dict[str, Any]
"""A stored trajectory: one segment of a member; its `tensors` are arrays by name, or None."""


def rows_of(stored: pa.RecordBatch) -> list[Row]:
    """Return the stored trajectories of one unit as rows."""
    tensors = arrays_of(stored.column("tensors"))
    rows = stored.drop_columns(["tensors"]).to_pylist()
    return [{**row, "tensors": of_row} for row, of_row in zip(rows, tensors, strict=True)]


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

    @property
    def num_tokens(self) -> int:
        return len(self.row["prompt_tokens"]) + len(self.row["response_tokens"])

    @property
    def num_trained_tokens(self) -> int:
        return int(self.mask.sum())


@dataclass
class Group:
    """A closed group: its unit and its members' rows, member after member, segment after segment."""

    unit: Unit
    rows: list[Row]
    advantages: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """Of each member."""
    shaped: Shaped | None = None
    """What the user's hooks made of it; None: they had no part in it. Its rows are `rows`."""

    @property
    def left_out(self) -> frozenset[tuple[int, int]]:
        """(member, segment) of rows that are not trained."""
        return frozenset() if self.shaped is None else self.shaped.left_out

    def advantage_of(self, row: Row, of_member: float) -> float | npt.NDArray[np.float32]:
        """Return what the tokens of a row are weighted by."""
        own = None if self.shaped is None else self.shaped.row_advantages.get((row["member"], row["segment"]))
        return of_member if own is None else own

    @property
    def members(self) -> list[list[Row]]:
        """The rows of each member."""
        return [list(rows) for _, rows in groupby(self.rows, key=itemgetter("member"))]

    @property
    def valid(self) -> npt.NDArray[np.bool_]:
        """Whether each member finished."""
        return np.array([first["status"] != "failed" for first, *_ in self.members], dtype=np.bool_)


def min_group_size(num_members: int) -> int:
    """Return how many members must remain for a group to be trained: max(2, half of them), 1 for a group of one."""
    return 1 if num_members == 1 else max(2, math.ceil(num_members / 2))


def is_usable(group: Group, config: RunConfig) -> bool:
    """Tell whether enough members of a group finished."""
    valid = group.valid
    num_valid = int(valid.sum())
    if config.assemble.failed_member == "drop-group" and num_valid < len(valid):
        return False
    return num_valid >= min_group_size(len(valid))


def build_batch(
    groups: Sequence[Group], *, step: int, objective: str, version_steps: Mapping[str, int], config: RunConfig
) -> BatchPlan:
    """Compute advantages, order, mini-batches, micro-batches, denominators and plan rows of one step.

    `version_steps` maps the weight version ids in the rows to their steps.
    """
    dropped = _score(groups, objective, config)
    oldest = step - 1 - config.rollout.max_staleness if config.assemble.stale == "mask" else None
    rollouts = [
        [
            _sequence(g.unit, row, g.advantage_of(row, float(advantage)), version_steps, oldest=oldest)
            for row in rows
            if (row["member"], row["segment"]) not in g.left_out
        ]
        for g in groups
        if g.unit.unit_id not in dropped
        for rows, advantage in zip(g.members, g.advantages, strict=True)
        if rows[0]["status"] != "failed"
    ]
    num_masked = sum(sum(s.row["loss_mask"]) - s.num_trained_tokens for rollout in rollouts for s in rollout)
    rollouts = [kept for rollout in rollouts if (kept := [s for s in rollout if s.num_trained_tokens])]
    order = np.random.Generator(np.random.PCG64([config.run.seed, step])).permutation(len(rollouts))
    num_updates = 1 if objective == "sft" else config.assemble.mini_batches
    minis = [
        [sequence for i in part for sequence in rollouts[i]]
        for part in np.array_split(order, min(num_updates, len(rollouts)) or 1)
    ]
    minis = [mini for mini in minis if mini]
    micro_batches: list[PackedMicroBatch] = []
    placed: _Placed = {}
    for mini_at, mini in enumerate(minis):
        for micro_at, micro in enumerate(_fill(mini, config.assemble.max_tokens_per_micro_batch)):
            rows = pack_rows(micro, step=step, mini_batch=mini_at, micro_batch=micro_at)
            micro_batches.append(PackedMicroBatch(mini_at, 0, micro_at, rows))
            placed.update({_key(s.row): (mini_at, micro_at) for s in micro})
    return BatchPlan(
        step=step,
        objective=objective,
        micro_batches=micro_batches,
        plan=_plan_rows(groups, dropped, placed, step=step, version_steps=version_steps),
        denominators=tuple(float(sum(s.num_trained_tokens for s in mini)) for mini in minis),
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


def _sequence(
    unit: Unit,
    row: Mapping[str, Any],
    advantage: float | npt.NDArray[np.float32],
    version_steps: Mapping[str, int],
    *,
    oldest: int | None,
) -> PackedSequence:
    """Return a segment with its mask; tokens of weights before step `oldest` are masked (None: none is)."""
    steps = _steps_of(row, version_steps)
    mask = np.array(row["loss_mask"], np.int8)
    if oldest is not None:
        mask[(steps != -1) & (steps < oldest)] = 0
    return PackedSequence(unit, row, advantage, steps, mask)


def _score(groups: Sequence[Group], objective: str, config: RunConfig) -> dict[int, str]:
    """Set each group's advantages; returns unit id to reason for groups without signal."""
    dropped: dict[int, str] = {}
    for group in groups:
        if objective == "sft":
            group.advantages = np.ones(len(group.members), np.float32)
            continue
        rewards = np.array(
            [[0.0 if first["reward"] is None else first["reward"] for first, *_ in group.members]]
        )
        advantages, filtered = grpo_advantages(
            rewards, group.valid[None, :], scale_by_deviation=config.assemble.advantage == "grpo"
        )
        group.advantages = advantages[0]
        shaped = group.shaped
        if shaped is not None and shaped.member_advantages is not None:
            given = shaped.member_advantages
            group.advantages = np.array(
                [given.get(first["member"], 0.0) for first, *_ in group.members], np.float32
            )
        elif filtered[0] and not (shaped is not None and shaped.row_advantages):
            dropped[group.unit.unit_id] = ZERO_DEVIATION
        trained = {(r["member"], r["segment"]) for r in group.rows if r["status"] != "failed"}
        if trained <= group.left_out:
            dropped[group.unit.unit_id] = CONVERSION
    return dropped


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
        "tensors": tensor_column([[s.row.get("tensors") for s in sequences]], BATCH.field("tensors").type),
    }
    arrays = [c if isinstance(c := columns[f.name], pa.Array) else pa.array(c).cast(f.type) for f in BATCH]
    return pa.RecordBatch.from_arrays(arrays, schema=BATCH)


def _steps_of(row: Mapping[str, Any], version_steps: Mapping[str, int]) -> npt.NDArray[np.int32]:
    steps = [version_steps[v] for v in row["weight_versions"]]
    return np.array([-1 if at == NOT_SAMPLED else steps[at] for at in row["token_versions"]], np.int32)


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


def _why_filtered(row: Mapping[str, Any], left_out: frozenset[tuple[int, int]]) -> str:
    if (row["member"], row["segment"]) in left_out:
        return CONVERSION
    if not row["response_tokens"]:
        return "empty_response"
    return STALE if any(row["loss_mask"]) else "masked"


def _plan_rows(
    groups: Sequence[Group],
    dropped: Mapping[int, str],
    placed: _Placed,
    *,
    step: int,
    version_steps: Mapping[str, int],
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
                    else reason or (None if place else _why_filtered(row, group.left_out)),
                    "advantage": None
                    if excluded
                    else _shown(group.advantage_of(row, float(advantage)), row["loss_mask"]),
                    "staleness": _staleness(row, version_steps, step),
                    "num_tokens": len(row["prompt_tokens"]) + len(row["response_tokens"]),
                    "mini_batch": place[0] if place else None,
                    "slice": 0 if place else None,
                    "micro_batch": place[1] if place else None,
                }
            )
    return pa.RecordBatch.from_pylist(rows, schema=PLAN)
