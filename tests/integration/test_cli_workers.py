"""Starting workers by the command line: the process is replaced, and what is missing is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from strawflow.config import load_config
from strawflow.flow.run import create_run

ECHO = """
import json, os, sys
print(json.dumps({"pid": os.getpid(), "arguments": sys.argv[1:], "torch": "torch" in sys.modules}))
sys.exit(7)
"""

HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {name!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
from strawflow.cli.main import main
main(sys.argv[1:])
"""


@pytest.fixture
def run_root(tmp_path: Path) -> Path:
    create_run(tmp_path / "runs/a", load_config(flags={"run.durability": "process"})).close()
    return tmp_path / "runs/a"


@pytest.fixture
def echoing_workers(tmp_path: Path) -> dict[str, str]:
    """An environment in which the worker program only says how it was started."""
    package = tmp_path / "stand_in/strawflow_workers"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "entry.py").write_text(ECHO, encoding="utf-8")
    return {**os.environ, "PYTHONPATH": str(package.parent)}


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("worker rollout a", ["rollout", "{root}"]),
        ("worker assemble a --json", ["assemble", "{root}"]),
        ("worker train ./runs/a", ["train", "{root}"]),
        ("resume a", ["supervise", "{root}"]),
        ("resume a --json", ["supervise", "{root}", "--json"]),
        (
            "replay a --from-step 2 --to-step 5 --json",
            ["replay", "{root}", "--from-step", "2", "--to-step", "5", "--json"],
        ),
        ("quickstart --run new", ["quickstart", "--seed", "0", "--run", "{runs}/new"]),
        (
            "quickstart --seed 3 --steps 9 --task chess --threads 2 --fresh --json",
            [
                "quickstart", "--seed", "3", "--run", "{runs}/quickstart", "--steps", "9", "--task", "chess",
                "--threads", "2", "--fresh", "--json",
            ],
        ),
    ],
)  # fmt: skip
def test_the_worker_takes_the_place_of_the_command(
    run_root: Path, echoing_workers: dict[str, str], words: str, arguments: list[str]
) -> None:
    started = subprocess.Popen(
        [sys.executable, "-m", "strawflow.cli.main", *words.split()],
        stdout=subprocess.PIPE,
        text=True,
        env=echoing_workers,
        cwd=run_root.parent.parent,
    )
    out, _ = started.communicate(timeout=60)
    assert started.returncode == 7  # the worker's own code
    said = json.loads(out)
    assert said["pid"] == started.pid
    assert said["arguments"] == [a.format(root=run_root, runs=run_root.parent) for a in arguments]


@pytest.mark.parametrize(
    ("hidden", "words", "extra"),
    [
        ("torch", ["worker", "train"], "strawflow[trainer]"),
        ("megatron", ["resume"], "strawflow[trainer]"),
        ("aiohttp", ["worker", "rollout"], "strawflow[rollout]"),
        ("strawflow_workers", ["worker", "assemble"], "strawflow[rollout,trainer]"),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(
    run_root: Path, hidden: str, words: list[str], extra: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HIDE.format(name=hidden), *words, str(run_root)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3
    assert extra in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", ["worker rollout", "worker assemble", "worker train", "resume", "replay"])
def test_a_worker_of_no_run_is_not_started(
    tmp_path: Path, echoing_workers: dict[str, str], words: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "strawflow.cli.main", *words.split(), "absent", "--json"],
        capture_output=True,
        text=True,
        env=echoing_workers,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 4
    assert json.loads(done.stderr)["error"]["kind"] == "not_found"
