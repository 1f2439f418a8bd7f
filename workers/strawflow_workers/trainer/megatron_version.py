"""The versions of megatron-core that the trainer works with, and all that differs between them.

1. 0.16 is what pip finds for Python 3.11, 0.19 for Python 3.12; any other is refused before anything is built.
2. Whatever else in the trainer is written for both; where their names or defaults part, the difference has its place here.
3. Importing this module imports nothing of Megatron.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from strawflow.errors import ConfigError

SUPPORTED = {"0.16": "0.16.1", "0.19": "0.19.2"}
"""Series, and the version of each that the tests run."""
DISTRIBUTION = "megatron-core"


def installed() -> str:
    """Return the version of megatron-core that is installed.

    Raises:
        ConfigError: there is none, or one that this trainer does not work with.
    """
    try:
        found = version(DISTRIBUTION)
    except PackageNotFoundError:
        raise ConfigError(
            "megatron-core is not installed; install it with pip install 'strawflow[trainer]'"
        ) from None
    if _series(found) not in SUPPORTED:
        wanted = SUPPORTED["0.19" if sys.version_info >= (3, 12) else "0.16"]
        raise ConfigError(
            f"megatron-core {found} is installed, and the trainer works with {' and '.join(SUPPORTED.values())}: "
            f"pip install megatron-core=={wanted}"
        )
    return found


def _series(found: str) -> str:
    return ".".join(re.split(r"[.+]", found)[:2])


def without_cuda_graphs() -> Mapping[str, Any]:
    """Return the fields of TransformerConfig that say that no part of the model is captured as a CUDA graph.

    The default of both versions comes to the same, with a warning. 0.19 renamed the field and refuses both together.
    """
    if _series(installed()) == "0.16":
        return {"cuda_graph_scope": []}
    return {"cuda_graph_modules": []}


def training_parser() -> Any | None:
    """Return the argument parser of megatron.training, or None where that package is not installed (0.16 has none)."""
    import importlib.util

    if importlib.util.find_spec("megatron.training") is None:
        return None
    import argparse
    import typing

    import typing_extensions

    if not hasattr(typing, "override"):  # 0.19 is written for Python 3.12
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
