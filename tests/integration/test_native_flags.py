"""Megatron's own settings: all of them are known, what they take is checked, and the trainer is built with them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strawflow.config import RunConfig, load_config
from strawflow.errors import ConfigError
from strawflow.flow.run import NATIVE_FILE
from strawflow_workers.trainer import megatron_version
from strawflow_workers.trainer.megatron import MegatronTrainer
from strawflow_workers.trainer.native_fields import configuration_classes, native_fields
from strawflow_workers.trainer.native_flags import OURS, checked_config, parse_words, require_same
from strawflow_workers.trainer.native_settings import NativeSettings
from strawflow_workers.trainer.replay import replay
from tests.conftest import CliResult
from tests.integration.megatron_cases import GRPO, make_hf, make_step
from tests.integration.stored_batches import stored_batches, train

pytestmark = pytest.mark.alone


def checked(words: str, **trainer: Any) -> dict[str, Any]:
    config = RunConfig.model_validate({"trainer": trainer})
    return dict(checked_config(config, words.split()).trainer.megatron)


# ---- which there are


def test_every_field_of_every_configuration_is_a_flag_or_is_listed_as_left_out() -> None:
    known, left_out = native_fields()
    skipped = {(one.configuration, one.name) for one in left_out}
    count = 0
    for owner, configuration in configuration_classes().items():
        for one in dataclasses.fields(configuration):
            count += 1
            declared_by = [c for c, n in skipped if n == one.name]
            assert one.name in known or declared_by, f"{owner}.{one.name} is neither"
    assert count > 500
    assert len(known) > 300
    reasons = {one.name: one.reason for one in left_out}
    assert reasons["timers"] == "no command line can say a function"
    assert reasons["quant_recipe"] == "no command line can say an object of Megatron's (RecipeConfig)"
    assert reasons["_cpu_offloading_context"]
    assert not set(reasons) & set(known)


def test_fields_are_told_with_the_type_default_and_configurations_that_megatron_gives_them() -> None:
    known, _ = native_fields()
    assert known["recompute_granularity"].kind.told() == "full | selective | none"
    assert known["recompute_modules"].kind.told() == "<text> ... | none"
    assert known["window_size"].kind.length == 2
    assert known["exp_avg_dtype"].kind.told() == "fp32 | bf16 | fp16 | ..."
    assert known["moe_layer_freq"].kind.told() == "<whole number> [...]"
    assert known["overlap_grad_reduce"].defaults == {"DistributedDataParallelConfig": False}
    both = known["use_distributed_optimizer"]
    assert both.defaults == {"OptimizerConfig": False, "DistributedDataParallelConfig": False}
    assert "Transformer layer" in known["recompute_granularity"].doc or known["recompute_granularity"].doc


def test_what_strawflow_decides_are_settings_that_some_supported_megatron_has() -> None:
    known, left_out = native_fields()
    names = set(known) | {one.name for one in left_out}
    assert len(set(OURS) - names) <= 2, set(OURS) - names


# ---- what they take


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--overlap-grad-reduce", {"overlap_grad_reduce": True}),
        ("--no-overlap-grad-reduce", {"overlap_grad_reduce": False}),
        ("--no-barrier-with-level-1-timing", {"barrier_with_L1_time": False}),
        ("--recompute-num-layers 3", {"recompute_num_layers": 3}),
        ("--recompute-num-layers none", {"recompute_num_layers": None}),
        ("--adam-eps=1e-6", {"adam_eps": 1e-6}),
        ("--init-method-std 2", {"init_method_std": 2.0}),
        ("--recompute-modules mlp core_attn", {"recompute_modules": ["mlp", "core_attn"]}),
        ("--moe-aux-loss-coeff 0.5", {"moe_aux_loss_coeff": 0.5}),
        ("--moe-aux-loss-coeff 0.5 1", {"moe_aux_loss_coeff": [0.5, 1.0]}),
        ("--exp-avg-dtype bf16", {"exp_avg_dtype": "bfloat16"}),
        ("--recompute-granularity selective", {"recompute_granularity": "selective"}),
    ],
)
def test_words_of_a_command_line_mean_values_of_the_fields_type(words: str, expected: dict[str, Any]) -> None:
    found = parse_words(words.split())
    assert found == expected
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--recompute-granularty full",
            "has a flag --recompute-granularty; did you mean --recompute-granularity",
        ),
        ("--max-stalenes 2", "has a flag --max-stalenes; did you mean --max-staleness?"),
        ("--recompute-granularity half", "--recompute-granularity takes full | selective | none, not 'half'"),
        ("--recompute-num-layers two", "--recompute-num-layers takes whole number | none, not 'two'"),
        ("--recompute-num-layers 1 2", "takes one value"),
        ("--recompute-num-layers", "takes whole number | none, and nothing was given"),
        ("--overlap-grad-reduce runs/a", "is a switch and takes no value, and 'runs/a' was given"),
        ("--adam-eps 1 --adam-eps 2", "adam_eps is given twice"),
        ("--overlap-grad-reduce --no-overlap-grad-reduce", "overlap_grad_reduce is given twice"),
        ("--hidden-size 8", "--hidden-size cannot be set: config.json of the model decides it"),
        ("--lr 1", "--lr cannot be set: it is a setting of strawflow's: --trainer.lr"),
        ("--calculate-per-token-loss", "the denominator of an update is planned"),
        (
            "--timers x",
            "--timers (ModelParallelConfig) cannot be given as a flag: no command line can say a function",
        ),
    ],
)
def test_words_that_do_not_fit_are_refused_with_the_flag_and_what_it_takes(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_words(words.split())
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"megatron": {"bucket_siz": 1}}, "trainer.megatron: neither strawflow nor megatron-core"),
        (
            {"megatron": {"bucket_size": "many"}},
            "trainer.megatron: bucket_size takes whole number | none, not 'many'",
        ),
        (
            {"megatron": {"bucket_size": True}},
            "trainer.megatron: bucket_size takes whole number | none, not True",
        ),
        ({"megatron": {"align_param_gather": 1}}, "align_param_gather is a switch: true or false, not 1"),
        (
            {"roles": {"actor": {"overrides": {"hidden_size": 1}}}},
            "trainer.roles: actor: overrides: hidden_size cannot be set: config.json",
        ),
    ],
)
def test_values_of_a_file_are_checked_as_those_of_the_command_line(
    trainer: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        checked("", **trainer)
    assert message in str(refused.value)


def test_a_flag_beats_the_file_and_a_role_beats_both() -> None:
    config = load_config(
        flags={
            "trainer.megatron": '{"bucket_size": 1, "adam_eps": 1e-6}',
            "trainer.roles": '{"actor": {"overrides": {"adam-eps": 1}}}',
        }
    )
    made = checked_config(config, ["--bucket-size", "2"])
    assert made.trainer.megatron == {"bucket_size": 2, "adam_eps": 1e-6}
    assert NativeSettings.of(made).values == {"bucket_size": 2, "adam_eps": 1.0}
    again = RunConfig.model_validate_json(made.model_dump_json())
    assert again == made
    assert checked_config(again, []) == made, "what was kept is read as it is"


# ---- what Megatron says to them together


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("--recompute-granularity full --bucket-size 7", "--recompute-granularity: "),
        (
            "--recompute-num-layers 1 --recompute-granularity selective",
            "--recompute-num-layers, --recompute-granularity: ",
        ),
        ("--main-grads-dtype bf16", "--main-grads-dtype: "),
        ("--reuse-grad-buf-for-mxfp8-param-ag", "--reuse-grad-buf-for-mxfp8-param-ag: "),
        (
            "--cpu-offloading --cpu-offloading-num-layers 99",
            "--cpu-offloading, --cpu-offloading-num-layers: ",
        ),
    ],
)
def test_what_a_configuration_of_megatrons_refuses_is_one_error_that_names_the_flags(
    words: str, flags: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        checked(words)
    message = str(refused.value)
    assert message.startswith(flags), message
    assert f"megatron-core {megatron_version.installed()} refuses it" in message
    assert "\n" not in message


def test_a_setting_of_other_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="--cache-mla-latents: it is a setting of models with multi-latent"):
        checked("--cache-mla-latents")


def test_an_unsupported_megatron_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_version, "version", lambda _name: "0.17.3")
    with pytest.raises(
        ConfigError,
        match=r"megatron-core 0\.17\.3 is installed, and the trainer works with 0\.16\.1 and 0\.19\.2",
    ):
        megatron_version.installed()


# ---- the command line


def program(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "strawflow.cli.main", *map(str, arguments)], capture_output=True, text=True
    )


DURABLE = ("--run.durability", "process")


@pytest.mark.long
def test_flags_that_megatron_refuses_end_run_create_before_there_is_a_run(tmp_path: Path) -> None:
    refused = program("run", "create", tmp_path / "a", "--recompute-granularity", "full", *DURABLE)
    assert refused.returncode == ConfigError.exit_code
    assert refused.stderr.startswith("error: --recompute-granularity: megatron-core")
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "a").exists()


@pytest.mark.long
def test_flags_that_megatron_takes_are_kept_with_the_run(tmp_path: Path) -> None:
    words = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers=1")
    kept = program("run", "create", tmp_path / "a", *words, *DURABLE, "--json")
    assert kept.returncode == 0, kept.stderr
    stored = json.loads((tmp_path / "a/config.json").read_text())["trainer"]["megatron"]
    assert stored == {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    assert json.loads(kept.stdout)["config"]["trainer"]["megatron"] == stored
    refused = program("run", "create", tmp_path / "b", "--bucket-siz", "1", *DURABLE, "--json")
    assert "did you mean --bucket-size?" in json.loads(refused.stderr)["error"]["message"]


def test_flags_before_the_name_of_the_run_are_told_to_come_after_it(cli: Callable[..., CliResult]) -> None:
    assert "flags of Megatron come after it" in cli("run", "create", "--bf16", "runs/a").err


@pytest.mark.long
def test_all_settings_are_listed_with_what_they_take(tmp_path: Path) -> None:
    told = program("worker", "train", "--help-megatron")
    assert told.returncode == 0, told.stderr
    known, left_out = native_fields()
    for name in known:
        assert f"  --{name.replace('_', '-')}" in told.stdout
    for one in left_out:
        assert f"  {one.name} ({one.configuration}): {one.reason}" in told.stdout
    listed = json.loads(program("worker", "train", "--help-megatron", "--json").stdout)
    assert len(listed) == len(known) + len(left_out)


# ---- what is built with them


def test_a_setting_reaches_the_optimizer_the_buffers_and_the_model(tmp_path: Path) -> None:
    make_hf(tmp_path / "hf")
    plain = MegatronTrainer(tmp_path / "hf", GRPO, seed=1)
    given = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "bucket_size": 4096,
        "adam_eps": 1e-8,
    }
    same = MegatronTrainer(tmp_path / "hf", GRPO, seed=1, native=NativeSettings(given))
    other = MegatronTrainer(tmp_path / "hf", GRPO, seed=1, native=NativeSettings({"adam_eps": 1e-2}))
    losses = [
        [t.train_step(make_step(step, num_updates=1)).loss for step in range(2)] for t in (plain, same, other)
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)  # recomputed, not changed
    assert losses[2][0] == losses[0][0], "the first loss is before any update"
    assert losses[2][1] != losses[0][1]
    assert plain.weights_digest() != other.weights_digest()


def test_a_run_shows_what_its_trainer_was_built_with_and_a_replay_of_it_is_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., CliResult]
) -> None:
    run = stored_batches(
        tmp_path,
        steps=2,
        settings={
            "trainer.megatron": '{"adam_eps": 0.01, "hidden_dropout": 0.1}',
            "trainer.roles": '{"actor": {"overrides": {"adam_eps": 0.05}}}',
        },
    )
    train(run, monkeypatch)
    built = json.loads((run.root / NATIVE_FILE).read_text())
    assert built["given"] == {"adam_eps": 0.05, "hidden_dropout": 0.1}
    fields = built["configurations"]
    assert fields["OptimizerConfig of grpo"]["adam_eps"] == 0.05
    assert fields["TransformerConfig"]["hidden_dropout"] == 0.1
    assert fields["TransformerConfig"]["num_layers"] == 2
    assert [step.is_equal for step in replay(run)] == [True, True]
    assert [step.state_equal for step in replay(run)][-1] is True
    run.close()
    shown = cli("run", "show", run.root)
    assert "  OptimizerConfig of grpo.adam_eps = 0.05\n" in shown.out
    as_json = cli("run", "show", run.root, "--json").json
    assert as_json["trainer_built_with"] == built
    assert as_json["config"]["trainer"]["megatron"] == {"adam_eps": 0.01, "hidden_dropout": 0.1}
    with pytest.raises(
        ConfigError, match=r"--adam-eps 0\.02: the run was made with 0\.05, and its settings never change"
    ):
        require_same(run.config, ["--adam-eps", "0.02"])
    require_same(run.config, ["--adam-eps", "0.05"])
