"""Megatron's own flags, as the installed Megatron knows them: read, checked before a run is made, and listed.

1. `--its-own-name [VALUE ...]`; switches are `--name` and `--no-name`. Names that Megatron's own parser gives a field mean it too.
2. What strawflow decides is refused, with the setting that decides it.
3. Megatron's configurations are made on trial from what is given: what one refuses is an error before there is a run.
4. Importing this module imports nothing of Megatron.
"""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from strawflow.cli.fields import short_names
from strawflow.config import RunConfig
from strawflow.config_trainer import TrainerSection
from strawflow.errors import ConfigError
from strawflow.native import Role, Roles

_BY_MODEL = "config.json of the model decides it (--model.path)"
_LR = "set trainer.lr (warm_start.lr for the warm start)"
_FROM_WEIGHTS = "weights come from the checkpoint, and none is made at random"
_OWN_ATTENTION = "the trainer has a packed attention of its own"
_OWN_LOSS = "strawflow computes log-probabilities itself"
OURS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size"),
            *("kv_channels", "layernorm_epsilon", "layernorm_zero_centered_gamma", "normalization"),
            *("qk_layernorm", "qk_l2_norm", "gated_linear_unit", "add_bias_linear", "add_qkv_bias"),
            *("rotary_interleaved", "window_size", "window_attn_skip_freq", "multi_latent_attention"),
            *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
            *("rope_type", "rotary_base", "rotary_percent", "rotary_scaling_factor"),
            *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
            *("num_moe_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
            *("moe_shared_expert_gate", "moe_layer_freq", "moe_router_topk", "moe_router_pre_softmax"),
            *("moe_router_score_function", "moe_router_topk_scaling_factor", "moe_router_num_groups"),
            *("moe_router_group_topk", "moe_router_enable_expert_bias", "mtp_num_layers", "softmax_scale"),
            *("softmax_type", "no_rope_freq", "is_hybrid_model", "experimental_attention_variant"),
            *("attention_output_gate", "glu_linear_offset", "activation_func_clamp_value"),
        ),
        _BY_MODEL,
    ),
    "lr": _LR,
    "min_lr": _LR,
    "decoupled_lr": _LR,
    "decoupled_min_lr": _LR,
    "calculate_per_token_loss": "the denominator of an update is planned and stored with its batch",
    "perform_initialization": _FROM_WEIGHTS,
    "use_cpu_initialization": _FROM_WEIGHTS,
    "init_model_with_meta_device": _FROM_WEIGHTS,
    "attention_dropout": "packed attention has no dropout",
    "attention_backend": _OWN_ATTENTION,
    "flash_decode": _OWN_ATTENTION,
    "transformer_impl": "the trainer chooses its layers",
    "cross_entropy_loss_fusion": _OWN_LOSS,
    "cross_entropy_fusion_impl": _OWN_LOSS,
}
"""Settings that strawflow decides, and how. Beside these: every one that the section `trainer` has under the same name."""


PARALLEL: Mapping[str, str] = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "pipeline_dtype": "precision",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert",
    "sequence_parallel": "sequence",
    "use_distributed_optimizer": "distributed_optimizer",
    "overlap_param_gather": "overlap_param_gather",
    "params_dtype": "precision",
    "bf16": "precision",
    "fp16": "precision",
    **dict.fromkeys(
        (
            *("virtual_pipeline_model_parallel_size", "hierarchical_context_parallel_sizes"),
            *("hybrid_context_parallel", "variable_seq_lengths", "autocast_dtype"),
        ),
        "",
    ),
}
"""Settings of how a model is spread and in which precision, and the field of the section `parallel` that decides each."""


def why_ours(name: str) -> str | None:
    """Return why a setting of Megatron's cannot be given; None: it can."""
    if name in TrainerSection.model_fields:
        return f"it is a setting of strawflow's: --trainer.{name}"
    if name in PARALLEL:
        section = RunConfig.model_fields.get("parallel")
        field = PARALLEL[name]
        if section is not None and field in getattr(section.annotation, "model_fields", ()):
            return f"it is a setting of strawflow's: --parallel.{field}"
        return "the trainer decides how its model is spread, and in which precision"
    return OURS.get(name)


