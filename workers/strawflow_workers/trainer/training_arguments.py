"""The arguments of Megatron's own training program, where it is installed: known by name, so that a flag of it is told apart.

They steer a loop, data and checkpoints of Megatron's; strawflow has its own, so none of them is taken.
"""

from __future__ import annotations

import contextlib
import functools
import io

from strawflow_workers.trainer import device, megatron_version


@functools.cache
def known() -> frozenset[str]:
    """Return the flags, without dashes; empty where megatron.training is not installed."""
    with (
        device.importing_megatron(),
        contextlib.redirect_stdout(io.StringIO()),
    ):  # it tells of inferred types there
        parser = megatron_version.training_parser()
    if parser is None:
        return frozenset()
    options = (option for action in parser._actions for option in action.option_strings)
    return frozenset(option.removeprefix("--") for option in options if option.startswith("--"))


def is_known(flag: str) -> bool:
    """Tell whether Megatron's training program has a flag."""
    return flag in known()
