"""Groups that are broken off go on where they were: by any worker, with what is left of their limits, each token with the
weights that sampled it. The fake engine's tokens are a function of those before them, so a break in the right place shows in
none of them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from strawflow.config import load_config, refuse_deadlocks
from strawflow.errors import ConfigError
from strawflow.flow import admit, claim, complete
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.flow.trajectory import Member
from strawflow.index import datasets, events, units, weights
from strawflow.states import UnitState
from strawflow.testing.fake_engine import Chain
from strawflow_workers.rollout.tokens import PromptTokenizer
from tests.integration.rollout_runs import NUM_UNITS, Worker, completed, rows_of, trainer_of

SLOW = {"token-s": "0.05", "mean-tokens": "100000"}
"""Every response has max_response_tokens tokens, and each takes 50 ms."""
VOCAB, EOS = 320, 257


def in_flight(run: Run) -> bool:
    with run.index.read() as connection:
        return len(units.listed(connection, run.branch, state=UnitState.LEASED)) == NUM_UNITS


def versions_of(row: dict[str, Any]) -> list[str]:
    return [row["weight_versions"][place] for place in row["token_versions"]]


def assert_drawn_without_a_break(row: dict[str, Any]) -> None:
    """Draw the response again from its prompt, each token with the weights the row names; it must be the same."""
    chain = Chain(row["prompt_tokens"], sample=0)
    drawn = [
        chain.next(weight_version=version, vocab_size=VOCAB, eos=EOS, mean_tokens=100_000)
        for version in versions_of(row)
    ]
    assert [token for token, _ in drawn] == row["response_tokens"]
    assert [logprob for _, logprob in drawn] == pytest.approx(row["logprobs"], abs=1e-6)


def newer_weights_amid_groups(run: Run) -> str:
    """Publish weights, and newer ones once groups are in flight, until a step's groups are completed; returns the newer."""
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:
            worker.wait(lambda: in_flight(run))
            worker.sleep(0.3)
            newer = publish(1)
            worker.wait(lambda: len(completed(run)) >= NUM_UNITS)
    return newer


@pytest.mark.parametrize("policy", ["park", "continue", "finish"])
def test_what_new_weights_do_to_groups_in_flight(make_run: Callable[..., Run], policy: str) -> None:
    run = make_run(
        engine_options=SLOW,
        on_new_weights=policy,
        samples_per_prompt=1,
        max_response_tokens=60,
        max_staleness=1,
        schedule="sync",
    )
    newer = newer_weights_amid_groups(run)
    first = sorted(completed(run), key=lambda u: u.unit_id)[:NUM_UNITS]
    rows = [row for row in rows_of(run) if row["unit_id"] in {u.unit_id for u in first}]
    assert len(rows) == NUM_UNITS
    for row in rows:
        assert len(row["response_tokens"]) == 60
        assert row["status"] == "truncated"
        assert_drawn_without_a_break(row)
    mixed = [row for row in rows if len(row["weight_versions"]) == 2]
    assert bool(mixed) == (policy != "finish")
    for row in mixed:
        told = versions_of(row)
        assert told == sorted(told), "a token of older weights follows one of newer"
        assert told[-1] == newer
    assert {u.parks > 0 for u in first} == {policy == "park"}
    assert {u.attempts for u in first} == {1}


def test_an_engine_that_cannot_pause_parks_instead(make_run: Callable[..., Run]) -> None:
    run = make_run(
        engine_options={**SLOW, "no-pause": "1"},
        on_new_weights="continue",
        samples_per_prompt=1,
        max_response_tokens=60,
        max_staleness=1,
        schedule="sync",
    )
    newer_weights_amid_groups(run)
    assert any(u.parks for u in completed(run))
    for row in rows_of(run):
        assert_drawn_without_a_break(row)


def test_a_drained_worker_parks_and_the_next_goes_on(make_run: Callable[..., Run]) -> None:
    run = make_run(engine_options=SLOW, samples_per_prompt=3, max_response_tokens=60)
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:
            worker.wait(lambda: in_flight(run))
            worker.sleep(0.8)
        with run.index.read() as connection:
            parked = units.listed(connection, run.branch)
        assert [(u.state, u.parks, u.attempts) for u in parked] == [(UnitState.READY, 1, 0)] * NUM_UNITS
        before = {u.unit_id: u.num_tokens for u in parked}
        assert all(0 < (tokens or 0) < 3 * 60 for tokens in before.values())
        with Worker(run) as worker:
            worker.wait(lambda: len(completed(run)) >= NUM_UNITS)
    for unit in completed(run):
        assert (unit.attempts, unit.parks) == (1, 1)
    for row in rows_of(run):
        assert len(row["response_tokens"]) == len(row["logprobs"]) == len(row["token_versions"]) == 60
        if row["member"] == 0:
            assert_drawn_without_a_break(row)


