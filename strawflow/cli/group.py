"""A group of commands whose --help, and that of the commands below it, loads nothing heavy.

typer converts the value of every option by pydantic, which takes longer to load than --help may take; it leaves out
flags that already hold a bool, and the --help flag of a group holds None until it is told that it was not given.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class QuickGroup(TyperGroup):
    """The groups of the program use this class."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option
