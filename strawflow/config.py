"""The configuration of a run: one frozen tree, read from TOML, flags and STRAWFLOW_ variables.

1. Every field can be given as `section.field` in three places; flag beats variable beats file beats default.
2. Unknown names are refused with the nearest known one.
3. The resolved tree is stored in the run's folder as config.json and never changes after the run was created.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from strawflow import config_algorithm, sampling
from strawflow.config_algorithm import AlgorithmSection
from strawflow.config_guard import GuardSection
from strawflow.config_parallel import ParallelSection, refuse_impossible_ranks
from strawflow.config_trainer import TrainerSection
from strawflow.dotted_path import checked_path
from strawflow.errors import ConfigError
from strawflow.eval_datasets import (
    HELD_OUT,
    EvalDataset,
    checked_entries,
    read_eval_datasets,
    refuse_unanswered,
)
from strawflow.native import checked_roles, read_roles
from strawflow.prompt_sets import DEFAULT as DEFAULT_SETS
from strawflow.prompt_sets import PromptSet, read_prompt_sets, refuse_wrong_sets
from strawflow.reward_names import is_address, parse_reward
from strawflow.sampling import EvalProfile
from strawflow.sampling import SamplingProfile as SamplingProfile
from strawflow.section import Section as Section
from strawflow.topology import Topology, checked_topology, read_topology

ENV_PREFIX = "STRAWFLOW_"
_COMMANDS = {"run", "eval"}
"""Sections whose name is also a command's: STRAWFLOW_RUN_... may be an option of `strawflow run`."""


class RunSection(Section):
    seed: int = 0
    """Seeds the order of prompts, sampling and the trainer."""
    durability: Literal["process", "host"] = "host"
    """`host` survives power loss (fdatasync, SQLite synchronous=FULL); `process` survives every kill."""
    index_url: str = ""
    """SQLAlchemy address of the index; empty: SQLite inside the run's folder."""

    @field_validator("durability", mode="before")
    @classmethod
    def _no_store_yet(cls, value: object) -> object:
        if value == "store":
            raise ValueError(
                "'store' is the level of an object store, and a run's packs lie in a folder: choose 'host', or 'process'"
            )
        return value


class ModelSection(Section):
    path: str = ""
    """Hugging Face checkpoint folder the run starts from (config.json, weights, tokenizer)."""


class DataSection(Section):
    prompts: tuple[PromptSet, ...] = ()
    """What is trained on: a prompt file, `path` or `path@[a:b]` (JSONL, Parquet or Arrow, plain, .gz or .zst), or several
    mixed by weight: `[NAME=]FILE:WEIGHT,...`, or tables with name, path or source, and weight."""
    demonstrations: str = ""
    """Prompt file with labels for the supervised warm start."""
    held_out: str = ""
    """Prompt file for evaluation; never trained on."""
    input_key: str = "prompt"
    """Field that holds the prompt: text, or a list of chat messages."""
    label_key: str = "label"
    """Field that holds the reference answer; empty: none."""
    metadata_key: str = ""
    """Field that holds a JSON object handed to the reward; empty: none."""
    images_key: str = ""
    """Field that holds an image or a list of them: paths relative to the file, `data:` addresses, or bytes; empty: none."""
    on_bad_row: Literal["fail", "skip"] = "fail"

    @field_validator("prompts", mode="before")
    @classmethod
    def _are_sets(cls, given: Any) -> list[Any]:
        return read_prompt_sets(given)


class WarmStartSection(Section):
    steps: int = Field(default=0, ge=0)
    """Supervised steps before reinforcement learning; 0: none."""
    prompts_per_step: int = Field(default=32, ge=1)
    lr: float = Field(default=1e-3, gt=0)
    lr_warmup_steps: int = Field(default=20, ge=0)
    weight_decay: float = Field(default=0.01, ge=0)


