"""`worker list`, `worker fence` and `unit release`: an operator takes back what a worker holds, and a live one is safe."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from strawflow.errors import LeaseLostError
from strawflow.testing.runs import SmallRun

Cli = Callable[..., object]


def test_workers_are_listed_with_what_they_hold(cli: Cli, small: SmallRun) -> None:
    small.claim(3)
    small.trainer()
    rows = cli("worker", "list", small.run.root, "--json").json  # type: ignore[attr-defined]
    by_kind = {row["kind"]: row for row in rows}
    assert by_kind["rollout"]["num_units"] == 3
    assert by_kind["rollout"]["process"] == "runs"
    assert by_kind["train"]["roles"] == ["consume:trainer"]
    assert 0 < by_kind["rollout"]["expires_in_s"] <= 60
    assert by_kind["rollout"]["session_id"] in cli("worker", "list", small.run.root).out  # type: ignore[attr-defined]


def test_a_live_worker_is_fenced_only_by_force_and_then_refused_everywhere(cli: Cli, small: SmallRun) -> None:
    grants = small.claim(3)
    worker = small.session("rollout").session_id
    for command in (
        ("worker", "fence", small.run.root, worker),
        ("unit", "release", small.run.root, "--worker", worker),
    ):
        refused = cli(*command)
        assert refused.code == 7  # type: ignore[attr-defined]
        assert "seems to live" in refused.err  # type: ignore[attr-defined]
    assert cli("worker", "fence", small.run.root, worker, "--force", "--json").json == {  # type: ignore[attr-defined]
        "worker": worker,
        "released": 3,
    }
    with pytest.raises(LeaseLostError):
        small.complete(grants)
    assert cli("worker", "fence", small.run.root, worker).code == 9  # type: ignore[attr-defined]
    assert cli("worker", "fence", small.run.root, "nobody").code == 4  # type: ignore[attr-defined]
    small.sessions.pop("rollout")
    assert [g.fence for g in small.claim(3)] == [2, 2, 2]
