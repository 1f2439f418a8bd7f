"""From the dotted path of a hook to its function: importable, callable, with parameters that fit, or a ConfigError.

Only what can be seen without calling it is judged here; `check.py` calls it.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from strawflow.config import RunConfig
from strawflow.config_algorithm import is_hook
from strawflow.dotted_path import is_dotted_path
from strawflow.errors import ConfigError
from strawflow_workers.rollout.hooks import slime, slime_rollout, slime_source, slime_training
from strawflow_workers.rollout.hooks.converted import GroupShaper
from strawflow_workers.rollout.hooks.filtered import nonzero_deviation
from strawflow_workers.rollout.hooks.interfaces import (
    Convert,
    Curriculum,
    DataSource,
    GenerateGroupsHook,
    GenerateHook,
    GroupFilter,
    LogHook,
    PostProcess,
    SampleFilter,
)

Function = Callable[..., Any]


@dataclass(frozen=True)
class Kind:
    """One place where a hook may stand."""

    setting: str
    parameters: tuple[str, ...]
    """Given in this order, by position."""
    is_async: bool
    adapter: Callable[[Function, slime.Arguments], Function] | None = None
    """Takes a function whose first parameter is `args` as slime would call it; None: there is none for this kind."""
    slime_parameters: tuple[str, ...] = ()
    slime_keywords: tuple[str, ...] = ()
    """Given by name to a function that has them."""
    slime_is_async: bool | None = None
    """Whether slime's form is an `async def`; None: as ours is."""
    built_in: tuple[tuple[str, Function], ...] = ()
    is_told_by_parameters: bool = True
    """Whether `hook check` takes a function with these parameters for one of this kind; others have the same."""

    def expected(self) -> str:
        """Return in words how a function of this kind is called."""
        forms = [self.parameters, self.slime_parameters] if self.adapter else [self.parameters]
        marks = [self.is_async, self.is_async if self.slime_is_async is None else self.slime_is_async]
        shown = [
            f"{'async ' if mark else ''}({', '.join(names)})"
            for names, mark in zip(forms, marks, strict=False)
        ]
        return f"expected is {', or '.join(shown)}{' as in slime' if self.adapter else ''}"


DATA_SOURCES = "data.prompts"
"""The setting that names data sources, each in a prompt set of its own."""

KINDS: dict[str, Kind] = {
    "generate": Kind(
        "rollout.generate",
        ("sample", "engine"),
        True,
        slime.generate_hook,
        ("args", "sample", "sampling_params"),
        ("evaluation",),
    ),
    "generate_groups": Kind(
        "rollout.generate_groups",
        ("groups", "engines"),
        True,
        slime_rollout.generate_groups_hook,
        ("args", "rollout_id", "data_source"),
        ("evaluation",),
        slime_is_async=False,
    ),
    "sample_filter": Kind(
        "rollout.sample_filter",
        ("sample", "rollout"),
        False,
        slime.sample_filter,
        ("args", "sample"),
        ("rollout_id", "evaluation"),
    ),
    "group_filter": Kind(
        "assemble.group_filter",
        ("group",),
        False,
        slime.group_filter,
        ("args", "group"),
        built_in=(("nonzero_deviation", nonzero_deviation),),
    ),
    "post_process": Kind(
        "assemble.post_process",
        ("group",),
        False,
        slime_training.post_process,
        ("args", "samples"),
        is_told_by_parameters=False,
    ),
    "convert": Kind(
        "assemble.convert",
        ("group",),
        False,
        slime_training.convert,
        ("args", "samples"),
        is_told_by_parameters=False,
    ),
    "log": Kind("assemble.log", ("step", "rows", "metrics"), False),
    "curriculum": Kind("rollout.curriculum", ("step", "sets", "state"), False),
    "data_source": Kind(DATA_SOURCES, ("request", "state"), False, slime_source.data_source, ("args",)),
    "advantage": Kind("algorithm.advantage", ("groups",), False),
    "reducer": Kind("algorithm.aggregation", ("mini_batches",), False),
    "loss": Kind("algorithm.loss", ("tokens",), False),
}


def load_generate(config: RunConfig, *, model_path: str = "") -> GenerateHook | None:
    """Return the generate hook of a configuration, None without one; raises ConfigError as `load`."""
    return cast(GenerateHook | None, configured("generate", config, model_path))


def load_generate_groups(config: RunConfig, *, model_path: str = "") -> GenerateGroupsHook | None:
    """Return the hook of whole claims of a configuration, None without one; raises ConfigError as `load`."""
    return cast(GenerateGroupsHook | None, configured("generate_groups", config, model_path))


def load_sample_filter(config: RunConfig) -> SampleFilter | None:
    """Return the sample filter of a configuration, None without one; raises ConfigError as `load`."""
    return cast(SampleFilter | None, configured("sample_filter", config))


def load_group_filter(config: RunConfig) -> GroupFilter | None:
    """Return the group filter of a configuration, None without one; raises ConfigError as `load`."""
    return cast(GroupFilter | None, configured("group_filter", config))


def load_log(config: RunConfig) -> LogHook | None:
    """Return the log hook of a configuration, None without one; raises ConfigError as `load`."""
    return cast(LogHook | None, configured("log", config))


def load_curriculum(config: RunConfig) -> Curriculum | None:
    """Return the curriculum of a configuration, None without one; raises ConfigError as `load`."""
    return cast(Curriculum | None, configured("curriculum", config))