class RolloutSection(Section):
    engine: Literal["sglang", "fake"] = "sglang"
    """`fake` is strawflow.testing's engine: for fault tests only."""
    prompts_per_step: int = Field(default=32, ge=1)
    samples_per_prompt: int = Field(default=8, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_response_tokens: int = Field(default=256, ge=1)
    min_response_tokens: int = Field(default=0, ge=0)
    """No end of sequence and no stop before so many tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end a response; they stay its last tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, beside the end of sequence."""
    max_staleness: int = Field(default=0, ge=0)
    """How many steps the weights that sample a batch may lag behind the weights it is applied to."""
    max_backlog: int = Field(default=0, ge=0)
    """No further training group is leased while so many are leased or wait for the trainer; 0: no bound of its own."""
    schedule: Literal["async", "sync"] = "async"
    """How far admission runs ahead: `async` by as many steps as max_staleness allows, `sync` by none."""
    over_provision: int = Field(default=0, ge=0)
    """Groups admitted beyond those that the next batches take, so that a batch need not wait for its longest groups: they
    go on for the batch after it."""
    units_in_flight: int = Field(default=32, ge=1)
    """Prompt groups that one worker asks its engine for at a time. It holds up to as many again that wait for their rewards,
    and while there are plenty it leases as many ahead, to begin one the moment another has its responses."""
    on_new_weights: Literal["finish", "park", "continue"] = "finish"
    """What happens to groups in flight when newer weights are published. `finish`: they are answered first. `park`: they are
    broken off, stored, and go on with the new weights. `continue`: the engine pauses, loads, and goes on inside them."""
    partial_rollout: bool = True
    """Keep what was generated of groups that are broken off (new weights, drain); off: they start again from the prompt."""
    save_every_s: float = Field(default=10.0, ge=0)
    """Seconds after which what was generated of groups in flight is saved: a kill then loses no more. 0: no such bound.
    Without `partial_rollout` nothing is saved."""
    save_every_tokens: int = Field(default=0, ge=0)
    """Tokens of a response after which it is saved as well; 0: no such bound."""
    stream_interval: int = Field(default=32, ge=1)
    """Tokens between two messages of an engine about a response that is saved while it is generated."""

    @property
    def saves_progress(self) -> bool:
        """Whether responses are saved while they are generated."""
        return self.partial_rollout and bool(self.save_every_s or self.save_every_tokens)

    reward: str = "exact"
    """Scores the responses: `exact`, `f1`, `math`, `multiple_choice` (each also `boxed_`), `instructions`, `code:python`,
    `reasoning_gym:<dataset>`, `remote:URL`, `reward_model:URL`, `package.module:function`, `group:` for whole groups."""
    reward_shape: Literal["raw", "exact"] = "exact"
    """`exact`: 1 where the verifier's score is exactly 1.0, else 0; `raw`: the score itself."""
    reward_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds for one reward; a process that takes longer is killed, a server's answer is waited for no longer."""
    reward_processes: int = Field(default=1, ge=1)
    reward_concurrency: int = Field(default=64, ge=1)
    """Requests to a reward server at a time (`remote:`, `reward_model:`)."""
    reward_retries: int = Field(default=5, ge=0)
    """How often a request is sent again after a server error (5xx) or a failed connection, with back-off."""
    reward_model_input: Literal["tokens", "text"] = "tokens"
    """What a reward model is sent: the very token ids (it has the same vocabulary), or prompt and response as text."""
    reward_post_process: str = ""
    """`package.module:function` that turns a group's rewards into those that are trained; empty: none."""
    row_rewards: tuple[str, ...] = ()
    """Functions and addresses that a row may name in `metadata.reward`; strawflow's own rewards need no listing."""
    generate: str = ""
    """Hook `package.module:function` that makes rollouts (turns, tools, several segments); empty: one request a sample."""
    generate_groups: str = ""
    """Hook `package.module:function` that makes all rollouts of one claim in one call; empty: none. Not beside `generate`."""
    generate_timeout_s: float = Field(default=0.0, ge=0)
    """Seconds that one call of the generate hook may take before its member (or claim) fails; 0: no bound."""
    sample_filter: str = ""
    """Hook `package.module:function` that may drop a rollout with a reason, before its reward; empty: none."""
    curriculum: str = ""
    """Hook `package.module:function` that sets the weights of the prompt sets as the run goes on; empty: they stay."""
    max_attempts: int = Field(default=3, ge=1)
    """Grants of a unit before it is set aside as failed."""
    engines: int = Field(default=1, ge=1)
    """Engines that `strawflow resume` starts on its host, each with a rollout worker of its own."""
    engine_urls: tuple[str, ...] = ()
    """Engines that run already, anywhere this run's weights folder can be read: one rollout worker is started for each, and
    none is started here. Each serves this run alone."""
    health_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that an engine may fail its health checks, paused or hung, before its worker starts again (an engine of its own,
    too). Loading weights does not count."""
    load_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that an engine may take to load weights, and before that their files to be read and checked, until its worker starts
    again."""
    answer_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds without a byte of an engine's answer after which a request is given up, and its unit tried again. An answer
    that is not streamed (attached engines without `--incremental-streaming-output`, or nothing saved) comes all at its end:
    make it longer than the longest response takes then."""
    quarantine_after: int = Field(default=3, ge=0)
    """Groups in a row whose answers are garbage (log-probabilities or weights that cannot be) after which an engine is put in
    quarantine; 0: never for that."""
    engine_args: tuple[str, ...] = ()
    """Further SGLang server flags, as they are."""
    router_args: tuple[str, ...] = ()
    """Further flags of SGLang's router, as they are, where the topology has one."""
    topology: Topology | Literal[""] = ""
    """Models, server groups and router that `strawflow resume` starts instead of `engines`: a YAML file, read when the run is
    created."""
    engine_options: dict[str, str] = Field(default_factory=dict)
    """For the fake engine: its fault switches."""

    _are_paths = field_validator("generate", "generate_groups", "sample_filter", "curriculum")(checked_path)

    @field_validator("reward")
    @classmethod
    def _is_a_reward(cls, name: str) -> str:
        parse_reward(name)
        return name

    @field_validator("row_rewards")
    @classmethod
    def _are_rewards(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            parse_reward(name)
        return names

    @field_validator("reward_post_process")
    @classmethod
    def _is_a_function(cls, name: str) -> str:
        if name and parse_reward(name).kind != "function":
            raise ConfigError(f"{name!r} is no function; write package.module:function")
        return name


class AssembleSection(Section):
    mini_batches: int = Field(default=2, ge=1)
    """Optimizer updates per step."""
    max_tokens_per_micro_batch: int = Field(default=16384, ge=1)
    failed_member: Literal["exclude", "drop-group"] = "exclude"
    """What a failed member does to its group: leave it out while enough remain, or drop the group."""
    stale: Literal["requeue", "drop", "mask", "train"] = "requeue"
    """What becomes of tokens staler than rollout.max_staleness when their batch is planned: their group is sampled afresh,
    or dropped; they are masked and the rest of their group trained; or trained all the same, oldest weights first."""
    max_requeues: int = Field(default=1, ge=0)
    """How often a group is sampled afresh for being stale; after that it is dropped."""
    group_filter: str = ""
    """Which groups take a place in a batch (dynamic sampling): `nonzero_deviation`, or a hook `package.module:function`; one
    that is dropped is replaced by another. Empty: all do, and those without signal leave their place unused."""
    post_process: str = ""
    """Hook `package.module:function` that turns the rewards of a planned group into others, or into advantages; empty: none."""
    convert: str = ""
    """Hook `package.module:function` that turns a planned group into the rows that are trained; empty: its segments as stored."""
    log: str = ""
    """Hook `package.module:function` that is told of each batch when it is planned; empty: none."""
    starved_after_batches: int = Field(default=8, ge=1)
    """Groups dropped in a row, in units of a batch, after which the run stops as starved."""

    _are_paths = field_validator("post_process", "convert", "log")(checked_path)


class EvalSection(Section):
    samples_per_prompt: int = Field(default=4, ge=1)
    """Answers sampled to every held-out prompt, at temperature 1."""
    greedy: bool = True
    """Also answer every held-out prompt once greedily."""
    interval: int = Field(default=0, ge=0)
    """Steps between evaluations, beside the one before and the one after; 0: those two alone. An evaluated step always has
    a checkpoint."""
    skip_first: bool = False
    """Do not evaluate the weights that reinforcement learning starts from."""
    datasets: tuple[EvalDataset, ...] = ()
    """Further datasets, each with its own sampling settings: a YAML file, read when the run is created."""


class LeaseSection(Section):
    ttl_s: float = Field(default=30.0, gt=0)
    heartbeat_s: float = Field(default=5.0, gt=0)
    margin_s: float = Field(default=5.0, ge=0)
    grace_s: float = Field(default=2.0, ge=0)
    """How long after its expiry a session is still left alone."""


class StorageSection(Section):
    sweep_grace_s: float = Field(default=3600.0, ge=0)
    """How long a file that nothing names is left alone; longer than any reader holds on to a place it looked up."""
    keep_checkpoints: int = Field(default=0, ge=0)
    """Newest checkpoints whose files retention keeps; 0: all. The newest, pinned ones and those a branch starts from
    always stay."""
    keep_checkpoints_every: int = Field(default=0, ge=0)
    """Checkpoints of every so many steps stay too; 0: none for that."""
    keep_weights_every: int = Field(default=0, ge=0)
    """Weights of every so many steps stay beside the newest trainer.keep_weights; 0: none for that."""
    keep_steps: int = Field(default=0, ge=0)
    """Batches, trajectories and unit rows of steps further behind their consumer's position may go; 0: kept for ever."""
    receipt_age_s: float = Field(default=604800.0, ge=3600)
    """Receipts of submissions are kept so long: longer than a submission may be repeated."""
    event_age_s: float = Field(default=604800.0, ge=0)
    """Older events are moved from the index to packs; 0: never."""
    quota_bytes: int = Field(default=0, ge=0)
    """Most bytes the run's folder may take; 0: no bound."""
    min_free_bytes: int = Field(default=1073741824, ge=0)
    """Free space below which nothing is admitted or claimed, at most 5 % of the disk; below its half nothing is written."""


class RunConfig(Section):
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    warm_start: WarmStartSection = WarmStartSection()
    rollout: RolloutSection = RolloutSection()
    assemble: AssembleSection = AssembleSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    trainer: TrainerSection = TrainerSection()
    parallel: ParallelSection = ParallelSection()
    guard: GuardSection = GuardSection()
    eval: EvalSection = EvalSection()
    lease: LeaseSection = LeaseSection()
    storage: StorageSection = StorageSection()

    @model_validator(mode="before")
    @classmethod
    def _knows_earlier_names(cls, tree: Any) -> Any:
        return config_algorithm.moved(tree) if isinstance(tree, Mapping) else tree

    @model_validator(mode="after")
    def _has_sound_prompt_sets(self) -> RunConfig:
        refuse_wrong_sets(self.data.prompts, taken=[dataset.name for dataset in self.eval.datasets])
        return self

    @property
    def total_steps(self) -> int:
        return self.warm_start.steps + self.trainer.steps

    def prompt_sets(self) -> tuple[PromptSet, ...]:
        """Return what is trained on; a run that names nothing has the one set `prompts`."""
        return self.data.prompts or DEFAULT_SETS

    def profiles(self) -> dict[str, SamplingProfile]:
        """Return the sampling settings by profile name."""
        return sampling.profiles(self)

    def eval_profiles(self) -> list[EvalProfile]:
        """Return how each dataset is evaluated, `held_out` first."""
        return sampling.eval_profiles(self)

    def eval_datasets(self) -> list[str]:
        """Return the names of the datasets that are evaluated, `held_out` first."""
        return [HELD_OUT, *(dataset.name for dataset in self.eval.datasets)]


def field_names() -> dict[str, type[Section]]:
    """Return every configurable name `section.field` and the section it belongs to."""
    names: dict[str, type[Section]] = {}
    for section_name, section in RunConfig.model_fields.items():
        section_type = section.annotation
        if not (isinstance(section_type, type) and issubclass(section_type, Section)):
            raise TypeError(f"RunConfig.{section_name} is not a Section")
        for field_name in section_type.model_fields:
            names[f"{section_name}.{field_name}"] = section_type
    return names


def load_config(
    toml_path: Path | None = None,
    *,
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> RunConfig:
    """Resolve a configuration from a TOML file, STRAWFLOW_ variables and flags, later ones winning.

    `flags` maps `section.field` to the text given; `STRAWFLOW_SECTION_FIELD` is the same name in capitals.

    Raises:
        ConfigError: a file, name or value is wrong; the message names it.
    """
    tree: dict[str, dict[str, Any]] = {}
    if toml_path is not None:
        tree = _read_toml(toml_path)
    known = field_names()
    by_variable = {ENV_PREFIX + name.replace(".", "_").upper(): name for name in known}
    given_by: dict[str, str] = {}
    for variable, text in (environ or {}).items():
        if variable in by_variable:
            given_by[by_variable[variable]] = variable
            _put(tree, by_variable[variable], text, given_by=variable)
        else:
            _refuse_misspelt(variable, by_variable)
    for name, text in (flags or {}).items():
        if name not in known:
            later = config_algorithm.LATER_NAMES.get(name)
            near = [later] if later else difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean --{near[0]}?" if near else ""
            raise ConfigError(f"unknown setting --{name}{hint}")
        given_by[name] = f"--{name}"
        _put(tree, name, text, given_by=given_by[name])
    where = str(toml_path) if toml_path else "the given flags"
    eval_settings = tree.get("eval", {})
    named = eval_settings.get("datasets")
    if isinstance(named, str):
        eval_settings["datasets"] = read_eval_datasets(Path(named)) if named else []
    elif named is not None:
        eval_settings["datasets"] = checked_entries(named, where=f"{where}: eval.datasets")
    rollout_settings = tree.get("rollout", {})
    drawn = rollout_settings.get("topology")
    if isinstance(drawn, str) and drawn:
        rollout_settings["topology"] = read_topology(Path(drawn))
    elif drawn:
        rollout_settings["topology"] = checked_topology(drawn, where=f"{where}: rollout.topology")
    trainer_settings = tree.get("trainer", {})
    of_roles = trainer_settings.get("roles")
    if isinstance(of_roles, str) and of_roles:
        trainer_settings["roles"] = read_roles(Path(of_roles))
    elif of_roles:
        trainer_settings["roles"] = checked_roles(of_roles, where=f"{where}: trainer.roles")
    config = sampling.with_filled_datasets(_validated(tree, where=where, given_by=given_by))
    refuse_unanswered(
        config.eval.datasets, where=named if isinstance(named, str) else f"{where}: eval.datasets"
    )
    return config


def with_found_model(config: RunConfig) -> RunConfig:
    """Return the configuration with model.path made absolute, from the working directory.

    Raises:
        ConfigError: the folder holds no Hugging Face checkpoint.
    """
    if not config.model.path:
        return config
    path = Path(config.model.path).absolute()
    if not (path / "config.json").exists():
        raise ConfigError(f"model.path: {path} is no Hugging Face checkpoint folder: it has no config.json")
    return config.model_copy(update={"model": ModelSection(path=str(path))})


def _refuse_misspelt(variable: str, known: Mapping[str, str]) -> None:
    """Raise ConfigError for a variable that names a section of ours and no field of it."""
    section = variable.removeprefix(ENV_PREFIX).split("_")[0].lower()
    sections = {name.split("_")[0] for name in RunConfig.model_fields} - _COMMANDS
    if variable.startswith(ENV_PREFIX) and section in sections:
        near = difflib.get_close_matches(variable, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"unknown variable {variable}{hint}")


def _read_toml(path: Path) -> dict[str, dict[str, Any]]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for section, values in tree.items():
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {section!r} must be a [section]; settings live inside sections")
    return tree


def _put(tree: dict[str, dict[str, Any]], name: str, text: str, *, given_by: str) -> None:
    section, field = name.split(".", 1)
    value: Any = text
    if text[:1] in ("[", "{"):  # lists and tables are given as JSON
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{given_by}: not valid JSON: {error}") from None
    tree.setdefault(section, {})[field] = value


def _validated(tree: dict[str, dict[str, Any]], *, where: str, given_by: Mapping[str, str]) -> RunConfig:
    """Return what the tree says; `given_by` names the flag or variable of each setting that does not come from `where`."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(
                name, field_names() if "." in name else RunConfig.model_fields, n=1
            )
            message = "there is no such setting" + (f"; did you mean {near[0]}?" if near else "")
        setting = ".".join(str(part) for part in first["loc"][:2])
        at = f"{given_by.get(setting, where)}: setting {name}" if name else where
        raise ConfigError(f"{at}: {message}") from None


def refuse_deadlocks(config: RunConfig) -> None:
    """Raise ConfigError for a rollout that could never fill a batch, or only with groups thrown away, and show why.

    Also for ranks of the trainer that cannot be.
    """
    refuse_impossible_ranks(config.parallel)
    r = config.rollout
    if r.max_backlog and r.max_backlog < r.prompts_per_step:
        raise ConfigError(
            f"rollout.max_backlog {r.max_backlog} < rollout.prompts_per_step {r.prompts_per_step}: the backlog is full before "
            f"a batch is; set it to at least {r.prompts_per_step}, or to 0 for no bound"
        )
    if r.over_provision and not r.max_staleness:
        raise ConfigError(
            f"rollout.over_provision {r.over_provision} with rollout.max_staleness 0: a group left over by the batch of step s "
            "is trained at step s + 1 at the earliest, by then 1 step stale: more than 0. Set max_staleness to 1 or more, or "
            "over_provision to 0"
        )
    for url in r.engine_urls:
        if not is_address(url):
            raise ConfigError(
                f"rollout.engine_urls: {url!r} is no address of an engine; write http://HOST:PORT"
            )
    if r.topology and (r.engine_urls or r.engines != 1):
        raise ConfigError(
            "rollout.topology says which engines there are: leave out rollout.engines and rollout.engine_urls (`strawflow "
            "engine add RUN --url ...` adds attached ones)"
        )
    if r.min_response_tokens > r.max_response_tokens:
        raise ConfigError(
            f"rollout.min_response_tokens {r.min_response_tokens} > rollout.max_response_tokens {r.max_response_tokens}: no "
            "response could ever end"
        )


def refuse_senseless(config: RunConfig) -> None:
    """Raise ConfigError for settings of the algorithm that contradict each other, or need what the run does not have."""
    a = config.algorithm
    config_algorithm.refuse_senseless(
        a, clip_low=config.trainer.clip_low, mini_batches=config.assemble.mini_batches
    )
    for name, folder in (("reference", a.reference), ("teacher", a.teacher)):
        if folder and not (Path(folder) / "config.json").exists():
            raise ConfigError(
                f"algorithm.{name}: {folder} is no Hugging Face checkpoint folder: it has no config.json"
            )


def to_json(config: RunConfig) -> str:
    return config.model_dump_json(indent=2) + "\n"


def from_json(text: str, *, path: str) -> RunConfig:
    """Read a stored configuration back.

    Raises:
        ConfigError: it does not match this program's configuration.
    """
    try:
        return RunConfig.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: setting {name}: {first['msg'].removeprefix('Value error, ')}") from None
