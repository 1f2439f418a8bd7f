"""`strawflow engine`: engines listed and changed by the command line."""

from __future__ import annotations

from collections.abc import Callable

from strawflow.flow import engines
from strawflow.testing.runs import SmallRun
from tests.conftest import CliResult

Cli = Callable[..., CliResult]

URL = "http://127.0.0.1:9"


def test_engines_are_added_listed_drained_and_removed(cli: Cli, small: SmallRun) -> None:
    root = small.run.root
    assert "no engines" in cli("engine", "list", root).out
    assert cli("engine", "add", root, "--url", URL, "--json").json == {"added": [2]}
    assert "2 engines are wanted: 3, 4" in cli("engine", "add", root, "--count", "2").out
    assert cli("engine", "add", root).code == 2
    assert cli("engine", "add", root, "--url", URL, "--json").code == 7
    refused = cli("engine", "add", root, "--url", "127.0.0.1:9")
    assert (
        refused.code,
        "'127.0.0.1:9' is no address of an engine; write http://HOST:PORT" in refused.err,
    ) == (2, True)
    assert "engine 3 is gone" in cli("engine", "drain", root, "3").out
    assert cli("engine", "remove", root, "4", "--json").json == {"engine": 4, "state": "gone"}
    assert [e["slot_id"] for e in cli("engine", "list", root, "--json").json] == [1, 2]
    assert [e["state"] for e in cli("engine", "list", root, "--all", "--json").json] == [
        "starting",
        "starting",
        "gone",
        "gone",
    ]
    assert cli("engine", "drain", root, "9").code == 4


def test_a_quarantined_engine_is_an_alarm_that_says_what_to_do(cli: Cli, small: SmallRun) -> None:
    root, session = small.run.root, small.session("rollout")
    slot = engines.take(session, slot_id=None, url=URL)
    engines.quarantine(session, slot.slot_id, reason="log-probability 0 is nan")
    listed = cli("engine", "list", root).out
    assert "quarantined" in listed
    assert URL in listed
    shown = " ".join(cli("status", root).out.split())
    assert "1 of 1 in quarantine" in shown
    assert "log-probability 0 is nan" in shown
    assert "engine release" in shown
    assert cli("engine", "release", root, slot.slot_id, "--json").json["state"] == "starting"
    assert "in quarantine" not in cli("status", root).out
    assert cli("engine", "release", root, slot.slot_id).code == 9
