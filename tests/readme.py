"""README's code, run as a newcomer types it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def without_strawflow(folder: Path, *, then: str = "") -> str:
    """Run "Open the data without strawflow" in `folder`, and `then` what is asked of it; returns what it printed."""
    section = (
        README.read_text(encoding="utf-8").split("## Open the data without strawflow")[1].split("\n## ")[0]
    )
    code = "\n".join(re.findall(r"^ {4}(.*)$", section, flags=re.MULTILINE))
    shown = subprocess.run(
        [sys.executable, "-c", f"{code}\n{then}\nimport sys; assert 'strawflow' not in sys.modules"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        timeout=120,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    return shown.stdout
