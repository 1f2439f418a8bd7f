"""The same promises with real SGLang: its engine, its worker and everything at once are killed in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.kill_run import SupervisedRun, campaign, check_finished, make_run


@pytest.mark.parametrize(
    ("parts", "steps"),
    [
        (["everything"], 10),
        pytest.param(["engine", "everything", "rollout"], 24, marks=pytest.mark.long),
    ],
    ids=["one", "three"],
)
def test_kills_with_real_sglang_lose_and_repeat_nothing(tmp_path: Path, parts: list[str], steps: int) -> None:
    root = tmp_path / "run"
    make_run(root, engine="sglang", steps=steps, seed=5).close()
    supervised = SupervisedRun(root)
    digests = campaign(supervised, parts, seed=5, gap_s=(1.0, 2.0), seconds=400, once_serving=True)
    assert sum(supervised.num_kills.values()) == len(parts)
    supervised.finish(seconds=240)
    check_finished(root, digests)
