"""Groups of trajectory rows without an index: told apart by record id, and taken only when they keep promises P9 and P10."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from strawflow.flow.found_results import groups_of
from strawflow.records import TRAJECTORY


def row(unit_id: int, member: int, **changes: Any) -> dict[str, Any]:
    return {
        "unit_id": unit_id,
        "fence": 3,
        "seq": 1,
        "member": member,
        "segment": 0,
        "purpose": "train",
        "status": "finished",
        "failure": None,
        "prompt_tokens": [1, 2],
        "response_tokens": [5, 6, 7],
        "loss_mask": [1, 1, 1],
        "logprobs": [-0.5, -0.25, -1.0],
        "token_versions": [0, 1, 0],
        "weight_versions": ["v1", "v2"],
        "reward": 1.0 + member,
        "score": 1.0,
        "response_text": "x",
        "finish_reason": "stop",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_response_tokens": 8,
        "engine": "e",
        **changes,
    }


def rows(*given: dict[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(given), schema=TRAJECTORY)


def test_groups_are_told_apart_by_unit_fence_and_seq() -> None:
    found = list(
        groups_of(rows(row(1, 0), row(1, 1), row(2, 0), row(2, 0, fence=4), row(2, 1, fence=4, seq=2)))
    )
    assert [(g.unit_id, g.fence, g.seq, g.row_start, g.row_count) for g in found] == [
        (1, 3, 1, 0, 2),
        (2, 3, 1, 2, 1),
        (2, 4, 1, 3, 1),
        (2, 4, 2, 4, 1),
    ]
    first = found[0]
    assert (first.versions, first.mean_reward, first.num_tokens, first.is_sound) == (
        frozenset({"v1", "v2"}),
        1.5,
        6,
        True,
    )
    assert first.has_all(2)
    assert not first.has_all(3)
    assert not found[1].has_all(2)


def test_a_rollouts_reward_counts_once_for_all_its_segments() -> None:
    (group,) = groups_of(rows(row(1, 0), row(1, 1), row(1, 1, segment=1), row(1, 1, segment=2)))
    assert (group.mean_reward, group.num_tokens, group.row_count) == (1.5, 12, 4)
    assert group.has_all(2)


def test_a_failed_member_belongs_to_its_group_and_earns_nothing() -> None:
    failed = row(
        1,
        1,
        status="failed",
        failure="the reward raised",
        reward=None,
        response_tokens=[],
        loss_mask=[],
        logprobs=[],
        token_versions=[],
        weight_versions=[],
    )
    (group,) = groups_of(rows(row(1, 0), failed))
    assert (group.is_sound, group.mean_reward, group.num_tokens) == (True, 1.0, 3)
    (only,) = groups_of(rows({**failed, "member": 0}))
    assert (only.mean_reward, only.versions) == (None, frozenset())


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": [-0.5, -0.25]},
        {"loss_mask": [1, 1, 1, 1]},
        {"token_versions": [0, 1]},
        {"logprobs": [-0.5, float("nan"), -1.0]},
        {"logprobs": [-0.5, float("-inf"), -1.0]},
        {"token_versions": [0, 2, 0]},
        {"token_versions": [0, -2, 0]},
        {"status": "failed"},
        {"failure": "told, and yet finished"},
        {"status": "failed", "failure": "a failed member with a reward"},
        {"purpose": "eval"},
    ],
    ids=str,
)
def test_rows_that_break_a_promise_are_no_result(changes: dict[str, Any]) -> None:
    found = list(groups_of(rows(row(1, 0), row(1, 1, **changes), row(2, 0))))
    assert [g.is_sound for g in found] == [False, True]


@pytest.mark.parametrize("name", ["loss_mask", "token_versions"])
@pytest.mark.parametrize(
    ("lengths", "sound"),
    [
        pytest.param((1, 3), (False, True), id="one item for three tokens, no null"),
        pytest.param((1, None), (False, True), id="one item for three tokens beside a null"),
        pytest.param((4, 2, None), (False, False, True), id="lengths that only add up beside a null"),
        pytest.param((2, None), (False, True), id="two items for three tokens beside a null"),
        pytest.param((3, None, 3), (True, True, True), id="as many as tokens"),
        pytest.param((None, None), (True, True), id="all null"),
    ],
)
def test_a_mask_and_versions_are_null_or_as_long_as_the_response(
    name: str, lengths: tuple[int | None, ...], sound: tuple[bool, ...]
) -> None:
    told = [None if length is None else [0] * length for length in lengths]
    given = [row(n, 0, **{"weight_versions": ["v1"], name: items}) for n, items in enumerate(told)]
    if name == "loss_mask":
        given = [{**own, "token_versions": None} for own in given]
    assert tuple(g.is_sound for g in groups_of(rows(*given))) == sound
    # A part of a message is judged as the whole is.
    assert tuple(g.is_sound for g in groups_of(rows(*given).slice(1))) == sound[1:]


def test_versions_are_null_only_where_one_version_sampled_all_or_none_any() -> None:
    given = [
        row(n, 0, token_versions=None, weight_versions=versions)
        for n, versions in enumerate(([], ["v1"], ["v1", "v2"]))
    ]
    assert [g.is_sound for g in groups_of(rows(*given))] == [True, True, False]
    assert [g.is_sound for g in groups_of(rows(given[2]))] == [False]
