"""Evaluation by the command line: datasets named at creation, enqueued by name, and what came of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from strawflow.flow import eval_consumer
from strawflow.flow.run import open_run
from strawflow.testing.runs import SMALL, SmallRun, prompt_lines
from tests.conftest import CliResult

Cli = Callable[..., CliResult]

YAML = """
defaults: {greedy: false}
datasets:
  - {name: sums, samples_per_prompt: 4, prompts: sums.jsonl}
  - {name: easy, samples_per_prompt: 0, greedy: true}
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("prompts", "sums", "easy"):
        Path(f"{name}.jsonl").write_text(prompt_lines(16 if name == "prompts" else 2), encoding="utf-8")
    Path("evals.yaml").write_text(YAML, encoding="utf-8")


def create(cli: Cli) -> CliResult:
    flags = [
        word
        for name, value in {**SMALL, "eval.datasets": "evals.yaml"}.items()
        for word in (f"--{name}", value)
    ]
    return cli("run", "create", "./run", *flags)


def test_datasets_are_named_at_creation_enqueued_by_name_and_their_results_listed(cli: Cli) -> None:
    made = create(cli)
    assert made.code == 0, made.err
    assert "  strawflow enqueue ./run sums.jsonl --dataset sums" in made.out.splitlines()
    assert "  strawflow enqueue ./run FILE --dataset easy" in made.out.splitlines()
    Path("evals.yaml").unlink()
    for name in ("prompts", "sums", "easy"):
        assert cli("enqueue", "./run", f"{name}.jsonl", "--dataset", name).code == 0
    purposes = {d["dataset_id"]: d["purpose"] for d in cli("status", "./run", "--json").json["datasets"]}
    assert purposes == {"prompts": "train", "sums": "eval", "easy": "eval"}
    assert cli("eval", "list", "./run").out == "nothing was evaluated yet\n"
    with SmallRun(open_run(Path("run"))) as small:
        small.publish(0)
        small.sample()
        measured = cli("eval", "list", "./run", "--json").json
        eval_consumer.collect(small.run)
    listed = cli("eval", "list", "./run", "--json").json
    assert listed == measured
    assert [(r["step"], r["dataset"], r["num_passed"], r["num_answers"]) for r in listed] == [
        (0, "sums", 4, 8),
        (0, "easy", 0, 2),
    ]
    assert listed[0]["pass_at"] == {"1": 0.5, "2": pytest.approx(5 / 6), "4": 1.0}
    (easy,) = cli("eval", "list", "./run", "--dataset", "easy", "--json").json
    assert easy == listed[1]
    table = cli("eval", "list", "./run").out
    for word in ("pass@2", "0.8333", "4 sampled", "greedy", "0.0%"):
        assert word in table
    shown = cli("status", "./run").out
    assert "sums: pass@1 50.0%, pass@2 83.3%, pass@4 100.0%; easy (greedy): pass@1 0.0%" in shown
    assert cli("status", "./run", "--json").json["evaluations"] == listed
    assert cli("batch", "list", "./run", "--consumer", "eval", "--json").json[0]["num_units"] == 4


def test_a_dataset_that_the_run_does_not_have_is_refused(cli: Cli) -> None:
    create(cli)
    refused = cli("enqueue", "./run", "sums.jsonl", "--dataset", "sumz")
    assert refused.code == 2
    assert "no such dataset, neither for training nor for evaluation; did you mean sums?" in refused.err
    assert refused.err.count("\n") == 1
    refused = cli("enqueue", "./run", "sums.jsonl", "--dataset", "qqq")
    assert "it has prompts, demonstrations, held_out, sums, easy." in refused.err
    assert cli("status", "./run", "--json").json["datasets"] == []
    refused = cli("eval", "list", "./run", "--dataset", "prompts")
    assert (refused.code, "evaluates no such dataset" in refused.err) == (2, True)


def test_a_bad_file_makes_no_run(cli: Cli) -> None:
    Path("evals.yaml").write_text("datasets: [{name: sums, top_p: 3}]\n", encoding="utf-8")
    refused = create(cli)
    assert refused.code == 3
    assert refused.err == (
        "error: evals.yaml: dataset 1 (sums): top_p: Input should be less than or equal to 1, not 3\n"
    )
    assert not Path("run").exists()


def test_variables_of_the_command_are_no_fields_of_the_section(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRAWFLOW_EVAL_LIST_DATASET", "sums")
    assert create(cli).code == 0
    assert json.loads(Path("run/config.json").read_text())["eval"]["datasets"][0]["name"] == "sums"
    assert cli("eval", "list", "./run", "--json").json == []
