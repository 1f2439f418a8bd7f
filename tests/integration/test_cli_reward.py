"""`strawflow reward check`: samples of a file scored without engines, every failure in its row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from strawflow.errors import InvalidInputError
from strawflow_workers.rollout.rewards.check import check_command
from strawflow_workers.rollout.rewards.scorer import ScorerOptions
from strawflow_workers.rollout.rewards.spec import RewardSpec

ROWS: list[dict[str, Any]] = [
    {"prompt": "1 + 1", "response": "2", "label": "2"},
    {"prompt": "1 + 1", "response": "3", "label": 2},
    {"prompt": "1 + 1", "response": "2"},
    {"prompt": "best?", "responses": ["(A)", "B"], "label": "B", "metadata": {"reward": "multiple_choice"}},
]


def check(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "strawflow.cli.main", "reward", "check", *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
    )


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_samples_are_scored_and_failures_told_by_row(samples: Path) -> None:
    done = check("exact", "--file", samples.name, "--json", cwd=samples.parent)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    failure = "the reward raised ValueError: the row has no label to compare with"
    assert [tuple(sample.values()) for sample in found["samples"]] == [
        (1, 0, 1.0, 1.0, None),
        (2, 0, 0.0, 0.0, None),
        (3, 0, None, None, failure),
        (4, 0, 0.0, 0.0, None),
        (4, 1, 1.0, 1.0, None),
    ]
    assert (found["num_samples"], found["num_failed"], found["mean_score"]) == (5, 1, 0.5)
    shown = check("exact", "--file", samples.name, cwd=samples.parent)
    assert failure in " ".join(shown.stdout.split())  # the table wraps it
    assert "5 samples: 4 scored, mean 0.5; 1 failed" in shown.stdout


def test_a_groups_function_of_ones_own_is_tried_with_its_post_processing(samples: Path) -> None:
    (samples.parent / "mine.py").write_text(
        "def longest(response_texts, **row):\n"
        "    return [float(text == max(response_texts, key=len)) for text in response_texts]\n"
        "def negative(rewards, **row):\n"
        "    return [-reward for reward in rewards]\n"
    )
    path = samples.parent / "groups.jsonl"
    path.write_text(json.dumps({"prompt": "", "responses": ["a", "bb"]}) + "\n\n")
    words = ("group:mine:longest", "--post-process", "mine:negative", "--file", str(path), "--json")
    found = json.loads(check(*words, cwd=samples.parent).stdout)
    assert [(s["member"], s["score"], s["reward"]) for s in found["samples"]] == [(0, 0, 0), (1, 1, -1)]


@pytest.mark.parametrize(
    "words, code, told",
    [
        (["mth"], 3, "reward 'mth' is unknown; did you mean 'math'?"),
        (["json:loadz"], 3, "has no attribute 'loadz'; did you mean 'load"),
        (["exact", "--post-process", "math"], 3, "--post-process 'math' is no function"),
    ],
)
def test_what_cannot_be_checked_is_one_clear_error(
    samples: Path, words: list[str], code: int, told: str
) -> None:
    done = check(*words, "--file", samples.name, cwd=samples.parent)
    assert (done.returncode, told in done.stderr) == (code, True), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "content, told",
    [
        ('{"response": "a"}\n{"prompt": "b"}\n', ":2: the row needs 'response', a text, or 'responses'"),
        ('{"response": 1}\n', ":1: the row needs 'response', a text"),
        ('{"responses": []}\n', ":1: the row needs 'response', a text"),
        ("[]\n", ":1: the row is no object"),
        ("{\n", ":1: not JSON"),
        ('{"response": "a", "metadata": "{}"}\n', ":1: 'metadata' must be an object"),
    ],
)
def test_a_row_that_is_no_sample_is_refused_with_its_line(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidInputError) as caught:
        check_command(path, ScorerOptions(spec=RewardSpec("exact")), as_json=False)
    assert caught.value.message.startswith(f"{path}{told}")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = check("exact", "--file", "absent.jsonl", "--json", cwd=tmp_path)
    assert done.returncode == 4
    assert json.loads(done.stderr)["error"]["message"] == "there is no file absent.jsonl"
