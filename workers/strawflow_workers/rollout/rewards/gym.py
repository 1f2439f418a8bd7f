"""The rewards `reasoning_gym:DATASET`: the verifiers of the datasets of the package reasoning-gym."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from strawflow.errors import ConfigError

_GYM = "reasoning_gym"


def load(dataset_name: str, settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the verifier of a dataset; `settings` configure the dataset where its verifier needs that.

    Raises:
        ConfigError: no such dataset, the package is missing, or the settings are not this dataset's.
    """
    dataset = _open_gym_dataset(dataset_name, settings)

    def score(
        response_text: str, *, prompt: str, label: str | None, metadata: Mapping[str, Any] | None
    ) -> Any:
        return dataset.score_answer(response_text, _gym_entry(prompt, label, metadata))

    return score


def _gym_entry(prompt: str, label: str | None, metadata: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the dataset's own entry: the row's metadata holds it whole, else the row itself is made into one."""
    if metadata is not None and {"question", "answer", "metadata"} <= metadata.keys():
        return metadata
    if label is None:
        raise ValueError("the row has neither an entry in its metadata nor a label")
    return {"question": prompt, "answer": label, "metadata": dict(metadata or {})}


def _open_gym_dataset(dataset_name: str, settings: Mapping[str, Any]) -> Any:
    try:
        _import_gym_dataset(dataset_name)
        factory = importlib.import_module(f"{_GYM}.factory")
    except ImportError as error:
        raise ConfigError(
            f"reward '{_GYM}:{dataset_name}' cannot be loaded: {error}; install {_GYM}"
        ) from error
    if dataset_name not in factory.DATASETS:
        near = difflib.get_close_matches(dataset_name, factory.DATASETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"reward '{_GYM}:{dataset_name}' is unknown; {_GYM} has no dataset of that name{hint}"
        )
    try:
        return factory.create_dataset(dataset_name, **{"seed": 0, "size": 1, **settings})
    except (TypeError, AssertionError) as error:
        raise ConfigError(f"reward '{_GYM}:{dataset_name}' does not take these settings: {error}") from error


def _import_gym_dataset(dataset_name: str) -> None:
    """Import the one module that registers a dataset, or the whole package where that does not work.

    The package's own __init__ imports every dataset and with them matplotlib, sympy and others: two seconds against
    a tenth. A replacement of a killed process pays this each time, hence the short way. It is taken only here, in a
    process that has no other use for the package.
    """
    if getattr(sys.modules.get(_GYM), "__file__", None):  # the whole package, and no shell of it
        return
    root = _package_folder()
    registers = re.compile(
        rf"""^\s*(DATASET_NAME\s*=|register_dataset\()\s*["']{re.escape(dataset_name)}["']""", re.M
    )
    for path in sorted(root.rglob("*.py")):
        if registers.search(path.read_text(encoding="utf-8")):
            parts = path.relative_to(root).with_suffix("").parts
            try:
                _import_without_inits(root, parts)
                return
            except ImportError:
                break
    _forget_gym()
    importlib.import_module(_GYM)


def _package_folder() -> Path:
    if (shell := sys.modules.get(_GYM)) is not None:
        return Path(shell.__path__[0])
    spec = importlib.util.find_spec(_GYM)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"no module named {_GYM!r}")
    return Path(spec.submodule_search_locations[0])


def _import_without_inits(root: Path, parts: tuple[str, ...]) -> None:
    for depth in range(len(parts)):
        name = ".".join((_GYM, *parts[:depth]))
        shell = ModuleType(name)
        shell.__path__ = [str(root.joinpath(*parts[:depth]))]
        sys.modules[name] = shell
    importlib.import_module(".".join((_GYM, *parts)))


def _forget_gym() -> None:
    for name in [name for name in sys.modules if name == _GYM or name.startswith(f"{_GYM}.")]:
        del sys.modules[name]
