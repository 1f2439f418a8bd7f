"""A file of functions written for slime runs as it is, and what strawflow promises of tokens holds for what they make."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest

from strawflow.flow.run import Run
from strawflow_workers.rollout.hooks import slime
from tests.integration import slime_functions
from tests.integration.rollout_runs import NUM_SAMPLES, NUM_UNITS, Worker, completed, rows_of, trainer_of
from tests.integration.test_stale_groups import assembler, fates

HERE = "tests.integration.slime_functions:"


def test_a_file_of_slime_functions_samples_rewards_and_filters_a_run(make_run: Callable[..., Run]) -> None:
    slime_functions.NUM_SEEN.clear()
    run = make_run(
        steps=1,
        prompts=3 * NUM_UNITS,
        generate=HERE + "generate_several",
        reward=HERE + "reward",
        sample_filter=HERE + "keeps_members_before_3",
        assemble={"group_filter": HERE + "keeps_even_groups"},
    )
    with trainer_of(run) as publish, Worker(run) as worker:
        publish(0)
        with assembler(run):
            worker.wait(
                lambda: ("trained", None) in fates(run) or ("dropped", "zero_deviation") in fates(run)
            )
    assert ("dropped", "odd_group") in fates(run)
    assert set(slime_functions.NUM_SEEN) == {NUM_SAMPLES - 1}, "failed members were shown"
    members = [list(m) for _, m in groupby(rows_of(run), key=lambda row: (row["unit_id"], row["member"]))]
    assert [len(m) for m in members[:NUM_SAMPLES]] == [1, 2, 3, 4]
    for segments in members:
        for row in segments:
            assert len(row["weight_versions"]) == 1
            assert row["loss_mask"].count(0) == 2
            assert [m == 0 for m in row["loss_mask"]] == [v == -1 for v in row["token_versions"]]
        first = segments[0]
        if first["member"] == 3:
            assert first["failure"] == "sample filter: removed by the sample filter"
        else:
            assert first["reward"] == len(segments[-1]["response_text"]) % 3 + 1


@pytest.mark.parametrize(
    "function, told",
    [
        ("forgets_logprobs", "ask the engine with return_logprob"),
        ("asks_for_more", "strawflow gives slime's functions no args.megatron_path; given: hf_checkpoint"),
    ],
)
def test_what_slime_functions_leave_out_or_ask_too_much_fails_the_member_with_a_reason(
    make_run: Callable[..., Run], function: str, told: str
) -> None:
    run = make_run(generate=HERE + function)
    with trainer_of(run) as publish, Worker(run) as worker:
        publish(0)
        worker.wait(lambda: len(completed(run)) >= NUM_UNITS)
    assert all(told in row["failure"] for row in rows_of(run))


def test_which_of_several_weights_sampled_a_token_is_never_guessed() -> None:
    sample = slime.Sample(tokens=[1, 2, 3], response_length=2, rollout_log_probs=[-1.0, -1.0])
    sample.status = slime.Sample.Status.COMPLETED
    assert slime.segment_of(sample, ["v1"]).versions == ["v1", "v1"]
    with pytest.raises(ValueError, match=r"which of the weights .* sampled which token is not told"):
        slime.segment_of(sample, ["v1", "v2"])
    sample.weight_versions = ["v2", "v2"]
    assert slime.segment_of(sample, ["v1", "v2"]).versions == ["v2", "v2"]


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"response_length": 4}, "response_length 4 of 3 tokens"),
        ({"rollout_log_probs": [-1.0]}, "1 of 2 rollout_log_probs"),
        ({"loss_mask": [1]}, "1 items of loss_mask for 2 response tokens"),
        ({"status": slime.Sample.Status.PENDING}, "status 'pending'"),
    ],
)
def test_length_rules_of_samples_are_enforced(changes: dict[str, Any], told: str) -> None:
    sample = slime.Sample(
        tokens=[1, 2, 3],
        response_length=2,
        rollout_log_probs=[-1.0, -1.0],
        status=slime.Sample.Status.TRUNCATED,
    )
    for name, value in changes.items():
        setattr(sample, name, value)
    with pytest.raises(ValueError, match=told):
        slime.segment_of(sample, ["v1"])


def test_a_sample_goes_through_its_dict_with_attributes_of_its_own() -> None:
    sample = slime.Sample(index=3, tokens=[1], status=slime.Sample.Status.TRUNCATED)
    sample.turns = 2  # type: ignore[attr-defined]  # slime's samples take any
    again = slime.Sample.from_dict(sample.to_dict())
    assert (again, again.turns) == (sample, 2)  # type: ignore[attr-defined]
