"""Results as rows: parallel arrays, versions by place, failures without rewards."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from strawflow.config import RunConfig
from strawflow.errors import InvalidInputError
from strawflow.flow.trajectory import Member, UnitResult, failed_member, to_record_batch, with_every_token
from strawflow.records import TRAJECTORY

PROFILE = RunConfig().profiles()["train"]


def member(number: int, **changes: Any) -> Member:
    values: dict[str, Any] = {
        "member": number,
        "status": "finished",
        "response_tokens": [7, 8, 9],
        "logprobs": [-0.5, -0.25, -1.0],
        "token_versions": ["v2", "v2", "v2"],
        "finish_reason": "stop",
        "reward": 1.0,
    }
    return Member(**{**values, **changes})


def result(*members: Member) -> UnitResult:
    return UnitResult(5, 2, 1, [1, 2], members, PROFILE, "engine")


def test_rows_hold_every_array_and_the_stored_schema() -> None:
    batch = to_record_batch([result(member(0), member(1, reward=0.0, response_tokens=[4, 5, 6]))])
    assert batch.schema.equals(TRAJECTORY, check_metadata=True)
    first, second = batch.to_pylist()
    assert first["response_tokens"] == [7, 8, 9]
    assert second["response_tokens"] == [4, 5, 6]
    assert first["prompt_tokens"] == [1, 2]
    assert first["logprobs"] == [-0.5, -0.25, -1.0]
    assert first["weight_versions"] == ["v2"]
    assert (first["unit_id"], first["fence"], first["seq"], second["member"]) == (5, 2, 1, 1)


def test_a_response_over_two_versions_names_the_version_of_each_token() -> None:
    (row,) = to_record_batch([result(member(0, token_versions=["v9", "v2", "v9"]))]).to_pylist()
    assert [row["weight_versions"][at] for at in row["token_versions"]] == ["v9", "v2", "v9"]


@pytest.mark.parametrize("versions", ["v2", ["v2"] * 3, "", [""] * 3])
def test_a_mask_and_versions_that_one_word_tells_are_stored_as_null(versions: str | list[str]) -> None:
    (row,) = to_record_batch([result(member(0, token_versions=versions))]).to_pylist()
    assert row["loss_mask"] is row["token_versions"] is None


def test_told_for_every_token_they_are_all_trained_and_of_the_version_that_sampled_them() -> None:
    members = [
        member(0),
        member(1, token_versions=["v9", "", "v2"]),
        member(2, response_tokens=[4], logprobs=[-1.0], token_versions=""),
        failed_member(3, "the reward raised"),
        member(4, token_versions="v2"),
    ]
    whole = with_every_token(to_record_batch([result(*members)]))
    whole.validate(full=True)
    assert whole.schema.equals(TRAJECTORY, check_metadata=True)
    assert whole.column("loss_mask").to_pylist() == [[1, 1, 1], [1, 1, 1], [1], [], [1, 1, 1]]
    assert whole.column("token_versions").to_pylist() == [[0, 0, 0], [1, -1, 0], [-1], [], [0, 0, 0]]
    for start in range(5):  # rows of a unit are a part of their message
        assert with_every_token(to_record_batch([result(*members)]).slice(start, 2)) == whole.slice(start, 2)
    assert with_every_token(whole) == whole


def test_a_mask_that_was_stored_stays_as_it_is() -> None:
    rows = to_record_batch([result(member(0), member(1))])
    masked = rows.set_column(
        rows.schema.get_field_index("loss_mask"),
        rows.schema.field("loss_mask"),
        pa.array([None, [0, 1, 0]], rows.schema.field("loss_mask").type),
    )
    assert with_every_token(masked).column("loss_mask").to_pylist() == [[1, 1, 1], [0, 1, 0]]


def test_tokens_that_no_weights_sampled_have_no_version() -> None:
    (row,) = to_record_batch([result(member(0, token_versions=["", "v1", ""]))]).to_pylist()
    assert (row["token_versions"], row["weight_versions"]) == ([-1, 0, -1], ["v1"])


def test_a_failed_member_is_a_row_with_its_reason_and_no_reward() -> None:
    (row,) = to_record_batch([result(failed_member(3, "reward: ValueError"))]).to_pylist()
    assert (row["status"], row["failure"], row["reward"]) == ("failed", "reward: ValueError", None)
    assert row["response_tokens"] == row["logprobs"] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [-0.5, -0.25]}, "3 tokens, 2 log-probabilities"),
        ({"token_versions": ["v2"]}, "1 versions"),
        ({"logprobs": [-0.5, float("nan"), -1.0]}, "not finite"),
        ({"status": "failed"}, "needs its reason"),
        ({"failure": "why"}, "must have none"),
        ({"status": "failed", "failure": "why"}, "has no reward"),
    ],
)
def test_a_member_that_breaks_a_promise_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        result(member(0), member(1, **changes)).check()
