"""A topology from a YAML file: what it starts on which GPUs, and errors that name file, model, group and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from strawflow.config import from_json, load_config, refuse_deadlocks, to_json
from strawflow.errors import ConfigError
from strawflow.topology import Placement, Topology, placements, read_topology

WHOLE = """
models:
  - name: policy
    server_groups:
      - worker_type: regular
        count: 2
        gpus_per_engine: 2
        overrides: {mem-fraction-static: 0.8, disable_radix_cache: true, cuda-graph-bs: ["1", "2"]}
      - worker_type: placeholder
        count: 3
      - {worker_type: prefill, overrides: {tp-size: 1}}
      - {worker_type: decode, count: 2}
      - {count: 4, engines_per_worker: 2}
  - name: grader
    path: /models/reward
    frozen: true
    port: 31000
    server_groups:
      - {count: 2, overrides: {is-embedding: true}}
router:
  policy: cache_aware
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "topology.yaml"


def shown(placement: Placement) -> list[tuple[str, int, int, int]]:
    return [(e.worker_type, e.first_gpu, e.num_gpus, e.port) for e in placement.engines]


def test_gpus_are_handed_out_in_the_order_of_the_file(path: Path) -> None:
    path.write_text(WHOLE)
    found = placements(read_topology(path))
    assert [(p.model, p.is_routed) for p in found] == [
        ("policy", False),
        ("policy", False),
        ("policy", True),
        ("policy", True),
        ("policy", True),
        ("grader", False),
        ("grader", False),
    ]
    assert [shown(p) for p in found] == [
        [("regular", 0, 2, 0)],
        [("regular", 2, 2, 0)],
        [("regular", 10, 1, 0), ("regular", 11, 1, 0)],
        [("regular", 12, 1, 0), ("regular", 13, 1, 0)],
        [("prefill", 7, 1, 0), ("decode", 8, 1, 0), ("decode", 9, 1, 0)],
        [("regular", 14, 1, 31000)],
        [("regular", 15, 1, 31001)],
    ]
    assert found[0].engines[0].arguments == (
        "--mem-fraction-static",
        "0.8",
        "--disable-radix-cache",
        "--cuda-graph-bs",
        "1",
        "2",
    )
    assert found[-1].engines[0].arguments == ("--is-embedding",)


def test_a_run_keeps_what_the_file_said(path: Path) -> None:
    path.write_text(WHOLE)
    config = load_config(flags={"rollout.topology": str(path)})
    assert config.rollout.topology == read_topology(path)
    assert from_json(to_json(config), path="config.json") == config
    refuse_deadlocks(config)


def test_a_topology_and_a_number_of_engines_are_one_too_many(path: Path) -> None:
    path.write_text(WHOLE)
    config = load_config(flags={"rollout.topology": str(path), "rollout.engines": "2"})
    with pytest.raises(ConfigError, match=r"leave out rollout\.engines"):
        refuse_deadlocks(config)


POLICY = "models:\n- name: policy\n  server_groups:\n  - {}\n"
GRADER = "- name: grader\n  path: /r\n  port: 31000\n  server_groups:\n  - {}\n"

WRONG = {
    "": "there must be a list `models:`",
    "models: 3": "models: Input should be a list",
    "models: []": "models: List should have at least 1 item",
    "model: []\n" + POLICY: "unknown field model; did you mean models?",
    POLICY.replace("policy", "actor"): r"model 1 \(actor\): path: name the Hugging Face folder",
    "models:\n" + GRADER: "models: none is called 'policy'",
    POLICY + POLICY[8:]: r"model 2 \(policy\): name: model 1 is called so already",
    POLICY.replace("{}", "{count: 0}"): r"model 1 \(policy\): server group 1: count: Input should be greater",
    POLICY.replace("{}", "{worker_type: prefil}"): r"server group 1: worker_type: Input should be 'regular'",
    POLICY.replace(
        "{}", "{gpu_per_engine: 2}"
    ): r"server group 1: unknown field gpu_per_engine; did you mean gpus_per_engine\?",
    POLICY.replace("{}", "{worker_type: prefill}"): r"server_groups: prefill needs a group of decode",
    POLICY.replace("{}", "{worker_type: decode}"): r"server_groups: decode needs a group of prefill",
    POLICY.replace("{}", "{worker_type: placeholder}"): "placeholders start nothing",
    POLICY.replace("{}", "{count: 3, engines_per_worker: 2}"): "3 engines do not share out",
    POLICY.replace(
        "{}", "{overrides: {enable-x: false}}"
    ): "overrides: enable-x: a flag is given or left out",
    POLICY.replace("{}", "{overrides: {x: {y: 1}}}"): r"model 1 \(policy\): server group 1: overrides: x: ",
    POLICY + "router: {policy: random}\n": "router: no server group needs one",
    POLICY + "  path: /m\n": r"model 1 \(policy\): path: the policy's engines serve the run's own",
    POLICY + GRADER.replace("  path: /r\n", ""): r"model 2 \(grader\): path: name the Hugging Face folder",
    POLICY + GRADER.replace("  port: 31000\n", ""): r"model 2 \(grader\): port: give one",
    POLICY + GRADER + "  frozen: false\n": r"model 2 \(grader\): frozen: only 'policy' gets weights",
    POLICY + GRADER.replace("{}", "{engines_per_worker: 2, count: 2}"): "regular groups without a router",
    POLICY + "models: []\n": "key 'models' is given twice",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items())
def test_what_is_wrong_is_told_with_its_place(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as told:
        load_config(flags={"rollout.topology": str(path)})
    assert str(path) in str(told.value)


def test_a_table_in_the_configuration_is_checked_as_a_file_is() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.topology: model 1 \(x\): path"):
        load_config(flags={"rollout.topology": '{"models": [{"name": "x", "server_groups": [{}]}]}'})
    found = load_config(flags={"rollout.topology": '{"models": [{"name": "policy", "server_groups": [{}]}]}'})
    assert isinstance(found.rollout.topology, Topology)
