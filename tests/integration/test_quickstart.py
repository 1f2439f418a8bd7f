"""The main job, shortened: real SGLang, real Megatron-core, a real task; then what a newcomer does with the finished run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from strawflow.flow.run import open_run
from strawflow.testing.invariants import check_exactly_once
from tests.readme import without_strawflow

pytestmark = pytest.mark.alone

RUN = Path("runs/quickstart")
STEPS = 3


def strawflow(folder: Path, *arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("strawflow")), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder in which `strawflow quickstart` has run, and what it printed."""
    folder = tmp_path_factory.mktemp("newcomer")
    return folder, strawflow(folder, "quickstart", "--steps", str(STEPS), "--seed", "3")


def test_the_summary_holds_the_figures_and_the_output_says_what_to_type_next(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, printed = finished
    summary = json.loads((folder / RUN / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert len(summary["reward_by_step"]) == STEPS
    assert 0 < summary["accuracy_before"] < 1
    assert 0 < summary["accuracy_after"] < 1
    assert summary["seconds"] > 0
    assert summary["restarts"] == 0
    assert summary["max_staleness"] == 0
    assert summary["logprob_gap_mean"] < 1e-4, "engine and trainer disagree"
    assert (folder / RUN / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "strawflow replay runs/quickstart" in printed.stdout
    assert "warm start: step" in printed.stderr


def test_every_prompt_was_trained_once_and_every_byte_checks(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = finished
    run = open_run(folder / RUN)
    fates = check_exactly_once(run, finished=True)
    run.close()
    assert len(fates) == 60 * 32 + STEPS * 32
    report = json.loads(strawflow(folder, "index", "check", str(RUN), "--json").stdout)
    assert report["findings"] == []


def test_a_second_start_is_refused_and_resume_of_a_finished_run_changes_nothing(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = finished
    before = (folder / RUN / "summary.json").read_text()
    refused = strawflow(folder, "quickstart", "--steps", "3", expect=5)
    assert "strawflow resume" in refused.stderr
    assert "--fresh" in refused.stderr
    strawflow(folder, "resume", str(RUN))
    after = json.loads((folder / RUN / "summary.json").read_text())
    assert after["reward_by_step"] == json.loads(before)["reward_by_step"]


def test_replay_gives_every_recorded_loss_without_an_engine(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = finished
    replayed = strawflow(folder, "replay", str(RUN), "--json")
    steps = [json.loads(line) for line in replayed.stdout.splitlines()]
    assert [s["step"] for s in steps] == list(range(1, 60 + STEPS + 1))
    assert all(s["loss"] == s["recorded_loss"] for s in steps)
    assert [s["state_equal"] for s in steps if s["step"] in (60, 63)] == [True, True]


def test_the_readme_opens_the_packs_with_polars_and_duckdb(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = finished
    shown = without_strawflow(folder)
    num_answers = 60 * 32 + STEPS * 32 * 8 + 2 * 400 * 5
    assert f"{num_answers} of {num_answers} rows count on this branch" in shown


def test_the_published_weights_load_in_transformers(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    from transformers import AutoModelForCausalLM

    folder, _ = finished
    newest = sorted((folder / RUN / "weights").iterdir())[-1]
    assert newest.name.startswith(f"v{60 + STEPS:06d}-main-")
    model = AutoModelForCausalLM.from_pretrained(newest, local_files_only=True)
    assert model.config.model_type == "qwen3"
