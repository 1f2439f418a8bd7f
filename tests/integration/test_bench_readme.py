"""What bench/README.md says of the scripts is what they take."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize("script", ["store.py", "index.py"])
def test_the_readme_lists_the_sections_that_a_script_accepts(script: str) -> None:
    shown = subprocess.run(
        [sys.executable, str(BENCH / script), "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"COLUMNS": "200", "PYTHONPATH": ":".join(sys.path)},
    ).stdout
    accepted = re.search(r"--only \{([a-z_,]+)\}", shown)
    told = re.search(rf"^\| `bench/{script}` \| (.*) \|$", (BENCH / "README.md").read_text(), re.MULTILINE)
    assert accepted is not None
    assert told is not None
    assert told[1].replace("`", "").split() == accepted[1].split(",")
