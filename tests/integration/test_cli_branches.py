"""Branches and checkpoints by the command line, of a run made by programs of one's own: it has no model for our workers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import strawflow
from strawflow.flow import pins
from strawflow.index import units
from strawflow.index.pins import PinKind
from strawflow.testing.runs import SmallRun
from tests.conftest import CliResult

Cli = Callable[..., CliResult]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run without a model; its trainer and a second consumer each committed two checkpoints of four groups."""
    settings = {
        "run.durability": "process",
        "rollout.samples_per_prompt": 1,
        "algorithm.advantage": "reward",
    }
    with strawflow.create(
        tmp_path / "own", prompts=[{"prompt": str(n)} for n in range(8)], settings=settings
    ) as store:
        store.admit(8)
        producer = SmallRun(store.run)
        assert producer.sample() == 8
        for session in producer.sessions.values():
            session.end()
        for name in ("trainer", "second"):
            with store.consumer(name) as consumer:
                while consumer.next_batch(4) is not None:
                    (consumer.checkpoint_folder() / "state").write_text(name)
                    consumer.commit_checkpoint()
    return tmp_path / "own"


def test_checkpoints_are_listed_by_consumer_with_what_is_kept_of_them(cli: Cli, folder: Path) -> None:
    with strawflow.open(folder) as store:
        pins.pin(store.run, PinKind.CHECKPOINT, "1", reason="for a figure")
    listed = cli("checkpoint", "list", folder, "--json").json
    assert [(c["consumer"], c["step"], c["branch_id"], c["files"], c["pinned"]) for c in listed] == [
        ("second", 1, "main", "kept", False),
        ("second", 2, "main", "kept", False),
        ("trainer", 1, "main", "kept", True),
        ("trainer", 2, "main", "kept", False),
    ]
    assert (folder / listed[0]["path"]).is_dir()
    assert [c["step"] for c in cli("checkpoint", "list", folder, "--consumer", "second", "--json").json] == [
        1,
        2,
    ]
    assert "c000002-main.second-f1" in cli("checkpoint", "list", folder).out
    assert "no consumer 'nobody'" in cli("checkpoint", "list", folder, "--consumer", "nobody").err


def test_a_resume_that_cannot_start_its_workers_makes_no_branch(cli: Cli, folder: Path) -> None:
    refused = cli("resume", folder, "--from", "1", "--branch", "alt")
    assert refused.code == 3
    assert "model.path is empty" in refused.err
    assert [b["branch"] for b in cli("branch", "list", folder, "--json").json] == ["main"]


def test_a_branch_is_made_without_workers_and_says_where_everybody_goes_on(cli: Cli, folder: Path) -> None:
    made = cli("branch", "create", folder, "--from", "1", "alt")
    assert made.code == 0, made.err
    assert "4 groups start again" in made.out
    assert "consumer second goes on after its step 1" in made.out
    of_second = cli("branch", "create", folder, "--from", "1", "--consumer", "second", "third", "--json").json
    assert (of_second["parent_id"], of_second["positions"]) == ("main", {"second": 1, "trainer": 1})
    assert [(b["branch"], b["active"]) for b in cli("branch", "list", folder, "--json").json] == [
        ("main", False),
        ("alt", False),
        ("third", True),
    ]
    assert len(cli("batch", "list", folder, "--consumer", "second", "--json").json) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "9", "alt"], "no checkpoint of step 9 of consumer 'trainer' on branch 'main'"),
        (["--from", "c9", "alt"], "strawflow checkpoint list"),
        (["--from", "c000001-main.second-f1", "alt"], "with --consumer second"),
        (["--from", "1", "main"], "there is a branch 'main' already"),
    ],
)
def test_a_branch_that_cannot_be_made_is_refused_with_what_to_do(
    cli: Cli, folder: Path, words: list[str], message: str
) -> None:
    refused = cli("branch", "create", folder, *words, "--json")
    assert refused.code != 0
    assert message in json.loads(refused.err)["error"]["message"]


def test_an_export_goes_on_after_a_branch_and_its_files_of_the_line_hold_every_prompt_once(
    cli: Cli, folder: Path, tmp_path: Path
) -> None:
    exported = tmp_path / "exported"
    example("export.py", folder, exported)
    before = {file.name: file.read_bytes() for file in exported.iterdir()}
    assert cli("branch", "create", folder, "--from", "1", "alt").code == 0
    with strawflow.open(folder) as store, closing(SmallRun(store.run)) as producer:
        assert producer.sample() == 4
    example("export.py", folder, exported)
    assert {name: (exported / name).read_bytes() for name in before} == before
    on_line = cli("batch", "list", folder, "--consumer", "export", "--json").json
    files = [exported / f"{batch['step']:06d}-{batch['digest']}.parquet" for batch in on_line]
    unit_ids = [row for file in files for row in pq.read_table(file)["unit_id"].to_pylist()]
    with strawflow.open(folder) as store, store.run.index.read() as connection:
        places = [units.find(connection, unit_id).position for unit_id in unit_ids]
    assert sorted(places) == list(range(8))
    assert len(list(exported.iterdir())) == len(before) + len(files)


def example(name: str, *arguments: object) -> None:
    words = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    subprocess.run(words, check=True, capture_output=True, timeout=120)
