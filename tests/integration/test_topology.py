"""Engines of a topology: several behind the real router and one worker, and a frozen model beside them."""

from __future__ import annotations

import json
import socket
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strawflow.errors import ConfigError
from strawflow.flow import engines
from strawflow.flow.run import Run
from strawflow.states import EngineState
from strawflow_workers.drain import Drain
from strawflow_workers.rollout import engine_plan
from strawflow_workers.supervisor import Supervisor
from tests.fault.kill_run import wait_until
from tests.integration.rollout_runs import NUM_UNITS, Worker, completed, rows_of, trainer_of

pytestmark = pytest.mark.alone


def asked_of(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/requests", timeout=10) as answer:
        return list(json.loads(answer.read()))


def members_of(run: Run) -> list[dict[str, Any]]:
    """Return the router's own list of the engines behind it."""
    (engine,) = engines.standing(run)
    with urllib.request.urlopen(f"{engine.url}/workers", timeout=10) as answer:
        return list(json.loads(answer.read())["workers"])


def units_asked(url: str) -> set[str]:
    return {str(r["rid"]).partition(".")[0] for r in asked_of(url) if r.get("rid")}


def policy(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"models": [{"name": "policy", "server_groups": list(groups)}], **more}


def test_engines_behind_a_router_keep_each_group_with_one_and_get_weights_together(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(
        topology=policy({"count": 2, "engines_per_worker": 2}),
        generate="tests.integration.own_hooks:fans_out",
        on_new_weights="finish",
    )
    (slot,) = engines.wanted(run)
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run, slot_id=slot.slot_id) as worker:
            worker.wait(lambda: len(completed(run)) == NUM_UNITS)
            newer = publish(1)
            worker.wait(lambda: len(completed(run)) == 2 * NUM_UNITS)
            members = [m["url"] for m in members_of(run)]
            assert len(members) == 2
            by_member = [units_asked(url) for url in members]
            for url in members:
                with urllib.request.urlopen(f"{url}/model_info", timeout=10) as answer:
                    assert json.loads(answer.read())["weight_version"] == newer
    assert all(by_member), "one engine had nothing to do"
    assert not by_member[0] & by_member[1], "the turns of a group went to several engines"
    assert len(by_member[0] | by_member[1]) == 2 * NUM_UNITS
    assert {row["status"] for row in rows_of(run)} <= {"finished", "truncated"}


@pytest.mark.parametrize("settings", [{}, pytest.param({"stream_interval": 1}, marks=pytest.mark.long)])
def test_prefill_and_decode_servers_answer_together_through_the_router(
    make_run: Callable[..., Run], settings: dict[str, Any]
) -> None:
    groups = ({"worker_type": "prefill"}, {"worker_type": "decode"})
    run = make_run(topology=policy(*groups, router={"request-timeout-secs": 60}), **settings)
    engine_plan.require_startable(run.config)
    (slot,) = engines.wanted(run)
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run, slot_id=slot.slot_id) as worker:
            worker.wait(lambda: len(completed(run)) == NUM_UNITS)
            found = {m["worker_type"]: m for m in members_of(run)}
            assert found.keys() == {"prefill", "decode"}
            rooms = [
                [r["bootstrap_room"] for r in asked_of(found[kind]["url"])] for kind in ("prefill", "decode")
            ]
    assert sorted(rooms[0]) == sorted(rooms[1])
    assert len(rooms[0]) >= NUM_UNITS


def test_what_is_missing_for_a_topology_is_told_before_anything_starts(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    groups = ({"worker_type": "prefill"}, {"worker_type": "decode"})
    run = make_run(topology=policy(*groups))
    on_sglang = run.config.model_copy(
        update={"rollout": run.config.rollout.model_copy(update={"engine": "sglang"})}
    )
    with pytest.raises(ConfigError, match=r"model policy: prefill and decode .* no NVIDIA driver"):
        engine_plan.require_startable(on_sglang)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_frozen_model_serves_first_and_never_gets_weights(
    make_run: Callable[..., Run], tiny_model: Path
) -> None:
    port = free_port()
    topology = policy({"count": 1})
    frozen = {"name": "grader", "path": str(tiny_model), "port": port, "server_groups": [{}]}
    topology["models"].append(frozen)
    run = make_run(topology=topology)
    with trainer_of(run) as publish:
        publish(0)
        drain = Drain()
        watched = Supervisor(run, drain)
        watched.children.clear()
        thread = threading.Thread(target=watched.supervise)
        thread.start()
        try:
            wait_until(lambda: len(completed(run)) == NUM_UNITS, seconds=60, what="the first groups")
            publish(1)
            wait_until(
                lambda: len(completed(run)) == 2 * NUM_UNITS, seconds=60, what="groups of newer weights"
            )
            grader = next(e for e in engines.standing(run) if e.model == "grader")
            assert (grader.url, grader.state) == (f"http://127.0.0.1:{port}", EngineState.SERVING)
            with urllib.request.urlopen(f"{grader.url}/model_info", timeout=10) as answer:
                assert json.loads(answer.read())["weight_version"] == "frozen"
            assert asked_of(grader.url or "") == []
            engines.remove(run, grader.slot_id)
            wait_until(lambda: not is_open(port), seconds=30, what="the frozen engine to end")
        finally:
            drain.request()
            thread.join(timeout=40)
    assert not thread.is_alive()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.long
def test_real_engines_behind_the_router_answer_with_every_version_they_are_given(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(engine="sglang", topology=policy({"count": 2, "engines_per_worker": 2}))
    (slot,) = engines.wanted(run)
    with trainer_of(run) as publish:
        versions = [publish(0)]
        with Worker(run, slot_id=slot.slot_id) as worker:
            worker.wait(lambda: len(completed(run)) == NUM_UNITS, seconds=400)
            assert len(members_of(run)) == 2
            versions.append(publish(1))
            worker.wait(lambda: len(completed(run)) == 2 * NUM_UNITS, seconds=120)
    rows = rows_of(run)
    assert {row["status"] for row in rows} <= {"finished", "truncated"}
    assert sorted({row["weight_versions"][0] for row in rows}) == versions
