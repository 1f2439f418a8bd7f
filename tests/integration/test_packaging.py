"""The wheel holds what is needed and nothing that pollutes site-packages; an editable install finds the same migrations."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from strawflow.index.migrate import migrations_folder

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            str(folder),
            str(REPOSITORY),
        ],
        check=True,
        capture_output=True,
    )
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_two_packages_and_their_metadata(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"strawflow", "strawflow_workers", "strawflow-0.1.0.dist-info"}
    assert "strawflow/_migrations/versions/0001_first_tables.py" in names
    assert "strawflow_workers/rollout/sglang_cpu/sitecustomize.py" in names
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests/")]


def test_a_run_can_be_made_from_the_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    program = (
        "import strawflow, sys; from strawflow.cli.main import main; "
        f"assert strawflow.__file__.startswith({str(site)!r}), strawflow.__file__; main()"
    )
    made = subprocess.run(
        [
            sys.executable,
            "-c",
            program,
            "run",
            "create",
            str(tmp_path / "run"),
            "--json",
        ],
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "run" / "index.sqlite").exists()


def test_an_editable_install_finds_the_migrations_of_the_checkout() -> None:
    assert (migrations_folder() / "env.py").exists()
