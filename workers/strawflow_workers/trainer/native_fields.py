"""The settings of the installed Megatron: every field of its configurations, and what each takes.

1. Fields are read from Megatron's own dataclasses: name, type, default and docstring; none is listed here.
2. What no command line could say (functions, objects, private fields) is left out, and listed with the reason.
3. Two configurations that have a field of one name get the same value, as one argument of Megatron's feeds both.
4. It knows no value that was given and no setting of strawflow's.
"""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import enum
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Shape = Literal["switch", "one", "several", "either"]
"""Words that a flag takes: none, one, one or more, one for a scalar and more for a list."""


@dataclass(frozen=True)
class Kind:
    """What a field may hold."""

    shape: Shape
    of: tuple[type, ...] = (str,)
    """Types of an item, the narrowest first: of bool, int, float, str, torch.dtype or an Enum."""
    choices: tuple[Any, ...] = ()
    takes_none: bool = False
    length: int | None = None
    """Of a tuple with so many items."""

    def told(self) -> str:
        """Return it as help shows it."""
        if self.shape == "switch":
            return "switch"
        item = " | ".join(str(c) for c in self.choices) or " | ".join(_told_type(t) for t in self.of)
        if self.shape == "several":
            item = " ".join([f"<{item}>"] * self.length) if self.length else f"<{item}> ..."
        elif self.shape == "either":
            item = f"<{item}> [...]"
        return item + (" | none" if self.takes_none else "")


def _told_type(one: type) -> str:
    if issubclass(one, enum.Enum):
        return " | ".join(member.name for member in one)
    return {str: "text", int: "whole number", float: "number", bool: "true | false"}.get(
        one, "fp32 | bf16 | fp16 | ..."
    )


@dataclass(frozen=True)
class NativeField:
    """One setting of Megatron's."""

    name: str
    """With underscores, as in the dataclass."""
    kind: Kind
    defaults: Mapping[str, Any]
    """By configuration that has it, in the order of `configuration_classes`."""
    doc: str
    on: tuple[str, ...] = ()
    """Other flags of Megatron's that mean it, and switch it on or give it a value, without dashes."""
    off: tuple[str, ...] = ()
    """Those that switch it off."""


@dataclass(frozen=True)
class LeftOut:
    """A field that no flag can set."""

    name: str
    configuration: str
    reason: str


@functools.cache
def configuration_classes() -> dict[str, type]:
    """Return Megatron's configurations by name: model and parallelism, MLA models, optimizer, gradient buffers."""
    from strawflow_workers.trainer import device

    with device.importing_megatron():
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    return {
        one.__name__: one
        for one in (
            ModelParallelConfig,
            TransformerConfig,
            MLATransformerConfig,
            OptimizerConfig,
            DistributedDataParallelConfig,
        )
    }


@functools.cache
def native_fields() -> tuple[dict[str, NativeField], tuple[LeftOut, ...]]:
    """Return the fields by name, in the order of the configurations, and what is left out."""
    fields: dict[str, NativeField] = {}
    left_out: list[LeftOut] = []
    for name, configuration in configuration_classes().items():
        hints = typing.get_type_hints(configuration)
        docs = _docstrings(configuration)
        for one in dataclasses.fields(configuration):
            if not one.init or _is_inherited(configuration, one.name):
                continue
            kind = _kind(hints[one.name])
            if isinstance(kind, str) or one.name.startswith("_"):
                reason = kind if isinstance(kind, str) else "it is Megatron's own"
                left_out.append(LeftOut(one.name, name, reason))
                continue
            known = fields.get(one.name)
            defaults = {**(known.defaults if known else {}), name: _default(one)}
            on, off = (known.on, known.off) if known else _other_flags(one, kind)
            doc = known.doc if known else docs.get(one.name, "")
            fields[one.name] = NativeField(
                one.name, known.kind if known else kind, defaults, doc, on=on, off=off
            )
    return fields, tuple(left_out)


def _is_inherited(configuration: type, name: str) -> bool:
    """Whether the field is that of a base which is read of its own."""
    bases = [base for base in configuration.__mro__[1:] if base.__name__ in configuration_classes()]
    return name not in vars(configuration).get("__annotations__", {}) and any(
        name in {one.name for one in dataclasses.fields(base)} for base in bases
    )


def _default(one: Any) -> Any:
    if one.default is not dataclasses.MISSING:
        return one.default
    return one.default_factory() if one.default_factory is not dataclasses.MISSING else None


def _other_flags(one: Any, kind: Kind) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the flags that Megatron's parser gives a field beside its name: (that set it, that switch it off)."""
    names = one.metadata.get("argparse_meta", {}).get("arg_names", ())
    flags = tuple(name.removeprefix("--") for name in names)
    if kind.shape == "switch" and one.default is True:
        return (), flags
    return flags, ()


def _kind(hint: Any) -> Kind | str:
    """Return what a type takes, or why no command line could say it."""
    parts = [hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = list(typing.get_args(hint))
    takes_none = type(None) in parts
    parts = [part for part in parts if part is not type(None)]
    lists = [kind for part in parts if (kind := _list_kind(part)) is not None]
    scalars = [part for part in parts if _list_kind(part) is None]
    choices = tuple(c for part in scalars if _is_literal(part) for c in typing.get_args(part))
    plain = [type(choices[0])] if choices else [part for part in scalars if _is_plain(part)]
    if not plain and not lists:
        return f"no command line can say {_shown(scalars[0])}"
    if plain == [bool] and not lists:
        return Kind("switch", (bool,), takes_none=takes_none)
    of = tuple(sorted({*plain, *(t for kind in lists for t in kind.of)}, key=_width))
    if not lists:
        return Kind("one", of, choices, takes_none)
    if not plain:
        return dataclasses.replace(lists[0], of=of, takes_none=takes_none)
    return Kind("either", of, choices or lists[0].choices, takes_none)


def _list_kind(part: Any) -> Kind | None:
    """Return the kind of a list or tuple type, None for any other."""
    origin, arguments = typing.get_origin(part), typing.get_args(part)
    if part is list:
        return Kind("several", (str,))
    if origin is list:
        inner = _kind(arguments[0])
        return None if isinstance(inner, str) else Kind("several", inner.of, inner.choices)
    if origin is tuple:
        items = [a for a in arguments if a is not Ellipsis]
        return Kind("several", (items[0],), length=None if Ellipsis in arguments else len(items))
    return None


def _is_literal(part: Any) -> bool:
    return typing.get_origin(part) is Literal


def _is_plain(part: Any) -> bool:
    import torch

    return isinstance(part, type) and (
        part in (bool, int, float, str, torch.dtype) or issubclass(part, enum.Enum)
    )


def _width(one: type) -> tuple[int, str]:
    order: Sequence[type] = (bool, int, float)
    return (order.index(one) if one in order else 4 if one is str else 3), one.__name__


def _shown(part: Any) -> str:
    if typing.get_origin(part) is collections.abc.Callable or part is typing.Callable:
        return "a function"
    name = str(getattr(part, "__name__", None) or part).replace("typing.", "")
    return f"an object of Megatron's ({name})"


def _docstrings(configuration: type) -> dict[str, str]:
    """Return the text under each field, of the class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(configuration.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        body = tree.body[0].body  # type: ignore[attr-defined]  # a class
        for one, after in itertools.pairwise(body):
            if (
                isinstance(one, ast.AnnAssign)
                and isinstance(one.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                found[one.target.id] = " ".join(str(after.value.value).split())
    return found
