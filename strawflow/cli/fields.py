"""The configuration fields as the command line shows them: parsed from flags, listed in help, printed as TOML.

1. `--section.field VALUE` and `--section.field=VALUE` are taken from anywhere on the line, before typer sees it. A field
   whose name no other section has may be given without its section, with `-` or `_`: `--max-staleness 2`.
2. Names are checked by config.load_config alone, so that flag, variable and file give the same hint.
3. Help is read from the source of strawflow/config.py and of the modules of single sections: defaults, limits and the docstring under each field.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from strawflow.errors import ConfigError, InvalidInputError

_FLAG = re.compile(r"--(?P<name>[A-Za-z_][\w.-]*)(?:=(?P<value>.*))?", re.DOTALL)


ENGINE_PREFIX, ROUTER_PREFIX = "--sglang-", "--router-"
_FIELDS_OF_OURS = frozenset({"--router-args"})
"""Short names of fields that begin as the flags of others do."""


def split_engine_flags(
    arguments: Sequence[str], *, prefix: str = ENGINE_PREFIX
) -> tuple[list[str], list[str]]:
    """Take the `--sglang-FLAG [VALUE ...]` out of a command line; returns (SGLang's own arguments, the rest).

    A flag's values are the words up to the next flag: some take none, some several.
    """
    taken: list[str] = []
    rest: list[str] = []
    at = 0
    while at < len(arguments):
        if not arguments[at].startswith(prefix) or arguments[at].partition("=")[0] in _FIELDS_OF_OURS:
            rest.append(arguments[at])
            at += 1
            continue
        taken.append("--" + arguments[at].removeprefix(prefix))
        at += 1
        while "=" not in taken[-1] and at < len(arguments) and not arguments[at].startswith("-"):
            taken.append(arguments[at])
            at += 1
    return taken, rest


def split_field_flags(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Take the `--section.field VALUE` pairs out of a command line; returns (values by name, the rest).

    Raises:
        InvalidInputError: a flag has no value or is given twice.
    """
    flags: dict[str, str] = {}
    rest: list[str] = []
    at = 0
    while at < len(arguments):
        match = _FLAG.fullmatch(arguments[at])
        name = _field_of(match["name"]) if match is not None else None
        at += 1
        if match is None or name is None:
            rest.append(arguments[at - 1])
            continue
        value = match["value"]
        if value is None:
            if at == len(arguments):
                raise InvalidInputError(f"--{name} needs a value: --{name} VALUE")
            value = arguments[at]
            at += 1
        if name in flags:
            raise InvalidInputError(f"--{name} is given twice")
        flags[name] = value
    return flags, rest


def _field_of(flag: str) -> str | None:
    """Return the `section.field` that a flag's name means; None for a flag of the command itself."""
    return flag if "." in flag else short_names().get(flag.replace("-", "_"))


@cache
def short_names() -> dict[str, str]:
    """Return {field: section.field} of the fields whose name one section alone has."""
    names = [field.name for field in field_helps()]
    shorts = [name.partition(".")[2] for name in names]
    counts = Counter(shorts)
    return {short: name for short, name in zip(shorts, names, strict=True) if counts[short] == 1}


def refuse_shared_names(arguments: Sequence[str]) -> None:
    """Refuse a flag that leaves out the section of a field which several sections have.

    Raises:
        InvalidInputError: names the sections to choose from.
    """
    for word in arguments:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        known = [field.name for field in field_helps() if field.name.partition(".")[2] == name]
        if word.startswith("--") and len(known) > 1:
            raise InvalidInputError(f"--{name}: several sections have it; write --{' or --'.join(known)}")


@dataclass(frozen=True)
class FieldHelp:
    """One configuration field as help shows it."""

    name: str
    kind: str
    default: Any
    doc: str

    @property
    def variable(self) -> str:
        return "STRAWFLOW_" + self.name.replace(".", "_").upper()


@cache
def field_helps() -> tuple[FieldHelp, ...]:
    """Return every field in the order of the configuration tree."""
    tree = _source("strawflow.config")
    own_files = [n.module or "" for n in tree.body if isinstance(n, ast.ImportFrom)]
    sources = [tree, *(_source(name) for name in own_files if name.startswith("strawflow.config_"))]
    classes = {n.name: n for source in sources for n in source.body if isinstance(n, ast.ClassDef)}
    helps = []
    for section_name, section_type, _ in _attributes(classes["RunConfig"]):
        for name, field_type, doc in _attributes(classes[ast.unparse(section_type.annotation)]):
            default, limits = _default(field_type.value)
            kind = _kind(field_type.annotation)
            helps.append(FieldHelp(f"{section_name}.{name}", f"{kind} {limits}".strip(), default, doc))
    return tuple(helps)


def _source(module: str) -> ast.Module:
    # The source is parsed, not imported: pydantic takes longer to load than --help may take.
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ConfigError(f"{module} is not installed; install strawflow again")
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _attributes(section: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign, str]]:
    """Yield (name, assignment, docstring under it) of a class's annotated attributes."""
    for at, node in enumerate(section.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            after = section.body[at + 1] if at + 1 < len(section.body) else None
            doc = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                doc = " ".join(str(after.value.value).split())
            yield node.target.id, node, doc


def _default(value: ast.expr | None) -> tuple[Any, str]:
    """Return the default an attribute has and the limits it must keep, as text."""
    if not isinstance(value, ast.Call):
        return (None if value is None else ast.literal_eval(value)), ""
    given = {k.arg: k.value for k in value.keywords}
    signs = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
    limits = ", ".join(f"{sign} {ast.unparse(given[name])}" for name, sign in signs if name in given)
    return (ast.literal_eval(given["default"]) if "default" in given else {}), limits


def _kind(annotation: ast.expr) -> str:
    text = ast.unparse(annotation)
    plain = {"str": "text", "int": "whole number", "float": "number", "bool": "true | false"}
    if isinstance(annotation, ast.Subscript) and text.startswith("Literal["):
        return " | ".join(ast.literal_eval(ast.unparse(annotation.slice)))
    lists = {"tuple[str, ...]": "list of text, as JSON", "tuple[int, ...]": "list of whole numbers, as JSON"}
    lists["Topology | Literal['']"] = "YAML file, or table as JSON"
    lists["Roles | Literal['']"] = "YAML file, or table as JSON"
    lists["dict[str, NativeValue]"] = "table, as JSON"
    lists["tuple[EvalDataset, ...]"] = "YAML file, or list of tables as JSON"
    lists["tuple[PromptSet, ...]"] = "file, FILE:WEIGHT,..., or list of tables as JSON"
    return plain.get(text) or lists.get(text, "table of text, as JSON")


def commented_toml() -> str:
    """Return a TOML file with every field at its default, each under its help."""
    lines = ["# A strawflow run. Every value is the default; delete what you do not change."]
    section = ""
    for field in field_helps():
        section_name, name = field.name.split(".", 1)
        if section_name != section:
            section = section_name
            lines += ["", f"[{section}]"]
        about = f"{field.kind}; {field.doc}" if field.doc else field.kind
        lines += [f"# {about}", f"{name} = {_toml(field.default)}"]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    # JSON text of a string, number or boolean is TOML too.
    return json.dumps(value, ensure_ascii=False)
