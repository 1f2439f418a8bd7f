"""Megatron's own settings as a run keeps them: plain values by name, and what the model of a role overrides.

    actor:                              # of --roles FILE; also critic, reference, teacher
      overrides:                        # Megatron's own settings, over those of trainer.megatron
        recompute-granularity: selective

1. A name is that of a field of one of Megatron's configurations; `-` and `_` are the same in it, and it is kept with `_`.
2. Which names there are and what each takes is said by the Megatron that is installed: the trainer's program checks them.
3. A role that nothing uses is refused: what it overrides would be ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from strawflow.errors import ConfigError
from strawflow.strict_yaml import read_yaml

Scalar = bool | int | float | str
NativeValue = Scalar | tuple[Scalar, ...] | None
ROLES = ("actor", "critic", "reference", "teacher")
USED_ROLES = frozenset({"actor"})
"""Roles whose model the trainer builds."""


def with_underscores(given: Any) -> Any:
    """Return settings by the names they are kept by.

    Raises:
        ValueError: a name is given in two spellings.
    """
    if not isinstance(given, Mapping):
        return given
    kept: dict[str, Any] = {}
    for name, value in given.items():
        plain = str(name).replace("-", "_")
        if plain in kept:
            raise ValueError(f"{plain} is given twice: as {name} and in another spelling")
        kept[plain] = list(value) if isinstance(value, tuple) else value
    return kept


class Role(BaseModel):
    """What the model of one role has otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    overrides: dict[str, NativeValue] = {}
    """Megatron's own settings, over those of trainer.megatron."""


class Roles(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    actor: Role = Role()
    critic: Role = Role()
    reference: Role = Role()
    teacher: Role = Role()


def read_roles(path: Path) -> Roles:
    """Return what a YAML file says.

    Raises:
        ConfigError: there is no such file, or it is not of this form; names role and setting.
    """
    return checked_roles(read_yaml(path, what="roles"), where=str(path))


def checked_roles(tree: Any, *, where: str) -> Roles:
    """Return the roles of a table, names of settings as they are kept.

    Raises:
        ConfigError: it is not of this form, or a role is given that nothing uses; names `where`, role and setting.
    """
    if isinstance(tree, Roles):
        return tree
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{where}: there must be a table of roles ({', '.join(ROLES)}), each with `overrides:`"
        )
    for role in tree:
        if role not in ROLES:
            near = difflib.get_close_matches(str(role), ROLES, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(ROLES)}"
            raise ConfigError(f"{where}: unknown role {role}{hint}")
        if role not in USED_ROLES:
            raise ConfigError(
                f"{where}: {role}: this trainer has no such model, and its overrides would be ignored; leave it out"
            )
    plain = {
        role: {**part, "overrides": _plain(part["overrides"], f"{where}: {role}")}
        if isinstance(part, dict) and "overrides" in part
        else part
        for role, part in tree.items()
    }
    try:
        return Roles.model_validate(plain)
    except ValidationError as error:
        first = error.errors()[0]
        # A value that fits none of the kinds is told once for each of them: the place ends at the setting's name.
        place = ": ".join(str(part) for part in first["loc"][:3])
        wanted = "there is no such field" if first["type"] == "extra_forbidden" else _WANTED
        raise ConfigError(f"{where}: {place}: {wanted}") from None


_WANTED = "give a text, a number, true or false, or a list of such"


def _plain(overrides: Any, where: str) -> Any:
    try:
        return with_underscores(overrides)
    except ValueError as error:
        raise ConfigError(f"{where}: overrides: {error}") from None
