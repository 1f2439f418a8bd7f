"""What a submission says is told by its digest: every stored value is part of it, its type in Python is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from strawflow.config import RunConfig
from strawflow.errors import InvalidInputError
from strawflow.flow.submission import Submission
from strawflow.flow.trajectory import Member, UnitResult
from strawflow.index.leases import Failure, Wanted

PROFILES = RunConfig().profiles()
MEMBER = Member(
    member=0,
    status="finished",
    response_tokens=[7, 8, 9],
    logprobs=[-0.5, -0.25, -1.0],
    token_versions=["v1", "v1", "v2"],
    finish_reason="stop",
    reward=1.0,
    score=0.5,
    response_text="seven",
    environment=b"at the door",
)
RESULT = UnitResult(5, 2, 1, [1, 2], [MEMBER], PROFILES["train"], "engine/1")
SUBMISSION = Submission("s", results=[RESULT])


def digest_of(**changes: Any) -> bytes:
    return Submission("s", results=[replace(RESULT, members=[replace(MEMBER, **changes)])]).content_digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"member": 1},
        {"status": "truncated"},
        {"response_tokens": [7, 8, 10]},
        {"logprobs": [-0.5, -0.25, -1.5]},
        {"token_versions": ["v1", "v2", "v1"]},
        {"token_versions": ["v1", "v1", "v3"]},
        {"token_versions": ["v1", "", "v2"]},
        {"token_versions": "v1"},
        {"finish_reason": "length"},
        {"reward": None},
        {"score": None},
        {"response_text": "eight"},
        {"environment": b"in the room"},
        {"failure": "none"},
        {"tensors": {"pixels": np.zeros(2, np.uint8)}},
    ],
)
def test_every_value_of_a_member_is_told(changes: dict[str, Any]) -> None:
    assert digest_of(**changes) != SUBMISSION.content_digest()


def test_every_bit_type_shape_and_name_of_an_array_is_told() -> None:
    arrays = [
        {"x": np.zeros(4, np.uint8)},
        {"y": np.zeros(4, np.uint8)},
        {"x": np.array([0, 0, 0, 1], np.uint8)},
        {"x": np.zeros(4, np.int8)},
        {"x": np.zeros((2, 2), np.uint8)},
        {"x": np.zeros(1, np.float32)},
        {"x": np.zeros(4, np.uint8), "y": np.zeros(0, np.uint8)},
    ]
    assert len({digest_of(tensors=given) for given in arrays}) == len(arrays)
    assert digest_of(tensors={}) == digest_of(tensors=None)


@pytest.mark.parametrize(
    "changes",
    [
        {"unit_id": 6},
        {"fence": 3},
        {"seq": 2},
        {"prompt_tokens": [1, 3]},
        {"members": [MEMBER, replace(MEMBER, member=1)]},
        {"profile": PROFILES["eval_sampled"]},
        {"engine": "engine/2"},
    ],
)
def test_every_value_of_a_result_is_told(changes: dict[str, Any]) -> None:
    changed = Submission("s", results=[replace(RESULT, **changes)])
    assert changed.content_digest() != SUBMISSION.content_digest()


@pytest.mark.parametrize(
    "other",
    [
        Submission("s", parked=[RESULT]),
        Submission("s"),
        Submission("s", results=[RESULT], wanted=Wanted(1)),
        Submission("s", results=[RESULT], released=[(6, 1)]),
        Submission("s", results=[RESULT], failures=[Failure(6, 1, "why")]),
    ],
)
def test_what_is_asked_beside_a_result_is_told(other: Submission) -> None:
    assert other.content_digest() != SUBMISSION.content_digest()


def test_tokens_that_move_from_prompt_to_response_are_told() -> None:
    """Both hold the same numbers one after another."""
    moved = replace(
        MEMBER, response_tokens=[2, 7, 8, 9], logprobs=[0.0, -0.5, -0.25, -1.0], token_versions="v1"
    )
    longer = replace(MEMBER, response_tokens=[7, 8, 9], token_versions="v1")
    one = Submission("s", results=[replace(RESULT, prompt_tokens=[1], members=[moved])])
    other = Submission("s", results=[replace(RESULT, prompt_tokens=[1, 2], members=[longer])])
    assert one.content_digest() != other.content_digest()


def test_the_same_values_in_other_types_say_the_same() -> None:
    same = digest_of(
        response_tokens=np.array([7, 8, 9], np.int32),
        logprobs=np.array([-0.5, -0.25, -1.0], np.float32),
        token_versions=("v1", "v1", "v2"),
    )
    assert same == SUBMISSION.content_digest()
    assert digest_of(token_versions="v1") == digest_of(token_versions=["v1"] * 3)
    assert digest_of(token_versions="") == digest_of(token_versions=[""] * 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"reward": np.float64(1.0), "score": np.float64(0.5)},
        {"reward": 1},
        {"environment": memoryview(b"at the door")},
        {"environment": bytearray(b"at the door")},
        {"member": np.int64(0)},
        {"token_versions": np.array(["v1", "v1", "v2"])},
        {"response_tokens": np.array([7, 0, 8, 0, 9], np.int32)[::2]},
    ],
)
def test_the_types_that_numeric_programs_hand_in_say_the_same(changes: dict[str, Any]) -> None:
    assert digest_of(**changes) == SUBMISSION.content_digest()


def test_ids_and_leases_say_the_same_in_other_types() -> None:
    one = Submission("s", released=[(6, 1)], failures=[Failure(7, 1, "why", 0)])
    other = Submission("s", released=[[np.int64(6), 1]], failures=[Failure(np.int64(7), 1, "why", 0.0)])  # type: ignore[list-item, arg-type]
    assert one.content_digest() == other.content_digest()
    serving = [Submission("s", wanted=Wanted(1, version)) for version in (None, "v1", "v2")]
    assert len({s.content_digest() for s in serving}) == 3


def test_a_submission_that_settles_a_unit_twice_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="is about a unit twice"):
        Submission("s", results=[RESULT], released=[(5, 2)]).check()
