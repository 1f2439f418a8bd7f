"""YAML files that a user writes: plain values only, and no key twice in one mapping (YAML would take the last).

It knows nothing of what is in them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from strawflow.errors import ConfigError


def read_yaml(path: Path, *, what: str) -> Any:
    """Return what a YAML file holds; `what` names it in errors.

    Raises:
        ConfigError: there is no such file, or it is no YAML; names file and place.
    """
    try:
        loader = _StrictLoader(path.read_text(encoding="utf-8"))
        loader.name = str(path)  # what errors call it
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path} of {what}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None


class _StrictLoader(yaml.SafeLoader):  # type: ignore[misc]  # the library has no types
    """Plain values only, and no key twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key_node.tag.endswith(":str") and key in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return found
