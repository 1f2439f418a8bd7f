"""Results as rows: parallel arrays, versions by place, failures without rewards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from strawflow.config import RunConfig
from strawflow.errors import CorruptPackError, InvalidInputError
from strawflow.flow.chain import saved_members
from strawflow.flow.submission import Submission
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


def stored(name: str, *lengths: int | None) -> pa.RecordBatch:
    """Return rows of three tokens whose column `name` has that many items, or is null."""
    rows = to_record_batch([result(*(member(n) for n in range(len(lengths))))])
    field = rows.schema.field(name)
    told = pa.array([None if length is None else [0] * length for length in lengths], field.type)
    return rows.set_column(rows.schema.get_field_index(name), field, told)


def test_a_mask_that_was_stored_stays_as_it_is() -> None:
    whole = with_every_token(stored("loss_mask", None, 3))
    assert whole.column("loss_mask").to_pylist() == [[1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize("name", ["loss_mask", "token_versions"])
@pytest.mark.parametrize(
    ("lengths", "bad_row"),
    [((1,), 0), ((3, 1), 1), ((1, None), 0), ((None, 2, 4), 1), ((None, 4, 2), 1), ((2, None), 0)],
)
def test_a_row_with_another_number_of_items_than_tokens_is_corrupt(
    name: str, lengths: tuple[int | None, ...], bad_row: int
) -> None:
    with pytest.raises(CorruptPackError, match=f"{name} of row {bad_row} has another.*member={bad_row}"):
        with_every_token(stored(name, *lengths))


def test_tokens_of_several_versions_that_do_not_say_which_are_corrupt() -> None:
    rows = to_record_batch([result(member(0), member(1, token_versions=["v9", "v2", "v9"]))])
    place = rows.schema.get_field_index("token_versions")
    untold = rows.set_column(place, rows.schema.field(place), pa.nulls(2, rows.schema.field(place).type))
    with pytest.raises(CorruptPackError, match=r"token_versions of row 1 .* several weight_versions"):
        with_every_token(untold)


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
        ({"logprobs": [-0.5, 0.5, -1.0]}, "above 0"),
        ({"response_tokens": [7, -8, 9]}, "token is below 0"),
        ({"status": "failed"}, "needs its reason"),
        ({"failure": "why"}, "must have none"),
        ({"status": "failed", "failure": "why"}, "has no reward"),
        ({"status": "done"}, "status 'done' is none of finished, truncated, failed, partial"),
        ({"status": ""}, "status '' is none of"),
        ({"status": "partial"}, "park its group"),
    ],
)
def test_a_member_that_breaks_a_promise_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        result(member(0), member(1, **changes)).check()


def test_a_member_is_partial_only_where_its_group_is_parked() -> None:
    half_done = result(member(0, status="truncated"), member(1, status="partial", reward=None))
    Submission(None, parked=[half_done]).check()
    with pytest.raises(InvalidInputError, match="member 1: a partial member cannot be completed"):
        Submission(None, results=[half_done]).check()
    with pytest.raises(InvalidInputError, match="status 'done'"):
        Submission(None, parked=[result(member(0, status="done"))]).check()


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ([member(0, reward=float("nan"))], "reward is nan"),
        ([member(0, score=float("inf"))], "score is inf"),
        ([member(0), member(0)], "its own number"),
        ([member(-1)], "its own number"),
        ([], "without members"),
    ],
)
def test_what_no_row_or_mean_could_tell_is_refused_before_it_is_written(
    members: list[Member], told: str
) -> None:
    with pytest.raises(InvalidInputError, match=told):
        Submission(None, results=[result(*members)]).check()


@pytest.mark.parametrize("tokens", [[1, 2, 2**31], [1, 2, "a"]])
def test_tokens_that_are_no_32_bit_numbers_are_told_with_their_member(tokens: list[Any]) -> None:
    with pytest.raises(InvalidInputError, match="member 3: a response token is no 32-bit whole number"):
        to_record_batch([result(member(3, response_tokens=tokens))])


def test_segments_of_a_rollout_are_rows_with_what_it_shares() -> None:
    second = member(
        9, prompt_tokens=[1, 2, 3], loss_mask=[1, 0, 1], token_versions=["v2", "", "v2"], reward=None
    )
    whole = result(member(0, siblings=(second,)), member(1, reward=0.0))
    whole.check()
    rows = with_every_token(to_record_batch([whole])).to_pylist()
    assert [(r["member"], r["segment"], r["reward"]) for r in rows] == [(0, 0, 1.0), (0, 1, 1.0), (1, 0, 0.0)]
    assert [r["prompt_tokens"] for r in rows] == [[1, 2], [1, 2, 3], [1, 2]]
    assert [r["loss_mask"] for r in rows] == [[1, 1, 1], [1, 0, 1], [1, 1, 1]]
    assert rows[1]["token_versions"] == [0, -1, 0]
    assert (whole.mean_reward, whole.num_tokens) == (0.5, 9)


def test_a_parked_rollout_comes_back_with_its_segments() -> None:
    second = member(0, prompt_tokens=[1, 2, 3], loss_mask=[1, 0, 1])
    parked = result(member(0, siblings=(second,)), member(1))
    rows = with_every_token(to_record_batch([parked], kind="continuation"))
    again = saved_members(rows)
    assert [len(again[n].segments) for n in (0, 1)] == [2, 1]
    stored = to_record_batch([replace(parked, members=list(again.values()))], kind="continuation")
    assert with_every_token(stored).equals(rows)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"loss_mask": [1, 0]}, "3 tokens, 2 items of loss_mask"),
        ({"loss_mask": [1, 2, 1]}, "other than 0 and 1"),
        ({"loss_mask": [1, 1, 1], "token_versions": ["v2", "", "v2"]}, "no weights sampled has loss_mask 1"),
    ],
)
def test_a_mask_that_cannot_be_is_refused_in_every_segment(changes: dict[str, Any], told: str) -> None:
    for broken in (member(0, **changes), member(0, siblings=(member(0, **changes),))):
        with pytest.raises(InvalidInputError, match=told):
            result(broken).check()


def test_what_a_submission_says_includes_masks_prompts_and_segments() -> None:
    said = [
        member(0),
        member(0, loss_mask=[1, 0, 1]),
        member(0, prompt_tokens=[1]),
        member(0, siblings=(member(0),)),
    ]
    digests = {Submission("s", results=[result(m)]).content_digest() for m in said}
    assert len(digests) == len(said)
    same = [member(0), member(0, loss_mask=[1, 1, 1])]
    assert len({Submission("s", results=[result(m)]).content_digest() for m in same}) == 1
