"""The same promises with real SGLang: its engine, its worker and everything at once are killed in the middle."""

from __future__ import annotations

from pathlib import Path

from tests.fault.kill_run import SupervisedRun, campaign, check_finished, make_run


def test_three_kills_with_real_sglang_lose_and_repeat_nothing(tmp_path: Path) -> None:
    root = tmp_path / "run"
    make_run(root, engine="sglang", steps=24, seed=5).close()
    supervised = SupervisedRun(root)
    parts = ["engine", "everything", "rollout"]
    digests = campaign(supervised, parts, seed=5, gap_s=(1.0, 2.0), seconds=400, once_serving=True)
    assert sum(supervised.num_kills.values()) == 3
    supervised.finish(seconds=240)
    check_finished(root, digests)