def load_data_sources(config: RunConfig, *, model_path: str = "") -> dict[str, DataSource]:
    """Return the data sources of a configuration by prompt set; raises ConfigError as `load`."""
    args = slime.arguments(config, model_path=model_path)
    return {
        one.name: cast(DataSource, load("data_source", one.source, args))
        for one in config.prompt_sets()
        if one.source
    }


def load_shaper(config: RunConfig) -> GroupShaper | None:
    """Return what a configuration shapes groups by when they are planned, None without any; raises ConfigError as `load`."""
    post_process = cast(PostProcess | None, configured("post_process", config))
    convert = cast(Convert | None, configured("convert", config))
    return None if post_process is None and convert is None else GroupShaper(post_process, convert)


def require(config: RunConfig) -> None:
    """Load every hook that a configuration names.

    Raises:
        ConfigError: one of them cannot be used.
    """
    if config.rollout.generate and config.rollout.generate_groups:
        raise ConfigError("rollout.generate and rollout.generate_groups both make rollouts; name one of them")
    for kind in KINDS.keys() - {"data_source"}:
        configured(kind, config)
    load_data_sources(config)


def configured(kind: str, config: RunConfig, model_path: str = "") -> Function | None:
    """Return the hook that a configuration names for a kind, None without one; raises ConfigError as `load`."""
    path = path_of(config, kind)
    return load(kind, path, slime.arguments(config, model_path=model_path)) if path else None


def path_of(config: RunConfig, kind: str) -> str:
    """Return what the setting of a kind says; empty: no hook. Settings of the algorithm may have names of ours instead."""
    section, _, name = KINDS[kind].setting.partition(".")
    path = str(getattr(getattr(config, section), name))
    return path if section != "algorithm" or is_hook(path) else ""


def load_own(kind: str, path: str) -> Function:
    """Return the hook of a path, of a kind that slime has none like; raises ConfigError as `load`."""
    return load(kind, path, slime.Arguments())


def load(kind: str, path: str, args: slime.Arguments) -> Function:
    """Return the hook of a path, ready to be called with this kind's parameters; `args` is for functions of slime's.

    Raises:
        ConfigError: it cannot be imported or called, or its parameters do not fit; the nearest name is told.
    """
    place = KINDS[kind]
    where = place.setting
    known = dict(place.built_in)
    if path in known:
        return known[path]
    function = import_function(path, where=where, known=tuple(known))
    slime_training.refuse_unmet(function, named=f"{where} {path!r}")
    if place.adapter is not None and slime.is_slimes(function):
        is_async = place.is_async if place.slime_is_async is None else place.slime_is_async
        _require_fit(function, place, path, place.slime_parameters, place.slime_keywords, is_async=is_async)
        return place.adapter(function, args)
    _require_fit(function, place, path, place.parameters)
    return function


def positional_names(function: Function) -> tuple[str, ...]:
    """Return the names of a function's parameters that may be given by position; none where it does not tell them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def import_function(path: str, *, where: str, known: tuple[str, ...] = ()) -> Function:
    """Return what `package.module:function` names.

    Raises:
        ConfigError: it cannot be imported, or is nothing that can be called.
    """
    if not is_dotted_path(path):
        raise ConfigError(
            f"{where} {path!r} is no dotted path; write package.module:function{_nearest(path, known)}"
        )
    module_name, _, attribute = path.partition(":")
    found: Any = _imported(module_name, path, where)
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise ConfigError(
                f"{where} {path!r}: {module_name} has no {attribute!r}{_nearest(name, tuple(dir(found)))}"
            ) from None
    if not callable(found):
        raise ConfigError(f"{where} {path!r} is {type(found).__name__}, nothing that can be called")
    function: Function = found
    return function


def _imported(module_name: str, path: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        near = ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            near = _nearest(missing.rpartition(".")[2], _modules_beside(missing))
            near += f"; looked in {', '.join(p or '.' for p in sys.path[:1])} and the installed packages"
        raise ConfigError(f"{where} {path!r} cannot be imported: no module {missing!r}{near}") from error
    except Exception as error:  # a module's own code: whatever it raises, the path cannot be used
        raise ConfigError(f"{where} {path!r} cannot be imported: {type(error).__name__}: {error}") from error


def _modules_beside(missing: str) -> tuple[str, ...]:
    parent = missing.rpartition(".")[0]
    places = getattr(sys.modules.get(parent), "__path__", []) if parent else sys.path[:1]
    return tuple(module.name for module in pkgutil.iter_modules([str(p) or "." for p in places]))


def _nearest(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _require_fit(
    function: Function,
    place: Kind,
    path: str,
    given: tuple[str, ...],
    by_name: tuple[str, ...] = (),
    *,
    is_async: bool | None = None,
) -> None:
    named = f"{place.setting} {path!r}"
    expected = place.expected()
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{named} tells no parameters: {error}") from error
    try:
        signature.bind(*given, **slime.keywords(function, dict.fromkeys(by_name)))
    except TypeError as error:
        raise ConfigError(f"{named}{signature}: {error}; {expected}") from None
    wanted = place.is_async if is_async is None else is_async
    if wanted != _is_async(function):
        raise ConfigError(f"{named} is {'no' if wanted else 'an'} 'async def'; {expected}")


def _is_async(function: Function) -> bool:
    plain = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    called = plain if inspect.isroutine(plain) else vars(type(plain)).get("__call__")
    return inspect.iscoroutinefunction(called)
