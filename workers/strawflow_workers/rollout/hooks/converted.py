"""Calling the hooks that shape what a group is trained as: post-processing of rewards, and conversion to training rows.

1. What they return is checked before anything of it is planned; what is wrong, or raised, stops the assembler with the text: a
   group that was trained as something else than was meant is worse than a run that waits.
2. Stored trajectories stay what they are; what the hooks make lies in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from strawflow.errors import ConfigError
from strawflow.flow.trajectory import MAX_LOGPROB, NOT_SAMPLED
from strawflow_workers.rollout.hooks.filtered import completed_group
from strawflow_workers.rollout.hooks.interfaces import (
    CompletedGroup,
    Convert,
    PostProcess,
    PostProcessed,
    TrainingRow,
)

Row = dict[str, Any]
T = TypeVar("T")

_OF_RESPONSE = ("loss_mask", "logprobs", "token_versions")


@dataclass(frozen=True)
class Shaped:
    """A group as it is trained."""

    rows: list[Row]
    """The stored rows, each as it is trained."""
    left_out: frozenset[tuple[int, int]] = frozenset()
    """(member, segment) of those that the conversion left out; their rewards count all the same."""
    member_advantages: Mapping[int, float] | None = None
    """By member; None: from the rewards."""
    row_advantages: Mapping[tuple[int, int], npt.NDArray[np.float32]] = field(default_factory=dict)
    """By (member, segment): one item a response token."""


class GroupShaper:
    """The hooks of one run."""

    def __init__(self, post_process: PostProcess | None, convert: Convert | None) -> None:
        self._post_process, self._convert = post_process, convert

    def shape(self, unit_id: int, rows: Sequence[Row]) -> Shaped:
        """Return what of a stored group is trained, and how.

        Raises:
            ConfigError: a hook raised, or returned what cannot be trained.
        """
        shaped = Shaped(list(rows))
        if self._post_process is not None:
            hook = self._post_process
            shaped = _told(
                "post_process", unit_id, lambda: _processed(hook, completed_group(unit_id, rows), rows)
            )
        if self._convert is not None:
            convert, before = self._convert, shaped
            shaped = _told(
                "convert",
                unit_id,
                lambda: _converted(convert, completed_group(unit_id, before.rows), before),
            )
        return shaped


def _told(kind: str, unit_id: int, call: Callable[[], T]) -> T:
    try:
        return call()
    except Exception as error:  # user code; it is mended, and the run resumed
        raise ConfigError(f"assemble.{kind} at unit {unit_id}: {type(error).__name__}: {error}") from error


def _processed(hook: PostProcess, group: CompletedGroup, rows: Sequence[Row]) -> Shaped:
    found = checked_post_processed(hook(group), group)
    sound = [m.member for m in group.members if m.status != "failed"]
    rewards = dict(zip(sound, found.rewards or (), strict=False))
    return Shaped(
        [
            {**row, "reward": float(rewards[row["member"]])} if row["member"] in rewards else row
            for row in rows
        ],
        member_advantages=None
        if found.advantages is None
        else {m: float(a) for m, a in zip(sound, found.advantages, strict=True)},
    )


def checked_post_processed(found: object, group: CompletedGroup) -> PostProcessed:
    """Return what a post-processing hook returned.

    Raises:
        TypeError: it is no PostProcessed.
        ValueError: an item for another number of members, or one that is not finite.
    """
    if not isinstance(found, PostProcessed):
        raise TypeError(f"it must return a PostProcessed, it returned {found!r:.200}")
    num_sound = len(group.rewards)
    for name in ("rewards", "advantages"):
        values = getattr(found, name)
        if values is None:
            continue
        if len(values) != num_sound:
            raise ValueError(f"{len(values)} {name} for {num_sound} members that did not fail")
        if not all(math.isfinite(value) for value in values):
            raise ValueError(f"{name} {list(values)} are not all finite")
    return found


def _converted(hook: Convert, group: CompletedGroup, before: Shaped) -> Shaped:
    found = checked_training_rows(hook(group), group)
    by_key = {(row.member, row.segment): row for row in found}
    rewards = {row.member: float(row.reward) for row in found if row.reward is not None}
    rows: list[Row] = []
    advantages: dict[tuple[int, int], npt.NDArray[np.float32]] = {}
    for stored in before.rows:
        key = stored["member"], stored["segment"]
        row = {**stored, "reward": rewards[key[0]]} if key[0] in rewards else stored
        if (made := by_key.get(key)) is not None:
            row = {**row, **{name: getattr(made, name) for name in _TAKEN}}
            if made.advantages is not None:
                length = len(made.response_tokens)
                advantages[key] = np.broadcast_to(np.asarray(made.advantages, np.float32), length)
        rows.append(row)
    sound = {(r["member"], r["segment"]) for r in before.rows if r["status"] != "failed"}
    return Shaped(rows, frozenset(sound - by_key.keys()), before.member_advantages, advantages)


_TAKEN = ("prompt_tokens", "response_tokens", *_OF_RESPONSE)


def checked_training_rows(found: object, group: CompletedGroup) -> list[TrainingRow]:
    """Return what a conversion hook returned.

    Raises:
        TypeError: it is no sequence of TrainingRow.
        ValueError: a row of no stored segment, or two of one; lists that are not parallel; a mask that trains what was not
            sampled; a number that is not finite; rewards of one rollout that differ.
    """
    if not isinstance(found, list | tuple) or not all(isinstance(row, TrainingRow) for row in found):
        raise TypeError(f"it must return a list of TrainingRow, it returned {found!r:.200}")
    stored = {
        (m.member, row["segment"]): row for m in group.members if m.status != "failed" for row in m.segments
    }
    seen: set[tuple[int, int]] = set()
    rewards: dict[int, float | None] = {}
    for row in found:
        key = row.member, row.segment
        where = f"member {row.member}, segment {row.segment}"
        if key not in stored or key in seen:
            raise ValueError(f"{where}: {'is there twice' if key in seen else 'there is no such segment'}")
        seen.add(key)
        if rewards.setdefault(row.member, row.reward) != row.reward:
            raise ValueError(f"{where}: the rows of one rollout share one reward")
        _check_row(row, where, num_versions=len(stored[key]["weight_versions"]))
    return list(found)


def _check_row(row: TrainingRow, where: str, *, num_versions: int) -> None:
    length = len(row.response_tokens)
    lengths = {name: len(getattr(row, name)) for name in _OF_RESPONSE}
    if not np.isscalar(row.advantages) and row.advantages is not None:
        lengths["advantages"] = len(row.advantages)  # type: ignore[arg-type]  # no number, so a sequence
    if wrong := {name: n for name, n in lengths.items() if n != length}:
        raise ValueError(f"{where}: {length} response tokens, but {wrong}")
    if not len(row.prompt_tokens):
        raise ValueError(f"{where}: no prompt token; the first response token is predicted from one")
    mask, versions = np.asarray(row.loss_mask), np.asarray(row.token_versions)
    logprobs = np.asarray(row.logprobs, np.float32)
    if length and (
        ((mask != 0) & (mask != 1)).any() or (mask.astype(bool) & (versions == NOT_SAMPLED)).any()
    ):
        raise ValueError(
            f"{where}: loss_mask holds other than 0 and 1, or trains a token that no weights sampled"
        )
    if length and not (versions.min() >= NOT_SAMPLED and versions.max() < num_versions):
        raise ValueError(
            f"{where}: token_versions name other than the {num_versions} weight_versions of the segment"
        )
    if not np.isfinite(logprobs).all() or logprobs.max(initial=0.0) > MAX_LOGPROB:
        raise ValueError(f"{where}: a log-probability is not finite, or above 0")
    told = () if row.advantages is None else row.advantages
    if not np.isfinite(np.asarray(told, np.float64)).all() or not math.isfinite(row.reward or 0.0):
        raise ValueError(f"{where}: an advantage or the reward is not finite")
