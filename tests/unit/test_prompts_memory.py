"""The reader streams: its memory does not grow with the file. Each read runs in a process of its own and is measured."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MIB = 2**20

READ_AND_MEASURE = """
import json, re, sys, time
from strawflow.prompts import PromptKeys, PromptSource, ReadReport, read_prompts
report, began = ReadReport(), time.monotonic()
last = 0
for row in read_prompts(PromptSource.parse(sys.argv[1]), PromptKeys("prompt"), report=report, on_bad_row="skip"):
    last = row.source_line
# Not ru_maxrss: that one is inherited from the process that started this one.
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
print(json.dumps({"peak": peak, "rows": report.num_accepted, "rejected": dict(report.rejected), "last": last,
                  "seconds": time.monotonic() - began}))
"""


def read_in_a_process(source: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", READ_AND_MEASURE, source], capture_output=True, text=True, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def write_rows(path: Path, total_bytes: int, *, prompt_chars: int = 4000) -> int:
    """Write rows of about `prompt_chars` until the uncompressed size is reached; return how many."""
    line = (json.dumps({"prompt": "word " * (prompt_chars // 5), "number": 0}) + "\n").encode()
    block = line * max(1, MIB // len(line))
    blocks = total_bytes // len(block) + 1
    with gzip.open(path, "wb", compresslevel=1) if path.suffix == ".gz" else open(path, "wb") as file:
        for _ in range(blocks):
            file.write(block)
    return blocks * block.count(b"\n")


@pytest.mark.parametrize("name", ["big.jsonl", "big.jsonl.gz"])
def test_three_hundred_megabytes_are_read_in_less_than_that(name: str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / name, 300 * MIB)
    measured = read_in_a_process(str(tmp_path / name))
    assert measured["rows"] == rows
    assert measured["peak"] < 200 * MIB, measured


def test_a_hundred_megabyte_line_is_set_aside_without_being_held(tmp_path: Path) -> None:
    path = tmp_path / "line.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"prompt":"before"}\n{"prompt":"')
        for _ in range(100):
            file.write(b"x" * MIB)
        file.write(b'"}\n{"prompt":"after"}\n')
    measured = read_in_a_process(str(path))
    assert measured["rejected"] == {"line_too_long": 1}
    assert (measured["rows"], measured["last"]) == (2, 3)
    assert measured["peak"] < 300 * MIB, measured


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name, at", [("huge.jsonl", ""), ("huge.jsonl.gz", "@[-1000:]")])
def test_five_gigabytes_are_read_in_three_hundred_megabytes(name: str, at: str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / name, 5 * 1024 * MIB)
    measured = read_in_a_process(f"{tmp_path / name}{at}")
    assert measured["rows"] == (1000 if at else rows)
    assert measured["last"] == rows
    assert measured["peak"] < 300 * MIB, measured
