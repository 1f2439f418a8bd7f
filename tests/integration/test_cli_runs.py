"""Creating, filling and listing runs by the command line; and how its errors are told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from strawflow.cli.fields import split_engine_flags
from strawflow.config import RunConfig, load_config
from strawflow.errors import ConfigError
from strawflow.index import migrate
from strawflow.index.engine import Index
from strawflow.testing.runs import prompt_lines
from strawflow_workers.rollout.sglang_flags import ROUTER, check_flags
from tests.conftest import CliResult

pytestmark = pytest.mark.alone

Cli = Callable[..., CliResult]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("STRAWFLOW_"):
            monkeypatch.delenv(name)


def create(cli: Cli, run: str, *more: object) -> CliResult:
    result = cli("run", "create", run, "--run.durability", "process", *more)
    assert result.code == 0, result.err
    return result


# ---- run create


def test_a_bare_name_is_made_under_runs_and_a_path_is_taken_as_it_is(cli: Cli, tmp_path: Path) -> None:
    create(cli, "first")
    assert (tmp_path / "runs/first/config.json").exists()
    create(cli, "./second")
    assert (tmp_path / "second/config.json").exists()
    assert cli("status", "first").code == 0
    assert cli("status", "second").code == 0


def test_the_commands_that_come_next_are_quoted_for_a_shell(cli: Cli) -> None:
    made = create(cli, "./my runs/a", "--data.prompts", "words.jsonl@[:5]", "--json")
    assert made.json["next"] == [
        "strawflow enqueue './my runs/a' 'words.jsonl@[:5]' --dataset prompts",
        "strawflow resume './my runs/a'",
        "strawflow status './my runs/a' --watch",
    ]


def test_every_field_can_be_a_flag_a_variable_or_a_line_of_toml_and_the_flag_wins(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text("[rollout]\ntemperature = 0.1\ntop_p = 0.2\nmax_staleness = 3\n", encoding="utf-8")
    monkeypatch.setenv("STRAWFLOW_ROLLOUT_TEMPERATURE", "0.3")
    monkeypatch.setenv("STRAWFLOW_ROLLOUT_TOP_P", "0.4")
    result = create(cli, "a", "--config", toml, "--rollout.temperature", "0.5", "--trainer.steps=7", "--json")
    rollout = result.json["config"]["rollout"]
    assert (rollout["temperature"], rollout["top_p"], rollout["max_staleness"]) == (0.5, 0.4, 3)
    stored = json.loads((tmp_path / "runs/a/config.json").read_text(encoding="utf-8"))
    assert stored == result.json["config"]
    assert stored["trainer"]["steps"] == 7


def test_field_flags_may_stand_before_the_name_of_the_run(cli: Cli, tmp_path: Path) -> None:
    assert cli("run", "create", "--run.durability", "process", "--run.seed", "5", "b").code == 0
    assert json.loads((tmp_path / "runs/b/config.json").read_text())["run"]["seed"] == 5


def test_a_field_that_no_other_section_has_needs_no_section(cli: Cli) -> None:
    result = create(
        cli, "a", "--partial-rollout", "off", "--max-staleness=2", "--on_new_weights", "park", "--json"
    )
    rollout = result.json["config"]["rollout"]
    assert (rollout["partial_rollout"], rollout["max_staleness"], rollout["on_new_weights"]) == (
        False,
        2,
        "park",
    )
    assert cli("run", "create", "b", "--steps", "3").code == 2, "warm_start and trainer both have steps"


@pytest.mark.long
def test_flags_that_the_installed_sglang_takes_are_kept(cli: Cli) -> None:
    flags = ("--sglang-disable-radix-cache", "--sglang-mem-fraction-static", "0.5")
    result = create(cli, "a", *flags, "--max-staleness", "2", "--json")
    rollout = result.json["config"]["rollout"]
    assert rollout["engine_args"] == ["--disable-radix-cache", "--mem-fraction-static", "0.5"]
    assert rollout["max_staleness"] == 2


def test_flags_of_sglang_are_taken_apart_and_refused_by_the_installed_one(cli: Cli, tmp_path: Path) -> None:
    words = ["a", "--sglang-cuda-graph-bs", "1", "2", "--json", "--sglang-dtype=float32", "--sglang-enable-x"]
    assert split_engine_flags(words) == (
        ["--cuda-graph-bs", "1", "2", "--dtype=float32", "--enable-x"],
        ["a", "--json"],
    )
    refused = subprocess.run(
        [
            sys.executable,
            "-m",
            "strawflow.cli.main",
            "run",
            "create",
            "b",
            "--sglang-mem-fraction-statik",
            "1",
        ],
        capture_output=True,
        text=True,
    )
    assert refused.returncode == ConfigError.exit_code
    assert "did you mean --sglang-mem-fraction-static?" in refused.stderr
    assert not (tmp_path / "runs/b").exists()


def test_flags_of_the_router_are_refused_by_the_installed_one_or_kept_for_a_topology_that_has_one(
    cli: Cli, tmp_path: Path
) -> None:
    words = ["a", "--router-policy", "random", "--router-args", '["--x"]', "--router-dp-aware"]
    assert split_engine_flags(words, prefix="--router-") == (
        ["--policy", "random", "--dp-aware"],
        ["a", "--router-args", '["--x"]'],
    )
    assert "stands behind a router" in cli("run", "create", "a", "--router-policy", "random").err
    topology = tmp_path / "topology.yaml"
    topology.write_text("models: [{name: policy, server_groups: [{count: 2, engines_per_worker: 2}]}]\n")
    with_router = ("--topology", str(topology), "--rollout.engine", "fake")
    kept = create(cli, "a", *with_router, "--router-policy", "random", "--json").json["config"]["rollout"]
    assert kept["router_args"] == ["--policy", "random"]
    assert kept["topology"]["models"][0]["server_groups"][0]["count"] == 2
    refused = subprocess.run(
        [
            sys.executable,
            "-m",
            "strawflow.cli.main",
            "run",
            "create",
            "b",
            *with_router,
            "--router-polcy",
            "random",
        ],
        capture_output=True,
        text=True,
    )
    assert refused.returncode == ConfigError.exit_code
    assert "did you mean --router-policy?" in refused.stderr
    with pytest.raises(ConfigError, match="--router-port cannot be set: a free port is taken"):
        check_flags(["--port", "1"], ROUTER)
    with pytest.raises(ConfigError, match="SGLang's router does not take --policy best"):
        check_flags(["--policy", "best"], ROUTER)
    with pytest.raises(ConfigError, match=r"^the file's router: the installed router has no flag --polcy"):
        check_flags(["--polcy", "best"], ROUTER, place="the file's router: ")
    assert not (tmp_path / "runs/b").exists()


@pytest.mark.long
def test_a_flag_in_a_topology_that_sglang_does_not_have_is_told_with_its_model(
    cli: Cli, tmp_path: Path
) -> None:
    topology = tmp_path / "topology.yaml"
    topology.write_text("models: [{name: policy, server_groups: [{overrides: {context-lenght: 5}}]}]\n")
    words = ("run", "create", "b", "--topology", str(topology))
    refused = subprocess.run(
        [sys.executable, "-m", "strawflow.cli.main", *words], capture_output=True, text=True
    )
    assert refused.returncode == ConfigError.exit_code
    assert refused.stderr.startswith(
        "error: the topology's model 'policy', overrides of a regular server group: the installed SGLang has no flag "
        "--context-lenght; did you mean --sglang-context-length?"
    )
    assert not (tmp_path / "runs/b").exists()


def test_an_unknown_field_is_refused_with_the_nearest_and_nothing_is_made(cli: Cli, tmp_path: Path) -> None:
    result = cli("run", "create", "a", "--rollout.temprature", "0.7")
    assert result.code == 3
    assert result.err == "error: unknown setting --rollout.temprature; did you mean --rollout.temperature?\n"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--rollout.temperature", "cold"], 3, "rollout.temperature"),
        (["--rollout.temperature"], 2, "needs a value"),
        (["--run.seed", "1", "--run.seed", "2"], 2, "given twice"),
        (["--config", "absent.toml"], 3, "no configuration file absent.toml"),
        (["--run.durability", "store"], 3, "run.durability: 'store' is the level of an object store"),
    ],
)
def test_bad_settings_are_refused_in_one_line(
    cli: Cli, arguments: list[str], code: int, message: str
) -> None:
    result = cli("run", "create", "a", *arguments)
    assert result.code == code
    assert message in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("command", [("run", "create"), ("status",), ("resume",), ("storage", "sweep")])
def test_a_run_is_not_taken_to_lie_in_an_object_store(
    cli: Cli, tmp_path: Path, command: tuple[str, ...]
) -> None:
    result = cli(*command, "s3://bucket/run")
    assert result.code == 3
    assert "error: s3://bucket/run is an address, and a run lies in a folder" in result.err
    assert result.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_create_prints_what_to_type_next(cli: Cli) -> None:
    result = create(cli, "a", "--data.prompts", "p.jsonl", "--warm_start.steps", "3")
    assert result.out.splitlines()[1:] == [
        "next:",
        "  strawflow enqueue a p.jsonl --dataset prompts",
        "  strawflow enqueue a FILE --dataset demonstrations",
        "  strawflow resume a",
        "  strawflow status a --watch",
    ]


def test_prompt_sets_are_enqueued_each_to_its_own_dataset_and_to_no_other(cli: Cli, tmp_path: Path) -> None:
    result = create(cli, "a", "--prompts", "sums.jsonl:0.7,puzzles=words.jsonl@[:2]:0.3")
    assert result.out.splitlines()[2:4] == [
        "  strawflow enqueue a sums.jsonl --dataset sums",
        "  strawflow enqueue a 'words.jsonl@[:2]' --dataset puzzles",
    ]
    (tmp_path / "sums.jsonl").write_text(prompt_lines(3), encoding="utf-8")
    assert "3 rows added" in cli("enqueue", "a", "sums.jsonl", "--dataset", "sums").out
    refused = cli("enqueue", "a", "sums.jsonl")
    assert refused.code == 2
    assert "it has sums, puzzles, demonstrations" in refused.err


def test_an_existing_run_is_refused_naming_resume_and_fresh_makes_it_anew(cli: Cli, tmp_path: Path) -> None:
    create(cli, "a", "--run.seed", "1")
    again = cli("run", "create", "a", "--run.durability", "process")
    assert again.code == 5
    assert "strawflow resume" in again.err
    assert "--fresh" in again.err
    create(cli, "a", "--run.seed", "2", "--fresh")
    assert json.loads((tmp_path / "runs/a/config.json").read_text())["run"]["seed"] == 2


def test_the_printed_configuration_is_toml_with_every_default(cli: Cli, tmp_path: Path) -> None:
    result = cli("run", "create", "--print-config")
    assert result.code == 0
    assert RunConfig.model_validate(tomllib.loads(result.out)) == RunConfig()
    path = tmp_path / "printed.toml"
    path.write_text(result.out, encoding="utf-8")
    assert load_config(path) == RunConfig()


def test_help_knows_the_fields_defaults_and_variables_that_the_configuration_has(cli: Cli) -> None:
    shown = {f["name"]: f for f in cli("run", "create", "--print-config", "--json").json}
    real = {
        f"{section}.{name}": value
        for section, values in RunConfig().model_dump(mode="json").items()
        for name, value in values.items()
    }
    assert {name: f["default"] for name, f in shown.items()} == real
    assert shown["rollout.top_p"]["variable"] == "STRAWFLOW_ROLLOUT_TOP_P"


# ---- run list


def test_runs_are_listed_with_where_they_stand_and_a_broken_one_with_its_reason(
    cli: Cli, tmp_path: Path
) -> None:
    assert cli("run", "list").out == "no runs in runs\n"
    create(cli, "a")
    create(cli, "b", "--trainer.steps", "7")
    (tmp_path / "runs/b/index.sqlite").unlink()
    first, second = cli("run", "list", "--json").json
    assert (first["name"], first["stage"], first["planned"], first["problem"]) == (
        "a",
        "not started",
        0,
        None,
    )
    assert second["name"] == "b"
    assert "the run's index is lost" in second["problem"]
    assert "not started" in cli("run", "list").out


# ---- enqueue


def test_a_file_is_enqueued_once_and_a_slice_of_it_adds_nothing(cli: Cli, tmp_path: Path) -> None:
    create(cli, "a")
    path = tmp_path / "p.jsonl"
    path.write_text(prompt_lines(5), encoding="utf-8")
    assert "3 rows added of 3" in cli("enqueue", "a", f"{path}@[0:3]").out
    report = cli("enqueue", "a", path, "--json").json
    assert (report["num_records"], report["num_added"], report["num_known"]) == (5, 2, 3)
    assert cli("enqueue", "a", path, "--json").json["num_added"] == 0
    sizes = {d["dataset_id"]: d["num_rows"] for d in cli("status", "a", "--json").json["datasets"]}
    assert sizes == {"prompts": 5}


def test_keys_may_be_named_and_an_empty_one_says_the_file_has_none(cli: Cli, tmp_path: Path) -> None:
    create(cli, "a")
    path = tmp_path / "p.jsonl"
    path.write_text('{"q": "1 + 1?", "a": "2"}\n', encoding="utf-8")
    result = cli(
        "enqueue",
        "a",
        path,
        "--input-key",
        "q",
        "--label-key",
        "a",
        "--metadata-key",
        "",
        "--dataset",
        "held_out",
    )
    assert result.code == 0, result.err
    assert cli("status", "a", "--json").json["datasets"][0]["purpose"] == "eval"


def test_a_bad_row_names_file_and_line_and_nothing_is_enqueued(cli: Cli, tmp_path: Path) -> None:
    create(cli, "a")
    path = tmp_path / "p.jsonl"
    path.write_text(prompt_lines(2) + "\n{not json}\n", encoding="utf-8")
    result = cli("enqueue", "a", path)
    assert result.code == 2
    assert f"{path}:4" in result.err
    assert cli("status", "a", "--json").json["datasets"] == []
    assert cli("status", "a", "--json").json["sessions"] == []


def test_skipped_rows_go_to_the_reject_file_with_counts_by_reason(cli: Cli, tmp_path: Path) -> None:
    create(cli, "a")
    path = tmp_path / "p.jsonl"
    path.write_text(prompt_lines(2) + '{"label": "x", "metadata": {}}\n', encoding="utf-8")
    rejects = tmp_path / "rejects.jsonl"
    report = cli("enqueue", "a", path, "--on-bad-row", "skip", "--reject-file", rejects, "--json").json
    assert (report["num_added"], report["rejected"]) == (2, {"missing_key": 1})
    assert len(rejects.read_text(encoding="utf-8").splitlines()) == 1


def test_an_option_can_be_given_by_its_variable(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(cli, "a")
    path = tmp_path / "p.jsonl"
    path.write_text(prompt_lines(1), encoding="utf-8")
    monkeypatch.setenv("STRAWFLOW_ENQUEUE_DATASET", "demonstrations")
    monkeypatch.setenv("STRAWFLOW_JSON", "1")
    assert cli("enqueue", "a", path).json["dataset_id"] == "demonstrations"
    assert cli("status", "absent").error["kind"] == "not_found"


# ---- index


def test_an_index_of_no_revision_is_refused_and_upgraded(cli: Cli, tmp_path: Path) -> None:
    create(cli, "a")
    assert cli("index", "upgrade", "a", "--json").json["changed"] is False
    index = Index(f"sqlite:///{tmp_path}/runs/a/index.sqlite")
    with index.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0000'")
    assert migrate.current(index) == "0000"
    index.close()
    refused = cli("status", "a", "--json")
    assert refused.code == 12
    assert "strawflow index upgrade" in refused.error["message"]


# ---- errors


def test_an_error_is_one_line_without_traceback_and_debug_shows_it(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = cli("status", "absent")
    assert result.code == 4
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    monkeypatch.setenv("STRAWFLOW_DEBUG", "1")
    assert "Traceback" in cli("status", "absent").err


def test_an_error_as_json_has_kind_message_and_facts(cli: Cli) -> None:
    create(cli, "a")
    assert cli("unit", "show", "a", 5, "--json").error == {
        "kind": "not_found",
        "message": "there is no unit 5",
        "facts": {},
    }


def test_usage_errors_exit_2_as_text_and_as_json(cli: Cli) -> None:
    assert cli("unit", "frobnicate").code == 2
    result = cli("unit", "list", "--json")
    assert result.code == 2
    assert result.error["kind"] == "invalid_input"
    assert cli("run", "create").code == 2


def test_ctrl_c_exits_130(cli: Cli, tmp_path: Path) -> None:
    create(cli, "a")
    watcher = subprocess.Popen(
        [sys.executable, "-m", "strawflow.cli.main", "status", "a", "--watch", "--json", "--interval", "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watcher.stdout is not None
    assert json.loads(watcher.stdout.readline())["name"] == "a"
    watcher.send_signal(signal.SIGINT)
    _, err = watcher.communicate(timeout=60)
    assert watcher.returncode == 130
    assert "Traceback" not in err


def test_an_unknown_exception_shows_its_traceback_and_exits_1(tmp_path: Path, cli: Cli) -> None:
    create(cli, "a")
    broken = (
        "import sys, strawflow.flow.run as run, strawflow.cli.main as program\n"
        "run.stored_config = lambda root: 1 / 0\n"
        "sys.argv = ['strawflow', 'status', 'a']\n"
        "program.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", broken], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize("content", [b"", b"\xff\xfe{", None], ids=["empty", "no text", "a folder"])
def test_a_config_that_cannot_be_read_is_one_line(cli: Cli, tmp_path: Path, content: bytes | None) -> None:
    create(cli, "a")
    path = tmp_path / "runs/a/config.json"
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    for command in (("status", "a"), ("index", "rebuild", "a")):
        result = cli(*command)
        assert result.code == ConfigError.exit_code
        assert result.err.count("\n") == 1
        assert "config.json" in result.err
