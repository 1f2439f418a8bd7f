"""Which engines a run starts, from a YAML file: models, their server groups, and what each group overrides.

    models:
      - name: policy                    # the one that is trained: engines serve the run's weights
        server_groups:
          - worker_type: regular        # or prefill and decode (both, behind a router), or placeholder
            count: 2
            gpus_per_engine: 1
            overrides:                  # SGLang's own flags, over those of the run
              mem-fraction-static: 0.8
      - name: grader                    # any other is frozen: its files are served, it never gets weights
        path: /models/reward
        port: 31000                     # of its first engine; the next have the next ports
        server_groups:
          - overrides: {is-embedding: true}
    router:                             # flags of the router, over rollout.router_args
      policy: cache_aware

1. GPUs are handed out in the order of the file; a placeholder takes its share and starts nothing.
2. Every error names file, model, group and field.
It starts nothing and knows no flag of SGLang: workers ask its parser.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from strawflow.errors import ConfigError
from strawflow.ids import NAME_RULE, is_name
from strawflow.strict_yaml import read_yaml

POLICY = "policy"
"""The model that is trained; every other is frozen."""

Flag = bool | int | float | str | tuple[str, ...]
WorkerType = Literal["regular", "prefill", "decode", "placeholder"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerGroup(_Part):
    """Engines that are started alike."""

    worker_type: WorkerType = "regular"
    count: int = Field(default=1, ge=1)
    """Engines."""
    gpus_per_engine: int = Field(default=1, ge=1)
    engines_per_worker: int = Field(default=1, ge=1)
    """Above 1: so many stand behind a router, which keeps each sample with one, and have one rollout worker."""
    overrides: dict[str, Flag] = {}
    """SGLang's own flags, without dashes in front; true: a flag without a value."""


class ServedModel(_Part):
    """A model and the engines that serve it."""

    name: str
    path: str = ""
    """Hugging Face folder of a frozen model; the policy has none."""
    frozen: bool | None = None
    """Said for the reader: all but the policy are."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Of a frozen model's first engine."""
    server_groups: tuple[ServerGroup, ...] = Field(min_length=1)


class Topology(_Part):
    """The whole file."""

    models: tuple[ServedModel, ...] = Field(min_length=1)
    router: dict[str, Flag] = {}


@dataclass(frozen=True)
class EnginePlan:
    """One server to start."""

    worker_type: WorkerType
    arguments: tuple[str, ...]
    """SGLang's own, over those of the run."""
    first_gpu: int
    num_gpus: int
    port: int = 0
    """0: any free one."""


@dataclass(frozen=True)
class Placement:
    """Servers that one worker process starts and ends together."""

    model: str
    path: str
    engines: tuple[EnginePlan, ...]

    @property
    def is_routed(self) -> bool:
        return len(self.engines) > 1


def placements(topology: Topology) -> tuple[Placement, ...]:
    """Return what is to be started, in the order of the file."""
    found: list[Placement] = []
    next_gpu = 0
    for model in topology.models:
        port = model.port or 0
        split: list[EnginePlan] = []  # prefill and decode stand behind one router
        for group in model.server_groups:
            alike: list[EnginePlan] = []
            for _ in range(group.count):
                arguments = as_arguments(group.overrides)
                alike.append(EnginePlan(group.worker_type, arguments, next_gpu, group.gpus_per_engine, port))
                next_gpu += group.gpus_per_engine
                port += bool(port)
            if group.worker_type == "regular":
                size = group.engines_per_worker
                found += [
                    Placement(model.name, model.path, tuple(alike[at : at + size]))
                    for at in range(0, len(alike), size)
                ]
            elif group.worker_type != "placeholder":
                split += alike
        if split:
            found.append(Placement(model.name, model.path, tuple(split)))
    return tuple(found)


def as_arguments(flags: Mapping[str, Flag]) -> tuple[str, ...]:
    """Return flags as a command line has them."""
    words: list[str] = []
    for name, value in flags.items():
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, tuple):
            words += value
        elif value is not True:
            words.append(str(value))
    return tuple(words)


def read_topology(path: Path) -> Topology:
    """Return what a YAML file says.

    Raises:
        ConfigError: there is no such file, or it is not of this form; names model, group and field.
    """
    tree = read_yaml(path, what="a topology")
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: there must be a list `models:` with at least one entry")
    return checked_topology(tree, where=str(path))


