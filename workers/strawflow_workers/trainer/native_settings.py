"""Megatron's settings of one model: what a run gives, laid over what strawflow sets, into Megatron's configurations.

1. What is given goes into every configuration that has the field; the rest of a configuration is as strawflow sets it, then as
   Megatron does.
2. A configuration that Megatron refuses is told as one error that names the flag to change.
3. Settings that strawflow decides never come here: `native_flags` refuses them when a run is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from strawflow.config import RunConfig
from strawflow.errors import ConfigError
from strawflow.native import Roles
from strawflow_workers.trainer import device, megatron_version
from strawflow_workers.trainer.native_fields import native_fields
from strawflow_workers.trainer.native_values import from_plain, plain, to_megatron


def given_settings(config: RunConfig, *, role: str = "actor") -> dict[str, Any]:
    """Return the settings by name that a run gives the model of a role."""
    roles = config.trainer.roles
    own = getattr(roles, role).overrides if isinstance(roles, Roles) else {}
    return {**config.trainer.megatron, **own}


@dataclass(frozen=True)
class NativeSettings:
    """What a run gives one model, checked by name and type."""

    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig, *, role: str = "actor") -> NativeSettings:
        """Return those of a run.

        Raises:
            ConfigError: the installed Megatron has no such setting, or it takes another value: it is not the one that was
            there when the run was made.
        """
        given = given_settings(config, role=role)
        if not given:  # reading Megatron's fields takes a moment
            return cls()
        known, _ = native_fields()
        values = {}
        for name, value in given.items():
            try:
                values[name] = from_plain(known[name].kind, value)
            except (KeyError, ValueError) as error:
                why = "has no such setting" if isinstance(error, KeyError) else f"refuses it: it {error}"
                raise ConfigError(
                    f"trainer.megatron: {name}: megatron-core {megatron_version.installed()}, which is installed here, {why}"
                ) from None
        return cls(values)

    def build(self, configuration: type, ours: Mapping[str, Any]) -> Any:
        """Make one of Megatron's configurations: the given settings over `ours` over Megatron's defaults.

        Raises:
            ConfigError: Megatron refuses it; names the flags without which it would not.
        """
        given = self._fields_of(configuration)
        try:
            with device.without_megatron_warnings():
                return configuration(**{**ours, **given})
        except (ValueError, AssertionError, RuntimeError, TypeError, KeyError) as error:
            if not given:
                raise
            culprits = [
                name for name in given if _is_taken(configuration, {**ours, **given}, without=name, ours=ours)
            ]
            flags = ", ".join("--" + name.replace("_", "-") for name in culprits or given)
            raise ConfigError(
                f"{flags}: megatron-core {megatron_version.installed()} refuses it ({configuration.__name__}): "
                f"{' '.join(str(error).split())}"
            ) from error

    def _fields_of(self, configuration: type) -> dict[str, Any]:
        if not self.values:
            return {}
        names = {one.name for one in dataclasses.fields(configuration) if one.init}
        known, _ = native_fields()
        return {
            name: to_megatron(known[name].kind, value) for name, value in self.values.items() if name in names
        }


NOTHING_GIVEN = NativeSettings()


def _is_taken(
    configuration: type, fields: Mapping[str, Any], *, without: str, ours: Mapping[str, Any]
) -> bool:
    rest = {name: value for name, value in fields.items() if name != without}
    if without in ours:
        rest[without] = ours[without]
    try:
        with device.without_megatron_warnings():
            configuration(**rest)
    except Exception:  # whatever it is, it is refused without this one too
        return False
    return True


def effective(configuration: Any) -> dict[str, Any]:
    """Return every field of a built configuration by name, as JSON can hold it."""
    return {one.name: plain(getattr(configuration, one.name)) for one in dataclasses.fields(configuration)}
