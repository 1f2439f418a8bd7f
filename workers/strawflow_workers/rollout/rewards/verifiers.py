"""The verifiers by name, loaded inside a reward process: `exact`, `reasoning_gym:DATASET`, `module:function`.

1. A verifier is called as `verifier(response_text, *, prompt, label, metadata) -> float`: label is text or None,
   metadata the parsed object or None. What it raises, and any value that is no finite number, is a failure.
2. Loading is what can be wrong with the configuration, so it raises ConfigError; scoring never does.
3. This module knows no time limits and no processes.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from strawflow.errors import ConfigError
from strawflow_workers.rollout.rewards.spec import RewardSpec

Verifier = Callable[..., Any]

_GYM = "reasoning_gym"


def load_verifier(spec: RewardSpec) -> Verifier:
    """Return the verifier a spec names.

    Raises:
        ConfigError: no such verifier, or it cannot be imported.
    """
    scheme, _, rest = spec.name.partition(":")
    if spec.name == "exact":
        return exact
    if scheme == _GYM and rest:
        return _gym_verifier(rest, spec.settings)
    if scheme and rest:
        return _imported(spec.name, scheme, rest)
    raise ConfigError(
        f"reward {spec.name!r} is unknown; write 'exact', 'reasoning_gym:DATASET' or 'package.module:function'"
    )


def exact(response_text: str, *, prompt: str, label: str | None, metadata: Mapping[str, Any] | None) -> float:
    """Score 1 where the response is the label, white space around both aside, else 0."""
    del prompt, metadata
    if label is None:
        raise ValueError("the row has no label to compare with")
    return float(response_text.strip() == label.strip())


def _imported(name: str, module_name: str, function: str) -> Verifier:
    try:
        found = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"reward {name!r} cannot be loaded: {error}") from error
    if not callable(found):
        raise ConfigError(f"reward {name!r} is {type(found).__name__}, not a function")
    verifier: Verifier = found
    return verifier


def _gym_verifier(dataset_name: str, settings: Mapping[str, Any]) -> Verifier:
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
        raise ConfigError(f"reward '{_GYM}:{dataset_name}' is unknown; {_GYM} has no dataset of that name")
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
    if _GYM in sys.modules:
        return
    spec = importlib.util.find_spec(_GYM)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"no module named {_GYM!r}")
    root = Path(spec.submodule_search_locations[0])
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
                _forget_gym()
                break
    importlib.import_module(_GYM)


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
