"""Damage as an operator meets it: what can still be shown is shown, and every place names the next command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strawflow.errors import CorruptPackError
from strawflow.flow.quarantine import quarantine_damage
from strawflow.index import batches, datasets, packs, units
from strawflow.testing.damage import flip
from strawflow.testing.runs import SmallRun, small_run
from tests.conftest import CliResult
from tests.contract.stored import end_sessions

Cli = Callable[..., CliResult]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallRun]:
    with small_run(tmp_path) as made:
        yield made


WAYS = pytest.mark.parametrize("in_quarantine", [False, True], ids=["found by reading", "in quarantine"])


def damage(small: SmallRun, extent_id: int, *, in_quarantine: bool) -> str:
    """Flip a bit of an extent; returns the path of its pack."""
    with small.run.index.read() as connection:
        extent = packs.find_extents(connection, [extent_id])[extent_id]
    flip(small.run.root / extent.path, extent.offset + extent.length - 3)
    if in_quarantine:
        end_sessions(small)
        quarantine_damage(small.run, do=True)
    return extent.path


def trajectories_of(small: SmallRun, unit_id: int) -> int:
    with small.run.index.read() as connection:
        found = units.find(connection, unit_id).extent_id
    assert found is not None
    return found


def prompts_of(small: SmallRun, unit_id: int) -> int:
    with small.run.index.read() as connection:
        segment_id = units.find(connection, unit_id).segment_id
        ((_, extent_id),) = datasets.segment_extent_ids(connection, segment_id)
    return extent_id


@WAYS
def test_a_unit_with_damaged_trajectories_shows_everything_else(
    cli: Cli, small: SmallRun, in_quarantine: bool
) -> None:
    small.advance(1)
    path = damage(small, trajectories_of(small, 1), in_quarantine=in_quarantine)
    shown = cli("unit", "show", small.run.root, 1, "--json")
    assert shown.code == CorruptPackError.exit_code
    assert (shown.json["members"], shown.json["prompt_damage"]) == ([], None)
    assert path in shown.json["damage"]
    assert "What is" in shown.json["prompt"]["prompt"]
    assert [(f["consumer"], f["outcome"], f["step"]) for f in shown.json["fates"]] == [
        ("trainer", "trained", 1)
    ]
    told = cli("unit", "show", small.run.root, 1).out
    for word in (f"DAMAGED trajectories: {path}", "prompt: What is", "trainer: trained in step 1"):
        assert word in told


@WAYS
def test_a_unit_with_a_damaged_prompt_shows_its_trajectories(
    cli: Cli, small: SmallRun, in_quarantine: bool
) -> None:
    small.sample(1)
    path = damage(small, prompts_of(small, 1), in_quarantine=in_quarantine)
    shown = cli("unit", "show", small.run.root, 1, "--json").json
    assert (shown["prompt"], shown["damage"], len(shown["members"])) == (None, None, 2)
    assert path in shown["prompt_damage"]
    told = cli("unit", "show", small.run.root, 1).out
    assert f"DAMAGED prompt: {path}" in told
    assert "answer 1 of unit 1" in told


@WAYS
def test_a_batch_with_damaged_rows_shows_its_plan(cli: Cli, small: SmallRun, in_quarantine: bool) -> None:
    small.advance(1)
    with small.run.index.read() as connection:
        batch = batches.require(connection, "main", "trainer", 1)
        (place,) = batches.places(connection, batch.batch_id)
    path = damage(small, place.extent_id, in_quarantine=in_quarantine)
    asked = cli("batch", "show", small.run.root, 1, "--json")
    assert asked.code == CorruptPackError.exit_code
    shown = asked.json
    assert shown["damage"] is None
    assert len(shown["members"]) == 8
    (micro_batch,) = shown["micro_batches"]
    assert (micro_batch["num_sequences"], path in micro_batch["damage"]) == (None, True)
    told = cli("batch", "show", small.run.root, 1).out
    assert f"DAMAGED mini-batch 0, slice 0, micro-batch 0: {path}" in told
    assert "trained" in told


@WAYS
def test_a_batch_with_a_damaged_plan_shows_its_rows_and_fates(
    cli: Cli, small: SmallRun, in_quarantine: bool
) -> None:
    small.advance(1)
    with small.run.index.read() as connection:
        plan = batches.require(connection, "main", "trainer", 1).plan_extent_id
    path = damage(small, plan, in_quarantine=in_quarantine)
    shown = cli("batch", "show", small.run.root, 1, "--json").json
    assert (shown["members"], path in shown["damage"]) == ([], True)
    assert [m["num_sequences"] for m in shown["micro_batches"]] == [8]
    assert {u["unit_id"] for u in shown["units"]} == {1, 2, 3, 4}
    told = cli("batch", "show", small.run.root, 1).out
    assert f"DAMAGED plan, so only the fate of each unit is told: {path}" in told


def test_status_says_that_extents_are_in_quarantine_and_what_to_type(cli: Cli, small: SmallRun) -> None:
    small.advance(1)
    assert "QUARANTINE" not in cli("status", small.run.root).out
    damage(small, trajectories_of(small, 1), in_quarantine=True)
    assert cli("status", small.run.root, "--json").json["num_quarantined"] == 1
    told = " ".join(cli("status", small.run.root).out.split())
    assert f"1 damaged extent; `strawflow index quarantine {small.run.root}` tells what they held" in told


def test_status_says_that_nothing_is_swept_after_a_restore_and_what_to_type(
    cli: Cli, small: SmallRun, tmp_path: Path
) -> None:
    small.advance(1)
    end_sessions(small)
    root = small.run.root
    assert cli("index", "backup", root, "--to", tmp_path / "backup").code == 0
    assert cli("index", "restore", root, "--from", tmp_path / "backup", "--replace", "--yes").code == 0
    told = " ".join(cli("status", root).out.split())
    assert "SWEEP nothing is swept (restored from backup" in told
    assert f"`strawflow storage reconcile {root}` allows it again" in told
    assert cli("storage", "reconcile", root, "--yes").code == 0
    assert "SWEEP" not in cli("status", root).out


def test_the_check_names_the_next_command_for_damage(cli: Cli, small: SmallRun) -> None:
    small.sample(1)
    damage(small, trajectories_of(small, 1), in_quarantine=False)
    checked = cli("index", "check", small.run.root, "--json")
    assert checked.code == CorruptPackError.exit_code
    (finding,) = checked.json["findings"]
    assert "`strawflow index quarantine RUN` tells what it held" in finding["message"]
