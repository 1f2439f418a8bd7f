"""Looking at a run by the command line: status, batches, units, events, the check."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import strawflow
from strawflow.flow import complete as completing
from strawflow.flow import rescue
from strawflow.flow.run import create_run
from strawflow.index import tables, weights
from strawflow.testing.runs import SmallRun, made_up_result, prompt_lines, small_config, small_run
from tests.conftest import CliResult

Cli = Callable[..., CliResult]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallRun]:
    with small_run(tmp_path) as made:
        yield made


def status_of(cli: Cli, small: SmallRun) -> dict[str, Any]:
    result = cli("status", small.run.root, "--json")
    assert result.code == 0, result.err
    found: dict[str, Any] = result.json
    return found


def fail_unit(small: SmallRun, error: str = "the engine closed the connection") -> int:
    """Fail the first claimable unit for good; returns its id."""
    session = small.session("rollout")
    unit_id = 0
    for _ in range(small.run.config.rollout.max_attempts):
        (grant,) = small.claim(1)
        unit_id = grant.unit_id
        completing.fail(session, unit_id, fence=grant.fence, error=error)
    return unit_id


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[SmallRun]:
    """A run of two prompt sets, 3 to 1, with one step trained."""
    settings = {"data.prompts": "sums.jsonl:3,words.jsonl:1"}
    with SmallRun(create_run(tmp_path / "mixed", small_config(settings))) as made:
        for name, first in (("sums", 0), ("words", 100)):
            path = tmp_path / f"{name}.jsonl"
            path.write_text(prompt_lines(8, first=first), encoding="utf-8")
            made.enqueue(path, dataset=name)
        made.publish(0)
        made.advance(1)
        yield made


# ---- prompt sets


def test_units_say_from_which_prompt_set_they_come_and_status_counts_by_set(
    cli: Cli, mixed: SmallRun
) -> None:
    listed = cli("unit", "list", mixed.run.root, "--json").json
    assert [u["dataset"] for u in listed[:4]] == ["sums", "sums", "words", "sums"]
    assert "words" in cli("unit", "list", mixed.run.root).out
    of_words = listed[2]["unit_id"]
    assert cli("unit", "show", mixed.run.root, of_words, "--json").json["dataset"] == "words"
    assert "of dataset words" in cli("unit", "show", mixed.run.root, of_words).out
    seen = status_of(cli, mixed)["prompt_sets"]
    assert {name: (s["weight"], s["num_admitted"], s["num_rows"]) for name, s in seen.items()} == {
        "sums": (0.75, 9, 8),
        "words": (0.25, 3, 8),
    }
    assert seen["sums"]["epoch"] == 1
    assert (seen["sums"]["num_groups"], seen["sums"]["mean_reward"]) == (6, 0.5)
    assert "9 admitted, weight 75.0%, mean reward 0.5" in cli("status", mixed.run.root).out


# ---- status


def test_status_tells_stage_steps_units_and_offers(cli: Cli, small: SmallRun) -> None:
    assert status_of(cli, small)["progress"]["stage"] == "rl"
    small.advance(1)
    small.sample(3)
    small.claim(1)
    seen = status_of(cli, small)
    assert seen["progress"] == {
        "stage": "rl",
        "position": 1,
        "trained": 1,
        "planned": 1,
        "total": 3,
        "warm_start_steps": 0,
    }
    counts = {(u["purpose"], u["state"]): u["num_units"] for u in seen["units"]}
    assert counts == {("train", "completed"): 11, ("train", "leased"): 1}
    assert seen["offered"] == {"train": 7}
    assert seen["outcomes"] == [{"outcome": "trained", "reason": None, "num_units": 4}]
    assert seen["last_batch"]["mean_reward"] == 0.5
    assert seen["last_metrics"]["loss"] == 1.0
    assert [c["step"] for c in seen["checkpoints"]] == [1]
    assert seen["newest_weights"]["step"] == 1
    assert seen["disk_bytes"]["packs"] > 0
    files = [p for p in (small.run.root / "weights").rglob("*") if p.is_file()]
    assert seen["disk_bytes"]["weights"] == sum(p.stat().st_size for p in files) > 0
    assert seen["events"][0]["name"] == "units.claimed"


def test_a_run_of_the_api_is_called_that_and_nothing_is_said_of_steps_to_come(
    cli: Cli, tmp_path: Path
) -> None:
    folder = tmp_path / "runs/mine"
    with strawflow.create(
        folder, prompts=[{"prompt": "2 + 2 ="}], settings={"run.durability": "process"}
    ) as store:
        assert cli("status", folder, "--json").json["progress"]["stage"] == "not started"
        store.admit(1)
        with store.worker() as worker, store.consumer("exporter") as exporter:
            (grant,) = worker.claim()
            member = strawflow.Member(0, "finished", [52], [-0.1], "", "stop", 1.0)
            members = [replace(member, member=n) for n in range(grant.profile.num_samples)]
            worker.complete([grant.result(members)])
            exporter.next_batch(1)
            exporter.advance()
    (told,) = cli("run", "list", folder.parent, "--json").json
    assert (told["stage"], told["position"], told["planned"], told["total"]) == ("api", 1, 1, None)
    assert "60" not in cli("run", "list", folder.parent).out
    shown = cli("status", folder).out
    assert "mine: moved on through the API" in shown
    assert "exporter 1 planned, 1 committed" in shown
    for wrong in ("not started", "of 60", "strawflow resume", "1 segments", "1 rows"):
        assert wrong not in shown


@pytest.mark.parametrize("columns", [80, 120])
def test_no_line_of_a_look_is_wider_than_the_terminal(
    cli: Cli, small: SmallRun, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_unit(small)
    small.advance(1)
    monkeypatch.setenv("COLUMNS", str(columns))
    root = small.run.root
    words = {
        "status": "checkpoint.committed",
        "run list": "position",
        "unit list": "completed",
        "batch list": "sequences",
        "batch show": "staleness",
        "worker list": "process",
        "events": "checkpoint.committed",
        "checkpoint list": "c000001-main.trainer-f1",
        "branch list": "position",
    }
    for look, word in words.items():
        lines = cli(*look.split(), root.parent if look == "run list" else root).out.splitlines()
        assert max(map(len, lines)) <= columns, look
        assert word in " ".join(lines).split(), look


def test_status_knows_before_within_and_after_the_warm_start(cli: Cli, tmp_path: Path) -> None:
    settings = {"warm_start.steps": "1", "warm_start.prompts_per_step": "4", "trainer.steps": "1"}
    with SmallRun(create_run(tmp_path / "warm", small_config(settings))) as warm:
        assert status_of(cli, warm)["progress"]["stage"] == "not started"
        warm.publish(0, admit_due=False)
        assert status_of(cli, warm)["progress"]["stage"] == "warm start"
    with small_run(tmp_path, settings={"trainer.steps": "1"}, name="short") as short:
        short.advance(1)
        assert status_of(cli, short)["progress"]["stage"] == "finished"


def test_status_shows_who_lives_what_they_hold_and_what_engines_serve(cli: Cli, small: SmallRun) -> None:
    small.assembler()
    session = small.session("rollout")
    with small.run.index.begin() as connection:
        weights.report_engine(
            connection,
            "engine-0",
            session_id=session.session_id,
            url="http://127.0.0.1:30000",
            build="fake/0",
            version_id=small.serving(),
        )
    seen = status_of(cli, small)
    live = {s["session_id"]: s for s in seen["sessions"]}
    assert 0 < live[session.session_id]["expires_in_s"] <= 60
    assert {r["role"]: r["is_live"] for r in seen["roles"]} == {
        "consume:trainer": True,
        "assemble:trainer": True,
    }
    assert seen["engines"][0]["version_id"] == seen["newest_weights"]["version_id"]
    shown = cli("status", small.run.root).out
    for word in ("engine-0", "assemble:trainer (fence 1)", "expires in", "8 ", "fake/0"):
        assert word in shown


def test_status_shows_failed_units_with_their_last_errors(cli: Cli, small: SmallRun) -> None:
    unit_id = fail_unit(small)
    seen = status_of(cli, small)
    assert seen["num_failed"] == 1
    assert [(u["unit_id"], u["last_error"]) for u in seen["failed"]] == [
        (unit_id, "the engine closed the connection")
    ]
    assert "the engine closed the connection" in cli("status", small.run.root).out


def test_status_says_that_nobody_works_and_how_to_go_on(cli: Cli, small: SmallRun) -> None:
    small.advance(1)
    for session in small.sessions.values():
        session.end()
    small.sessions.clear()
    assert f"no live worker; `strawflow resume {small.run.root}` starts them" in cli(
        "status", small.run.root
    ).out.replace("\n", " ")


def test_looking_changes_nothing(cli: Cli, small: SmallRun) -> None:
    small.advance(1)
    before = status_of(cli, small)["events"]
    for words in (("status",), ("batch", "list"), ("batch", "show"), ("unit", "list"), ("index", "check")):
        assert cli(*words, small.run.root).code == 0
    assert status_of(cli, small)["events"] == before


# ---- batches


def test_batches_are_listed_in_step_order(cli: Cli, small: SmallRun) -> None:
    assert cli("batch", "list", small.run.root).out == "no batch is planned yet\n"
    assert cli("batch", "show", small.run.root).code == 4
    small.advance(2)
    listed = cli("batch", "list", small.run.root, "--json").json
    assert [(b["step"], b["state"], b["num_units"]) for b in listed] == [(1, "trained", 4), (2, "trained", 4)]
    assert [b["step"] for b in cli("batch", "list", small.run.root, "--last", 1, "--json").json] == [2]
    assert "trained" in cli("batch", "list", small.run.root).out


def test_a_batch_is_opened_with_fates_rewards_staleness_and_lengths(cli: Cli, small: SmallRun) -> None:
    small.advance(1)
    shown = cli("batch", "show", small.run.root, 1, "--json").json
    assert shown["batch"]["step"] == 1
    assert [u["outcome"] for u in shown["units"]] == ["trained"] * 4
    assert len(shown["members"]) == 8
    member = next(m for m in shown["members"] if m["member"] == 1)
    assert (member["outcome"], member["reward"], member["staleness"]) == ("trained", 1.0, 0)
    assert (member["prompt_length"], member["response_length"]) == (3, 3)
    (place,) = shown["micro_batches"]
    assert (place["num_sequences"], place["num_tokens"]) == (8, 44)
    assert (small.run.root / place["path"]).exists()
    assert "response_length" in cli("batch", "show", small.run.root).out
    assert cli("batch", "show", small.run.root, 9, "--json").error["kind"] == "not_found"


# ---- units


def test_units_are_listed_by_state_up_to_a_limit(cli: Cli, small: SmallRun) -> None:
    unit_id = fail_unit(small)
    failed = cli("unit", "list", small.run.root, "--state", "failed", "--json").json
    assert [u["unit_id"] for u in failed] == [unit_id]
    assert len(cli("unit", "list", small.run.root, "--limit", 3, "--json").json) == 3
    assert "--limit shows more" in cli("unit", "list", small.run.root, "--limit", 3).out
    assert cli("unit", "list", small.run.root, "--state", "eaten").code == 2


def test_a_unit_is_opened_with_prompt_answers_fate_and_events(cli: Cli, small: SmallRun) -> None:
    small.advance(1)
    shown = cli("unit", "show", small.run.root, 1, "--json").json
    assert shown["prompt"]["prompt"].startswith("What is ")
    assert [m["response_text"] for m in shown["members"]] == ["answer 0 of unit 1", "answer 1 of unit 1"]
    assert [m["num_response_tokens"] for m in shown["members"]] == [2, 3]
    assert shown["fates"] == [
        {"consumer": "trainer", "epoch": 0, "outcome": "trained", "reason": None, "step": 1}
    ]
    assert [e["name"] for e in shown["events"]] == ["units.completed", "units.claimed"]
    text = cli("unit", "show", small.run.root, 1).out
    assert "trainer: trained in step 1" in text
    assert "answer 1 of unit 1" in text


def test_a_failed_member_is_shown_with_its_reason_and_without_a_reward(cli: Cli, small: SmallRun) -> None:
    (grant,) = small.claim(1)
    result = made_up_result(grant, small.serving() or "", failed=[1])
    completing.complete(small.session("rollout"), [result], submission_id="s-1")
    members = cli("unit", "show", small.run.root, grant.unit_id, "--json").json["members"]
    assert (members[1]["status"], members[1]["reward"]) == ("failed", None)
    assert members[1]["failure"] == "the reward raised ValueError"


def test_failed_units_are_offered_again_one_or_all(cli: Cli, small: SmallRun) -> None:
    first, second = fail_unit(small), fail_unit(small)
    assert cli("unit", "retry", small.run.root, first, "--json").json == {"retried": [first]}
    assert cli("unit", "retry", small.run.root, first).code == 9
    assert cli("unit", "retry", small.run.root, "--json").json == {"retried": [second]}
    assert cli("unit", "retry", small.run.root).out == "no failed unit to retry\n"


# ---- events


def test_events_come_newest_first_and_by_name(cli: Cli, small: SmallRun) -> None:
    small.advance(1)
    events = cli("events", small.run.root, "--limit", 5, "--json").json
    assert len(events) == 5
    assert [e["event_id"] for e in events] == sorted((e["event_id"] for e in events), reverse=True)
    only = cli("events", small.run.root, "--name", "units.completed", "--json").json
    assert {e["name"] for e in only} == {"units.completed"}
    assert "checkpoint.committed" in cli("events", small.run.root).out


# ---- the check


def findings(cli: Cli, small: SmallRun) -> list[dict[str, str]]:
    result = cli("index", "check", small.run.root, "--json")
    report = result.json
    assert result.code == (0 if report["is_sound"] else 11)
    assert report["is_sound"] == (report["findings"] == [])
    found: list[dict[str, str]] = report["findings"]
    return found


def test_a_run_is_sound_in_every_state_it_passes_through(cli: Cli, small: SmallRun) -> None:
    assert findings(cli, small) == []
    small.claim(2)
    assert findings(cli, small) == []
    small.complete(small.claim(2))
    fail_unit(small)
    assert findings(cli, small) == []
    rescue.declare_lost(small.run, small.session("rollout").session_id, reason="test")
    del small.sessions["rollout"]
    assert findings(cli, small) == []
    rescue.recover_packs(small.session("supervise"))
    assert findings(cli, small) == []
    small.sample()
    small.plan()
    assert findings(cli, small) == []
    small.train(1)
    assert findings(cli, small) == []


def test_a_flipped_bit_is_found_and_named(cli: Cli, small: SmallRun) -> None:
    small.advance(1)
    (place,) = cli("batch", "show", small.run.root, 1, "--json").json["micro_batches"]
    path = small.run.root / place["path"]
    content = bytearray(path.read_bytes())
    content[place["offset"] + place["length"] // 2] ^= 1
    path.write_bytes(content)
    (found,) = findings(cli, small)
    assert found["check"] == "extent"
    assert place["path"] in found["message"]
    assert cli("batch", "show", small.run.root, 1).code == 11


def test_a_missing_pack_is_found(cli: Cli, small: SmallRun) -> None:
    small.advance(1)
    (place,) = cli("batch", "show", small.run.root, 1, "--json").json["micro_batches"]
    (small.run.root / place["path"]).unlink()
    assert [f["check"] for f in findings(cli, small)] == ["pack"]


def test_a_missing_checkpoint_folder_is_found(cli: Cli, small: SmallRun) -> None:
    small.advance(1)
    shutil.rmtree(small.run.root / "checkpoints/c000001-main.trainer-f1")
    (found,) = findings(cli, small)
    assert (found["check"], found["subject"]) == ("checkpoint", "checkpoints/c000001-main.trainer-f1")
    assert "is missing" in found["message"]


SPOILS: dict[str, tuple[str, str, str]] = {
    "a completed unit loses its offer": ("DELETE FROM offers WHERE unit_id = 5", "fate", "never be trained"),
    "a trained unit is offered again": (
        "INSERT INTO offers VALUES ('main', 'trainer', 'train', 0, 1)",
        "fate",
        "trained twice",
    ),
    "a trained unit is ready again": (
        "UPDATE units SET state = 'ready', extent_id = NULL WHERE unit_id = 1",
        "fate",
        "still to be worked on",
    ),
    "a unit has two fates": (
        "INSERT INTO assignments SELECT unit_id, branch_id, consumer, 7, batch_id, outcome, reason, at_step "
        "FROM assignments WHERE unit_id = 1",
        "fate",
        "more than one fate",
    ),
    "the cursor ran ahead": ("UPDATE cursors SET num_admitted = num_admitted + 1", "cursor", "counts 13"),
    "a batch is gone from its place": ("UPDATE batches SET step = 9", "batch", "not 1 to that"),
    "the position ran ahead of a batch": ("UPDATE batches SET state = 'planned'", "batch", "position is 1"),
    "a segment counts too many rows": ("UPDATE segments SET num_rows = 99", "count", "99 rows"),
    "a batch counts too many sequences": ("UPDATE batches SET num_sequences = 9", "count", "9 sequences"),
    "an extent lies in a condemned pack": (
        "UPDATE packs SET state = 'condemned' WHERE kind = 'plan'",
        "dangling",
        "condemned",
    ),
    "a lease is held by a lost session": (
        "UPDATE units SET state = 'leased', session_id = 'gone' WHERE state = 'ready'",
        "dangling",
        "not live",
    ),
    "a checkpoint stands for another batch": (
        "UPDATE checkpoints SET batch_digest = 'x'",
        "dangling",
        "another batch",
    ),
}


@pytest.mark.parametrize("name", SPOILS)
def test_a_broken_promise_is_found_when(cli: Cli, small: SmallRun, name: str) -> None:
    statement, check, message = SPOILS[name]
    small.advance(1)
    with small.run.index.begin() as connection:
        connection.exec_driver_sql(statement)
    found = findings(cli, small)
    assert [f for f in found if f["check"] == check and message in f["message"]], json.dumps(found, indent=1)
    assert message in cli("index", "check", small.run.root).out.replace("\n", " ")


def test_every_table_of_the_index_is_in_the_run(small: SmallRun) -> None:
    with small.run.index.read() as connection:
        for table in tables.metadata.sorted_tables:
            connection.exec_driver_sql(f"SELECT count(*) FROM {table.name}")


def test_damaged_weights_and_checkpoints_are_found_and_named(cli: Cli, small: SmallRun) -> None:
    small.advance(1)
    (checkpoint,) = small.run.root.glob("checkpoints/*/state")
    weights = sorted(small.run.root.glob("weights/*/model.safetensors"))[-1]
    for path in (checkpoint, weights):
        content = bytearray(path.read_bytes())
        content[-1] ^= 0xFF
        path.write_bytes(content)
    found = {f["check"]: f["message"] for f in findings(cli, small)}
    assert set(found) == {"checkpoint", "weights"}
    assert str(checkpoint) in found["checkpoint"]
    assert str(weights) in found["weights"]
