"""Enqueuing streams: a file larger than memory would allow is taken with a few hundred megabytes at most."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from strawflow.config import RunConfig
from strawflow.flow.run import create_run, open_run
from strawflow.index import datasets

pytestmark = pytest.mark.alone

LIMIT_BYTES = 300 * 1024 * 1024
PROGRAM = """
import sys
from pathlib import Path
from strawflow.flow.enqueue import EnqueueRequest, enqueue
from strawflow.flow.run import open_run
from strawflow.flow.session import WorkerSession
from strawflow.prompts.row import PromptKeys
from strawflow.prompts.source import PromptSource
run = open_run(Path(sys.argv[1]))
with WorkerSession(run, "enqueue") as session:
    source = PromptSource.parse(sys.argv[2])
    print(enqueue(session, EnqueueRequest("prompts", "train", source, PromptKeys("prompt", "label"))).num_added)
status = Path("/proc/self/status").read_text()
print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
"""


def write_prompts(path: Path, *, num_bytes: int) -> int:
    """Write JSON lines of about 2 KB; returns how many."""
    filler = "x" * 1900
    number = written = 0
    with path.open("w", encoding="utf-8") as sink:
        while written < num_bytes:
            written += sink.write(json.dumps({"prompt": f"{number} {filler}", "label": str(number)}) + "\n")
            number += 1
    return number


def enqueue_in_a_process(folder: Path, *, num_bytes: int) -> tuple[int, int, int]:
    """Return (rows in the file, rows added, peak resident bytes of the process that enqueued them)."""
    create_run(folder / "run", RunConfig.model_validate({"run": {"durability": "process"}})).close()
    path = folder / "prompts.jsonl"
    num_rows = write_prompts(path, num_bytes=num_bytes)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder / "run"), str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    num_added, peak_kib = (int(line) for line in done.stdout.split())
    return num_rows, num_added, peak_kib * 1024


@pytest.mark.long
def test_a_file_of_300_mb_is_enqueued_within_300_mb_of_memory(tmp_path: Path) -> None:
    num_rows, num_added, peak = enqueue_in_a_process(tmp_path, num_bytes=300_000_000)
    assert num_added == num_rows
    assert peak < LIMIT_BYTES
    run = open_run(tmp_path / "run")
    with run.index.read() as connection:
        assert datasets.num_rows(connection, "prompts") == num_rows
    run.close()


@pytest.mark.long
def test_a_file_of_5_gb_is_enqueued_within_300_mb_of_memory(tmp_path: Path) -> None:
    num_rows, num_added, peak = enqueue_in_a_process(tmp_path, num_bytes=5_000_000_000)
    assert num_added == num_rows
    assert peak < LIMIT_BYTES