def parse_words(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings that words of a command line mean, by name.

    Raises:
        ConfigError: a name is unknown, strawflow's to decide, or given twice, or a value does not fit; names the flag.
    """
    from strawflow_workers.trainer.native_fields import native_fields
    from strawflow_workers.trainer.native_values import from_words

    known, _ = native_fields()
    flags = _flags()
    values: dict[str, Any] = {}
    for flag, given in _groups(words):
        if flag not in flags:
            raise ConfigError(_unknown(flag, flags))
        name, switched = flags[flag]
        _refuse_ours(name, f"--{flag}")
        if name in values:
            raise ConfigError(f"--{flag}: {name} is given twice")
        try:
            is_switch = known[name].kind.shape == "switch" and not given
            values[name] = switched if is_switch else from_words(known[name].kind, given)
        except ValueError as error:
            raise ConfigError(f"--{flag} {error}") from None
    return values


def checked_config(config: RunConfig, words: Sequence[str]) -> RunConfig:
    """Return the configuration with all settings of Megatron as they are kept, `words` over those in it.

    Raises:
        ConfigError: a name, a value, or what they come to together is refused; names setting or flag.
    """
    trainer = config.trainer
    megatron = {**_checked(trainer.megatron, "trainer.megatron"), **parse_words(words)}
    roles = trainer.roles
    if isinstance(roles, Roles):
        actor = _checked(roles.actor.overrides, "trainer.roles: actor: overrides")
        roles = roles.model_copy(update={"actor": Role(overrides=actor)})
    made = trainer.model_copy(update={"megatron": megatron, "roles": roles})
    # Validated again, so that what is checked is what will be read back.
    checked = RunConfig.model_validate({**config.model_dump(), "trainer": made.model_dump()})
    try_configurations(checked)
    return checked


def checked_apart(config: RunConfig, words: Sequence[str]) -> RunConfig:
    """Do as `checked_config` in a process of its own, so that this one does not keep Megatron in memory.

    Raises:
        ConfigError: as there.
    """
    done = subprocess.run(
        [sys.executable, "-m", "strawflow_workers.entry", "megatron-flags", "--check", "--json"],
        input=json.dumps({"config": config.model_dump(mode="json"), "words": list(words)}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
        try:
            message = json.loads(last)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"Megatron could not be asked for its settings: {last}"
        raise ConfigError(message)
    return RunConfig.model_validate_json(done.stdout.strip().splitlines()[-1])


def require_same(config: RunConfig, words: Sequence[str]) -> None:
    """Refuse flags that differ from what the run was made with: its settings never change.

    Raises:
        ConfigError: one differs; names it and both values.
    """
    from strawflow_workers.trainer.native_settings import given_settings

    stored = given_settings(config)
    for name, value in parse_words(words).items():
        kept = list(stored[name]) if isinstance(stored.get(name), tuple) else stored.get(name)
        if name not in stored or kept != value:
            has = f"was made with {kept!r}" if name in stored else "was made without it"
            raise ConfigError(
                f"--{name.replace('_', '-')} {value!r}: the run {has}, and its settings never change: make another run"
            )


def try_configurations(config: RunConfig) -> None:
    """Make Megatron's configurations as the trainer of this run would.

    Raises:
        ConfigError: Megatron refuses one.
    """
    from strawflow_workers.trainer.configurations import of_run

    of_run(config)


def command(*, check: bool, as_json: bool) -> int:
    """List the settings, or check a configuration and words given as JSON on stdin and print what they come to."""
    if check:
        asked = json.loads(sys.stdin.read())
        config = RunConfig.model_validate(asked["config"])
        print(checked_config(config, asked["words"]).model_dump_json())
        return 0
    listed = list(_listed())
    if as_json:
        print(json.dumps(listed))
        return 0
    for line in _told(listed):
        print(line)
    return 0


def _groups(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag, without dashes, with its values."""
    at = 0
    while at < len(words):
        flag, equals, value = words[at].removeprefix("--").partition("=")
        at += 1
        values = [value] if equals else []
        while at < len(words) and not words[at].startswith("--"):
            values.append(words[at])
            at += 1
        yield flag, values


def _flags() -> dict[str, tuple[str, bool]]:
    """Return the field that each flag means, and what it switches to where it is a switch."""
    from strawflow_workers.trainer.native_fields import native_fields

    known, _ = native_fields()
    flags: dict[str, tuple[str, bool]] = {}
    for name, field in known.items():
        flags |= dict.fromkeys(field.on, (name, True)) | dict.fromkeys(field.off, (name, False))
    for name, field in known.items():  # a field's own name is never another's
        flag = name.replace("_", "-")
        if field.kind.shape == "switch":
            flags[f"no-{flag}"] = (name, False)
        flags[flag] = (name, True)
    return flags


def _unknown(flag: str, flags: Mapping[str, Any]) -> str:
    from strawflow_workers.trainer import megatron_version, training_arguments
    from strawflow_workers.trainer.native_fields import native_fields

    _, left_out = native_fields()
    for one in left_out:
        if flag.replace("-", "_") == one.name:
            return f"--{flag} ({one.configuration}) cannot be given as a flag: {one.reason}"
    if training_arguments.is_known(flag):
        return f"--{flag} is an argument of Megatron's own training program, whose loop strawflow replaces"
    ours = (name.replace("_", "-") for name in short_names())
    near = difflib.get_close_matches(flag, [*flags, *ours], n=1)
    hint = f"; did you mean --{near[0]}?" if near else ""
    return f"neither strawflow nor megatron-core {megatron_version.installed()} has a flag --{flag}{hint}"


def _refuse_ours(name: str, told: str) -> None:
    why = why_ours(name)
    if why is not None:
        raise ConfigError(f"{told} cannot be set: {why}")


def _checked(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    from strawflow_workers.trainer.native_fields import native_fields
    from strawflow_workers.trainer.native_values import from_plain

    known, _ = native_fields()
    values = {}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{where}: {_unknown(name.replace('_', '-'), _flags())}")
        _refuse_ours(name, f"{where}: {name}")
        try:
            values[name] = from_plain(known[name].kind, value)
        except ValueError as error:
            raise ConfigError(f"{where}: {name} {error}") from None
    return values


def _listed() -> Iterator[dict[str, Any]]:
    from strawflow_workers.trainer.native_fields import native_fields
    from strawflow_workers.trainer.native_values import plain

    known, left_out = native_fields()
    for name, field in known.items():
        flag = name.replace("_", "-")
        off = (f"no-{flag}", *field.off) if field.kind.shape == "switch" else ()
        yield {
            "flag": f"--{flag}",
            "also": ["--" + other for other in field.on if other != flag],
            "off": ["--" + other for other in dict.fromkeys(off)],
            "takes": field.kind.told(),
            "defaults": {owner: plain(value) for owner, value in field.defaults.items()},
            "doc": field.doc,
            "ours": why_ours(name),
        }
    for one in left_out:
        yield {"left_out": one.name, "configuration": one.configuration, "reason": one.reason}


def _told(listed: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    from strawflow_workers.trainer import megatron_version

    yield (
        f"Settings of megatron-core {megatron_version.installed()}: flags of `strawflow run create` after the name of the run, "
        "or a [trainer.megatron] table."
    )
    yield "A setting that two configurations have goes into both. What strawflow sets itself is listed last."
    free = [one for one in listed if "flag" in one and not one["ours"]]
    for one in free:
        takes = " " + one["takes"] if one["takes"] != "switch" else ""
        others = "".join(f", {flag}" for flag in (*one["also"], *one["off"]))
        defaults = ", ".join(f"{owner}: {json.dumps(value)}" for owner, value in one["defaults"].items())
        yield f"  {one['flag']}{takes}{others}  [{defaults}]"
        yield from (f"      {line}" for line in textwrap.wrap(one["doc"], 116))
    yield ""
    yield "Set by strawflow:"
    yield from (f"  {one['flag']}: {one['ours']}" for one in listed if one.get("ours"))
    yield ""
    yield "Left out:"
    yield from (
        f"  {one['left_out']} ({one['configuration']}): {one['reason']}"
        for one in listed
        if "left_out" in one
    )