def checked_topology(tree: Any, *, where: str) -> Topology:
    """Return a topology that can be started, as far as can be told without SGLang.

    Raises:
        ConfigError: it cannot; names `where`, model, group and field.
    """
    try:
        topology = tree if isinstance(tree, Topology) else Topology.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_told(error, tree)}") from None
    names = [model.name for model in topology.models]
    for number, model in enumerate(topology.models, start=1):
        at = f"{where}: model {number} ({model.name})"
        if not is_name(model.name):
            raise ConfigError(f"{at}: name: {NAME_RULE}")
        if names.index(model.name) != number - 1:
            raise ConfigError(f"{at}: name: model {names.index(model.name) + 1} is called so already")
        (_check_policy if model.name == POLICY else _check_frozen)(model, at)
        _check_groups(model, at)
    if POLICY not in names:
        raise ConfigError(f"{where}: models: none is called {POLICY!r}, which is the one that is trained")
    if topology.router and not any(p.is_routed for p in placements(topology)):
        raise ConfigError(
            f"{where}: router: no server group needs one; they do with prefill and decode, or engines_per_worker above 1"
        )
    return topology


def _check_policy(model: ServedModel, at: str) -> None:
    if model.path:
        raise ConfigError(f"{at}: path: the policy's engines serve the run's own weights; leave it out")
    if model.frozen:
        raise ConfigError(f"{at}: frozen: the policy is what is trained")
    if model.port is not None:
        raise ConfigError(f"{at}: port: a free one is taken at each start; leave it out")


def _check_frozen(model: ServedModel, at: str) -> None:
    if model.frozen is False:
        raise ConfigError(f"{at}: frozen: only {POLICY!r} gets weights; every other model is frozen")
    if not model.path:
        raise ConfigError(f"{at}: path: name the Hugging Face folder that it serves")
    if model.port is None:
        raise ConfigError(
            f"{at}: port: give one, for whoever asks it by address (reward_model:http://127.0.0.1:PORT)"
        )
    for number, group in enumerate(model.server_groups, start=1):
        if group.worker_type in ("prefill", "decode") or group.engines_per_worker > 1:
            raise ConfigError(
                f"{at}: server group {number}: worker_type: a frozen model has regular groups without a router"
            )


def _check_groups(model: ServedModel, at: str) -> None:
    kinds = {group.worker_type for group in model.server_groups}
    for one, other in (("prefill", "decode"), ("decode", "prefill")):
        if one in kinds and other not in kinds:
            raise ConfigError(f"{at}: server_groups: {one} needs a group of {other} beside it")
    if kinds == {"placeholder"}:
        raise ConfigError(f"{at}: server_groups: placeholders start nothing; give it a group that serves")
    for number, group in enumerate(model.server_groups, start=1):
        if group.engines_per_worker > 1 and group.worker_type != "regular":
            raise ConfigError(
                f"{at}: server group {number}: engines_per_worker: prefill and decode share one worker as it is"
            )
        if group.count % group.engines_per_worker:
            raise ConfigError(
                f"{at}: server group {number}: count: {group.count} engines do not share out among workers of "
                f"{group.engines_per_worker}"
            )
        for name, value in group.overrides.items():
            if value is False:
                raise ConfigError(
                    f"{at}: server group {number}: overrides: {name}: a flag is given or left out; false says neither"
                )


def _told(error: ValidationError, tree: Any) -> str:
    """Return the first thing that is wrong, with its place in the words of the file."""
    first = error.errors()[0]
    words: list[str] = []
    known: Sequence[str] = tuple(Topology.model_fields)
    place = list(first["loc"])
    while place:
        part = place.pop(0)
        if part == "models" and place and isinstance(place[0], int):
            number = place.pop(0)
            name = _at(tree, "models", number, "name")
            words.append(f"model {int(number) + 1}" + (f" ({name})" if isinstance(name, str) else ""))
            known = tuple(ServedModel.model_fields)
        elif part == "server_groups" and place and isinstance(place[0], int):
            words.append(f"server group {int(place.pop(0)) + 1}")
            known = tuple(ServerGroup.model_fields)
        elif part in ("overrides", "router") and place:
            words += [str(part), str(place[0])]
            break
        else:
            words.append(str(part))
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(words[-1], known, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
        return ": ".join([*words[:-1], f"unknown field {words[-1]}{hint}"])
    return ": ".join([*words, first["msg"].replace("a valid tuple", "a list").replace("Tuple", "List")])


def _at(tree: Any, *place: Any) -> Any:
    for part in place:
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):
            return None
    return tree
