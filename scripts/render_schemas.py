"""Render the frozen contracts into schemas/: Arrow, SQL, command line, errors and states.

The truth is the typed code; these files are for reviewers, and tests/contract/test_frozen_schemas.py fails when they
drift from it. Run `python scripts/render_schemas.py` after a change that is meant, and read the diff.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer

from strawflow import errors, states
from strawflow.cli.fields import field_helps
from strawflow.cli.main import app
from strawflow.errors import StrawflowError
from strawflow.index.ddl import as_sql
from strawflow.records import COMPRESSION, SCHEMAS
from strawflow.states import TRANSITIONS

FOLDER = Path(__file__).resolve().parent.parent / "schemas"


def rendered() -> dict[str, str]:
    """Return the content of every file of schemas/."""
    return {
        "arrow.txt": arrow(),
        "sql.sqlite.sql": as_sql("sqlite"),
        "sql.postgresql.sql": as_sql("postgresql"),
        "cli.txt": command_line(),
        "errors.txt": error_tree(),
        "states.md": state_machines(),
    }


def arrow() -> str:
    parts = []
    for kind, schema in SCHEMAS.items():
        version = schema.metadata[b"strawflow.version"].decode()
        compression = COMPRESSION[kind] or "none"
        fields = [f"  {f.name}: {f.type}{'' if f.nullable else ' not null'}" for f in schema]
        parts.append("\n".join([f"{kind} version {version}, compression {compression}", *fields]))
    return "\n\n".join(parts) + "\n"


def command_line() -> str:
    parts = [
        _command(words, command) for words, command in _commands(typer.main.get_command(app), ["strawflow"])
    ]
    fields = [f"  --{f.name} <{f.kind}> default {f.default!r} [{f.variable}]" for f in field_helps()]
    return (
        "\n\n".join([*parts, "\n".join(["configuration fields, flags of `strawflow run create`", *fields])])
        + "\n"
    )


def _commands(command: Any, words: list[str]) -> Iterator[tuple[list[str], Any]]:
    yield words, command
    for name, sub in getattr(command, "commands", {}).items():
        yield from _commands(sub, [*words, name])


def _command(words: list[str], command: Any) -> str:
    lines = [" ".join(words)]
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            name = (parameter.metavar or parameter.name.upper()).strip("{}")
            lines.append(f"  {name if parameter.required else f'[{name}]'}")
        else:
            variable = parameter.envvar or "_".join(["strawflow", *words[1:], parameter.name]).upper()
            value = "" if parameter.is_flag else f" <{_type_name(parameter)}>"
            default = (
                "" if parameter.is_flag or parameter.default is None else f" default {parameter.default!r}"
            )
            lines.append(f"  {', '.join(parameter.opts)}{value}{default} [{variable}]")
    return "\n".join(lines)


def _type_name(parameter: Any) -> str:
    annotation = parameter.type_descriptor.annotation
    choices = getattr(annotation, "__args__", None)
    if choices and all(isinstance(choice, str) for choice in choices):
        return "|".join(choices)
    return str(getattr(annotation, "__name__", annotation))


def error_tree() -> str:
    found = [StrawflowError, *_subclasses(StrawflowError)]
    rows = [
        (cls.kind, cls.__name__, str(cls.exit_code))
        for cls in sorted(found, key=lambda c: (c.exit_code, c.kind))
    ]
    widths = [max(len(row[at]) for row in rows) for at in (0, 1)]
    head = "# kind, class, exit code; kinds are append-only. Usage errors exit 2, Ctrl-C 130, anything unforeseen 1.\n"
    return head + "".join(f"{kind:<{widths[0]}}  {name:<{widths[1]}}  {code}\n" for kind, name, code in rows)


def _subclasses(cls: type[StrawflowError]) -> Iterator[type[StrawflowError]]:
    for sub in cls.__subclasses__():
        if sub.__module__ == errors.__name__:
            yield sub
            yield from _subclasses(sub)


def state_machines() -> str:
    docs = _member_docs()
    machines = [
        m
        for m in vars(states).values()
        if isinstance(m, type) and issubclass(m, StrEnum) and m is not StrEnum
    ]
    parts = ["# States\n\nRendered from `strawflow.states`: what may become what, by which verb."]
    parts += [_machine(machine, docs) for machine in machines]
    return "\n\n".join(parts) + "\n"


def _machine(machine: type[StrEnum], docs: dict[tuple[str, str], str]) -> str:
    moves = sorted((verb, old.value, new.value) for verb, old, new in TRANSITIONS if isinstance(old, machine))
    entered = {new for _, _, new in moves}
    starts = [state.value for state in machine if state.value not in entered] or [next(iter(machine)).value]
    diagram = ["```mermaid", "stateDiagram-v2", *(f"    [*] --> {state}" for state in starts)]
    diagram += [f"    {old} --> {new}: {verb}" for verb, old, new in moves] + ["```"]
    meanings = ["| state | meaning |", "|---|---|"]
    meanings += [f"| {state.value} | {docs[machine.__name__, state.name]} |" for state in machine]
    table = [
        "| verb | from | to |",
        "|---|---|---|",
        *(f"| {verb} | {old} | {new} |" for verb, old, new in moves),
    ]
    return "\n".join([f"## {machine.__name__}", "", *diagram, "", *meanings, "", *table])


def _member_docs() -> dict[tuple[str, str], str]:
    docs: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(states)).body:
        if isinstance(node, ast.ClassDef):
            for member, doc in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(member, ast.Assign)
                    and isinstance(doc, ast.Expr)
                    and isinstance(doc.value, ast.Constant)
                ):
                    name = ast.unparse(member.targets[0])
                    docs[node.name, name] = " ".join(str(doc.value.value).split())
    return docs


def main() -> int:
    """Write what changed; returns 0."""
    FOLDER.mkdir(exist_ok=True)
    for name, content in rendered().items():
        path = FOLDER / name
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            path.write_text(content, encoding="utf-8")
            print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
