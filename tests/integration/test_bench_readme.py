"""What bench/README.md says of the scripts is what they take."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def sections(script: Path) -> list[str]:
    """Return the names of the sections that a script gives to `rows.main`, read from its text: importing takes seconds."""
    (given,) = (
        node.args[1]
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "main"
    )
    assert isinstance(given, ast.Dict)
    return [ast.literal_eval(key) for key in given.keys if key is not None]


@pytest.mark.parametrize(
    "script", ["store.py", "index.py", "rollout.py", "trainer.py", "trainer_wait.py", "gpu.py"]
)
def test_the_readme_lists_the_sections_that_a_script_accepts(script: str) -> None:
    readme = (BENCH / "README.md").read_text(encoding="utf-8")
    told = re.search(rf"^\| `bench/{script}` \| (.*) \|$", readme, re.MULTILINE)
    assert told is not None
    assert told[1].replace("`", "").split() == sections(BENCH / script)