def test_without_partial_rollout_a_broken_off_group_starts_again_pristine(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(engine_options=SLOW, samples_per_prompt=1, max_response_tokens=60, partial_rollout=False)
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:
            worker.wait(lambda: in_flight(run))
            worker.sleep(0.3)
        with run.index.read() as connection:
            found = units.listed(connection, run.branch)
    assert [(u.state, u.parks, u.attempts, u.extent_id) for u in found] == [
        (UnitState.READY, 0, 0, None)
    ] * NUM_UNITS


def test_saved_tokens_that_could_not_be_trained_any_more_are_dropped_with_the_reason(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(
        engine_options=SLOW,
        on_new_weights="park",
        samples_per_prompt=1,
        max_response_tokens=60,
    )
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:
            worker.wait(lambda: in_flight(run))
            worker.sleep(0.3)
        # A step goes by while they are parked: with max_staleness 0 their tokens are worth nothing now.
        with run.index.begin() as connection:
            connection.exec_driver_sql("UPDATE consumers SET planned = 1")
        newer = publish(1)
        with Worker(run) as worker:
            worker.wait(lambda: len(completed(run)) >= NUM_UNITS)
    assert {tuple(row["weight_versions"]) for row in rows_of(run)} == {(newer,)}
    with run.index.read() as connection:
        told = events.latest(connection, limit=100, name_prefix="continuation.dropped")
    assert len(told) == NUM_UNITS
    assert {e["facts"]["reason"] for e in told} == {"stale"}
    assert all(e["facts"]["num_tokens"] > 0 for e in told)


@pytest.mark.parametrize(("schedule", "expected"), [("sync", 1), ("async", 3)])
def test_admission_runs_ahead_as_far_as_the_schedule_says(
    make_run: Callable[..., Run], schedule: str, expected: int
) -> None:
    run = make_run(schedule=schedule, max_staleness=2, over_provision=3, steps=5)
    with trainer_of(run) as publish:
        publish(0)
        with WorkerSession(run, "rollout") as session:
            assert admit.admit_due(session) == expected * NUM_UNITS + 3
            assert admit.admit_due(session) == 0
        publish(4)
        with WorkerSession(run, "rollout") as session:
            admit.admit_due(session)
        with run.index.read() as connection:
            assert datasets.num_admitted(connection, run.branch, admit.PROMPTS) == 5 * NUM_UNITS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_backlog": "3", "prompts_per_step": "4"}, r"max_backlog 3 < rollout.prompts_per_step 4"),
        ({"over_provision": "8"}, r"1 step stale: more than 0"),
        ({"min_response_tokens": "9", "max_response_tokens": "8"}, r"no response could ever end"),
    ],
)
def test_what_must_deadlock_is_refused_with_the_arithmetic(settings: dict[str, str], message: str) -> None:
    config = load_config(flags={f"rollout.{name}": value for name, value in settings.items()})
    with pytest.raises(ConfigError, match=message):
        refuse_deadlocks(config)


def park_with(run: Run, lengths: list[int], version_id: str) -> dict[int, int]:
    """Claim a group for each length and park it with so many tokens of its response; returns {unit: length}."""
    tokenizer = PromptTokenizer(run.model_path)
    with WorkerSession(run, "rollout") as session:
        admit.admit_due(session)
        shelf = claim.PromptShelf(session)
        grants = claim.claim(session, shelf, limit=len(lengths), serving_version_id=version_id)
        progress = []
        for grant, length in zip(grants, lengths, strict=True):
            prompt_tokens = tokenizer.encode(grant.prompt)
            chain = Chain(prompt_tokens, sample=0)
            drawn = [
                chain.next(weight_version=version_id, vocab_size=VOCAB, eos=EOS, mean_tokens=100_000)
                for _ in range(length)
            ]
            member = Member(
                member=0,
                status="partial",
                response_tokens=[token for token, _ in drawn],
                logprobs=[logprob for _, logprob in drawn],
                token_versions=version_id,
                finish_reason="abort",
                reward=None,
            )
            progress.append(grant.result([member], prompt_tokens=prompt_tokens))
        complete.park(session, progress, submission_id="saved before")
    return {grant.unit_id: length for grant, length in zip(grants, lengths, strict=True)}


def test_a_resumed_response_asks_for_what_is_left_and_not_at_all_when_nothing_is(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(engine_options={"mean-tokens": "100000"}, samples_per_prompt=1, max_response_tokens=100)
    with trainer_of(run) as publish:
        saved = park_with(run, [25, 50, 99, 100], publish(0))
        with Worker(run) as worker:
            worker.wait(lambda: len(completed(run)) >= NUM_UNITS)
            with run.index.read() as connection:
                (engine,) = weights.engines_listed(connection)
            with urllib.request.urlopen(f"{engine.url}/requests", timeout=10) as answer:
                asked = json.loads(answer.read())
    assert sorted(r["sampling_params"]["max_new_tokens"] for r in asked) == [1, 50, 75]
    for row in rows_of(run):
        assert (row["status"], len(row["response_tokens"])) == ("truncated", 100)
        assert_drawn_without_a_break(row)
    assert {u.unit_id for u in completed(run)} == saved.keys()
